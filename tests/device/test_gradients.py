"""What calls with gradients do on a GPU alone."""

from __future__ import annotations

import atexit
import time

import pytest
import torch

import jitgen
from jitgen.call import derivative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.skipif(not derivative.ABORTS_AT_EXIT, reason="this Python stops threads at exit instead of ending them")
def test_the_interpreter_waits_for_autograd_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = []
    monkeypatch.setattr(atexit, "register", lambda *call: registered.append(call))  # torch registers others, too
    derivative._let_autograd_finish_at_exit.cache_clear()
    sine = jitgen.jit(torch.sin)
    for device, waits in (("cpu", 0), ("cuda", 1), ("cuda", 1)):
        x = torch.randn(7, device=device, requires_grad=True)
        sine(x).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, x.detach().cos())
        assert registered.count((time.sleep, derivative.EXIT_SECONDS)) == waits
