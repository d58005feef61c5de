"""Times the candidates of products of random sizes on this GPU: what the models of ``families/gemm`` are fitted to.

::

    python -m bench.gemm_timings timings.json --seed 7 --shapes 40 --kinds mma rows wgmma_quantized wgmma_dense

For each kind of mainloop, sizes are drawn as ``jitgen bench sweep`` draws them. Every candidate is compiled (in as many
processes as there are cores), launched over rotating copies of its weights, and timed in a CUDA graph. Results of the
candidates of one problem must agree, and a candidate that differs is reported. A line of the output is
``[kind, rows, columns, length, fields of the candidate, blocks that share K, microseconds]``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import math
import os
import pickle
import random
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import condensed
from bench.products import GPU_ROWS, LLAMA, linear, swiglu
from bench.records import write_rows
from bench.sizes import log_uniform, side
from bench.timing import graph_seconds
from jitgen.families import registry
from jitgen.families.gemm import wgmma, wgmma_tiles, wgmma_times
from jitgen.families.gemm.mainloops import MmaQuantized, MmaRows, WgmmaDense, WgmmaLaunch, WgmmaQuantized, WgmmaTilings
from jitgen.families.gemm.schedule import bucket
from jitgen.families.gemm.schedules import cuda
from jitgen.kernel.launch import OVERLAPS
from jitgen.schedule.choose import Choice

KINDS = {
    "mma": ("int4", 1, 16),
    "rows": (None, 1, 16),
    "wgmma_quantized": ("int4", 9, 8192),
    "wgmma_dense": (None, 17, 8192),
    "wgmma_quantized g64": ("int4", 9, 8192),
    "wgmma_quantized g32": ("int4", 9, 8192),
    "swiglu_quantized": ("int4", 65, 8192),
    "swiglu_dense": (None, 65, 8192),
    "int4": ("int4", 1, 8192),
    "dense": (None, 1, 8192),
    "swiglu int4": ("int4", 1, 8192),
    "swiglu dense": (None, 1, 8192),
    "int8": (None, 1, 8192),
    "float8": (None, 1, 8192),
    "int8_rows": (None, 1, 16),
    "float8_rows": (None, 1, 16),
}
"""The format of the weights, and the fewest and the most rows, of each kind. Of the first eight every candidate of one
mainloop is timed, of the others that which is chosen."""
BYTES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
BYTES |= {f"{kind}_rows": dtype for kind, dtype in BYTES.items()}
"""The dtype of both operands, of kinds where that has one byte."""
PATHS = {"swiglu_quantized": "wgmma_quantized", "swiglu_dense": "wgmma_dense"}
PATHS |= dict.fromkeys(("wgmma_quantized g64", "wgmma_quantized g32"), "wgmma_quantized")
PATHS |= {kind: "bytes" if kind.endswith("_rows") else "wgmma_dense" for kind in BYTES}
"""The mainloop of a kind, where it is not the kind's name."""
CHOSEN = ("int4", "dense", "swiglu int4", "swiglu dense")
POOL_BYTES = 2**30
"""Memory that copies of the weights are taken from."""
ROW_RANGES = (
    *((1, 8), (9, 16), (17, 64), (1, 64), (65, 256), (257, 1024), (1025, 8192)),
    *((65, 8192), (1, 8192)),
)
"""The ranges of rows that ``summarise`` has lines for."""
SHOWN = 8
"""Candidates of a shape that are printed."""
HIDDEN = ("shared_bytes", "wide", "raster", "contractions", "steps", "stagger", "cluster_k_splits")
"""Fields of a candidate that are not."""
CACHED_BYTES = 2**28
"""Bytes after which a copy is certainly not in the second-level cache any more."""


def llama() -> Iterator[tuple[str, int, int, int]]:
    """The layers of Llama, and its SwiGLU beside the product of the same size."""
    for rows in GPU_ROWS:
        for columns, length in LLAMA.values():
            for kind in CHOSEN[:2]:
                yield kind, rows, columns, length
        for kind in CHOSEN[2:]:
            yield kind, rows, 14336, 4096


