"""What calls with gradients do on a GPU alone."""

from __future__ import annotations

import atexit
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F

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


def layer(x: Any, norm: Any, gate: Any, up: Any, down: Any) -> Any:
    h = F.rms_norm(x, x.shape[-1:], norm)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("rows", [5, 200])
def test_gradients_of_products(rows: int, backend: str) -> None:
    """A gradient that several products read, along its rows and along its columns, is stored once."""
    shapes = [(rows, 136), (136,), (264, 136), (264, 136), (136, 264)]
    wide = [torch.randn(shape, device="cuda", dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes]
    given = [one.bfloat16().requires_grad_() for one in wide]
    seed = torch.randn(rows, 136, device="cuda").bfloat16()
    found = torch.autograd.grad(jitgen.jit(layer, backend=backend)(*given), given, seed)
    exact = [one.detach().double().requires_grad_() for one in given]
    wanted = torch.autograd.grad(layer(*exact), exact, seed.double())
    for one, other in zip(found, wanted, strict=True):
        # A handful of values on the way are rounded to bfloat16, each off by half a unit in the last place at most.
        assert float((one.double() - other).norm() / other.norm()) < 4 * 2.0**-8


SPECIAL: dict[str, Any] = {
    "elu": F.elu,
    "celu": lambda x: F.celu(x, 0.5),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "prelu": lambda x: F.prelu(x, torch.full((1,), float("inf"), device=x.device)),
    "logit": lambda x: torch.logit(x, 0.1),
    "prod": lambda x: x.prod(-1),
    "prod of columns": lambda x: x.prod(0),
    "cumprod": lambda x: x.cumprod(-1),
    "renorm": lambda x: x.renorm(2, 0, 3.0),
}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_points_have_torchs_gradients(name: str, backend: str) -> None:
    """Those of torch's kernels for this device, which compute an element at a time."""
    points = torch.tensor([0.0, 0.5, -0.5, 1.0, 2.0, -3.0, 3.0, float("inf"), float("nan"), -4.0])
    x = points[torch.randint(0, 10, (64, 5), generator=torch.Generator().manual_seed(3))].cuda()
    found = []
    for function in (SPECIAL[name], jitgen.jit(SPECIAL[name], backend=backend)):
        leaf = x.clone().requires_grad_()
        result = function(leaf)
        seed = torch.arange(1.0, result.numel() + 1, device="cuda").reshape(result.shape)
        found.append(torch.autograd.grad(result, leaf, seed)[0])
    # Gradients up to 320 meet in a row of five; where they cancel, what is left is the rounding of each.
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=8 * 320 * 2.0**-23, equal_nan=True)
