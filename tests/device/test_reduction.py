"""Row reductions on a GPU, in both dialects, against float64 torch on the same (rounded) data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.families.rows.reduction.schedule import occupancy
from jitgen.schedule.chips import H200
from tests import sixteen_bits
from tests.numeric import close, results

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

Function = Callable[..., Any]
LENGTHS = (1, 2, 3, 7, 8, 31, 32, 33, 100, 129, 1000, 1023, 1024, 1025, 4096, 5000, 8192, 16384, 16385, 20001, 32768)
LENGTHS += (32769, 65536, 151936, 200000)
"""Around every change of threads, cluster and residency."""
ROWS = occupancy(H200)


def weight(x: torch.Tensor, start: float) -> torch.Tensor:
    return torch.linspace(start, start + 1, x.shape[-1], device=x.device).to(x.dtype)


def rows_of(count: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, length, device="cuda").to(dtype)


FLOATING: dict[str, tuple[Function, float]] = {
    "sum": (lambda x, w: x.sum(-1), 4),
    "mean": (lambda x, w: x.mean(-1, keepdim=True), 4),
    "variance": (lambda x, w: x.var(-1) if x.shape[-1] > 1 else x.sum(-1), 8),
    "standard deviation": (lambda x, w: x.std(-1, correction=0), 8),
    "norms": (lambda x, w: (x.norm(dim=-1), x.norm(1, dim=-1), x.norm(math.inf, dim=-1)), 4),
    "logsumexp": (lambda x, w: x.logsumexp(-1), 8),
    "softmax": (lambda x, w: F.softmax(x, -1), 16),
    "log_softmax": (lambda x, w: F.log_softmax(x, -1), 16),
    "rms_norm": (lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), 8),
    "layer_norm": (lambda x, w: F.layer_norm(x, w.shape, w, w), 16),
    "add and normalize": (lambda x, w: (x + w, F.rms_norm(x + w, w.shape, w, 1e-5)), 16),
    "normalize": (lambda x, w: F.normalize(x, dim=-1), 8),
    "norms that share a weight": (lambda x, w: (F.layer_norm(x, w.shape, w, w), F.rms_norm(x, w.shape, w, 1e-5)), 16),
    "two norms and a softmax": (lambda x, w: F.softmax(F.layer_norm(x, w.shape) * w, -1), 64),
    "everything": (lambda x, w: (x.sum(), x.mean()), 16),
    "columns": (lambda x, w: (x.sum(0), F.softmax(x, 0)), 16),
}
EXACT: dict[str, Function] = {
    "extrema": lambda x, w: (x.amax(-1), x.amin(-1, keepdim=True), x.max(), x.amax(0)),
    "places": lambda x, w: (x.argmax(-1), x.argmin(-1), x.max(-1)[1]),
    "truth": lambda x, w: ((x > 2).any(-1), (x > -3).all(-1)),
}


def rows(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    count = max(2, min(70, 300_000 // length))
    return torch.randn(count, length, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.quick(
    where=lambda dtype, length: (
        length in (1, 33, 1000, 8192, 20001, 151936) and (dtype == torch.bfloat16) == (length % 8 == 0)
    )
)
def test_reductions(backend: str, dtype: torch.dtype, length: int) -> None:
    x = rows(length, dtype, length)
    w = weight(x, 0.5)
    for name, (function, terms) in FLOATING.items():
        got = results(jitgen.jit(backend=backend)(function)(x, w))
        want = results(function(x.double(), w.double()))
        size = max(1.0, x.double().abs().max().item()) * (
            length**0.5 if name in ("sum", "everything", "columns") else 1
        )
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == dtype, name
            close(ours, theirs, dtype, terms, max(length, x.shape[0]), size)
    for name, function in EXACT.items():
        got = results(jitgen.jit(backend=backend)(function)(x, w))
        for ours, theirs in zip(got, results(function(x, w)), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(("count", "length"), [(30_000, 24), (3000, 1000), (1500, 9000), (700, 33_000), (150, 151_936)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.quick(where=lambda dtype, count: (dtype == torch.bfloat16) == (count in (3000, 150)))
def test_more_rows_than_run_at_once(backend: str, dtype: torch.dtype, count: int, length: int) -> None:
    x = torch.randn(count, length, device="cuda").to(dtype)
    w = weight(x, 0.5)
    for function in (lambda x, w: F.softmax(x, -1), lambda x, w: F.layer_norm(x, w.shape, w, w)):
        out = torch.full_like(x, math.nan)
        jitgen.jit(backend=backend)(function).bind(x, w)(x, w, out=out)
        want = function(x.double(), w.double())
        close(out, want, dtype, 16, length, max(1.0, want.abs().max().item()))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [5, 1000, 4096, 40000])
@pytest.mark.quick(where=lambda dtype, length: length in (5, 4096) and dtype != torch.float16)
def test_special_rows(backend: str, dtype: torch.dtype, length: int) -> None:
    x = rows(length, dtype, 1)[:6].repeat(2, 1)[:6].clone()
    x[0] = -math.inf
    x[1, length // 2] = math.nan
    x[2, 0] = 60000.0  # one huge outlier
    x[3] = 1e-40  # denormal in float32 and bfloat16, zero in float16
    x[4, -1] = math.inf
    w = weight(x, 0.5)
    names = ("softmax", "log_softmax", "logsumexp", "rms_norm", "layer_norm", "sum", "norms")
    for name in names:
        function, terms = FLOATING[name]
        got = results(jitgen.jit(backend=backend)(function)(x, w))
        # On the CPU, where torch composes: its fused CUDA norms make a whole row NaN where one element is infinite.
        wanted = results(function(x.double().cpu(), w.double().cpu()))
        for ours, theirs in zip(got, (want.cuda() for want in wanted), strict=True):
            overflow = theirs.abs() > torch.finfo(dtype).max
            theirs = torch.where(overflow & ~theirs.isnan(), theirs.sign() * math.inf, theirs)
            close(ours[5:], theirs[5:], dtype, 4 * terms, length, 4 * length**0.5)
            assert torch.equal(ours.isnan(), theirs.isnan()), name
    for function in EXACT.values():
        for ours, theirs in zip(
            results(jitgen.jit(backend=backend)(function)(x, w)), results(function(x, w)), strict=True
        ):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


AGAIN = (
    "softmax",
    "log_softmax",
    "logsumexp",
    "layer_norm",
    "variance",
    "standard deviation",
    "two norms and a softmax",
)
ROWS_READ_AGAIN = [("cuda", 220_000), ("triton", 40_000), ("triton", 151_936)]


@pytest.mark.parametrize(
    ("count", "length"),
    [
        (ROWS.full + 1, 9001),
        (ROWS.several, 20_000),
        (ROWS.several + 3, 33_000),
        (200, 70_001),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.quick(where=lambda dtype, length: dtype == torch.float32 and length in (9001, 70_001))
def test_many_rows_that_are_read_once(backend: str, dtype: torch.dtype, count: int, length: int) -> None:
    """A block for each, which keeps nothing."""
    x = torch.randn(count, length, device="cuda").to(dtype)
    w = weight(x, 0.5)
    for name in ("logsumexp", "variance", "standard deviation"):
        function, terms = FLOATING[name]
        got, want = jitgen.jit(backend=backend)(function)(x, w), function(x.double(), w.double())
        close(got, want, dtype, terms, length, max(1.0, x.double().abs().max().item()))
    classes = torch.randint(length, (len(x),), device="cuda")
    classes[3] = -100
    losses = jitgen.jit(backend=backend)(lambda x, t: F.cross_entropy(x, t, reduction="none"))(x, classes)
    close(losses, F.cross_entropy(x.double(), classes, reduction="none"), dtype, 16, length, 16.0)


@pytest.mark.parametrize(("backend", "length"), ROWS_READ_AGAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.quick(where=lambda dtype: dtype == torch.float32)
def test_rows_that_every_pass_reads_again(backend: str, length: int, dtype: torch.dtype) -> None:
    """What would wait for the maximum or the mean is computed beside it. So many rows are not reduced in chunks."""
    x = torch.randn(80, length, device="cuda").to(dtype)
    w = weight(x, 0.5)
    for name in AGAIN:
        function, terms = FLOATING[name]
        got, want = jitgen.jit(backend=backend)(function)(x, w), function(x.double(), w.double())
        close(got, want, dtype, terms, length, max(1.0, x.double().abs().max().item()))
    classes = torch.randint(length, (80,), device="cuda")
    classes[3] = -100
    losses = jitgen.jit(backend=backend)(lambda x, t: F.cross_entropy(x, t, reduction="none"))(x, classes)
    close(losses, F.cross_entropy(x.double(), classes, reduction="none"), dtype, 16, length, 16.0)
    columns = jitgen.jit(backend=backend)(lambda x: (F.softmax(x, 0), x.var(0)))(x.t()[:9001, :48].contiguous())
    for ours, theirs in zip(columns, (lambda x: (F.softmax(x, 0), x.var(0)))(x.t()[:9001, :48].double()), strict=True):
        close(ours, theirs, dtype, 16, 9001, 8.0)


@pytest.mark.parametrize(("backend", "length"), ROWS_READ_AGAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.quick(where=lambda dtype: dtype == torch.float32)
def test_special_rows_that_every_pass_reads_again(backend: str, length: int, dtype: torch.dtype) -> None:
    x = torch.randn(80, length, device="cuda")
    x[0] = -math.inf
    for number, value in enumerate((math.inf, -math.inf, math.nan, 1e30)):
        for place, column in enumerate((0, length // 2, -1)):
            x[3 * number + place + 1, column] = value
    x[13] *= 1e-39
    x[14] = 3.0
    x[15, : length // 2] = -math.inf
    x[16], x[17] = torch.linspace(-30, 30, length), torch.linspace(30, -30, length)
    x[18] += 1e4
    x = x.to(dtype)
    w = weight(x, 0.5)
    for name in ("softmax", "log_softmax", "logsumexp", "variance"):
        function, terms = FLOATING[name]
        got, want = jitgen.jit(backend=backend)(function)(x, w), function(x.double(), w.double())
        overflow = want.abs() > torch.finfo(dtype).max
        want = torch.where(overflow & ~want.isnan(), want.sign() * math.inf, want)
        assert torch.equal(got.isnan(), want.isnan()), name
        assert torch.equal(got.isinf(), want.isinf()), name
        for number in [*range(16), *range(19, 80)]:
            close(got[number], want[number], dtype, 4 * terms, length, 4 * length**0.5)
        for number in (16, 17, 18):
            size = 1e4 if number == 18 else 32
            close(got[number], want[number], dtype, 4 * terms, length, float(size))
    if dtype != torch.bfloat16:  # which has no two numbers that close to 1e4
        variance = jitgen.jit(backend=backend)(FLOATING["variance"][0])(x, w)[18].double()
        exact = x[18].double().var()
        assert (variance / exact - 1).abs() < 1e-4


FEW_ROWS = [(8, 40_001), (20, 33_003), (48, 70_000), (49, 70_000), (9, 262_145)]
FEW_ROWS += [(64, 100_001), (40, 151_936), (64, 163_840), (64, 163_856)]


@pytest.mark.parametrize(("count", "length"), FEW_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.quick(
    where=lambda dtype, count: (
        count in (8, 49, 9, 40) and dtype == (torch.float32 if count in (8, 40) else torch.bfloat16)
    )
)
def test_few_long_rows(backend: str, dtype: torch.dtype, count: int, length: int) -> None:
    x = torch.randn(count, length, device="cuda")
    x[0] = -math.inf
    x[1, length // 2] = math.nan
    x[2, 7] = 60000.0
    x[3, -1] = math.inf
    x[4] = 3.0
    x[5, : length // 2] = -math.inf
    x[6] += 100
    x = x.to(dtype)
    w = weight(x, 0.5)
    for name in (*AGAIN, "rms_norm", "add and normalize"):
        function, terms = FLOATING[name]
        got = results(jitgen.jit(backend=backend)(function)(x, w))
        # On the CPU, where torch composes: its fused CUDA norms make a whole row NaN where one element is infinite.
        wanted = results(function(x.double().cpu(), w.double().cpu()))
        for ours, theirs in zip(got, (want.cuda() for want in wanted), strict=True):
            overflow = theirs.abs() > torch.finfo(dtype).max
            theirs = torch.where(overflow & ~theirs.isnan(), theirs.sign() * math.inf, theirs)
            assert torch.equal(ours.isnan(), theirs.isnan()), name
            close(ours[7:], theirs[7:], dtype, 4 * terms, length, 8.0)
            close(ours[4:7], theirs[4:7], dtype, 4 * terms, length, 128.0)


@pytest.mark.parametrize("shape", [(11, 2**18), (13, 2**18 + 77), (64, 300_000), (1, 2**22 + 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.quick(where=lambda dtype, shape: dtype == torch.float32 and shape[0] in (13, 1))
def test_rows_in_parts(backend: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    count, length = shape
    x = torch.randn(shape, device="cuda") + 3
    if count > 10:
        x[0], x[1, 500], x[2, 70_000], x[3, :4000] = -math.inf, math.nan, math.inf, -math.inf
        x[4, 9], x[4, -1], x[5], x[6] = math.nan, math.nan, 3.0, torch.finfo(torch.float32).min
        x[7, -1], x[8, 3:5] = 1000.0, 1000.0
    x = x.to(dtype)
    for name in ("sum", "mean", "variance", "standard deviation", "norms", "logsumexp", "softmax", "log_softmax"):
        function, terms = FLOATING[name]
        got = results(jitgen.jit(backend=backend)(function)(x, x[0]))
        # On the CPU, where torch composes: one infinite element makes a whole fused result NaN. Its norms lose digits.
        exact = x.double() if count == 1 else x.double().cpu()
        wanted = results(function(exact, exact[0]))
        size = 16.0 * (length**0.5 if name in ("sum", "norms") else 1)
        for ours, theirs in zip(got, (want.cuda() for want in wanted), strict=True):
            if count == 1:
                close(ours, theirs, dtype, terms, length, size)
                continue
            assert torch.equal(ours[:6].isnan(), theirs[:6].isnan()), name
            close(ours[9:], theirs[9:], dtype, terms, length, size)
            close(ours[7:9], theirs[7:9], dtype, 4 * terms, length, size * 1000.0)
            if name in ("softmax", "log_softmax", "logsumexp"):
                close(ours[3], theirs[3], dtype, 4 * terms, length, size)
                close(ours[5], theirs[5], dtype, 4 * terms, length, size)
            if name == "softmax":
                close(ours[6], theirs[6], dtype, 4 * terms, length, size)
    places = (*EXACT.values(), lambda x, w: (x.argmax(), x.argmin(), x.max(-1)[0]))
    for function in places:
        got, want = results(jitgen.jit(backend=backend)(function)(x, x[0])), results(function(x, x[0]))
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


IN_SHARED_MEMORY: dict[str, tuple[Function, float]] = {
    "softmax": (lambda x: F.softmax(x, -1), 16),
    "log_softmax": (lambda x: F.log_softmax(x, -1), 16),
    "normalize": (lambda x: F.normalize(x, dim=-1), 8),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), 8),
    "share": (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), 16),
    "halves": (lambda x: (x - x.mean(-1, keepdim=True)).to(torch.bfloat16), 8),
    "three": (lambda x: F.log_softmax(x / x.abs().amax(-1, keepdim=True), -1), 32),
}


@pytest.mark.parametrize(
    ("count", "length"), [(49, 81_924), (50, 100_004), (64, 151_936), (100, 120_000), (128, 155_648)]
)
@pytest.mark.quick(where=lambda count: count in (50, 64))
def test_rows_that_lie_partly_in_shared_memory(count: int, length: int) -> None:
    x = torch.randn(count, length, device="cuda")
    special = torch.stack([x[0], torch.full_like(x[0], -math.inf), x[1], x[2], x[3]])
    special[2, length // 2], special[3, -1], special[4, 0] = math.nan, math.inf, 60000.0
    for name, (function, terms) in IN_SHARED_MEMORY.items():
        jitted = jitgen.jit(backend="cuda")(function)
        got, want = jitted(x), function(x.double())
        close(got, want, got.dtype, terms, length, max(1.0, want.abs().max().item()))
        if name in ("softmax", "log_softmax"):
            rows = torch.cat([special, x[5:]])
            got, want = jitted(rows), function(rows.double().cpu()).cuda()
            assert torch.equal(got.isnan(), want.isnan()), name
            close(got[4:], want[4:], got.dtype, 4 * terms, length, 4 * length**0.5)


PERSISTENT: dict[str, tuple[Function, float]] = {
    "softmax": (lambda x, y, w, b: F.softmax(x, -1), 16),
    "log_softmax": (lambda x, y, w, b: F.log_softmax(x, -1), 16),
    "normalize": (lambda x, y, w, b: F.normalize(x, dim=-1), 8),
    "rms_norm": (lambda x, y, w, b: F.rms_norm(x, w.shape, w), 8),
    "layer_norm": (lambda x, y, w, b: F.layer_norm(x, w.shape, w, b), 16),
    "norm of a sum": (lambda x, y, w, b: (x + y, F.rms_norm(x + y, w.shape, w)), 8),
    "weighted first": (lambda x, y, w, b: F.softmax(x * w + b, -1) * w, 16),
    "share": (lambda x, y, w, b: x.exp() / x.exp().sum(-1, keepdim=True), 16),
    "halves": (lambda x, y, w, b: (x - x.mean(-1, keepdim=True)).to(torch.bfloat16), 8),
    "three": (lambda x, y, w, b: F.log_softmax(x / x.abs().amax(-1, keepdim=True), -1), 32),
    "places": (lambda x, y, w, b: (x - x.amax(-1, keepdim=True), x.argmax(-1), x.sum(-1)), 32),
}
SEVERAL_TURNS = [(16, 151_936), (31, 120_004), (33, 45_056), (64, 81_920), (64, 151_936), (90, 204_800), (300, 65_540)]


@pytest.mark.parametrize(("count", "length"), SEVERAL_TURNS)
@pytest.mark.quick(where=lambda count, length: (count, length) in ((33, 45_056), (64, 151_936)))
def test_rows_that_clusters_take_one_after_another(count: int, length: int) -> None:
    x, y = torch.randn(2, count, length, device="cuda")
    w, b = torch.rand(2, length, device="cuda") + 0.5
    special = torch.stack([x[0], torch.full_like(x[0], -math.inf), x[1], x[2], x[3]])
    special[2, length // 2], special[3, -1], special[4, 0] = math.nan, math.inf, 60000.0
    for name, (function, terms) in PERSISTENT.items():
        jitted = jitgen.jit(backend="cuda")(function)
        exact = [t.double() for t in (x, y, w, b)]
        for got, want in zip(results(jitted(x, y, w, b)), results(function(*exact)), strict=True):
            if got.dtype == torch.int64:
                assert torch.equal(got, want), name
            else:
                close(got, want, got.dtype, terms, length, max(1.0, want.abs().max().item()))
        if name in ("softmax", "log_softmax"):
            rows = torch.cat([special, x[5:]])
            got, want = jitted(rows, y, w, b), function(rows.double().cpu(), y, w, b).cuda()
            assert torch.equal(got.isnan(), want.isnan()), name
            close(got[4:], want[4:], got.dtype, 4 * terms, length, 4 * length**0.5)


STAGED: dict[str, tuple[Function, float]] = {
    "rms_norm": (lambda x, w, b: F.rms_norm(x, w.shape, w), 8),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), 16),
    "without a bias": (lambda x, w, b: F.layer_norm(x, w.shape, w), 16),
    "standardised": (lambda x, w, b: F.layer_norm(x, x.shape[-1:]), 16),
    "with its statistics": (lambda x, w, b: (F.layer_norm(x, w.shape, w, b), *torch.var_mean(x, -1)), 16),
}


@pytest.mark.parametrize("count", [33, 47, 64])
@pytest.mark.parametrize("length", [65_544, 73_736, 98_304, 131_080, 151_936, 163_840])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.quick(
    where=lambda dtype, length, count: count == 47 and dtype == torch.bfloat16 and length in (65_544, 151_936)
)
def test_pairs_of_blocks_and_what_all_rows_read(dtype: torch.dtype, length: int, count: int) -> None:
    """Which comes into shared memory while the row does. Beside rows around 0: far from it, and with an outlier."""
    x, (w, b) = rows_of(count, length, dtype), torch.rand(2, length, device="cuda").to(dtype) + 0.5
    x[1] += 64.0
    x[2, 3], x[3, -1] = 3e4, -3e4
    for name, (function, terms) in STAGED.items():
        jitted = jitgen.jit(backend="cuda")(function)
        got, again = results(jitted(x, w, b)), results(jitted(x, w, b))
        for one, other, want in zip(got, again, results(function(x.double(), w.double(), b.double())), strict=True):
            close(one, want, dtype, terms, length, max(1.0, want.abs().max().item()))
            assert torch.equal(one, other), name


@pytest.mark.parametrize("length", [73_736, 151_936])
def test_pairs_of_blocks_and_what_each_row_has_for_itself(length: int) -> None:
    """A residual that only the last pass reads, and weights of fewer bytes than the row: nothing is copied ahead."""
    x, y = rows_of(64, length, torch.bfloat16), rows_of(64, length, torch.bfloat16)
    w = (torch.rand(length, device="cuda") + 0.5).bfloat16()
    codes = torch.randint(-8, 8, (length,), device="cuda", dtype=torch.int8)
    added: Function = lambda x, y, w, codes: F.rms_norm(x, w.shape, w) + y  # noqa: E731
    coded: Function = lambda x, y, w, codes: F.rms_norm(x, x.shape[-1:]) * codes  # noqa: E731
    for function in (added, coded):
        got = jitgen.jit(backend="cuda")(function)(x, y, w, codes)
        want = function(x.double(), y.double(), w.double(), codes)
        close(got, want, x.dtype, 8, length, max(1.0, want.abs().max().item()))


MOMENT_LENGTHS = (
    1,
    2,
    5,
    8,
    31,
    64,
    100,
    129,
    768,
    1000,
    1024,
    2048,
    4096,
    5000,
    8192,
    16384,
    20001,
    32768,
    65536,
    98304,
)


@pytest.mark.parametrize("length", MOMENT_LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.quick(
    where=lambda dtype, length: (
        (dtype == torch.float32 and length in (5, 1000, 65536)) or (dtype == torch.bfloat16 and length in (100, 8192))
    )
)
def test_means_and_deviations_together(dtype: torch.dtype, length: int) -> None:
    """Of equal values, of values far from 0, beside an outlier, and of rows that are infinite or not numbers."""
    x = rows_of(40, length, torch.float32).to(dtype)
    x[0], x[1] = 3.0, x[1] + 1000
    x[2, length // 2], x[3, 0] = 1e4, math.inf
    x[4, -1], x[5, length // 3] = -math.inf, math.nan

    def standardised(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean = x.mean(-1, keepdim=True)
        return mean, (x - mean).square().sum(-1), F.layer_norm(x, x.shape[-1:])

    mean, squares, normal = jitgen.jit(backend="cuda")(standardised)(x)
    exact = [t.cuda() for t in standardised(x.double().cpu())]
    for got, want in zip((mean, squares, normal), exact, strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
    finite = torch.tensor([0, 1, 2, *range(6, 40)], device="cuda")
    eps = torch.finfo(dtype).eps
    wide = max(eps, 2.0**-23) if dtype != torch.float64 else eps
    far, spread = exact[0].abs()[finite], x.double().std(-1, correction=0)[finite].unsqueeze(-1)
    assert ((mean - exact[0])[finite].abs() <= eps * far + 16 * wide * (far + spread)).all()
    error = (squares - exact[1])[finite].abs()
    assert (
        error <= eps * exact[1][finite] + 64 * wide * (exact[1][finite] + length * (far * spread).squeeze(-1))
    ).all()
    others = finite[2:]
    scale = exact[2][others].abs().amax().item()
    close(normal[others], exact[2][others], dtype, 32, length, max(1.0, scale))


def test_persistent_rows_again_and_in_views() -> None:
    """The same bits at every launch; rows apart from one another in memory, of two dimensions, and in place."""
    x, w = torch.randn(8, 12, 65_536, device="cuda"), torch.rand(65_536, device="cuda")
    function = lambda x, w: F.layer_norm(x, w.shape, w, w)  # noqa: E731
    jitted = jitgen.jit(backend="cuda")(function)
    wanted = function(x.double(), w.double())
    first = jitted(x, w)
    close(first, wanted, x.dtype, 16, 65_536, 8.0)
    for _ in range(20):
        assert torch.equal(jitted(x, w), first)
    apart = torch.randn(12, 8, 2 * 65_536, device="cuda")
    view = apart.transpose(0, 1)[:, :, 65_536:]
    view.copy_(x)
    assert torch.equal(jitted(view, w), first)
    assert torch.equal(jitted(x, w, out=x), first)


WRITTEN_AHEAD = {
    "softmax": lambda x, y: F.softmax(x, -1),
    "rms_norm": lambda x, y: F.rms_norm(x, x.shape[-1:], y[0], 1e-5),
    "norm of a sum": lambda x, y: F.rms_norm(x + y, x.shape[-1:], None, 1e-5),
}
"""Rows that clusters prefetch, and that they read once past the first-level cache."""


@pytest.mark.parametrize("length", [1000, 8192, 32768, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WRITTEN_AHEAD)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.quick(
    where=lambda dtype, length, name: dtype == torch.bfloat16 and length in (1000, 151_936) and name != "softmax"
)
def test_rows_that_the_kernel_ahead_writes(backend: str, name: str, dtype: torch.dtype, length: int) -> None:
    """They are asked for before it has ended; what is computed is what it wrote."""
    x, y = torch.randn(2, 64, length, device="cuda", dtype=dtype)
    scales = torch.rand(12, 1, device="cuda", dtype=dtype) + 0.25
    scaled, given = torch.empty_like(x), [torch.empty_like(x) for _ in scales]
    write, read = jitgen.jit(lambda x, scale: x * scale), jitgen.jit(backend=backend)(WRITTEN_AHEAD[name])
    write(x, scales[0], out=scaled)
    read(scaled, y, out=given[0])
    torch.cuda.synchronize()
    for scale, out in zip(scales, given, strict=True):
        write(x, scale, out=scaled)
        read(scaled, y, out=out)
    for scale, out in zip(scales, given, strict=True):
        close(out, WRITTEN_AHEAD[name]((x * scale).double(), y.double()), dtype, 16, length, 0.0)


SIXTEEN_BITS = [(37, 7), (300, 100), (70, 1000), (33, 4097), (20, 20_000), (140, 9000), (64, 40_008), (200, 33_336)]
SIXTEEN_BITS += [(64, 151_936), (130, 151_936)]


@pytest.mark.parametrize(("count", "length"), SIXTEEN_BITS)
@pytest.mark.parametrize("dtype", sixteen_bits.DTYPES)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.quick(where=lambda dtype, count: dtype == torch.bfloat16 and count in (37, 70, 140, 130))
def test_sixteen_bits_to_the_last_place(backend: str, dtype: torch.dtype, count: int, length: int) -> None:
    for name, function in sixteen_bits.FUNCTIONS.items():
        jitted = jitgen.jit(backend=backend)(function)
        for kind in sixteen_bits.KINDS:
            x = sixteen_bits.rows(kind, count, length, dtype, "cuda")
            wrong = sixteen_bits.mismatch(jitted(x), function(x.double()), function(x))
            assert wrong is None, f"{name}, {kind}: {wrong}"


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_quantisation_of_rows_is_one_kernel(backend: str) -> None:
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(-1, keepdim=True).float() / 127
        return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale[:, 0]

    function = jitgen.jit(backend=backend)(quantize)
    x = rows(4096, torch.bfloat16, 3)
    codes, scale = function(x)
    assert len(function.lower(x).kernels) == 1
    want_codes, want_scale = (want.cuda() for want in quantize(x.cpu()))  # CUDA eager divides by a number inexactly
    assert torch.equal(scale, want_scale)
    assert (codes.int() - want_codes.int()).abs().max() <= 1
    assert (codes != want_codes).float().mean() < 1e-3


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (1, 1)])
def test_degenerate_shapes(backend: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda")
    for function in (lambda x: x.sum(-1), lambda x: x.prod(-1), lambda x: F.softmax(x, -1), lambda x: (x > 0).all(-1)):
        assert torch.equal(jitgen.jit(backend=backend)(function)(x), function(x))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_same_call_gives_the_same_bits(backend: str) -> None:
    x = rows(151936, torch.float32, 4)
    for function in (lambda x: F.softmax(x, -1), lambda x: x.sum(), lambda x: x.sum(0)):
        jitted = jitgen.jit(backend=backend)(function)
        first = jitted(x)
        assert all(torch.equal(first, jitted(x)) for _ in range(5))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_integers(backend: str, dtype: torch.dtype) -> None:
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (37, 1003), device="cuda").to(dtype)
    for function in (
        lambda x: (x.sum(-1), x.sum(), x.any(-1), x.all(0)),
        lambda x: (x.amax(-1), x.amin(0), x[:, :7].prod(-1)),
    ):
        for ours, theirs in zip(jitgen.jit(backend=backend)(function)(x), function(x), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_strided_and_several_dimensions(backend: str) -> None:
    x = torch.randn(6, 20, 33, 8, device="cuda")
    cases: tuple[Function, ...] = (
        lambda x: x.sum((1, 2)),
        lambda x: x.mean((0, 2), keepdim=True),
        lambda x: F.softmax(x.transpose(1, 3), -1),
        lambda x: F.layer_norm(x[:, ::2, 1:], (32, 8)),
        lambda x: x.permute(3, 1, 0, 2).amax((1, 3)),
        lambda x: x.expand(2, *x.shape).sum(0),
    )
    for function in cases:
        ours, theirs = jitgen.jit(backend=backend)(function)(x), function(x.double())
        close(ours, theirs, torch.float32, 16, 1000, 20)