def drawn(source: random.Random, kind: str, fewest: int, at_most: int) -> tuple[int, int, int]:
    """(rows, columns, length), with ``fewest`` to ``at_most`` rows."""
    _, least, most = KINDS[kind]
    least, most = max(least, fewest), min(most, at_most)
    while True:
        rows = int(log_uniform(source, least, most + 1))
        columns, length = side(source, 16 if kind in BYTES else 8), side(source, 16 if kind in BYTES else 128)
        if most > 16 and kind not in CHOSEN and source.random() < 0.4:
            length = 128 * source.randint(1, 10)
        if columns * length <= 3e8 and rows * columns * length <= 1e12:
            return rows, columns, length


def lowered(kind: str, rows: int, columns: int, length: int, target: str) -> Any:
    format = KINDS[kind][0]
    if kind in BYTES:
        x, w = (jitgen.TensorSpec((size, length), BYTES[kind]) for size in (rows, columns))
        return jitgen.jit(backend="cuda")(codes).lower(x, w, target=target).lowered
    x = jitgen.TensorSpec((rows, length), torch.bfloat16)
    group = None if format is None else group_of(kind)
    w = jitgen.TensorSpec((columns, length), torch.bfloat16, format=format, group_size=group)
    if kind.startswith("swiglu"):
        return jitgen.jit(backend="cuda")(swiglu).lower(x, w, w, target=target).lowered
    return jitgen.jit(backend="cuda")(linear).lower(x, w, target=target).lowered


def group_of(kind: str) -> int:
    """The group size of a kind's weights, which its name ends in where it is not 128."""
    _, _, size = kind.partition(" g")
    return int(size or 128)


def codes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.float() @ weight.float().T).to(torch.bfloat16)


def scheduled(low: Any, kind: str, extra: Any, within: float) -> Iterator[Any]:
    """The candidates of a problem, without alternatives, that are estimated to take at most ``within`` times as long as
    the best."""
    family, route = registry.family_of(low.program.kernels[0]), low.route
    problem = family.problem(low.program.kernels[0], low.layouts[0], low.laid_out.geometries[0], route.device)
    found = list(family.candidates(problem, route.device))
    if extra is not None:
        found += extra(problem)
    path = PATHS.get(kind, kind)
    costs = {
        candidate: family.cost(problem, candidate, route.device)
        for candidate in found
        if candidate.path == path and not isinstance(candidate, WgmmaTilings)
    }
    best = min(costs.values(), default=0.0)
    yield from (candidate for candidate, estimated in costs.items() if estimated <= within * best)


@dataclasses.dataclass(frozen=True)
class Job:
    """One launch to time: what it is called by, what is launched, and the bytes and dtypes of its operands."""

    fields: dict[str, Any]
    splits: int | None
    source: str
    shape: Any
    arguments: Any
    operands: tuple[tuple[int, str], ...]
    result: tuple[int, ...]


def job_of(low: Any, schedule: Any, splits: int | None, source: str) -> Job:
    operands = [(bytes_of(m, b), b.dtype) for m, b in zip(low.memories, low.program.buffers, strict=True)]
    fields, result = dataclasses.asdict(schedule), low.memories[-1].view.sizes
    with contextlib.ExitStack() as replaced:
        if splits is not None:
            chosen = WgmmaLaunch(schedule, 0, splits)
            replaced.enter_context(mock.patch.object(wgmma, "for_launch", return_value=chosen))
        launch, arguments = low.launch(0), low.arguments(0)
    return Job(fields, splits, source, launch, arguments, tuple(operands), result)


def bytes_of(memory: Any, buffer: Any) -> int:
    item = {"bfloat16": 2, "float32": 4, "int32": 4, "uint8": 1, "int8": 1, "float8_e4m3fn": 1}[buffer.dtype]
    return math.prod(memory.view.sizes) * item


def compiled(source: Any) -> Any:
    from jitgen.compilers import nvrtc

    try:
        artifact = nvrtc.compile(source)
    except Exception as error:  # reported, and the candidate left out
        return str(error)[:300]
    return (
        artifact.meta["entry"],
        artifact.files[artifact.binary],
        artifact.meta.get("spill_bytes", 0),
        artifact.meta.get("registers", 0),
    )


