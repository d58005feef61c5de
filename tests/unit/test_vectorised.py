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


@pytest.mark.skipif(host.toolchain() is None or host.toolchain().compiler != "gcc", reason="about GCC")  # type: ignore[union-attr]
@pytest.mark.parametrize("arch", ["x86-64-v3", "x86-64-v4"])
def test_extremes_of_short_rows_take_no_jumps(arch: str) -> None:
    """Nobody foretells the jumps of a comparison for each lane: rows of 32 took seven times as long."""
    function = jitgen.jit(lambda x: (x.amax(-1), x.amin(-1)))
    source, _ = function.lower(jitgen.TensorSpec((4096, 32), torch.float32), target=arch)._lowered.render(0)
    assert "comiss" not in host.assembly(host.prepare(source))


@pytest.mark.skipif(host.toolchain() is None or host.toolchain().compiler != "gcc", reason="about GCC")  # type: ignore[union-attr]
@pytest.mark.parametrize(("length", "wide"), [(64, False), (4096, True)])
def test_halves_of_short_rows_are_no_wider_than_what_they_are_put_together_to(length: int, wide: bool) -> None:
    """As two halves in memory that are read as one vector, norms of rows of 64 took four times as long."""
    function = jitgen.jit(lambda x: F.layer_norm(x, x.shape[-1:]))
    specification = jitgen.TensorSpec((4096, length), torch.bfloat16)
    source, _ = function.lower(specification, target="x86-64-v4")._lowered.render(0)
    assert ("zmm" in host.assembly(host.prepare(source))) == wide
