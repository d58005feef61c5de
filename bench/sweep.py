"""Products and attention of random sizes, so that no figure holds only for the sizes that something was tuned for.

A sweep goes round ``CYCLE``: products of quantised weights with 16-bit activations, dense ones, batches of dense ones,
and attention. M (rows of x, of each matrix of a batch, of each head's query) is from 1 to 8192 and not rounded. M of
the cases of a kind are a random shift of multiples of the golden ratio, on a logarithmic scale, so that those of any
beginning of a sweep are spread evenly. N and K are drawn on a logarithmic scale as multiples of 8, K of a quantised
weight as one of its group of 32, 64 or 128; half of them have a large odd factor, the others are rounded to multiples
of 256. Every third product is timed with bias and gelu too, in alternation.

On a GPU other processes compile what is measured next, of jitgen and of humming (``compiled_ahead``), and a sweep may
end after ``Bench.seconds``. A case that raises, or whose result is wrong (``measurement.attempted``), has failed: it
has no times, and its notes say why. ``tabulated`` condenses a sweep by kinds and ranges of rows.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import geometric_mean
from typing import Any

import torch

import jitgen
from bench import attention, batched, humming_products
from bench.epilogues import biased
from bench.measurement import Bench, Measurement, attempted
from bench.prebuild import Compiled, compiling, gpu_target, importing
from bench.products import Product, linear, measure
from bench.records import failure_of
from bench.sizes import log_uniform, side
from jitgen.spec import dtype_name

SWEEP, EPILOGUES = "sweep", "sweep epilogues"
"""The groups of its measurements."""
FORMATS = {"int4": "int4", "int8": "int8", "fp8": "fp8_e4m3"}
"""The format of the weights of each quantised kind."""
DENSE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CYCLE = {
    "cuda": (
        *("int4", "bfloat16", "attention", "int8", "int4", "batched", "fp8", "bfloat16", "float16"),
        *("int4", "attention", "int8", "bfloat16", "batched", "int4", "fp8", "float16", "attention"),
    ),
    "cpu": ("int4", "float32"),
}
"""The kinds of cases that follow one another, by device."""
PEERS = ("F.linear", "humming")
"""The peers of products on a GPU; torch's own int4 product takes a multiple of their time."""
GROUP_SIZES = (32, 64, 128)
"""Columns that share a scale, of which each case draws one."""
MOST_ROWS = 8192
SIDES = {"cuda": (64, 60_000), "cpu": (64, 4096)}
"""The least and the most of N and K, by device."""
MOST_WEIGHTS = {"cuda": 2.5e8, "cpu": 1.2e7}
"""The most elements of a weight, so that copies of it fit in memory, and a sweep takes minutes."""
MOST_PRODUCTS = {"cuda": 4e11, "cpu": 4e9}
"""The most multiply-adds of a case."""
MOST_BATCH, MOST_ELEMENTS, MOST_SIDE = 256, 1e8, 8192
"""Of a batched product: the most matrices, elements of each of its tensors, and of N and K."""
ROW_RANGES = ((1, 8), (9, 64), (1, 64), (65, 256), (257, MOST_ROWS), (1, MOST_ROWS))
"""The ranges of rows that a summary has lines for."""
PATIENCE = 4.0
"""See ``products.measure``; on a CPU. On a GPU it would count what humming's calls take on the host."""
CACHES = 2
"""Copies of the weights take this many times the bytes of the last-level cache, which ``Bench.elements`` exceeds."""
BUDGET = 0.03
"""Seconds of timing of a case on a GPU."""
WITH_EPILOGUE = 3
"""Every so manieth product of a kind has an epilogue too."""
CHUNK, HUMMING_PROCESSES = 6, 2
"""Kernels that humming compiles at once in a process, and processes of it."""
WINDOW = 2 * len(CYCLE["cuda"])
"""The cases of which the first that is compiled is measured next."""
POLL = 0.02
"""Seconds between two looks for one."""
WORST = 5
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One case of a sweep.

    Attributes:
        kind: as ``CYCLE`` names it.
        rows: M.
        columns, length: N and K of a product; the keys and the depth of attention.
        dtype: of the activation, or of the query.
        group: columns that share a scale of a quantised weight.
        batch: matrices of a batched product.
        attended: of ``kind`` attention.
        epilogue: whether the product is timed with bias and gelu, too.
    """

    kind: str
    rows: int
    columns: int
    length: int
    dtype: torch.dtype
    group: int | None = None
    batch: int = 1
    attended: attention.Case | None = None
    epilogue: bool = False

    def __str__(self) -> str:
        if self.attended is not None:
            return f"{self.kind}: {self.attended}"
        if self.kind == "batched":
            return f"{self.kind}: {self.batch} of M={self.rows}, {self.columns}x{self.length}"
        return f"{self.product.name}, M={self.rows}"

    @property
    def product(self) -> Product:
        name = f"{self.kind}: {self.columns}x{self.length}" + (f" g{self.group}" if self.group else "")
        format, group = FORMATS.get(self.kind), self.group or self.length
        return Product(name, linear, 1, format, (self.columns, self.length), self.dtype, group)

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of a measurement's ``shape``, of which the last three are M, N and K."""
        if self.attended is not None:
            return self.attended.batch, self.attended.heads, self.rows, self.columns, self.length
        sizes = self.rows, self.columns, self.length
        return (self.batch, *sizes) if self.kind == "batched" else sizes

    def calls(self) -> Iterator[tuple[Callable[..., Any], tuple[jitgen.TensorSpec, ...]]]:
        """The functions that are timed, with the specs of their arguments."""
        spec = partial(jitgen.TensorSpec, dtype=self.dtype)
        if (case := self.attended) is not None:
            q, k = ((case.batch, heads, count, case.depth) for heads, count in _heads(case))
            slopes = jitgen.TensorSpec((case.heads,), torch.float32)
            yield attention.function_of(case.rule), (spec(q), spec(k), spec(k), slopes)
        elif self.kind == "batched":
            left, right = (self.batch, self.rows, self.length), (self.batch, self.length, self.columns)
            yield batched.bmm, (spec(left), spec(right))
        else:
            x = spec((self.rows, self.length))
            weight = spec((self.columns, self.length), format=FORMATS.get(self.kind), group_size=self.group)
            yield linear, (x, weight)
            if self.epilogue:
                yield biased, (x, weight, spec((self.columns,)))

    def measured(self, bench: Bench) -> Iterator[Measurement]:
        if self.attended is not None:
            for found in attention.measure(self.attended, self.dtype, bench, SWEEP):
                yield replace(found, name=str(self), shape=self.shape)
        elif self.kind == "batched":
            for found in batched.measure(self.shape, self.dtype, bench, SWEEP):  # type: ignore[arg-type]
                yield replace(found, name=str(self))
        else:
            peers: dict[str, Any] = {"peers": PEERS} if bench.device == "cuda" else {"patience": PATIENCE}
            epilogue = biased if self.epilogue else None
            copied = CACHES * bench.elements
            yield from measure(self.product, (self.rows,), bench, SWEEP, copied, epilogue=epilogue, **peers)


