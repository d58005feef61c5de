"""Split-K: what becomes of a program whose product is dealt out along K. (Results: ``test_gemm_triton.py``.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import lowering
from jitgen.deploy import manifest, row_variants
from jitgen.families.aliasing import read_elsewhere
from jitgen.families.gemm.mainloops import TritonWeights
from jitgen.families.gemm.schedule import ROW_BUCKETS
from jitgen.families.gemm.schedules import triton as rule
from jitgen.spec import Target

PARTS = 3


@pytest.fixture(autouse=True)
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of up to 64 rows is split."""

    def candidates(problem: Any) -> list[TritonWeights]:
        return [TritonWeights(64, 64, 32, 4, 3, k_splits=PARTS if problem.rows <= 64 else 1)]

    monkeypatch.setattr(rule, "candidates", candidates)


def spec(*shape: Any, format: str | None = None) -> jitgen.TensorSpec:
    return jitgen.TensorSpec(shape, torch.bfloat16, format=format, group_size=32 if format else None)


def lowered(function: Any, *specs: jitgen.TensorSpec) -> tuple[lowering.Lowered, str]:
    low = jitgen.jit(function).lower(*specs, target="sm_90a", backend="triton")
    return low._lowered, low.explain()


def residual(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.linear(x, w)) + y


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def projections(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.linear(x, q), F.linear(x, k) * 2


def normalised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(F.linear(x, w) + 1, (w.shape[0],))


def kinds(program: Any) -> list[tuple[str, str]]:
    return [(kernel.name, kernel.family) for kernel in program.kernels]


@pytest.mark.parametrize("format", [None, "int4"])
def test_a_product_and_its_sums(format: str | None) -> None:
    low, text = lowered(residual, spec(5, 96), spec(33, 96, format=format), spec(5, 33))
    program = low.program
    assert kinds(program) == [("residual", "gemm"), ("residual_sum", "elementwise")]
    (temporary,) = program.temporaries
    assert temporary.dtype == "float32"
    assert low.memories[len(program.inputs)].view.sizes == (PARTS * 5, 36)
    (product,), (sums,) = (kernel.bodies for kernel in program.kernels)
    assert [i.op for i in product.instructions] == ["contract", "store"]
    assert [operand.kind for operand in sums.operands] == ["load"] * (PARTS + 1) + ["store"]
    assert sums.operands[-1].buffer == len(program.inputs) + 1
    assert f"K is split over {PARTS} blocks" in text
    assert "the epilogue in the kernel that follows" in text
    assert "written by residual, read by residual_sum" in text


def test_the_program_of_any_size_is_kept() -> None:
    low, _ = lowered(residual, spec(5, 96), spec(33, 96), spec(5, 33))
    assert kinds(low.partitioned.program) == [("residual", "gemm")]
    many, text = lowered(residual, spec(100, 96), spec(33, 96), spec(100, 33))
    assert many.program is many.partitioned.program
    assert "split over" not in text


def test_every_product_of_a_kernel_has_sums_of_its_own() -> None:
    low, _ = lowered(swiglu, spec(5, 96), spec(33, 96), spec(33, 96))
    assert kinds(low.program) == [("swiglu", "gemm"), ("swiglu_sum", "elementwise")]
    assert len(low.program.temporaries) == 2
    assert len(low.program.kernels[1].bodies) == 1


def test_regions_stay_together() -> None:
    low, _ = lowered(projections, spec(5, 96), spec(33, 96), spec(70, 96))
    assert kinds(low.program) == [("projections", "gemm"), ("projections_sum", "elementwise")]
    assert [len(kernel.bodies) for kernel in low.program.kernels] == [2, 2]
    sizes = [low.memories[len(low.program.inputs) + place].view.sizes for place in range(2)]
    assert sizes == [(PARTS * 5, 36), (PARTS * 5, 72)]


def test_sums_into_a_temporary() -> None:
    low, _ = lowered(normalised, spec(5, 96), spec(64, 96))
    assert [family for _, family in kinds(low.program)] == ["gemm", "elementwise", "reduction"]
    assert len(low.program.temporaries) == 2
    product, sums, norm = (kernel.bodies[0] for kernel in low.program.kernels)
    first = len(low.program.inputs)
    assert product.operands[-1].buffer == first + 1
    assert sums.operands[-1].buffer == first
    assert {operand.buffer for operand in norm.operands} == {first, first + 2}


def test_the_activation_is_free_once_the_product_is_summed() -> None:
    """So a square product may write over it."""
    low, _ = lowered(lambda x, w: F.linear(x, w), spec(5, 64), spec(64, 64))
    sizes, whole = {"s0_0": 5, "s0_1": 64, "s1_0": 64, "s1_1": 64}, low.partitioned.program
    assert 0 not in read_elsewhere(low.program, sizes, low.memories, 0)
    assert 0 in read_elsewhere(whole, sizes, [*low.memories[: len(whole.inputs)], low.memories[-1]], 0)


@pytest.mark.parametrize("columns", [4096, 4099])
def test_all_numbers_of_rows_are_at_most_eight_plans(columns: int) -> None:
    keys = set()
    for rows in (*range(2, 70), *range(100, 3000, 331), 8192):
        low, _ = lowered(residual, spec(rows, 512), spec(columns, 512, format="int4"), spec(rows, columns))
        keys.add(low.key)
    assert len(keys) <= len(ROW_BUCKETS) + 1


def test_every_bucket_of_a_recorded_product_is_prepared(tmp_path: Path) -> None:
    """Split where its rows are few, and whole where they are many, from one recording."""
    path = tmp_path / "specs.json"
    with jitgen.record(path):
        jitgen.jit(residual)(torch.randn(5, 96), torch.randn(33, 96), torch.randn(5, 33))
    (entry,) = json.loads(path.read_text())["entries"]
    route = lowering.Route("triton", "triton", Target.parse("sm_90a"))
    found = [manifest.relower(variant, route) for variant in row_variants.variants(entry, route.device)]
    rows = {low.laid_out.geometries[0][0].rows: len(low.program.kernels) for low in found}
    assert len(found) == len(ROW_BUCKETS) + 1
    assert all(kernels == (2 if count <= 64 else 1) for count, kernels in rows.items())
