"""Matrix products in CUDA C++, compiled without a device: the mainloop, its instructions, its resources."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.families.gemm.schedules import cuda

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS = (1, 16, 300)
MAINLOOPS = ("mma", "rows", "columns", "dense", "simt")
"""Those of ``gemm_mma.cuh``, ``gemm_dense.cuh`` and ``gemm_simt.cuh``."""


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def biased(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, bias)) + residual


def projections(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def quantized(n: int, k: int, format: str = "int4", group: int | None = 128, dtype: torch.dtype = BF16) -> TensorSpec:
    return TensorSpec((n, k), dtype, format=format, group_size=group)


def lowered(function: Callable[..., Any], *specs: TensorSpec, target: str = "sm_90a") -> Any:
    return jitgen.jit(function).lower(*specs, target=target, backend="cuda")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("format", "group", "dtype", "target"),
    [
        ("int4", 128, BF16, "sm_80"),
        ("int4", 128, BF16, "sm_90a"),
        ("int4", 128, BF16, "sm_100a"),
        ("int4", 32, F16, "sm_80"),
        ("uint4", 64, BF16, "sm_90a"),
        ("uint4", None, F16, "sm_90a"),
        ("int8", None, BF16, "sm_80"),
    ],
)
@pytest.mark.quick(
    where=lambda rows, format, target: rows == 16 and (format, target) in (("uint4", "sm_90a"), ("int8", "sm_80"))
)
def test_a_quantised_weight_is_read_16_bytes_at_a_time(
    format: str, group: int, dtype: Any, rows: int, target: str
) -> None:
    low = lowered(linear, TensorSpec((rows, 4096), dtype), quantized(4096, 4096, format, group, dtype), target=target)
    assert [kernel.template for kernel in low.kernels] == ["gemm/gemm.cu.j2"]
    if low._lowered.schedules[0].path not in MAINLOOPS:
        pytest.skip("another mainloop's")
    built = low.compile()
    (report,) = built.report
    assert report["spill_bytes"] <= 64  # a few addresses outside the loop, where registers are capped for two blocks
    sass = built.asm["sass"]
    assert f"HMMA.16816.F32{'.BF16' if dtype == BF16 else ''}" in sass
    # Codes alone come past the first-level cache.
    assert set(re.findall(r"LDG\.E\.NA\.(\w+)", sass)) == {"128"}
    assert "LDGSTS.E.128" in sass


@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("function", [swiglu, projections])
@pytest.mark.quick(where=lambda rows: rows == 16)
def test_products_of_one_activation_are_one_kernel(function: Callable[..., Any], rows: int) -> None:
    count = 2 if function is swiglu else 3
    low = lowered(function, TensorSpec((rows, 4096), BF16), *(quantized(2048, 4096) for _ in range(count)))
    assert len(low.kernels) == 1
    (report,) = low.compile().report
    assert report["spill_bytes"] <= 64


def test_regions_that_differ_in_their_weights_alone_share_a_mainloop() -> None:
    specs = [quantized(n, 4096) for n in (4096, 1024, 1024)]
    source = lowered(projections, TensorSpec((1, 4096), BF16), *specs, target="sm_80").source
    assert source.count("_gemm<Config0>(") == 1
    mixed = [quantized(4096, 4096), quantized(1024, 4096, group=64), quantized(1024, 4096)]
    source = lowered(projections, TensorSpec((1, 4096), BF16), *mixed, target="sm_80").source
    assert source.count("_gemm<Config") >= 2


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("rows", [1, 64, 300])
@pytest.mark.parametrize("length", [4096, 4095])
@pytest.mark.quick(where=lambda rows, length, target: (rows, target) == (64, "sm_80") or (rows, length) == (300, 4096))
def test_dense_weights(rows: int, length: int, target: str) -> None:
    specs = [TensorSpec((rows, length), BF16), TensorSpec((1024, length), BF16)]
    specs += [TensorSpec((1024,), BF16), TensorSpec((rows, 1024), BF16)]
    low = lowered(biased, *specs, target=target)
    if low._lowered.schedules[0].path not in MAINLOOPS:
        pytest.skip("another mainloop's")
    built = low.compile()
    assert built.report[0]["spill_bytes"] == 0
    assert "HMMA.16816.F32.BF16" in built.asm["sass"]
    # Odd rows cannot be copied sixteen bytes at a time.
    assert ("LDGSTS.E.128" in built.asm["sass"]) == (length % 8 == 0)
    # They are loaded element by element, several at once: a load waits for none of the stores before it.
    singles = re.findall(r"\b(LDG|STS)\.(?:E\.)?U16", built.asm["sass"])
    runs = [len(list(run)) for kind, run in itertools.groupby(singles) if kind == "LDG"]
    assert runs or length % 2 == 0
    assert length % 2 == 1 or not runs or rows == 1  # an epilogue of one row may take an element at a time
    assert all(run == 8 for run in runs) or rows < 64


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.quick(where=lambda dtype, rows, transposed: rows == 4 and dtype is (BF16 if transposed else F32))
def test_dense_weights_of_few_rows_are_read_16_bytes_at_a_time(transposed: bool, dtype: Any, rows: int) -> None:
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ (w if transposed else w.T)

    shape = (4096, 6144) if transposed else (6144, 4096)
    low = lowered(product, TensorSpec((rows, 4096), dtype), TensorSpec(shape, dtype))
    paths = ("stream", "stream_outer") if dtype is F32 else ("rows", "columns")
    if transposed and rows > cuda.MMA_ROWS and dtype is not F32:
        assert low._lowered.schedules[0].path == "wgmma_dense"  # which reads them by tensor copies
        return
    assert low._lowered.schedules[0].path == paths[transposed]
    built = low.compile()
    assert built.report[0]["spill_bytes"] == 0
    assert set(re.findall(r"LDG\.E\.NA\.(?:LTC128B\.)?(\w+)", built.asm["sass"])) == {"128"}
    assert ("HMMA.16816.F32" in built.asm["sass"]) == (dtype is not F32)


@pytest.mark.parametrize("weights", ["int4", "int8", None])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.quick(where=lambda dtype, target: (dtype, target) == (BF16, "sm_90a"))
def test_an_activation_of_few_rows_is_computed_in_shared_memory(weights: str | None, dtype: Any, target: str) -> None:
    def function(x: torch.Tensor, scale: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x * scale[:, None], w).relu()

    weight = quantized(4096, 4096, weights, 128, dtype) if weights else TensorSpec((4096, 4096), dtype)
    specs = [TensorSpec((1, 4096), dtype), TensorSpec((1,), dtype), weight]
    low = lowered(function, *specs, target=target)
    assert len(low.kernels) == 1
    assert low.source.count("struct Activation") == 1
    assert low.compile().report[0]["spill_bytes"] <= 64
    many = lowered(function, TensorSpec((512, 4096), dtype), TensorSpec((512,), dtype), weight, target=target)
    assert len(many.kernels) == 2


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("weight", [None, "int4", "uint4", "int8"])
@pytest.mark.quick(where=lambda rows, weight: (rows, weight) in ((300, None), (1, "int4")))
def test_float32_is_not_rounded(rows: int, weight: str | None) -> None:
    spec = quantized(1024, 512, weight, 64, F32) if weight else TensorSpec((1024, 512), F32)
    built = lowered(linear, TensorSpec((rows, 512), F32), spec).compile()
    assert built.report[0]["spill_bytes"] == 0
    assert "FFMA" in built.asm["sass"]
    assert "HMMA" not in built.asm["sass"]


def test_a_recorded_prefill_prewarms_every_number_of_rows_with_its_prologue_or_without(
    tmp_path: Path, own_store: Path
) -> None:
    def function(gate: torch.Tensor, up: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(gate) * up, w)

    gate, up, w = (torch.randn(rows, 256).to(BF16) for rows in (100, 100, 64))
    with torch.no_grad(), jitgen.record(tmp_path / "specs.json"):
        jitgen.jit(function)(gate, up, w)
    jitgen.prewarm(tmp_path / "specs.json", targets=["sm_90a"])
    with jitgen.strict():
        for rows, kernels in [(1, 1), (3, 1), (16, 1), (50, 2), (300, 2), (2000, 2)]:
            low = lowered(function, *2 * [TensorSpec((rows, 256), BF16)], TensorSpec((64, 256), BF16))
            low.compile()
            assert len(low.kernels) == kernels


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256, 1024, 5000])
def test_float32_tiles_fit_a_block(rows: int, target: str) -> None:
    for shape in ((4096, 4096), (28672, 4096), (1024, 14336)):
        low = lowered(linear, TensorSpec((rows, shape[1]), F32), TensorSpec(shape, F32), target=target)
        schedule = low._lowered.schedules[0]
        assert schedule.shared_bytes <= {"sm_80": 163, "sm_86": 99, "sm_90a": 227}[target] * 1024
        assert schedule.cluster_k_splits == 1 or target == "sm_90a"


def test_old_architectures_have_no_clusters() -> None:
    for rows in (1, 4, 16, 64):
        for target in ("sm_80", "sm_86", "sm_89"):
            low = lowered(linear, TensorSpec((rows, 14336), BF16), quantized(4096, 14336), target=target)
            schedule = low._lowered.schedules[0]
            assert schedule.cluster_k_splits == 1
            assert schedule.shared_bytes <= (163 if target == "sm_80" else 99) * 1024
            assert "__cluster_dims__" not in low.source


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64], ids=str)
def test_integers_are_summed_as_integers(dtype: torch.dtype) -> None:
    low = lowered(lambda x, w: x @ w.T, TensorSpec(("M", 64), dtype), TensorSpec((128, 64), dtype), target="sm_80")
    sass = low.compile().asm["sass"]
    assert "IMAD" in sass
    assert "FFMA" not in sass