def _heads(case: attention.Case) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and rows of the query, and of keys and values."""
    return (case.heads, case.rows), (case.shared, case.keys)


def cases(bench: Bench, kinds: Sequence[str] | None = None) -> Iterator[Case]:
    """``bench.cases`` cases of ``kinds``, by default those of ``CYCLE``, drawn with ``bench.seed``."""
    kinds = kinds or CYCLE[bench.device]
    sources = {kind: random.Random(f"{kind} {bench.seed}") for kind in kinds}
    shifts = {kind: source.random() for kind, source in sources.items()}
    drawn = dict.fromkeys(kinds, 0)
    for index in range(bench.cases):
        kind = kinds[index % len(kinds)]
        share = (shifts[kind] + drawn[kind] * (math.sqrt(5) - 1) / 2) % 1
        rows = int(math.exp(share * math.log(MOST_ROWS + 1)))
        yield draw(sources[kind], kind, rows, bench.device, drawn[kind] % WITH_EPILOGUE == 0)
        drawn[kind] += 1


def draw(source: random.Random, kind: str, rows: int, device: str, epilogue: bool) -> Case:
    """One case of so many rows."""
    dtype = DENSE.get(kind, torch.bfloat16 if device == "cuda" else torch.float32)
    if kind == "attention":
        attended = attention.draw_rows(source, rows, MOST_PRODUCTS[device])
        return Case(kind, rows, attended.keys, attended.depth, dtype, attended=attended)
    group = source.choice(GROUP_SIZES) if kind in FORMATS else None
    while True:
        batch = int(log_uniform(source, 1, MOST_BATCH + 1)) if kind == "batched" else 1
        least, most = (SIDES[device][0], MOST_SIDE) if kind == "batched" else SIDES[device]
        columns, length = (side(source, unit, least, most) for unit in (8, group or 8))
        tensors = batch * max(columns * length, rows * length, rows * columns)
        if kind == "batched" and tensors > MOST_ELEMENTS:
            continue
        if columns * length <= MOST_WEIGHTS[device] and batch * rows * columns * length <= MOST_PRODUCTS[device]:
            return Case(kind, rows, columns, length, dtype, group, batch, epilogue=epilogue and kind != "batched")


def built(case: Case, backend: str, target: str) -> str:
    """Compiles a case's kernels into the store, in a process of its own; what went wrong, or nothing."""
    torch.set_num_threads(1)
    try:
        for function, specs in case.calls():
            jitgen.jit(backend=backend)(function).lower(*specs, target=target).compile()
    except Exception as error:  # the measuring process meets it again
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def built_by_humming(*chunk: Case) -> str:
    """Compiles humming's kernels of some cases in threads, each of which waits for a process of the compiler: one
    process and one context on the device for all of them. What went wrong, or nothing."""

    def failure(case: Case) -> str:
        try:
            humming_products.compiled(case.product, case.rows)
        except Exception as error:
            return f"{case}: {type(error).__name__}: {str(error)[:300]}"
        return ""

    with ThreadPoolExecutor(CHUNK) as pool:
        return "; ".join(filter(None, pool.map(failure, chunk)))


