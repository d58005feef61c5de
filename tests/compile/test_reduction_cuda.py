"""Row reductions in CUDA C++, compiled without a device: resources, access widths, kernel counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec

CASES: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "residual": lambda x: (x + x.flip(0), F.rms_norm(x + x.flip(0), x.shape[-1:])),
    "quantize": lambda x: ((x / (x.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8), x.abs().amax(-1) / 127),
    "quantize to float8": lambda x: (x / (x.abs().amax(-1, keepdim=True) / 448)).to(torch.float8_e4m3fn),
    "argmax": lambda x: x.max(-1),
    "columns": lambda x: x.sum(0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("length", [7, 4096, 32768, 151936])
def test_one_kernel_with_the_row_in_registers(name: str, target: str, length: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    spec = TensorSpec(("M", length), torch.bfloat16)
    lowered = jitgen.jit(CASES[name]).lower(spec, target=target)
    assert [kernel.template for kernel in lowered.kernels] == ["cuda/reduction.cu.j2"]
    (report,) = lowered.compile().report
    # Registers are capped so that 1024 threads fit a multiprocessor; a few scalars may pay for that, never the row.
    tolerated = {("residual", 151936, "sm_90a"): 16}
    assert report["spill_bytes"] <= tolerated.get((name, length, target), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [4096, 32768, 151936])
def test_accesses_are_16_bytes_wide(dtype: torch.dtype, length: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    spec = TensorSpec(("M", length), dtype)
    sass = jitgen.jit(CASES["softmax"]).lower(spec, target="sm_90a").compile().asm["sass"]
    loads = set(re.findall(r"LDG\.(\S+)", sass))
    stores = set(re.findall(r"STG\.(\S+)", sass))
    assert loads
    assert stores
    assert all("128" in width for width in loads | stores)


def test_a_row_is_read_once(tmp_path, monkeypatch) -> None:
    """Resident rows: as many load instructions as vectors of a thread, whatever the number of passes."""
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    lowered = jitgen.jit(CASES["softmax"]).lower(TensorSpec(("M", 4096), torch.bfloat16), target="sm_90a")
    schedule = lowered._lowered.schedules[0]
    assert schedule.kept
    assert schedule.full
    assert len(re.findall(r"LDG\.", lowered.compile().asm["sass"])) == schedule.unroll


@pytest.mark.parametrize("length", [81_924, 100_000, 151_936, 155_648])
@pytest.mark.parametrize("rows", [49, 128])
def test_rows_that_lie_partly_in_shared_memory(rows: int, length: int, tmp_path, monkeypatch) -> None:
    """What is beyond eight vectors of a thread is copied there without registers, and read by whole accesses."""
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    for name in ("softmax", "log_softmax", "rms_norm"):
        lowered = jitgen.jit(CASES[name]).lower(TensorSpec((rows, length), torch.float32), target="sm_90a")
        (schedule,) = lowered._lowered.schedules
        there = schedule.shared_vectors
        assert there == schedule.unroll - 8 > 0
        assert (schedule.block_threads, schedule.blocks) == (256, 4)
        compiled = lowered.compile()
        (report,) = compiled.report
        assert report["spill_bytes"] <= 16
        sass = compiled.asm["sass"]
        assert len(re.findall(r"LDGSTS\.\S*128", sass)) == there
        assert len(re.findall(r"LDG\.\S*128", sass)) == 8
        # Every pass but the one that copied reads them, and that one too; softmax keeps exponentials in their place.
        assert len(re.findall(r"LDS\.128", sass)) == there * (2 if name == "rms_norm" else 3)
        assert len(re.findall(r"STS\.128", sass)) == there * (name == "softmax")


@pytest.mark.parametrize(
    ("rows", "length", "dtype"),
    [
        (48, 151_936, torch.float32),  # few: more blocks of a row are as good as more rows
        (129, 151_936, torch.float32),
        (64, 81_920, torch.float32),  # four blocks of it have a multiprocessor's registers
        (64, 155_652, torch.float32),  # more than a block's shared memory
        (64, 151_937, torch.float32),  # rows that no access of 16 bytes begins
        (64, 151_936, torch.bfloat16),
    ],
)
def test_rows_that_lie_in_registers_alone(rows: int, length: int, dtype: torch.dtype, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    spec = TensorSpec((rows, length), dtype)
    (schedule,) = jitgen.jit(CASES["softmax"]).lower(spec, target="sm_90a")._lowered.schedules
    assert schedule.shared_vectors == 0


def test_many_reductions_leave_no_room_in_shared_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))

    def powers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x / x.abs().amax(-1, keepdim=True)
        return x

    lowered = jitgen.jit(powers).lower(TensorSpec((64, 151_936), torch.float32), target="sm_90a")
    assert lowered._lowered.schedules[0].shared_vectors == 0
    assert lowered.compile().report[0]["shared_bytes"] < 49152


def test_two_values_of_an_element_lie_in_registers(tmp_path, monkeypatch) -> None:
    """One place in shared memory would not do for both."""
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))

    def both(x: torch.Tensor) -> torch.Tensor:
        return x + F.softmax(x, -1)

    def weighted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight)

    rows, weight = TensorSpec((64, 151_936), torch.float32), TensorSpec((151_936,), torch.float32)
    for function, specs in ((both, [rows]), (weighted, [rows, weight])):
        (schedule,) = jitgen.jit(function).lower(*specs, target="sm_90a")._lowered.schedules
        assert schedule.shared_vectors == 0


@pytest.mark.parametrize(
    ("dtype", "target"),
    [(dtype, target) for dtype in (torch.float32, torch.float64) for target in ("sm_80", "sm_90a")]
    + [(torch.float16, "sm_80")],  # which Hopper keeps in a cluster
)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "logsumexp", "var", "columns of softmax"])
def test_rows_that_every_pass_reads_again(name: str, target: str, dtype: torch.dtype, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    more = {
        "logsumexp": lambda x: x.logsumexp(-1),
        "var": lambda x: x.var(-1),
        "columns of softmax": lambda x: x.softmax(0),
    }
    shape = (10_000, 9000) if name == "columns of softmax" else (300, 200_000)
    lowered = jitgen.jit((CASES | more)[name]).lower(TensorSpec(shape, dtype), target=target)
    assert not lowered._lowered.schedules[0].kept
    assert any(word in lowered.source for word in ("SumExp<", "Deviations::"))
    (report,) = lowered.compile().report
    assert report["spill_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 64), (1500, 256), (300, 100_000), (9000, 9000)])
def test_many_reductions_of_columns_fit(dtype: torch.dtype, shape: tuple[int, int], tmp_path, monkeypatch) -> None:
    """Their states, in a thread's registers and in a block's shared memory, however many rows an access reaches."""
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))

    def many(x: torch.Tensor) -> Any:
        found = (x.sum(0), x.amax(0), x.amin(0), x.argmax(0), x.argmin(0), x.prod(0), x.any(0), x.all(0))
        return found if not x.is_floating_point() else (*found, x.var(0), x.logsumexp(0), x.norm(dim=0))

    lowered = jitgen.jit(many).lower(TensorSpec(shape, dtype), target="sm_90a")
    (report,) = lowered.compile().report
    assert report["spill_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [64, 512])
def test_many_short_rows_of_which_little_is_kept(dtype: torch.dtype, length: int, tmp_path, monkeypatch) -> None:
    """A thread holds many elements of such rows, and takes several of them; places are computed in both passes."""
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))

    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).sum(-1, keepdim=True) * x[:, :1].expand_as(x)

    def placed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[-1], device=x.device)
        return (x + places).sum(-1, keepdim=True) * places

    for function in (scaled, placed):
        spec = TensorSpec((100_000, length), dtype)
        lowered = jitgen.jit(function).lower(spec, spec, target="sm_90a")
        assert lowered._lowered.schedules[0].turns > 1
        (report,) = lowered.compile().report
        assert report["spill_bytes"] == 0


def test_cross_entropy_reads_the_logits_in_one_kernel() -> None:
    logits, target = TensorSpec(("M", 4096), torch.bfloat16), TensorSpec(("M",), torch.int64)
    none = jitgen.jit(lambda x, t: F.cross_entropy(x, t, reduction="none")).lower(logits, target, target="sm_90a")
    assert len(none.kernels) == 1
    mean = jitgen.jit(lambda x, t: F.cross_entropy(x, t)).lower(logits, target, target="sm_90a")
    assert len(mean.kernels) == 2