@mock.patch.object(cuda, "k_splits", new=mock.Mock(return_value=1))  # the rest is of split_k_timings.py
def prepared(options: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """The launches of each problem, and the sources of their kernels."""
    source = random.Random(options.seed)
    target = "sm_90a"
    problems, sources, rendered = [], {}, {}
    shapes = [
        (kind, *drawn(source, kind, options.fewest_rows, options.most_rows))
        for _ in range(0 if options.sizes else options.shapes)
        for kind in options.kinds
    ]
    shapes += [(kind, *map(int, size.split("x"))) for size in options.sizes or () for kind in options.kinds]
    shapes += llama() if options.llama else ()
    for kind, rows, columns, length in shapes:
        low = lowered(kind, rows, columns, length, target)
        if low.program.kernels[0].family != "gemm":
            continue
        jobs: list[Any] = []
        if kind in CHOSEN:
            text = low.render(0)[0]
            sources[text.text] = text
            jobs.append(job_of(low, low.schedules[0], None, text.text))
        for schedule in () if kind in CHOSEN else scheduled(low, kind, EXTRA.get(kind), options.within):
            for wanted, splits in variants(schedule, rows, columns, length, weights_of(low)):
                name = (low.program.kernels[0].digest, str(low.layouts), wanted)
                one = dataclasses.replace(low, choices=(Choice(wanted, ""),))
                if name not in rendered:
                    rendered[name] = one.render(0)[0]
                    sources[rendered[name].text] = rendered[name]
                fresh = dataclasses.replace(one)  # rendering has settled how many blocks share K
                jobs.append(job_of(fresh, wanted, splits, rendered[name].text))
        problems.append(((kind, rows, columns, length), jobs))
    return problems, sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--shapes", type=int, default=30, help="of each kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS)[:4], choices=KINDS)
    parser.add_argument("--fewest-rows", type=int, default=1)
    parser.add_argument("--most-rows", type=int, default=8192)
    parser.add_argument("--sizes", nargs="*", help="rows x columns x length, as 1024x4096x4096, instead of random ones")
    parser.add_argument("--within", type=float, default=math.inf, help="the largest estimate, of the best candidate's")
    parser.add_argument("--seconds", type=float, default=100, help="after which no further problem is begun")
    parser.add_argument("--llama", action="store_true", help="also the layers of Llama")
    parser.add_argument("--kernels", type=Path, help="compiled ahead: written where there is none, else read")
    parser.add_argument("--dry", action="store_true", help="only count what would be timed")
    options = parser.parse_args()
    started = time.time()
    if options.kernels and options.kernels.exists():
        problems, built = pickle.loads(options.kernels.read_bytes())
    else:
        problems, sources = prepared(options)
        timings = sum(len(jobs) for _, jobs in problems)
        print(f"{len(problems)} problems, {timings} timings, {len(sources)} sources", flush=True)
        if options.dry:
            return
        built = built_of(sources)
        if options.kernels:
            options.kernels.write_bytes(pickle.dumps((problems, built)))
            return
    print(f"prepared after {time.time() - started:.1f} s", flush=True)
    results: list[Any] = []
    bench = Timer()
    for shape, jobs in problems:
        if time.time() - started > options.seconds:
            break
        reference = None
        for job in jobs:
            if isinstance(built[job.source], str) or built[job.source][2] > 120:
                continue
            try:
                microseconds, out = bench.time(job, built[job.source])
            except Exception:
                print("FAILED", shape, job.fields, job.splits, flush=True)
                raise
            if reference is None:
                reference = out
            error = (out - reference).abs().max().item() / max(reference.abs().max().item(), 1e-30)
            if not error < 0.02:
                print("WRONG", shape, job.fields, job.splits, error, flush=True)
            results.append([*shape, job.fields, job.splits, round(microseconds, 3)])
        results.append(["cublas", *shape[1:], {}, 1, round(bench.peer(*shape), 3)])
        write_rows(options.output, results)
        compare(shape, results)
    layers = set(llama())
    summarise([each for each in results if tuple(each[:4]) not in layers])
    for kind, rows, columns, length, _, _, microseconds in results if options.llama else ():
        if (kind, rows, columns, length) in layers:
            print(f"llama {kind} {rows} x {columns} x {length}: {microseconds:.2f} us")
    print(f"{len(results)} timings after {time.time() - started:.1f} s")


