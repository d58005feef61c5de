"""0-d CPU tensors among CUDA arguments, which kernels take as numbers; here the numbers are given to CPU kernels.

A call on a GPU is in ``tests/device/test_elementwise.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from numeric import DTYPES

import jitgen
from jitgen.errors import TraceError, UnsupportedError
from jitgen.trace.host_scalars import exchanged, host_scalar


def combine(x: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
    return [x * s, s + x, torch.where(x > s, x, s), x.float() / s, s.expand(x.shape) * x, x.to(s.dtype)]


@pytest.mark.parametrize("kind", DTYPES, ids=str)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16, torch.int32), DTYPES], ids=["few", "all"])
@pytest.mark.quick(where=lambda kind, dtypes: kind == torch.bfloat16 and dtypes is not DTYPES)
def test_they_promote_as_0d_tensors_do(kind: torch.dtype, dtypes: Sequence[torch.dtype]) -> None:
    function = jitgen.jit(combine)
    for dtype in dtypes:
        x = torch.tensor([0, 1, 3, 5]).to(dtype)
        for value in (1, 2.75):
            scalar = torch.tensor(value).to(kind)
            for got, want in zip(function(x, host_scalar(scalar)), combine(x, scalar), strict=True):
                assert got.dtype == want.dtype
                torch.testing.assert_close(got, want)
    assert len(function.specializations) == len(dtypes)


def test_they_are_read_at_every_call() -> None:
    function = jitgen.jit(lambda x, s: x * s)
    x = torch.ones(3)
    for value in (2.0, -0.5, math.inf, 1e-40):
        assert torch.equal(function(x, host_scalar(torch.tensor(value))), x * value)
    assert function(x, host_scalar(torch.tensor(math.nan))).isnan().all()
    wide = torch.tensor(2**62 + 1)
    assert function(torch.ones(1, dtype=torch.int64), host_scalar(wide)).item() == wide.item()
    assert len(function.specializations) == 2


def test_only_0d_cpu_tensors_beside_others_are_exchanged() -> None:
    on_device, scalar, vector = torch.empty(3, device="meta"), torch.tensor(2.5), torch.ones(2)
    assert exchanged([on_device, 3, "mean"]) is None
    assert exchanged([vector, scalar]) is None
    assert exchanged([scalar, scalar]) is None
    found = exchanged([scalar, on_device, 3])
    assert found is not None
    assert found[0] == 2.5
    assert found[1] is on_device
    with pytest.raises(UnsupportedError, match=r"meta and cpu.*\.to\(device\)"):
        jitgen.jit(combine)(on_device, vector)


@pytest.mark.parametrize(
    ("function", "error", "what"),
    [
        (lambda x, s: (x, s * 2), UnsupportedError, r"0-d CPU tensors alone.*\.to\(device\)"),
        (lambda x, s: (x, s), UnsupportedError, "0-d CPU tensors alone"),
        (lambda x, s: (x, s.add_(1)), UnsupportedError, "updates a 0-d CPU tensor"),
        (lambda x, s: x if s > 0 else -x, TraceError, "condition"),
    ],
)
def test_what_torch_would_do_on_the_cpu_is_refused(function: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        jitgen.jit(function)(torch.ones(3), host_scalar(torch.tensor(1.0)))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_kernels_take_them_as_numbers(backend: str) -> None:
    spec = jitgen.TensorSpec((64,), torch.bfloat16)
    function = jitgen.jit(lambda x, s: x * s)
    source = function.lower(spec, host_scalar(torch.tensor(2.0)), target="sm_90a", backend=backend)
    assert len(source.kernels) == 1
    assert source._lowered.program.inputs[1:] == ()
