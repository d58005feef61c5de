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
from jitgen.families.rows.reduction.forms import PersistentRows

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
@pytest.mark.quick(
    where=lambda name, target, length: (
        (target, length) == ("sm_90a", 4096) or (name, target, length) == ("softmax", "sm_90a", 151936)
    )
)
def test_one_kernel_with_the_row_in_registers(name: str, target: str, length: int) -> None:
    spec = TensorSpec(("M", length), torch.bfloat16)
    lowered = jitgen.jit(CASES[name]).lower(spec, target=target)
    assert [kernel.template for kernel in lowered.kernels] == ["reduction/reduction.cu.j2"]
    (report,) = lowered.compile().report
    # Registers are capped so that 1024 threads fit a multiprocessor; a few scalars may pay for that, never the row.
    tolerated = {("residual", 151936, "sm_90a"): 16}
    assert report["spill_bytes"] <= tolerated.get((name, length, target), 0)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.quick(where=lambda count, dtype: count == 3 and dtype is torch.bfloat16)
def test_columns_of_several_operands_spill_nothing(count: int, dtype: torch.dtype) -> None:
    """As the gradients of a norm's weight add them up, beside a number for each row: the more operands, the fewer
    elements of each are in flight."""

    def columns(*xs: Any) -> Any:
        *own, scale = xs
        total = own[0].float()
        for x in own[1:]:
            total = total * x
        return (total * scale).sum(0), own[0].float().sum(0)

    specs = [TensorSpec(("M", 4096), dtype)] * count
    lowered = jitgen.jit(columns).lower(*specs, TensorSpec(("M", 1), torch.float32), target="sm_90a")
    (report,) = lowered.compile().report
    assert report["spill_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [4096, 32768, 151936])
@pytest.mark.quick(where=lambda length: length == 4096)
def test_accesses_are_16_bytes_wide(dtype: torch.dtype, length: int) -> None:
    spec = TensorSpec(("M", length), dtype)
    sass = jitgen.jit(CASES["softmax"]).lower(spec, target="sm_90a").compile().asm["sass"]
    loads = set(re.findall(r"LDG\.(\S+)", sass))
    stores = set(re.findall(r"STG\.(\S+)", sass))
    assert loads
    assert stores
    assert all("128" in width for width in loads | stores)


def test_a_row_is_read_once() -> None:
    """Resident rows: as many load instructions as vectors of a thread, whatever the number of passes."""
    lowered = jitgen.jit(CASES["softmax"]).lower(TensorSpec(("M", 4096), torch.bfloat16), target="sm_90a")
    schedule = lowered._lowered.schedules[0]
    assert schedule.resident
    assert schedule.is_unmasked
    assert len(re.findall(r"LDG\.", lowered.compile().asm["sass"])) == schedule.unroll


@pytest.mark.parametrize("length", [81_924, 100_000, 151_936, 155_648])
@pytest.mark.parametrize("rows", [49, 128])
@pytest.mark.quick(where=lambda rows, length: (rows, length) == (128, 151_936))
def test_rows_that_lie_partly_in_shared_memory(rows: int, length: int) -> None:
    """What is beyond eight vectors of a thread is copied there without registers, and read by whole accesses."""
    for name in ("softmax", "log_softmax", "rms_norm"):
        lowered = jitgen.jit(CASES[name]).lower(TensorSpec((rows, length), torch.float32), target="sm_90a")
        (schedule,) = lowered._lowered.schedules
        there = schedule.shared_vectors
        assert there == schedule.unroll - 8 > 0
        assert (schedule.block_threads, schedule.blocks_per_multiprocessor) == (256, 4)
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
def test_rows_that_lie_in_registers_alone(rows: int, length: int, dtype: torch.dtype) -> None:
    spec = TensorSpec((rows, length), dtype)
    (schedule,) = jitgen.jit(CASES["softmax"]).lower(spec, target="sm_90a")._lowered.schedules
    assert schedule.shared_vectors == 0


def test_many_reductions_leave_no_room_in_shared_memory() -> None:

    def powers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = x / x.abs().amax(-1, keepdim=True)
        return x

    lowered = jitgen.jit(powers).lower(TensorSpec((64, 151_936), torch.float32), target="sm_90a")
    assert lowered._lowered.schedules[0].shared_vectors == 0
    assert lowered.compile().report[0]["shared_bytes"] < 49152


def test_two_values_of_an_element_lie_in_registers() -> None:
    """One place in shared memory would not do for both."""

    def both(x: torch.Tensor) -> torch.Tensor:
        return x + F.softmax(x, -1)

    rows, weight = TensorSpec((64, 151_936), torch.float32), TensorSpec((151_936,), torch.float32)
    for function, specs in ((both, [rows]), (weighted, [rows, weight])):
        (schedule,) = jitgen.jit(function).lower(*specs, target="sm_90a")._lowered.schedules
        assert schedule.shared_vectors == 0


def weighted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight)


def affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def added(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y, F.rms_norm(x + y, weight.shape, weight)


PERSISTENT = {
    "norm of a weight": (weighted, 1, 1, 45_056),
    "layer_norm": (affine, 1, 2, 45_056),
    "norm of a sum": (added, 2, 1, 45_056),
    "softmax": (CASES["softmax"], 1, 0, 163_844),
    "log_softmax": (CASES["log_softmax"], 1, 0, 163_844),
    "quantize": (CASES["quantize"], 1, 0, 163_844),
}
"""Functions of rows that clusters take one after another: how many operands have rows of their own, and have not, and
from what length on; without the latter, where blocks of its own cannot hold a row."""


@pytest.mark.parametrize("length", [45_056, 81_920, 81_924, 151_936, 163_844, 204_800])
@pytest.mark.parametrize("name", PERSISTENT)
@pytest.mark.quick(where=lambda name, length: name in ("layer_norm", "norm of a sum", "softmax") and length == 163_844)
def test_persistent_rows(name: str, length: int) -> None:
    """Rows come into shared memory by bulk copies, and what all rows read is read outside the loop over them."""
    function, own, common, least = PERSISTENT[name]
    specs = [TensorSpec((64, length), torch.float32)] * own + [TensorSpec((length,), torch.float32)] * common
    lowered = jitgen.jit(function).lower(*specs, target="sm_90a")
    (schedule,) = lowered._lowered.schedules
    assert isinstance(schedule, PersistentRows) == (length >= least)
    if length < least:
        return
    assert "persistent clusters" in lowered.explain()
    assert schedule.cluster == (4 if length <= 81_920 else 8)
    compiled = lowered.compile()
    (report,) = compiled.report
    assert report["spill_bytes"] <= 32
    assert report["shared_bytes"] <= 228 * 1024
    sass = compiled.asm["sass"]
    parked = schedule.shared_operands
    # A cluster's first row, and in the loop the next; once what all rows read and no register holds.
    assert len(re.findall(r"UBLKCP\.S\.G", sass)) == own * 2 + parked
    assert len(re.findall(r"LDG\.\S*128", sass)) == (common - parked) * schedule.unroll
    # Moments of 32 warps or of 64 are read by four numbers each.
    received = schedule.cluster * schedule.threads // 32 // 32 if schedule.online else 0
    assert schedule.online == (name == "layer_norm")
    assert len(re.findall(r"LDS\.128", sass)) == (own + parked) * schedule.unroll + received


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "target"),
    [
        (15, 151_936, torch.float32, "sm_90a"),  # a cluster for each is under way at once
        (32, 81_920, torch.float32, "sm_90a"),  # the same, of four blocks
        (129, 151_936, torch.float32, "sm_90a"),  # many: small blocks of several rows overlap better
        (64, 45_052, torch.float32, "sm_90a"),  # short
        (64, 204_804, torch.float32, "sm_90a"),  # more than the registers of a cluster
        (64, 151_937, torch.float32, "sm_90a"),  # rows that no access of 16 bytes begins
        (64, 151_936, torch.bfloat16, "sm_90a"),
        (64, 151_936, torch.float32, "sm_80"),
    ],
)
def test_rows_that_have_blocks_of_their_own(
    rows: int, length: int, dtype: torch.dtype, target: str, tmp_path, monkeypatch
) -> None:
    specs = TensorSpec((rows, length), dtype), TensorSpec((length,), dtype)
    (schedule,) = jitgen.jit(weighted).lower(*specs, target=target)._lowered.schedules
    assert not isinstance(schedule, PersistentRows)
    assert bool(schedule.shared_bytes) == bool(schedule.staged)