def built_of(sources: Mapping[str, Any]) -> dict[str, Any]:
    """Each source compiled, or what is wrong with it, in as many processes as there are cores."""
    from jitgen.compilers import routes

    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        ready = [routes.prepare(each) for each in sources.values()]
        built = dict(zip(sources, pool.map(compiled, ready, chunksize=2), strict=True))
    for name, each in built.items():
        if isinstance(each, str):
            print("not compiled", name[:600], each, flush=True)
        elif each[2]:
            print("spills", each[2:], flush=True)
    return built


def compare(shape: tuple[str, int, int, int], results: list[Any]) -> None:
    """Prints torch's time of the dense product of a shape, and the fastest candidates."""
    timed = [(us, splits, fields) for *of, fields, splits, us in results if tuple(of) == shape]
    times = sorted(timed, key=lambda one: one[:2])
    if len(times) > 1:
        print(*shape, f"torch {results[-1][-1]:.1f}", flush=True)
        for us, splits, fields in times[:SHOWN]:
            shown = {key: value for key, value in fields.items() if value and key not in HIDDEN}
            print(
                "  ", f"{us:.1f}", f"splits {splits}", *(f"{key} {value}" for key, value in shown.items()), flush=True
            )


def summarise(results: list[Any]) -> None:
    """Prints, of what was chosen, torch's time of the dense product as a multiple of the product's, by rows."""
    peers = {tuple(shape): microseconds for kind, *shape, _, _, microseconds in results if kind == "cublas"}
    for kind in CHOSEN:
        ratios = sorted(
            (peers[m, n, k] / us, m, n, k, us) for of, m, n, k, _, _, us in results if of == kind and (m, n, k) in peers
        )
        for low, high in ROW_RANGES:
            found = [ratio for ratio, rows, *_ in ratios if low <= rows <= high]
            if found:
                print(f"{kind} {low}-{high}: {condensed(found)}")
        for ratio, rows, columns, length, microseconds in ratios[:10]:
            print(f"  {ratio:.2f} {rows} x {columns} x {length}, {microseconds:.1f} us")


def weights_of(low: Any) -> Any:
    """The facts by which the model of wgmma compares tiles."""
    geometries = low.laid_out.geometries[0]
    contractions = low.program.kernels[0].bodies[0].contractions
    columns = [geometry.columns for geometry in geometries]
    return wgmma.weights_of(contractions, columns, geometries[0].length, low.route.device.model)


