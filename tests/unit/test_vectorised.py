"""Generated CPU kernels are vector code: GCC is easily kept from making it, and nothing but the speed shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compile import host

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "chain": lambda x, y, mask: (x * 1.1 + 0.3).relu() * x - 0.5,
    "gated": lambda x, y, mask: F.silu(x) * y,
    "gelu": lambda x, y, mask: F.gelu(x) + F.gelu(y, approximate="tanh"),
    "selected": lambda x, y, mask: torch.where(mask, x, y),
    "filled": lambda x, y, mask: x.masked_fill(mask, -1.0),
    "masked": lambda x, y, mask: x * mask,
    "compared": lambda x, y, mask: torch.where(x > y, x.exp(), y.sigmoid()),
    "clamped": lambda x, y, mask: x.clamp(-1, 1).maximum(y),
    "power": lambda x, y, mask: x.pow(1.5) + x.pow(y),
    "cast": lambda x, y, mask: (x * 127).round().clamp(-128, 127).to(torch.int8),
}


def vector_arithmetic(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> int:
    """Instructions on full vectors that are more than moves."""
    x = jitgen.TensorSpec((4096,), dtype)
    lowered = jitgen.jit(function).lower(x, x, jitgen.TensorSpec((4096,), torch.bool), target="x86-64-v4")
    source, _ = lowered._lowered.render(0)
    listing = host.assembly(host.prepare(source))
    return sum("zmm" in line and "vmov" not in line for line in listing.splitlines())


@pytest.mark.skipif(host.toolchain() is None or host.toolchain().compiler != "gcc", reason="about GCC")  # type: ignore[union-attr]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_are_vectorised(name: str, dtype: torch.dtype) -> None:
    assert vector_arithmetic(FUNCTIONS[name], dtype) >= 3