@pytest.mark.parametrize(("name", "own", "common"), [("weighted", 1, 1), ("affine", 1, 2)])
@pytest.mark.parametrize("rows", [33, 64])
@pytest.mark.parametrize("length", [65_544, 98_304, 131_072, 151_936, 163_840])
@pytest.mark.quick(where=lambda rows, length: (rows, length) == (64, 98_304))
def test_what_all_rows_read_comes_while_the_row_does(
    name: str, own: int, common: int, rows: int, length: int, tmp_path, monkeypatch
) -> None:
    """Of pairs of blocks: into shared memory by bulk copies, as much as it takes; the rest into registers."""
    function = {"weighted": weighted, "affine": affine}[name]
    specs = [TensorSpec((rows, length), torch.bfloat16)] * own + [TensorSpec((length,), torch.bfloat16)] * common
    lowered = jitgen.jit(function).lower(*specs, target="sm_90a")
    (schedule,) = lowered._lowered.schedules
    assert (schedule.cluster, schedule.staged.operands) == (2, tuple(range(own, own + common)))
    assert schedule.staged.vectors == min(schedule.unroll, 226 * 1024 // (schedule.threads * 16 * common))
    assert "copied to shared memory while the row is loaded" in lowered.explain()
    compiled = lowered.compile()
    (report,) = compiled.report
    assert report["spill_bytes"] <= 16
    assert report["shared_bytes"] <= 228 * 1024
    sass = compiled.asm["sass"]
    assert len(re.findall(r"UBLKCP\.S\.G", sass)) == common  # a loop's
    late = common * (schedule.unroll - schedule.staged.vectors)
    assert len(re.findall(r"LDG\.\S*128", sass)) == own * schedule.unroll + late
    received = 2 if name == "affine" else 0
    assert len(re.findall(r"LDS\.128", sass)) == common * schedule.staged.vectors + received


@pytest.mark.parametrize("weights", [1, 2, 7, 15])
@pytest.mark.quick(where=lambda weights: weights in (2, 15))
def test_what_a_row_sends_leaves_less_for_what_all_rows_read(weights: int) -> None:
    """Of many reductions, and of more operands than have any room."""

    def many(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = F.layer_norm(x, x.shape[-1:])
        for number, weight in enumerate(weights):
            found = found * weight + number
        others = [(x * float(power)).abs().amax(-1) for power in range(2, 12)]
        return found, *others

    rows, weight = TensorSpec((64, 73_728), torch.bfloat16), TensorSpec((73_728,), torch.bfloat16)
    lowered = jitgen.jit(many).lower(rows, *[weight] * weights, target="sm_90a")
    (schedule,) = lowered._lowered.schedules
    assert (schedule.cluster, bool(schedule.staged)) == (2, weights < 15)
    (report,) = lowered.compile().report
    assert report["shared_bytes"] <= 228 * 1024


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("a residual", [TensorSpec((64, 73_728), torch.bfloat16)]),
        ("an operand along columns", [TensorSpec((64, 73_728), torch.bfloat16, strides=(1, 0))]),
        ("every second element", [TensorSpec((64, 73_728), torch.bfloat16, strides=(0, 2))]),
        ("codes", [TensorSpec((73_728,), torch.int8)]),
    ],
)
def test_what_no_whole_accesses_of_all_rows_bring_is_asked_for(name: str, specs) -> None:
    """Vector for vector, and then so is the weight: what is asked for of one operand is of all."""
    rows, weight = TensorSpec((64, 73_728), torch.bfloat16), TensorSpec((73_728,), torch.bfloat16)

    def normal(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight) + other

    lowered = jitgen.jit(normal).lower(rows, weight, *specs, target="sm_90a")
    (schedule,) = lowered._lowered.schedules
    assert (schedule.cluster, schedule.staged) == (2, None)
    assert re.search(r"for \(int u = 0; u < batch1; \+\+u\) ask1\(u\);", lowered.source)
    assert "if (u + batch1 < unroll) ask1(u + batch1);" in lowered.source
    lowered.compile()


@pytest.mark.parametrize("length", [768, 1024, 98_304])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_little_of_what_all_rows_read_is_asked_for_with_the_row(
    length: int, dtype: torch.dtype, tmp_path, monkeypatch
) -> None:
    lowered = jitgen.jit(weighted).lower(TensorSpec((8, length), dtype), TensorSpec((length,), dtype), target="sm_90a")
    (schedule,) = lowered._lowered.schedules
    assert schedule.preload_deferred == (length <= 1024) == (schedule.unroll <= 4)
    asked, _, rest = lowered.compile().asm["sass"].partition("SHFL")
    assert len(re.findall(r"LDG\.\S*128", asked)) == schedule.unroll * (2 if schedule.preload_deferred else 1)
    assert bool(re.search(r"LDG\.\S*128", rest)) == (not schedule.preload_deferred)


def test_rows_that_shared_memory_cannot_take() -> None:
    """Of two operands, by targets."""
    spec, weight = TensorSpec((64, 151_936), torch.float32), TensorSpec((151_936,), torch.float32)
    for target, expected in (("sm_90a", True), ("sm_100a", True), ("sm_120a", False)):
        (schedule,) = jitgen.jit(added).lower(spec, spec, weight, target=target)._lowered.schedules
        assert isinstance(schedule, PersistentRows) == expected


def test_many_rows_that_are_persistent() -> None:
    """Because of what all rows read, or because nothing else holds them."""
    rows, weight = TensorSpec((8192, 151_936), torch.float32), TensorSpec((151_936,), torch.float32)
    longer = TensorSpec((8192, 163_844), torch.float32)
    cases = [(affine, [rows, weight, weight], True), (weighted, [rows, weight], False)]
    cases += [(CASES["softmax"], [rows], False), (CASES["softmax"], [longer], True)]
    for function, specs, expected in cases:
        (schedule,) = jitgen.jit(function).lower(*specs, target="sm_90a")._lowered.schedules
        assert isinstance(schedule, PersistentRows) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [10, 300])
