"""Rendered kernels compile for every target, without any of its devices."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec

SPEC = TensorSpec(("M", 4096), torch.bfloat16)


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x.float() * 1.5).to(x.dtype) + w


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def mixed(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.to(torch.float8_e4m3fn), (x > 0) & (x < n), torch.stack([x.t(), x.t() + 1], -1).to(torch.int8)


CASES: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "chain": (chain, (SPEC, TensorSpec((4096,), torch.float32))),
    "rotate": (rotate, (SPEC, SPEC, SPEC)),
    "mixed": (mixed, (SPEC, 3)),
    "ragged": (chain, (TensorSpec((3, 1001), torch.float16), TensorSpec((3, 1), torch.float16))),
    "float64": (chain, (TensorSpec(("M",), torch.float64), TensorSpec((1,), torch.float64))),
}
TARGETS = [("cuda", "sm_80"), ("cuda", "sm_90a"), ("cuda", "sm_100a"), ("triton", "sm_80"), ("triton", "sm_90")]
TARGETS += [("triton", "sm_100"), ("triton", "gfx942"), ("cpp", "x86-64-v2"), ("cpp", "x86-64-v4"), ("cpp", "generic")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "target"), TARGETS)
@pytest.mark.quick(
    where=lambda case, target: (
        (case == "mixed" and target in ("gfx942", "x86-64-v2")) or (case, target) == ("chain", "sm_90a")
    )
)
def test_every_target_compiles(case: str, backend: str, target: str, own_store) -> None:
    function, arguments = CASES[case]
    compiled: list[jitgen.CompileEvent] = []
    unsubscribe = jitgen.on_compile(compiled.append)
    try:
        lowered = jitgen.jit(function).lower(*arguments, target=target, backend=backend)
        executable = lowered.compile()
        assert [event.key for event in compiled] == [kernel.key for kernel in lowered.kernels]
        again = jitgen.jit(function).lower(*arguments, target=target, backend=backend).compile()
    finally:
        unsubscribe()
    assert all(row["origin"] == "compiled" for row in executable.report)
    assert all(row["origin"] == "store" for row in again.report)
    assert len(compiled) == len(lowered.kernels)
    assert not any(row["spill_bytes"] for row in executable.report)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [("M",), ("M", 4096)])
@pytest.mark.quick(where=lambda dtype, shape: dtype == torch.bfloat16 and len(shape) == 2)
def test_accesses_are_16_bytes_wide(backend: str, dtype: torch.dtype, shape) -> None:
    specs = TensorSpec(shape, dtype), TensorSpec(shape[-1:], dtype)
    sass = jitgen.jit(lambda x, w: x * w + x).lower(*specs, target="sm_90a", backend=backend).compile().asm["sass"]
    assert re.search(r"LDG\.\S*128", sass)
    assert re.search(r"STG\.\S*128", sass)


@pytest.mark.parametrize("boundaries", [1024, 70001])
def test_a_search_compiles_in_seconds(boundaries: int, own_store) -> None:
    """A search that was written out once in each step of another took minutes; it is 0.1 and 0.7 s here."""
    search = jitgen.jit(lambda x, edges: torch.bucketize(x, edges, right=True))
    specs = TensorSpec((4000,), torch.float32), TensorSpec((boundaries,), torch.float32)
    seconds: list[float] = []
    unsubscribe = jitgen.on_compile(lambda event: seconds.append(event.seconds))
    try:
        search.lower(*specs, target="sm_90a", backend="cuda").compile()
    finally:
        unsubscribe()
    (taken,) = seconds
    assert taken < 20


def test_unaligned_operands_are_not_read_16_bytes_at_a_time() -> None:
    spec = TensorSpec(("M",), torch.bfloat16, alignment=2)
    sass = jitgen.jit(lambda x: x * 2).lower(spec, target="sm_90a").compile().asm["sass"]
    assert "LDG" in sass
    assert not re.search(r"LDG\.\S*(64|128)", sass)


def test_indices_are_64_bit_where_an_extent_needs_it() -> None:
    function = jitgen.jit(lambda x: x * 2)
    for size, index in ((2**31 - 2**21, "int32_t"), (2**31, "int64_t")):
        lowered = function.lower(TensorSpec((size,), torch.int8), target="sm_90a")
        assert f"using Index = {index};" in lowered.source
        assert lowered.compile().report[0]["elements"] == size
    triton = function.lower(TensorSpec((2**16, 2**15), torch.int8), target="sm_90", backend="triton")
    assert ".to(tl.int64)" in triton.source
    assert triton.compile().report[0]["elements"] == 2**31


def test_a_backend_refuses_a_target_it_cannot_serve() -> None:
    with pytest.raises(jitgen.UnsupportedError, match="backend 'cuda' does not make code for gfx942"):
        jitgen.jit(lambda x: x + 1).lower(SPEC, target="gfx942", backend="cuda")
    with pytest.raises(jitgen.UnsupportedError, match="unknown target 'sm90'"):
        jitgen.jit(lambda x: x + 1).lower(SPEC, target="sm90")
    with pytest.raises(jitgen.UnsupportedError, match="sm_75 is older than sm_80"):
        jitgen.jit(lambda x: x + 1).lower(SPEC, target="sm_75")
