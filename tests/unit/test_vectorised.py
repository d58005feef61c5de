"""Generated CPU kernels are vector code: GCC is easily kept from making it, and nothing but the speed shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host

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


pytestmark = pytest.mark.optimised
about_gcc = pytest.mark.skipif(
    host.toolchain() is None or host.toolchain().compiler != "gcc",  # type: ignore[union-attr]
    reason="about GCC",
)


def assembly(function: Callable[..., object], *specs: jitgen.TensorSpec, target: str = "x86-64-v4") -> str:
    source, _ = jitgen.jit(function).lower(*specs, target=target)._lowered.render(0)
    return host.assembly(host.prepare(source))


def vector_arithmetic(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> int:
    """Instructions on full vectors that are more than moves."""
    x = jitgen.TensorSpec((4096,), dtype)
    lines = assembly(function, x, x, jitgen.TensorSpec((4096,), torch.bool)).splitlines()
    return sum("zmm" in line and "vmov" not in line for line in lines)


@about_gcc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.quick(
    where=lambda name, dtype: (
        name in ("gelu", "compared", "power") and dtype == (torch.bfloat16 if name == "compared" else torch.float32)
    )
)
def test_kernels_are_vectorised(name: str, dtype: torch.dtype) -> None:
    assert vector_arithmetic(FUNCTIONS[name], dtype) >= 3


@about_gcc
@pytest.mark.parametrize("arch", ["x86-64-v3", "x86-64-v4"])
def test_extremes_of_short_rows_take_no_jumps(arch: str) -> None:
    """Nobody foretells the jumps of a comparison for each lane: rows of 32 took seven times as long."""
    rows = jitgen.TensorSpec((4096, 32), torch.float32)
    assert "comiss" not in assembly(lambda x: (x.amax(-1), x.amin(-1)), rows, target=arch)


@about_gcc
@pytest.mark.parametrize(("length", "wide"), [(64, False), (4096, True)])
def test_halves_of_short_rows_are_no_wider_than_what_they_are_put_together_to(length: int, wide: bool) -> None:
    """As two halves in memory that are read as one vector, norms of rows of 64 took four times as long."""
    rows = jitgen.TensorSpec((4096, length), torch.bfloat16)
    assert ("zmm" in assembly(lambda x: F.layer_norm(x, x.shape[-1:]), rows)) == wide