@pytest.mark.quick(where=lambda rows, dtype: (rows, dtype) == (300, torch.bfloat16))
def test_sums_of_two_operands_compile_at_every_length(rows: int, dtype: torch.dtype) -> None:
    """Their rows have seven blocks from a length on, which is more than the least that eight can be."""
    for length in (32_768, 49_156, 65_536, 65_540, 81_920, 81_924, 131_080, 163_840, 262_152):
        spec, weight = TensorSpec((rows, length), dtype), TensorSpec((length,), dtype)
        for report in jitgen.jit(added).lower(spec, spec, weight, target="sm_90a").compile().report:
            assert report["spill_bytes"] <= 32


def test_what_a_later_pass_reads_of_a_row_has_no_place_in_shared_memory() -> None:
    spec = TensorSpec((64, 151_936), torch.float32)
    weight = TensorSpec((151_936,), torch.float32)
    later = jitgen.jit(lambda x, y, w: weighted(x, w) + y).lower(spec, spec, weight, target="sm_90a")
    assert not isinstance(later._lowered.schedules[0], PersistentRows)
    # The same elements again are kept.
    again = jitgen.jit(lambda x, w: weighted(x, w) + x).lower(spec, weight, target="sm_90a")
    assert isinstance(again._lowered.schedules[0], PersistentRows)


@pytest.mark.parametrize(
    ("dtype", "target"),
    [(dtype, target) for dtype in (torch.float32, torch.float64) for target in ("sm_80", "sm_90a")]
    + [(torch.float16, "sm_80")],  # which Hopper keeps in a cluster
)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "logsumexp", "var", "columns of softmax"])
@pytest.mark.quick(where=lambda dtype, target: (dtype, target) == (torch.float32, "sm_90a"))
def test_rows_that_every_pass_reads_again(name: str, target: str, dtype: torch.dtype) -> None:
    more = {
        "logsumexp": lambda x: x.logsumexp(-1),
        "var": lambda x: x.var(-1),
        "columns of softmax": lambda x: x.softmax(0),
    }
    shape = (10_000, 9000) if name == "columns of softmax" else (300, 250_000)
    lowered = jitgen.jit((CASES | more)[name]).lower(TensorSpec(shape, dtype), target=target)
    assert not lowered._lowered.schedules[0].resident
    assert any(word in lowered.source for word in ("SumExp<", "Deviations::"))
    (report,) = lowered.compile().report
    assert report["spill_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 64), (1500, 256), (300, 100_000), (9000, 9000)])
@pytest.mark.quick(where=lambda shape, dtype: dtype == torch.float32 and shape == (300, 100_000))
def test_many_reductions_of_columns_fit(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Their states, in a thread's registers and in a block's shared memory, however many rows an access reaches."""

    def many(x: torch.Tensor) -> Any:
        found = (x.sum(0), x.amax(0), x.amin(0), x.argmax(0), x.argmin(0), x.prod(0), x.any(0), x.all(0))
        return found if not x.is_floating_point() else (*found, x.var(0), x.logsumexp(0), x.norm(dim=0))

    lowered = jitgen.jit(many).lower(TensorSpec(shape, dtype), target="sm_90a")
    (report,) = lowered.compile().report
    assert report["spill_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_many_short_rows_of_which_little_is_kept(dtype: torch.dtype, length: int) -> None:
    """A thread holds many elements of such rows, and takes several of them; places are computed in both passes."""

    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).sum(-1, keepdim=True) * x[:, :1].expand_as(x)

    def placed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[-1], device=x.device)
        return (x + places).sum(-1, keepdim=True) * places

    for function in (scaled, placed):
        spec = TensorSpec((100_000, length), dtype)
        lowered = jitgen.jit(function).lower(spec, spec, target="sm_90a")
        assert lowered._lowered.schedules[0].rows_per_iteration > 1
        (report,) = lowered.compile().report
        assert report["spill_bytes"] == 0


def test_cross_entropy_reads_the_logits_in_one_kernel() -> None:
    logits, target = TensorSpec(("M", 4096), torch.bfloat16), TensorSpec(("M",), torch.int64)
    none = jitgen.jit(lambda x, t: F.cross_entropy(x, t, reduction="none")).lower(logits, target, target="sm_90a")
    assert len(none.kernels) == 1
    mean = jitgen.jit(lambda x, t: F.cross_entropy(x, t)).lower(logits, target, target="sm_90a")
    assert len(mean.kernels) == 2