def variants(schedule: Any, rows: int, columns: int, length: int, weights: Any) -> list[tuple[Any, int]]:
    """(schedule, blocks of a cluster that share K) worth timing: without splits, some numbers of them, and the one that
    the model takes."""
    if (
        not isinstance(schedule, WgmmaQuantized | WgmmaDense)
        or schedule.multicast > 1
        or not may_split(schedule, weights)
    ):
        return [(schedule, schedule.cluster_k_splits)]
    found = [(dataclasses.replace(schedule, cluster_k_splits=1), 1)]
    items = -(-rows // schedule.block_m) * -(-columns // schedule.block_n)
    chunks = -(-length // schedule.block_k)
    room = 132 * schedule.resident
    left = items % room
    if left and left <= room // 2:
        wanted = min(8, room // left, max(1, chunks // 4))
        several = dataclasses.replace(schedule, cluster_k_splits=8)
        own = wgmma_times.estimate(schedule, rows, weights)[0]
        found += [(several, splits) for splits in sorted({wanted, min(3, wanted), own} - {1})]
    return found


def may_split(schedule: Any, weights: Any) -> bool:
    """Whether blocks of a cluster can share the K of this tile."""
    return isinstance(schedule, WgmmaQuantized) or wgmma_tiles._splitting(schedule, weights).cluster_k_splits > 1


def streams(problem: Any) -> Any:
    """Candidates of the mainloops for few rows, which their rules do not have."""
    kind = MmaQuantized if problem.quantized else MmaRows
    tokens = next(t for t in (1, 4, 8, 16) if bucket(problem.rows) <= t)
    tiles, chunks = -(-problem.columns[0] // 16), -(-problem.length // 64)
    found = []
    for (rows, across, along), deep in STREAMS:
        for splits in (1, 2, 4, 8):
            for stages in (2, 4):
                if (stages == 4 and (not deep or splits > 2)) or splits > {1: 8, 2: 4, 4: 2, 7: 2}[rows]:
                    continue
                blocks = -(-tiles // (rows * across)) * splits
                if along * splits > chunks or (splits > 1 and blocks > 132 * 4):
                    continue
                made = kind(tokens, rows, across, along, stages, cluster_k_splits=splits)
                found.append((blocks * min(across * along, 16), cuda._with_stages_that_fit(made, problem)))
    most = max((each for each, _ in found), default=0)
    return [made for warps, made in found if warps >= min(most, 132 * 16) / 6]


STREAMS = [
    *(
        ((1, 1, 16), True),
        ((1, 1, 8), True),
        ((1, 2, 8), False),
        ((1, 2, 4), True),
        ((1, 4, 4), False),
        ((1, 4, 2), False),
    ),
    *(
        ((2, 1, 8), True),
        ((2, 1, 16), False),
        ((2, 2, 4), True),
        ((2, 2, 8), False),
        ((2, 4, 2), False),
        ((2, 4, 4), False),
    ),
    *(
        ((2, 7, 2), False),
        ((2, 8, 1), False),
        ((4, 1, 8), True),
        ((4, 1, 4), False),
        ((4, 2, 4), True),
        ((4, 4, 2), False),
    ),
    *(((4, 2, 8), False), ((4, 8, 1), False), ((7, 2, 4), False), ((7, 4, 2), False), ((7, 2, 2), False)),
]


def dense(problem: Any) -> Any:
    """Candidates of the dense mainloop that its rule does not have."""

    def tiles(down: int, columns: int, stages: int, **rest: Any) -> WgmmaDense:
        staged = 16 if columns % 32 else 32 if columns % 64 or down == 3 else 64
        return WgmmaDense(down, 1, columns, stages=stages, staged=staged, **rest)

    shapes = ((2, 256, 4), (2, 224, 4), (2, 192, 4), (2, 160, 5), (2, 128, 6), (3, 128, 5), (3, 160, 4), (3, 192, 4))
    shared = [tiles(*shape, multicast=2, shares_x=x) for shape in shapes for x in (False, True)]
    alone = [tiles(*shape) for shape in ((3, 160, 4), (3, 192, 4), (2, 208, 4), (2, 176, 4), (2, 144, 5), (2, 112, 6))]
    in_turn = [tiles(*shape, pingpong=True) for shape in ((2, 192, 4), (1, 192, 5), (1, 256, 4))]
    for shape in ((1, 256, 4), (2, 128, 6), (2, 160, 5), (2, 192, 4)):
        in_turn += [tiles(*shape, pingpong=True, multicast=2, shares_x=x) for x in (False, True)]
    weights = cuda._weights(problem)
    made = [each for each in (*shared, *alone, *in_turn) if problem.rows > 64 * (each.down - 1) and problem.rows > 64]
    return [cuda._with_wgmma_stages_that_fit(wgmma_tiles._splitting(each, weights), problem) for each in made]


EXTRA: dict[str, Any] = {"mma": streams, "rows": streams, "wgmma_dense": dense}


class Timer:
    """Launches a candidate over random memory, in a CUDA graph."""

    def __init__(self) -> None:
        self.pool = torch.randint(-(2**31), 2**31 - 1, (POOL_BYTES // 4,), dtype=torch.int32, device="cuda")
        # Any bits are codes. Of the 16-bit floats some bits of the exponent are fixed, so that they are 2**-8 to 2.
        self.floats = (torch.randn(POOL_BYTES // 2, device="cuda") * 0.5).to(torch.bfloat16)
        self.bytes_of_floats = self.floats.to(torch.float8_e4m3fn)
        self.functions: dict[Any, Any] = {}

    def time(self, job: Job, built: Any) -> tuple[float, torch.Tensor]:
        from jitgen.runtime import cuda, residency
        from jitgen.runtime.tensor_map import TensorMap

        shape, arguments, name = job.shape, job.arguments, job.source
        if (name, shape.entry) not in self.functions:
            self.functions[name, shape.entry] = cuda.load(built[1], built[0] + shape.entry, 0, shape.shared_bytes)
        function = self.functions[name, shape.entry]
        packing = arguments.packing("")
        launch = cuda.Launch(
            function,
            packing.codes,
            packing.values,
            residency.resident_grid(function, shape),
            shape.block,
            shape.shared_bytes,
            cluster=(shape.cluster, 1, 1) if shape.any_cluster and shape.cluster > 1 else None,
            pdl=OVERLAPS in shape.attributes,
            struct_layout=packing.layout,
        )
        weights = sum(size for size, _ in job.operands[1:-1])
        copies = max(2, min(16, CACHED_BYTES // max(weights, 1)))
        out = torch.full(job.result, float("nan"), dtype=torch.bfloat16, device="cuda")
        maps = [TensorMap(**vars(each)) for each in arguments.maps]
        sets = []
        for copy in range(copies):
            places: list[int] = []
            at = 0
            for size, dtype in job.operands[:-1]:
                wholes = {"bfloat16": self.floats, "float8_e4m3fn": self.bytes_of_floats}
                whole = wholes.get(dtype, self.pool)
                offset = at + copy * weights if places else at
                places.append(whole.data_ptr() + offset % (whole.nbytes - size) // 256 * 256)
                at += -(-size // 256) * 256
            places.append(out.data_ptr())
            values = [each.encode(places[each.buffer]) for each in maps]
            values += [places[number] + offset for number, offset in arguments.pointers]
            sets.append(values)
        launch(torch._C._cuda_getCurrentRawStream(0), *sets[0])
        torch.cuda.synchronize()
        result = out[:, : 1 << 14].float()

        def call(values: list[Any]) -> None:
            launch(torch._C._cuda_getCurrentRawStream(0), *values)

        calls = [partial(call, values) for values in sets]
        return graph_seconds(calls) * 1e6, result

    def peer(self, kind: str, rows: int, columns: int, length: int) -> float:
        """The time in microseconds of torch's F.linear of a dense weight, or of its product of operands of one byte:
        ``_int_mm``, which takes more than 16 rows and stores int32, or ``_scaled_mm`` by row without fast sums."""
        if kind in BYTES:
            return self.byte_peer(BYTES[kind], rows, columns, length)
        copies = max(2, min(16, CACHED_BYTES // (2 * columns * length)))
        x = self.floats[: rows * length].view(rows, length)
        size = columns * length
        starts = (copy * size % (self.floats.numel() - size) // 8 * 8 for copy in range(copies))
        weights = [self.floats[at : at + size].view(columns, length) for at in starts]
        return graph_seconds([partial(F.linear, x, weight) for weight in weights]) * 1e6

    def byte_peer(self, dtype: torch.dtype, rows: int, columns: int, length: int) -> float:
        whole = (self.pool.view(torch.int8) if dtype == torch.int8 else self.bytes_of_floats).view(-1)
        rows = max(rows, 17) if dtype == torch.int8 else rows
        size = columns * length
        copies = max(2, min(16, CACHED_BYTES // size))
        x = whole[: rows * length].view(rows, length)
        starts = (copy * size % (whole.numel() - size) // 256 * 256 for copy in range(copies))
        weights = [whole[at : at + size].view(columns, length).T for at in starts]
        if dtype == torch.int8:
            return graph_seconds([partial(torch._int_mm, x, weight) for weight in weights]) * 1e6
        scales = torch.ones(rows, 1, device="cuda"), torch.ones(1, columns, device="cuda")
        multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16)
        return graph_seconds([partial(multiply, x, weight, *scales) for weight in weights]) * 1e6


if __name__ == "__main__":
    main()
