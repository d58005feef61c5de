"""Generated sources of some hundred specialisations, for comparing two versions of jitgen by what they generate.

::

    python tests/corpus.py write before/            # with one version of the code
    python tests/corpus.py compare before/          # with the other: prints a diff, exits 1 where there is one

    python tests/corpus.py compare before/ --only attention    # the cases whose names have this word

    python tests/corpus.py write before/ --compiled sm_90a     # kernels in CUDA C++ with their headers
    python tests/corpus.py compare before/ --compiled sm_90a   # what NVRTC makes of them

The head of a source (its comment lines, which describe the specialisation) is left out of the comparison. tinygrad
compares its kernels with those of its main branch in the same way ("process replay").

Nothing is compiled but with ``--compiled``, for changes of headers: kernels of which the source or a header differs are
compiled with both versions, and their instructions, constants and resources are compared (``machine_code.py``). These
are the chosen schedule of each kernel and ``--schedules`` others of those that it may have, and of all of them one with
each source; ``--header gemm_mma.cuh`` leaves out kernels without this header, and ``--most`` all but so many of those
that differ.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import itertools
import json
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from barrier_launches import candidates, of_lowered
from machine_code import compiled, without_digests

import jitgen
from jitgen.spec import KernelSource

Spec = jitgen.TensorSpec
Case = tuple[str, Callable[..., Any], tuple[Any, ...]]
half, single, double = torch.bfloat16, torch.float32, torch.float64

ROUTES = (
    ("cpp", "x86-64-v3"),
    ("cpp", "x86-64-v4"),
    ("cuda", "sm_80"),
    ("cuda", "sm_90a"),
    ("triton", "sm_90a"),
    ("triton", "gfx942"),
)


def _pointwise() -> Iterator[Case]:
    def gelu(x: Any) -> Any:
        return F.gelu(x)

    def rope(x: Any, cos: Any, sin: Any) -> Any:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def heads(q: Any, k: Any, of_q: Any, of_k: Any) -> Any:
        return F.rms_norm(q, (128,), of_q), F.rms_norm(k, (128,), of_k)

    def update(x: Any, residual: Any, alpha: float) -> None:
        residual.add_(x.t() * alpha)

    def causal(scores: Any) -> Any:
        rows, columns = torch.arange(scores.shape[0])[:, None], torch.arange(scores.shape[1])
        return scores.masked_fill(rows < columns, float("-inf"))

    def two(x: Any, y: Any) -> Any:
        return x + y, (x * y).to(torch.float8_e4m3fn)

    def shifted(x: Any) -> Any:
        return (x << 2) // 3

    def cat(x: Any, y: Any) -> Any:
        return torch.cat([x, y * 2], 0).permute(1, 0)

    for dtype in (half, single, double):
        yield f"gelu_{dtype}", gelu, (Spec(("M", 1024), dtype),)
        yield f"causal_{dtype}", causal, (Spec(("Q", "K"), dtype),)
    yield "heads", heads, (Spec((1, "S", 32, 128), half), Spec((1, "S", 8, 128), half), *2 * [Spec((128,), half)])
    yield "rope", rope, (Spec(("B", "S", 128), half), Spec(("S", 128), half), Spec(("S", 128), half))
    yield "update", update, (Spec((64, 32), single), Spec((32, 64), single), 0.5)
    yield "two", two, (Spec(("M", 100), half), Spec((100,), single))
    yield "shifted", shifted, (Spec(("M", 7), torch.int32),)
    yield "cat", cat, (Spec((10, "N"), half), Spec((7, "N"), half))
    yield "long", gelu, (Spec((2**16, 2**15), half),)


def _rows() -> Iterator[Case]:
    def softmax(x: Any) -> Any:
        return torch.softmax(x, -1)

    def columns(x: Any) -> Any:
        return torch.softmax(x, 0)

    def log_softmax(x: Any) -> Any:
        return torch.log_softmax(x, -1)

    def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    def add_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
        h = x + residual
        return h, F.rms_norm(h, h.shape[-1:], weight, 1e-5)

    def extremes(x: Any) -> Any:
        return x.argmax(-1), x.amin(-1)

    def moments(x: Any) -> Any:
        return x.var(-1), x.mean(-1)

    def whole(x: Any) -> Any:
        return x.sum()

    def cross_entropy(x: Any, y: Any) -> Any:
        return F.cross_entropy(x, y)

    def between(x: Any) -> Any:
        return x - x.mean((0, 2), keepdim=True)

    for rows, length in (
        (8192, 100),
        (8192, 1024),
        (64, 4096),
        (8192, 16384),
        (64, 151936),
        (8192, 151936),
        (3, 2**19),
    ):
        for dtype in (half, single):
            size = f"{rows}x{length}_{dtype}"
            yield f"softmax_{size}", softmax, (Spec((rows, length), dtype),)
            yield f"layer_norm_{size}", layer_norm, (Spec((rows, length), dtype), *2 * [Spec((length,), dtype)])
            pair = 2 * [Spec((rows, length), dtype)]
            yield f"add_rms_norm_{size}", add_rms_norm, (*pair, Spec((length,), dtype))
            yield f"extremes_{size}", extremes, (Spec((rows, length), dtype),)
        yield f"log_softmax_{rows}x{length}", log_softmax, (Spec((rows, length), half),)
        yield f"moments_{rows}x{length}", moments, (Spec((rows, length), half),)
        yield f"columns_{length}x{rows}", columns, (Spec((length, rows), half),)
        yield f"cross_entropy_{rows}x{length}", cross_entropy, (Spec((rows, length), half), Spec((rows,), torch.int64))
    yield "whole", whole, (Spec((1000, 10000), half),)
    yield "one_row", layer_norm, (Spec((1, 1, 4096), half), *2 * [Spec((4096,), half)])
    yield "between", between, (Spec((32, 64, 100), single),)
    yield "softmax_any", softmax, (Spec(("M", "N"), half),)


def _attention() -> Iterator[Case]:
    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def capped(q: Any, k: Any, v: Any) -> Any:
        scores = 20 * torch.tanh(q @ k.transpose(-1, -2) / 20)
        return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)

    for rows, keys in ((1, 4096), (7, 300), (1024, 1024)):
        for dtype in (half, single):
            q, k = Spec((2, 32, rows, 128), dtype), Spec((2, 8, keys, 128), dtype)
            yield f"sdpa_{rows}x{keys}_{dtype}", sdpa, (q, k, k)
        yield f"capped_{rows}x{keys}", capped, (Spec((2, 32, rows, 64), half), *2 * [Spec((2, 32, keys, 64), half)])


def _products() -> Iterator[Case]:
    def linear(x: Any, w: Any) -> Any:
        return F.linear(x, w)

    def bias_gelu(x: Any, w: Any, b: Any) -> Any:
        return F.gelu(F.linear(x, w, b))

    def swiglu(x: Any, gate: Any, up: Any) -> Any:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    def qkv(x: Any, q: Any, k: Any, v: Any) -> Any:
        return x @ q.T, x @ k.T, x @ v.T

    def gated_down(gate: Any, up: Any, down: Any, residual: Any) -> Any:
        return residual + F.linear(F.silu(gate) * up, down)

    def normed(x: Any, weight: Any, w: Any) -> Any:
        return F.rms_norm(F.linear(x, w), (w.shape[0],), weight)

    def transposed(x: Any, w: Any) -> Any:
        return x @ w

    def gated_groups(x: Any, w: Any, ends: Any) -> Any:
        gate, up = torch._grouped_mm(x, w.transpose(-2, -1), ends).chunk(2, -1)
        return F.silu(gate) * up

    def likeliest(h: Any, head: Any) -> Any:
        return F.linear(h, head).argmax(-1)

    def chosen(x: Any, w: Any, ids: Any) -> Any:
        return torch.bmm(w[ids], x.unsqueeze(-1)).squeeze(-1)

    quantised = {
        "int4": lambda n, k: Spec((n, k), half, format="int4", group_size=128),
        "uint4": lambda n, k: Spec((n, k), half, format="uint4", group_size=64),
        "int8": lambda n, k: Spec((n, k), half, format="int8", group_size=None),
        "dense": lambda n, k: Spec((n, k), half),
    }
    for rows in (1, 4, 16, 64, 256, 1024, 4096):
        for format, weight in quantised.items():
            size = f"{rows}_{format}"
            x = Spec((rows, 4096), half)
            yield f"linear_{size}", linear, (x, weight(6144, 4096))
            yield f"swiglu_{size}", swiglu, (x, weight(14336, 4096), weight(14336, 4096))
            gate = 2 * [Spec((rows, 14336), half)]
            yield f"gated_down_{size}", gated_down, (*gate, weight(4096, 14336), Spec((rows, 4096), half))
        yield f"qkv_{rows}", qkv, (x, *(quantised["int4"](n, 4096) for n in (4096, 1024, 1024)))
    for dtype in (torch.float16, single, double):
        yield f"bias_gelu_{dtype}", bias_gelu, (Spec((33, 777), dtype), Spec((100, 777), dtype), Spec((100,), dtype))
    for rows in (8, 300, 8192):  # of two experts for each token
        dense, ends = Spec((8, 2048, 1024), half), Spec((8,), torch.int32)
        for name, weight in (("dense", dense), ("int4", Spec((8, 2048, 1024), half, format="int4", group_size=128))):
            yield f"grouped_{name}_{rows}", gated_groups, (Spec((rows, 1024), half), weight, ends)
    yield "grouped_lengths", torch._grouped_mm, (Spec((512, 300), half), Spec((300, 256), half), ends)
    yield "chosen", chosen, (Spec((8, 1024), half), dense, Spec((8,), torch.int64))
    yield "batched", linear, (Spec(("B", "S", 256), half), Spec((100, 256), half))
    yield "normed", normed, (Spec((64, 4096), half), Spec((4096,), half), quantised["int4"](4096, 4096))
    yield "transposed", transposed, (Spec((77, 512), half), Spec((512, 256), half))
    for rows, format, dtype in ((1, None, half), (2, "int4", half), (8, None, half), (3, None, single)):
        head = Spec((128256, 4096), dtype, format=format, group_size=format and 128)
        yield f"likeliest_{rows}_{format or dtype}", likeliest, (Spec((rows, 4096), dtype), head)


def _codes() -> Iterator[Case]:
    """Products of 8-bit codes, and of further formats of weights."""

    def scaled(x: Any, w: Any, s: Any, t: Any) -> Any:
        return ((x.float() @ w.float().T) * s * t).to(half)

    def in_blocks(x: Any, w: Any, s: Any, t: Any) -> Any:
        wide = (x.float().unflatten(-1, (-1, 128)) * s.unsqueeze(-1)).flatten(-2)
        tiles = w.float().view(w.shape[0] // 128, 128, w.shape[1] // 128, 128) * t[:, None, :, None]
        return wide @ tiles.view(w.shape).T

    def mlp(x: Any, gain: Any, gate: Any, up: Any, down: Any) -> Any:
        y = F.rms_norm(x, (4096,), gain)
        return F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)

    for rows in (4, 4096):
        for dtype in (torch.int8, torch.float8_e4m3fn):
            x, w = Spec((rows, 4096), dtype), Spec((6144, 4096), dtype)
            scales = Spec((rows, 1), single), Spec((6144,), single)
            yield f"codes_{rows}_{dtype}", scaled, (x, w, *scales)
            scales = Spec((rows, 32), single), Spec((48, 32), single)
            yield f"blocks_{rows}_{dtype}", in_blocks, (x, w, *scales)
        for format, group, kind in (
            *(("int4", 128, "int8"), ("uint4", 128, "int8"), ("int8", None, "int8")),
            *(("fp8_e4m3", None, "fp8_e4m3"), ("fp8_e4m3.rows128", 128, "fp8_e4m3.block128")),
        ):
            weight = Spec((6144, 4096), half, format=format, group_size=group, activation=kind)
            yield f"{format.replace('.', '_')}_codes_{rows}", F.linear, (Spec((rows, 4096), half), weight)
        for format, group in (("int2", 128), ("mxfp4", 32), ("nf4", 64), ("int4", 128), ("int8", None)):
            weight = Spec((6144, 4096), half, format=format, group_size=group)
            for dtype in (half, single):
                yield f"{format}_{rows}_{dtype}", F.linear, (Spec((rows, 4096), dtype), weight)
        kind = {"format": "fp8_e4m3.rows128", "group_size": 128, "activation": "fp8_e4m3.block128"}
        weights = [Spec(shape, half, **kind) for shape in ((14336, 4096), (14336, 4096), (4096, 14336))]
        yield f"blocks_mlp_{rows}", mlp, (Spec((rows, 4096), half), Spec((4096,), half), *weights)


def _ordered() -> Iterator[Case]:
    """Scans, sorts and scatters."""

    def router(x: Any) -> Any:
        values, indices = x.softmax(-1).topk(8, -1)
        return values / values.sum(-1, keepdim=True), indices

    x, indices = Spec((64, 5000), single), Spec((64,), torch.int64)
    yield "cumsum", lambda x: x.cumsum(-1), (x,)
    yield "cumsum_of_columns", lambda x: x.exp().cumsum(0), (Spec((300, 70), half),)
    yield "cummax", lambda x: x.cummax(-1), (Spec((3, 100000), single),)
    yield "logcumsumexp", lambda x: x.logcumsumexp(-1), (x,)
    yield "sort", lambda x: x.sort(-1, descending=True), (x,)
    yield "topk", lambda x: x.topk(5, -1), (Spec((64, 333), half),)
    yield "router", router, (Spec((64, 128), single),)
    yield "sort_long", lambda x: x.argsort(-1), (Spec((2, 90000), single),)
    yield "index_add", lambda x, i: x.new_zeros(11, x.shape[1]).index_add(0, i, x), (x, indices)
    yield "embedding", lambda w, i: F.embedding(i, w), (x, indices)
    yield "scatter", lambda x, i: x.scatter(1, i, 2.0), (x, Spec((64, 9), torch.int64))


def _more_attention() -> Iterator[Case]:
    def windowed(q: Any, k: Any, v: Any) -> Any:
        rows, keys = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        scores = (q @ k.mT * 0.125).masked_fill((keys > rows) | (rows - keys >= 256), float("-inf"))
        return torch.softmax(scores, -1) @ v

    def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return torch.softmax(q @ k.mT / 8 + bias, -1) @ v

    def sinks(q: Any, k: Any, v: Any, sink: Any) -> Any:
        scores = torch.cat([q @ k.mT / 8, sink.expand(*q.shape[:-1], 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] @ v

    heads = 3 * [Spec((2, 8, 700, 64), half)]
    yield "windowed", windowed, tuple(heads)
    yield "biased", biased, (*heads, Spec((8, 700, 700), half))
    yield "sinks", sinks, (*heads, Spec((8, 1, 1), half))
    quantised = [Spec((1, 8, 1, 128), half), *2 * [Spec((1, 8, 9000, 128), torch.float8_e4m3fn)]]
    yield "decode_float8", lambda q, k, v: torch.softmax(q @ k.to(q.dtype).mT, -1) @ v.to(q.dtype), tuple(quantised)


def _convolutions() -> Iterator[Case]:
    def layer(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        return F.relu(F.conv2d(x, w, bias, stride=2, padding=1) + residual)

    def transposed(x: Any, w: Any) -> Any:
        return F.conv_transpose1d(x, w, stride=2)

    for dtype in (half, single, double):
        sizes = ("N", 8, 12, 12), (16, 8, 3, 3), (16,), ("N", 16, 6, 6)
        yield f"convolution_{dtype}", layer, tuple(Spec(shape, dtype) for shape in sizes)
    yield "convolution_transposed", transposed, (Spec((2, 8, 20), single), Spec((8, 4, 4), single))


def _gradients() -> Iterator[Case]:
    """Functions whose backwards are lowered."""

    def causal(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def capped(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return torch.softmax(20 * torch.tanh((q @ k.mT + bias) / 20), -1) @ v

    def mlp(x: Any, weight: Any, gate: Any, down: Any) -> Any:
        x = F.rms_norm(x, x.shape[-1:], weight)
        return F.linear(F.silu(F.linear(x, gate)), down)

    def spec(*shape: int, dtype: torch.dtype = half) -> Any:
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    for dtype in (half, single):
        yield f"backward_causal_{dtype}", causal, tuple(3 * [spec(2, 8, 700, 64, dtype=dtype)])
    yield "backward_causal_wide", causal, tuple(3 * [spec(1, 4, 512, 128)])
    yield "backward_capped", capped, (*3 * [spec(2, 8, 700, 64)], spec(8, 700, 700))
    yield "backward_mlp", mlp, (spec(300, 512), spec(512), spec(1024, 512), spec(512, 1024))
    yield "backward_softmax", lambda x: torch.softmax(x, -1), (spec(700, 4096),)
    yield "backward_embedding", lambda w, i: F.embedding(i, w), (spec(1000, 64), torch.zeros(300, dtype=torch.int64))


def _lowered(name: str, function: Callable[..., Any], arguments: tuple[Any, ...], route: tuple[str, str]) -> Any:
    lowered = jitgen.jit(function).lower(*arguments, backend=route[0], target=route[1])
    return (lowered, lowered.backward) if name.startswith("backward") else (lowered,)


def _cases(word: str) -> Iterator[Case]:
    """The cases whose names have ``word``."""
    cases = (
        _pointwise(),
        _rows(),
        _attention(),
        _products(),
        _codes(),
        _ordered(),
        _more_attention(),
        _gradients(),
        _convolutions(),
    )
    for name, function, arguments in itertools.chain(*cases):
        name = name.replace("torch.", "")
        if word in name:
            yield name, function, arguments


def sources(word: str = "") -> Iterator[tuple[str, str]]:
    """(name, source) of every kernel of the cases whose names have ``word``."""
    for name, function, arguments in _cases(word):
        for backend, target in ROUTES:
            file = f"{name}.{backend}.{target}"
            try:
                lowered = _lowered(name, function, arguments, (backend, target))
            except jitgen.UnsupportedError as error:
                yield file, f"refused: {type(error).__name__}\n"
                continue
            for number, kernel in enumerate(kernel for one in lowered for kernel in one.kernels):
                yield f"{file}.{number}", kernel.source


def cuda_sources(word: str, target: str, header: str, schedules: int) -> dict[str, KernelSource]:
    """Name -> source of the kernels that ``--compiled`` compares. A name has a digest of the schedule."""
    found: dict[str, KernelSource] = {}
    seen = set()
    for name, function, arguments in _cases(word):
        try:
            both = _lowered(name, function, arguments, ("cuda", target))
        except jitgen.UnsupportedError:
            continue
        for side, one in enumerate(both):
            for number, own in enumerate(one._lowered.schedules):
                others = sorted(map(repr, made := candidates(one._lowered, number)))
                chosen = set(random.Random(name).sample(others, min(schedules, len(others))))
                for schedule in (own, *(other for other in made if other != own and repr(other) in chosen)):
                    source, _ = of_lowered(one._lowered, number, schedule)
                    if not _includes(source, header):
                        continue
                    inputs = _inputs(source)
                    if inputs not in seen:
                        seen.add(inputs)
                        label = hashlib.sha256(repr(schedule).encode()).hexdigest()[:8]
                        found[f"{name}.{side}.{number}.{label}"] = source
    return found


def _includes(source: KernelSource, header: str) -> bool:
    return not header or f"jitgen/{header}" in dict(source.headers)


def _inputs(source: KernelSource) -> str:
    """A digest of all that decides what ``source`` compiles to."""
    text = [*_body(source.text), source.headers, source.packages, source.options, str(source.target)]
    return hashlib.sha256(repr(text).encode()).hexdigest()


def compare_compiled(before: dict[str, KernelSource], now: dict[str, KernelSource], known: Path, most: int) -> int:
    """Prints the kernels whose code differs; returns how many. ``known``: a file of digests that are known already."""
    digests: dict[str, str] = json.loads(known.read_text()) if known.exists() else {}
    changed = [name for name in sorted(now.keys() & before.keys()) if _inputs(before[name]) != _inputs(now[name])]
    some = random.Random(0).sample(changed, min(most, len(changed))) if most else changed
    missing = {_inputs(source): source for name in some for source in (before[name], now[name])}
    missing = {inputs: source for inputs, source in missing.items() if inputs not in digests}
    with ProcessPoolExecutor(2) as pool:
        for inputs, code in zip(missing, pool.map(compiled, missing.values()), strict=True):
            digests[inputs] = code
            known.write_text(json.dumps(digests))
    differing = [name for name in some if digests[_inputs(before[name])] != digests[_inputs(now[name])]]
    alone = sorted(now.keys() ^ before.keys())
    print(*(f"differs: {name}" for name in differing), sep="\n", end="\n" if differing else "")
    print(
        *(f"only {'now' if name in now else 'before'}: {name}" for name in alone), sep="\n", end="\n" if alone else ""
    )
    print(
        f"{len(now)} kernels, {len(changed)} of other sources or headers, {len(some)} of these compiled, "
        f"{len(differing)} to other code"
    )
    return len(differing) + len(alone)


def _body(source: str) -> list[str]:
    """The lines of ``source`` behind its head, without the entry's digest, which follows from all others."""
    lines = without_digests(source).splitlines()
    first = next((n for n, line in enumerate(lines) if line.strip() and not line.startswith(("//", "#  ", "# "))), 0)
    return lines[first:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("write", "compare"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", default="", metavar="WORD", help="the cases whose names have this word")
    parser.add_argument("--compiled", metavar="TARGET", help="compile kernels in CUDA C++ for this target")
    parser.add_argument("--header", default="", help="with --compiled: kernels that include this one")
    parser.add_argument("--schedules", type=int, default=4, help="with --compiled: of a kernel, beside its own")
    parser.add_argument(
        "--most", type=int, default=0, help="with --compiled: kernels to compile; 0 for all that differ"
    )
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.compiled:
        kernels = cuda_sources(options.only, options.compiled, options.header, options.schedules)
        file = options.directory / f"{options.compiled}.pickle"
        if options.verb == "write":
            file.write_bytes(pickle.dumps(kernels))
            print(f"{len(kernels)} kernels written")
            return 0
        before = pickle.loads(file.read_bytes())
        before = {name: before[name] for name in before if options.only in name.partition(".")[0]}
        before = {name: source for name, source in before.items() if _includes(source, options.header)}
        return int(bool(compare_compiled(before, kernels, options.directory / "compiled.json", options.most)))
    found = dict(sources(options.only))
    if not found:
        parser.error(f"no case has {options.only!r} in its name")
    if options.verb == "write":
        for name, source in found.items():
            (options.directory / name).write_text(source)
        print(f"{len(found)} sources written")
        return 0
    files = [path for path in options.directory.iterdir() if path.suffix not in (".pickle", ".json")]
    before = {path.name: path.read_text() for path in files if options.only in path.name.partition(".")[0]}
    differing = sorted(found.keys() ^ before.keys())
    for name in differing:
        print(f"only {'now' if name in found else 'before'}: {name}")
    for name in sorted(found.keys() & before.keys()):
        old, new = _body(before[name]), _body(found[name])
        if old != new:
            differing.append(name)
            sys.stdout.writelines(
                f"{line}\n" for line in difflib.unified_diff(old, new, f"before/{name}", name, "", "", 1)
            )
    print(f"{len(found)} sources, {len(differing)} of them different")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