@dataclass(frozen=True)
class Ahead:
    """What other processes compile for the cases of a sweep.

    Attributes:
        own: the jobs of each case, of jitgen.
        humming: those of each chunk of cases, of humming.
        chunks: the chunk of each case that has one.
    """

    own: Compiled
    humming: Compiled
    chunks: Mapping[Case, int]

    def ready(self, case: Case) -> bool:
        return self.own.ready(case) and (case not in self.chunks or self.humming.ready(self.chunks[case]))

    def report(self, case: Case) -> None:
        """Prints what went wrong; the measuring process compiles it again."""
        with suppress(BrokenExecutor):
            self.own(case)
            if case in self.chunks:
                self.humming(self.chunks[case])


@contextmanager
def compiled_ahead(drawn: Sequence[Case], bench: Bench) -> Iterator[Ahead]:
    """Compiles what the cases need, in their order, while they are measured."""
    target, context = gpu_target(), importing(__name__)
    own = {case: [(case, backend, target) for backend in bench.backends] for case in drawn}
    theirs = [case for case in drawn if case.kind in FORMATS and humming_products.multiplies(case.product)]
    humming = {index: [tuple(theirs[index : index + CHUNK])] for index in range(0, len(theirs), CHUNK)}
    chunks = {case: index for index, (chunk,) in humming.items() for case in chunk}
    with (
        compiling(built_by_humming, humming, context, HUMMING_PROCESSES) as by_humming,
        compiling(built, own, context) as by_jitgen,
    ):
        yield Ahead(by_jitgen, by_humming, chunks)


def run(bench: Bench, kinds: Sequence[str] | None = None) -> Iterator[Measurement]:
    """The measurements of ``cases``."""
    started = time.monotonic()
    first, step = bench.part
    pending = list(islice(cases(bench, kinds), first - 1, None, step))
    on_gpu = bench.device == "cuda"
    if on_gpu:
        bench = replace(bench, compile_peer=False, budget=BUDGET)
    with torch.no_grad(), compiled_ahead(pending, bench) if on_gpu else nullcontext() as ahead:
        while pending and (bench.seconds is None or time.monotonic() - started < bench.seconds):
            case = next((case for case in pending[:WINDOW] if ahead is None or ahead.ready(case)), None)
            if case is None:
                time.sleep(POLL)
                continue
            pending.remove(case)
            if ahead is not None:
                ahead.report(case)
            yield from attempted(case.measured(bench), bench, SWEEP, str(case), dtype_name(case.dtype), case.shape)
            if on_gpu:
                torch.cuda.synchronize()  # raises where a kernel has broken the context: no further case would be timed
                torch.cuda.empty_cache()


