"""Functions that close over tensors of this machine, lowered for targets that it need not have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec

WEIGHT, SCALE = torch.randn(48, 64, dtype=torch.bfloat16), torch.randn(48, dtype=torch.bfloat16)
QUANTIZED = jitgen.quantize(torch.randn(48, 64), "int4", 32)


@jitgen.jit
def scaled(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, WEIGHT) * SCALE


@jitgen.jit
def decoded(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, QUANTIZED)


@pytest.mark.parametrize("function", [scaled, decoded])
@pytest.mark.parametrize(("target", "backend"), [("sm_90a", "cuda"), ("sm_80", "triton"), ("gfx942", "triton")])
def test_captured_tensors_stand_for_tensors_of_the_target(
    function: jitgen.api.JitFunction, target: str, backend: str
) -> None:
    for spec in (TensorSpec(("M", 64), torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)):
        low = function.lower(spec, target=target, backend=backend)
        assert [kernel.backend for kernel in low.kernels] == [backend]


def test_they_have_the_key_of_arguments() -> None:
    """A kernel does not know whether a tensor was closed over."""
    x = TensorSpec(("M", 64), torch.bfloat16)

    def scaled(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) * scale

    as_arguments = jitgen.jit(scaled).lower(x, WEIGHT, SCALE, target="sm_90a")
    assert globals()["scaled"].lower(x, target="sm_90a").key == as_arguments.key


def test_a_call_after_it_is_a_trace_of_its_own() -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    scaled.lower(x, target="sm_90a")
    torch.testing.assert_close(scaled(x), F.linear(x, WEIGHT) * SCALE, rtol=2e-2, atol=2e-2)
