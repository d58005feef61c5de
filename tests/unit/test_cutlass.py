"""Products by CUTLASS: which kernels a program becomes, their epilogue visitor trees, and what is refused and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.codegen import evt
from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import row_text
from jitgen.errors import UnsupportedError
from jitgen.families.gemm import cutlass_epilogue
from jitgen.families.gemm.cutlass_mainloops import CutlassTile
from jitgen.families.gemm.schedules import cutlass
from jitgen.ir.body import Instruction
from jitgen.ir.ops import OPS

ROWS, COLUMNS, LENGTH = 777, 512, 256


def spec(*shape: int, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    return TensorSpec(shape, dtype)


X, WEIGHT = spec(ROWS, LENGTH), spec(COLUMNS, LENGTH)


def lower(function: Callable[..., Any], *specs: TensorSpec) -> Any:
    return jitgen.jit(backend="cutlass")(function).lower(*specs, target="sm_90a")


def sources(function: Callable[..., Any], *specs: TensorSpec) -> list[str]:
    return [kernel.source for kernel in lower(function, *specs).kernels if kernel.template == "gemm/gemm_cutlass.cu.j2"]


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def test_a_product_is_one_kernel_of_cutlass() -> None:
    (source,) = sources(linear, X, WEIGHT)
    assert "using Epilogue = Sm90EVT<Sm90Compute<Identity, cutlass::bfloat16_t, float" in source
    assert "using Element = cutlass::bfloat16_t;" in source


def test_the_epilogue_is_a_tree_made_from_the_operations_behind_the_product() -> None:
    def block(x: Any, w: Any, b: Any, s: Any, r: Any) -> torch.Tensor:
        return F.gelu(x @ w + b) * s + r

    vector, matrix = spec(COLUMNS), spec(ROWS, COLUMNS)
    (source,) = sources(block, X, spec(LENGTH, COLUMNS), vector, vector, matrix)
    for node in ("Sm90RowBroadcast<0, BlockTile, cutlass::bfloat16_t", "Sm90SrcFetch<cutlass::bfloat16_t>"):
        assert node in source
    assert source.count("Sm90Compute<cutlass::plus") == 2
    assert "return jitgen::erfc(x0);" in source
    assert "cutlass::layout::RowMajor, 8, float, BlockTile" in source  # W is contiguous along its columns


def test_second_results_and_values_of_a_row_are_auxiliary() -> None:
    def both(x: Any, w: Any, s: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.linear(x, w).float() * s[:, None]
        return y, torch.relu(y).to(torch.bfloat16)

    (source,) = sources(both, X, WEIGHT, spec(ROWS, dtype=torch.float32))
    assert "Sm90AuxLoad<0, EpilogueTile, float, Stride<int64_t, _0, int64_t>" in source
    assert "Sm90AuxStore<0, EpilogueTile, cutlass::bfloat16_t" in source
    assert "using Result = float;" in source


def test_numbers_are_scalars_and_constants_part_of_a_function() -> None:
    def scaled(x: Any, w: Any, factor: float) -> torch.Tensor:
        return F.linear(x, w) * factor + 2

    low = jitgen.jit(backend="cutlass")(scaled).lower(X, WEIGHT, 0.25, target="sm_90a")
    (source,) = [kernel.source for kernel in low.kernels]
    assert "Sm90ScalarBroadcast<float>" in source
    assert "{{params.scalar0}}" in source
    assert "x0 + 2.0f" in source


def test_two_products_are_two_kernels() -> None:
    def swiglu(x: Any, gate: Any, up: Any) -> torch.Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    def halves(x: Any, first: Any, second: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return F.linear(x, first), F.linear(x, second)

    assert len(sources(swiglu, X, WEIGHT, WEIGHT)) == 2
    assert len(sources(halves, X, WEIGHT, WEIGHT)) == 2


@pytest.mark.parametrize(
    ("function", "specs", "reason"),
    [
        (linear, (spec(ROWS, LENGTH, dtype=torch.float32), spec(COLUMNS, LENGTH, dtype=torch.float32)), "float32"),
        (linear, (spec(ROWS, 257), spec(COLUMNS, 257)), "activation is not contiguous"),
        (linear, (X, spec(511, LENGTH)), "no result is whole, with contiguous rows"),
        (lambda x, w: F.linear(x, w)[:, :60], (X, WEIGHT), "it is a slice"),
        (lambda x, w: F.dropout(F.linear(x, w), 0.1), (X, WEIGHT), "positions of elements, as random numbers do"),
        (linear, (spec(ROWS, 0), spec(COLUMNS, 0)), "sums nothing"),
        (linear, (X, TensorSpec((COLUMNS, LENGTH), torch.bfloat16, format="int4", group_size=128)), "int4"),
        (torch.matmul, (spec(3, ROWS, LENGTH), spec(3, LENGTH, COLUMNS)), "batches"),
        (lambda x, w: F.linear(x, w).to(torch.int32), (X, WEIGHT), "int32"),
    ],
)
def test_what_cutlass_has_no_kernel_for_is_refused(function: Any, specs: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"backend 'cutlass' has no kernel for this product: .*{reason}"):
        lower(function, *specs)


def test_another_target_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sm_90a"):
        jitgen.jit(linear, backend="cutlass").lower(X, WEIGHT, target="sm_80")


def test_every_operation_of_float32_has_a_node() -> None:
    for op in OPS.values():
        if "float32" not in op.domain:
            continue
        loads = [Instruction("load", (), "float32", number) for number in range(op.arity)]
        if op.name == "where":
            loads[0] = Instruction("load", (), "bool", 0)
        own = Instruction(op.name, tuple(range(op.arity)), "bool" if op.predicate else "float32")
        assert evt.lack(own, [load.dtype for load in loads]) is None
        node = evt.node_of(op.arity, [*loads, own])
        assert bool(node.functor) != bool(node.expression), op.name
        assert node.arguments == tuple(range(op.arity))
        assert row_text(CUDA.rows, op.name, "float32") is not None


def test_integers_have_no_node() -> None:
    assert "int64" in (evt.lack(Instruction("add", (0, 1), "int64"), ["int64", "int64"]) or "")


@pytest.mark.parametrize("rows", [1, 100, 777, 4096])
def test_tiles_fit_shared_memory(rows: int) -> None:
    low = lower(linear, spec(rows, LENGTH), WEIGHT).lowered
    (schedule,) = low.schedules
    assert isinstance(schedule, CutlassTile)
    assert schedule.shared_bytes <= 227 * 1024
    assert schedule.stages >= cutlass.LEAST_STAGES
    shape = low.launch(0)
    assert shape.grid[0] % shape.cluster == 0
    maps = low.arguments(0).maps
    assert [len(described.box) for described in maps] == [3, 3, 3]
    assert all(size <= 256 for described in maps for size in described.box)


VECTOR, MATRIX = spec(COLUMNS), spec(ROWS, COLUMNS)
SINGLE, SINGLES = spec(COLUMNS, dtype=torch.float32), spec(ROWS, COLUMNS, dtype=torch.float32)


@pytest.mark.parametrize(
    ("function", "specs", "shared_bytes"),
    [
        (linear, (X, WEIGHT), 214016),
        (lambda x, w, r: F.linear(x, w) + r, (X, WEIGHT, MATRIX), 230400),
        (lambda x, w: F.linear(x, w).float(), (X, WEIGHT), 231424),
        (lambda x, w, b: F.linear(x, w).float() + b, (X, WEIGHT, VECTOR), 231424),
        (lambda x, w, a, b, c: (F.linear(x, w) + a) * b + c, (X, WEIGHT, SINGLE, SINGLE, VECTOR), 184320),
        (lambda x, w, r, q: F.linear(x, w) * r + q, (X, WEIGHT, MATRIX, SINGLES), 215040),
    ],
)
def test_shared_memory_is_what_cutlass_takes(function: Any, specs: Any, shared_bytes: int, monkeypatch: Any) -> None:
    """Sizes of ``GemmKernel::SharedStorage`` as NVRTC 13.5 has them of CUTLASS 4.2; a kernel does not compile where its
    launch has less."""
    monkeypatch.setattr(cutlass, "TILES", ((128, 256, 2),))
    (schedule,) = lower(function, *specs).lowered.schedules
    assert schedule.shared_bytes == shared_bytes


def rounded_to(dtype: torch.dtype) -> Any:
    return lambda x, w, b: (F.linear(x, w) * b).to(dtype)


def test_columns_of_a_result_of_bytes_are_multiples_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass_epilogue, "e4m3fn_saturates", lambda: True)
    function = rounded_to(torch.float8_e4m3fn)
    assert len(sources(function, X, spec(528, LENGTH), spec(528))) == 1
    with pytest.raises(UnsupportedError, match="its number of columns is no multiple of 16, say"):
        lower(function, X, spec(520, LENGTH), spec(520))


def test_results_whose_overflow_cutlass_stores_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUTLASS converts to 8 bits with ``satfinite``: seen on an H100 with torch 2.11, which has NaN beyond 448."""
    with pytest.raises(UnsupportedError, match="this torch infinity"):
        lower(rounded_to(torch.float8_e5m2), X, spec(528, LENGTH), spec(528))
    monkeypatch.setattr(cutlass_epilogue, "e4m3fn_saturates", lambda: False)
    with pytest.raises(UnsupportedError, match="this torch NaN"):
        lower(rounded_to(torch.float8_e4m3fn), X, spec(528, LENGTH), spec(528))