def batches(bench: Bench) -> Iterator[Measurement]:
    """``run`` with batches of products alone."""
    yield from run(bench, ["batched"])


def products(bench: Bench) -> Iterator[Measurement]:
    """``run`` without batches and attention."""
    yield from run(bench, [kind for kind in CYCLE[bench.device] if kind in (*FORMATS, *DENSE)])


def kind_of(row: Row) -> str:
    """The kind of a case, of a measurement as ``Measurement.to_json`` has it."""
    kind: str = row["name"].partition(":")[0]
    return kind


def ratio_of(row: Row) -> tuple[float, str]:
    """The time of the fastest peer as a multiple of jitgen's, and that peer."""
    return min((ratio, peer) for peer, ratio in row["ratios"].items())


def tabulated(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """For each backend and kind, in ranges of rows: how many cases, and by how much jitgen is faster than the fastest
    peer: the geometric mean, the 5th percentile, the worst, and the share of cases in which it is at least as fast."""
    table = []
    for (backend, kind), found in _by_kind(rows, SWEEP).items():
        for least, most in ROW_RANGES:
            inside = [row for row in found if least <= row["shape"][-3] <= most]
            ratios = sorted(ratio_of(row)[0] for row in inside if row["ratios"])
            if not inside:
                continue
            failed = sum(bool(failure_of(row)) for row in inside)
            shown = ["-"] * 4
            if ratios:
                figures = geometric_mean(ratios), ratios[len(ratios) // 20], ratios[0]
                shown = [f"{figure:.2f}" for figure in figures]
                shown.append(f"{sum(ratio >= 1 for ratio in ratios) / len(ratios):.0%}")
            span = "all" if (least, most) == ROW_RANGES[-1] else f"{least} to {most}"
            table.append((kind, backend, span, str(len(inside)), *shown, str(failed)))
    return table


HEADER = ("kind", "backend", "M", "cases", "geometric mean", "5th percentile", "worst", "at least 1", "failed")


def epilogues(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """For each backend and kind: how many times as long as the bare product the one with bias and gelu takes, by the
    geometric mean and at most, and torch's time of the same as a multiple of it."""
    table = []
    for (backend, kind), found in _by_kind(rows, EPILOGUES).items():
        ratios = [row["ratios"] for row in found if row["ratios"]]
        if ratios:
            costs = [1 / each["bare"] for each in ratios]
            others = [ratio for each in ratios for peer, ratio in each.items() if peer != "bare"]
            figures = geometric_mean(costs), max(costs), geometric_mean(others), min(others)
            table.append((kind, backend, str(len(ratios)), *(f"{figure:.2f}" for figure in figures)))
    return table


EPILOGUES_HEADER = ("kind", "backend", "cases", "over the bare product", "most", "torch's over it", "worst")


def worst(rows: Sequence[Row]) -> list[str]:
    """The ``WORST`` cases of each backend and kind, and every case that failed."""
    lines = []
    for (backend, _), found in _by_kind(rows, SWEEP).items():
        ranked = sorted((*ratio_of(row), row["name"]) for row in found if row["ratios"])
        lines += [f"{ratio:.2f} of {peer}, {backend}, {name}" for ratio, peer, name in ranked[:WORST]]
    lines += [f"{row['backend']}, {row['name']}: {failure}" for row in rows if (failure := failure_of(row))]
    return lines


def summary(measurements: Sequence[Measurement]) -> list[str]:
    """``tabulated``, ``epilogues`` and the ``worst``, as lines."""
    rows = [found.to_json() for found in measurements if found.group in (SWEEP, EPILOGUES)]
    if not rows:
        return []
    tables = [(HEADER, tabulated(rows)), (EPILOGUES_HEADER, epilogues(rows))]
    return [*(", ".join(line) for header, table in tables if table for line in (header, *table)), *worst(rows)]


def _by_kind(rows: Sequence[Row], group: str) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["group"] == group:
            found.setdefault((row["backend"], kind_of(row)), []).append(row)
    return found
