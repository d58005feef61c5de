"""Times steps and prompts of a decoder of Llama-3-8B's sizes with few layers, beside Inductor in the same process.

    python -m bench.decoder_steps --json steps.json
    python -m bench.decoder_steps --device cpu --small --json steps.json      # sizes of a test: whether all of it runs
    python -m bench.decoder_steps --only 'cuda (bf16|int4) . 1$' --prebuild 15     # few of the cases

The decoder is plain PyTorch: an embedding, ``--layers`` blocks with a cache of 1,024 keys, a last norm, and the argmax
of the logits of each last token. A step has one new token after 512 random keys and values; a prompt has no keys
before it. Inductor compiles the decoder as a whole; jitgen has a function for a block and one for each end. Each case
is a CUDA graph of the decoder and one of its ends alone, and the replays of the cases of one batch take turns: ``ms``
and ``ends ms`` are medians of five runs, ``layer us`` their difference over the layers, ``32 layers ms`` what follows
for a model of 32 such layers (extrapolated, not run), and ``floor ms`` the time in which a sum reads the weights and
keys of those. ``error`` is that of one block beside float64 on dequantised weights, relative in norm; ``same tokens``
compares what is chosen with the first route of the same weights, which may differ where two logits are near.

The product with the head and its argmax are measured by themselves too (``head``): without logits, and with. Kernels
are compiled by some processes before, so that they are in the stores of jitgen and Inductor.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import jitgen
from bench import llama_block
from bench.measurement import made, relative_error
from bench.records import end
from jitgen.models import graphs

LAYERS = 32
"""Layers of the model that times are extrapolated to."""


@dataclass(frozen=True)
class Sizes(llama_block.Sizes):
    """Of a decoder; ``vocabulary``: rows of the embedding, which is the head."""

    vocabulary: int = 128256


SMALL = Sizes(256, 4, 2, 64, 512, 128, 1000)


@dataclass(frozen=True)
class Case:
    """Names one figure.

    Attributes:
        weights: ``bf16``, ``int4`` (of the blocks), ``all int4`` (of the head too), or ``fp8`` with activations.
        variant: of the block; one of ``VARIANTS`` shows what some of its kernels take.
    """

    route: str
    weights: str
    batch: int
    tokens: int = 1
    variant: str = ""

    @property
    def group(self) -> tuple[int, int]:
        return self.batch, self.tokens

    @property
    def name(self) -> str:
        """Returns what ``--only`` selects by: route, weights, batch, tokens and variant."""
        return f"{self.route} {self.weights} {self.batch} {self.tokens} {self.variant}".rstrip()


VARIANTS = ("no norms", "scales", "counter")
"""Blocks with other results: without norms; with a known scale instead of a row's root mean square; and one that also
counts the tokens of its cache, as transformers does, in a kernel of one element."""

CASES = (
    *(Case(route, "bf16", batch) for batch in (2, 1) for route in ("inductor", "cuda")),
    Case("triton", "bf16", 2),
    Case("cuda", "bf16", 8),
    *(Case("cuda", "int4", batch) for batch in (1, 2, 8)),
    Case("cuda", "all int4", 1),
    *(Case("inductor", "bf16", batch, tokens) for batch, tokens in ((2, 512), (1, 4096))),
    *(Case("cuda", weights, *size) for size in ((2, 512), (1, 4096)) for weights in ("bf16", "int4", "fp8")),
    *(Case("cuda", weights, 1, variant=name) for weights in ("bf16", "int4") for name in VARIANTS),
    Case("triton", "int4", 2),
    Case("triton", "bf16", 1),
)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def block_of(sizes: Sizes, variant: str = "") -> Callable[..., Tensor]:
    """Makes the function of a block; without a mask its attention is causal among the tokens of the call."""
    counts = sizes.heads, sizes.kv_heads, sizes.kv_heads

    def norm(x, weight, scale):
        if variant == "scales":
            return x * scale * weight
        return x if variant == "no norms" else F.rms_norm(x, (sizes.hidden,), weight, 1e-5)

    def block(x, cos, sin, places, mask, first, wqkv, wo, second, gate, up, down, keys, values):
        counter, places = places, places % sizes.keys if variant == "counter" else places
        qkv = F.linear(norm(x, first, cos[:1, :1]), wqkv)
        q, k, v = (
            each.unflatten(-1, (count, sizes.width)).transpose(1, 2)
            for each, count in zip(qkv.split([count * sizes.width for count in counts], -1), counts, strict=True)
        )
        k = rotated(k, cos, sin)
        keys.index_copy_(2, places, k)
        values.index_copy_(2, places, v)
        if mask is not None:
            k, v = keys, values
        mixed = F.scaled_dot_product_attention(
            rotated(q, cos, sin), k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), wo)
        h = norm(x, second, sin[:1, :1])
        x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        if variant == "counter":
            counter.add_(1)
        return x

    return block


def begin(tokens, words):
    return F.embedding(tokens, words)


def end_of(sizes: Sizes) -> Callable[..., Tensor]:
    def end(x, norm, head):
        return F.linear(F.rms_norm(x[:, -1:], (sizes.hidden,), norm, 1e-5), head).argmax(-1)

    return end


class Decoder:
    """Holds random weights, and their quantised copies once they are asked for."""

    def __init__(self, sizes: Sizes, layers: int, device: str):
        self.sizes, self.device = sizes, device
        torch.manual_seed(0)
        q, kv, h = sizes.heads * sizes.width, sizes.kv_heads * sizes.width, sizes.hidden
        shapes = ((h,), (q + 2 * kv, h), (h, q), (h,), (sizes.inner, h), (sizes.inner, h), (h, sizes.inner))
        self.layers = [[self._random(*shape) for shape in shapes] for _ in range(layers)]
        self.words, self.norm = self._random(sizes.vocabulary, h), self._random(h)
        self.head = self.words

    def _random(self, *shape: int) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self.device)
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16).mul_(0.02)

    @functools.lru_cache(8)  # noqa: B019 (lives as long as the process)
    def weights(self, kind: str) -> tuple[list[list[Any]], Any]:
        """Returns the weights of the blocks, and the head."""
        if kind == "bf16":
            return self.layers, self.head
        if kind == "all int4":
            return self.weights("int4")[0], jitgen.quantize(self.head, "int4", 128, method="absmax")
        if kind == "int4":
            quantize = functools.partial(jitgen.quantize, format="int4", group_size=128, method="absmax")
        else:
            quantize = functools.partial(jitgen.quantize, format="fp8_e4m3", activation="fp8_e4m3", method="absmax")
        return [[w if w.dim() == 1 else quantize(w) for w in layer] for layer in self.layers], self.head

    def nbytes(self, case: Case, layers: int) -> int:
        """Returns what a step has to read in a model of ``layers``: its weights, and the keys and values so far."""
        blocks, head = self.weights(case.weights)
        keys = 0 if case.tokens > 1 else self.sizes.keys // 2 + 1
        cache = 2 * case.batch * self.sizes.kv_heads * keys * self.sizes.width * 2
        return head.nbytes + layers * (sum(weight.nbytes for weight in blocks[0]) + cache)


@dataclass(frozen=True)
class Inputs:
    tokens: Tensor
    angles: tuple[Tensor, Tensor]
    places: Tensor
    mask: Tensor | None
    caches: list[tuple[Tensor, Tensor]]


def inputs_of(decoder: Decoder, case: Case) -> Inputs:
    sizes, device = decoder.sizes, decoder.device
    room = max(sizes.keys, case.tokens)
    start = sizes.keys // 2 if case.tokens == 1 else 0
    places = torch.arange(start, start + case.tokens, device=device)
    frequencies = 500000.0 ** -(torch.arange(0, sizes.width, 2, device=device) / sizes.width)
    angles = (places[:, None] * frequencies).repeat(1, 2)
    mask = (torch.arange(room, device=device) <= places[:, None])[None, None] if case.tokens == 1 else None
    torch.manual_seed(case.batch)
    tokens = torch.randint(0, sizes.vocabulary, (case.batch, case.tokens), device=device)
    shape = case.batch, sizes.kv_heads, room, sizes.width
    caches = [
        (torch.randn(shape, device=device).bfloat16(), torch.randn(shape, device=device).bfloat16())
        for _ in decoder.layers
    ]
    return Inputs(tokens, (angles.cos().bfloat16(), angles.sin().bfloat16()), places, mask, caches)


def runs(decoder: Decoder, case: Case, inputs: Inputs) -> tuple[Callable[[], Tensor], Callable[[], Tensor], Any]:
    """Makes the decoder of this case, its ends alone, and its block."""
    blocks, head = decoder.weights(case.weights)
    functions: list[Callable[..., Any]] = [block_of(decoder.sizes, case.variant), end_of(decoder.sizes), begin]
    if case.route in ("cuda", "triton", "cpp"):
        functions = [jitgen.jit(backend=case.route)(function) for function in functions]
    block, end, first = functions

    def whole(tokens, angles, places, mask, words, layers, caches, norm, head):
        x = first(tokens, words)
        for layer, cache in zip(layers, caches, strict=True):
            x = block(x, *angles, places, mask, *layer, *cache)
        return end(x, norm, head)

    if case.route == "inductor":
        whole, block = torch.compile(whole, dynamic=False), torch.compile(block, dynamic=False)
    facts = inputs.tokens, inputs.angles, inputs.places, inputs.mask, decoder.words
    return (
        lambda: whole(*facts, blocks, inputs.caches, decoder.norm, head),
        lambda: whole(*facts, [], [], decoder.norm, head),
        block,
    )


def error_of(decoder: Decoder, case: Case, inputs: Inputs, block: Any) -> float:
    """Compares one block with float64; that of Inductor is what eager torch runs."""
    layer = decoder.weights(case.weights)[0][0]
    x = begin(inputs.tokens, decoder.words) * 50  # of size 1, as hidden states are
    caches = [tensor.clone() for tensor in inputs.caches[0]]
    exact = [w.dequantize(torch.float64) if isinstance(w, jitgen.QTensor) else w.double() for w in layer]
    angles = [tensor.double() for tensor in inputs.angles]
    expected = block_of(decoder.sizes)(
        x.double(), *angles, inputs.places, inputs.mask, *exact, *(tensor.double() for tensor in caches)
    )
    return relative_error(block(x, *inputs.angles, inputs.places, inputs.mask, *layer, *caches), expected)


def graph_of(step: Callable[[], Any]) -> Callable[[], None]:
    return graphs.capture(step)[0]


def milliseconds(replays: dict[Any, Callable[[], None]], steps: int) -> dict[Any, float]:
    """Measures the median of five runs of ``steps`` replays of each, in turns."""
    taken: dict[Any, list[float]] = {name: [] for name in replays}
    for _ in range(5):
        for name, replay in replays.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            replay()
            start.record()
            for _ in range(steps):
                replay()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(start.elapsed_time(end) / steps)
    return {name: sorted(times)[2] for name, times in taken.items()}


def measure(decoder: Decoder, cases: Sequence[Case], bandwidth: float, say: Callable[[dict[str, Any]], None]) -> None:
    """Measures cases of one group; a failure is a row."""
    rows: dict[Case, dict[str, Any]] = {}
    replays: dict[Any, Callable[[], None]] = {}
    chosen: dict[str, Tensor] = {}
    kept = []  # what the graphs read
    for case in cases:
        row: dict[str, Any] = asdict(case)
        try:
            start = time.perf_counter()
            inputs = inputs_of(decoder, case)
            whole, ends, block = runs(decoder, case, inputs)
            kept.append((inputs, whole, ends))
            tokens = whole().clone()
            ends()
            row["ready s"] = round(time.perf_counter() - start, 2)
            first = chosen.setdefault(case.weights + case.variant, tokens)
            row["same tokens"] = f"{int((tokens == first).sum())} of {tokens.numel()}"
            if case.route != "inductor" and case.tokens < 4096 and not case.variant:
                row["error"] = error_of(decoder, case, inputs, block)
            rows[case] = row
            if decoder.device == "cuda":
                whole(), ends()
                torch.cuda.synchronize()
                replays |= {(case, "ms"): graph_of(whole), (case, "ends ms"): graph_of(ends)}
        except Exception as error:
            say(row | {"failed": f"{type(error).__name__}: {error}"[:600]})
            rows.pop(case, None)
    replays = {key: replay for key, replay in replays.items() if key[0] in rows}
    times = milliseconds(replays, 30 if cases[0].tokens == 1 else 5)
    for (case, name), value in times.items():
        rows[case][name] = round(value, 4)
    for case, row in rows.items():
        if "ms" in row:
            layer = (row["ms"] - row["ends ms"]) / len(decoder.layers)
            row |= {"layer us": round(layer * 1e3, 2), "32 layers ms": round(row["ends ms"] + LAYERS * layer, 4)}
            if case.tokens == 1:
                size = decoder.nbytes(case, LAYERS)
                row |= {"floor ms": round(size / bandwidth * 1e3, 4), "GB": round(size / 1e9, 3)}
        say(row)


def heads_of(decoder: Decoder, route: str, weights: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Makes the ways to the likeliest token of hidden states: without logits, and by logits in two kernels or more."""
    head, jit = decoder.weights(weights)[1], jitgen.jit(backend=route)

    def column(h, head):
        return F.linear(h, head).argmax(-1)

    joined, product, largest = jit(column), jit(lambda h, head: F.linear(h, head)), jit(lambda y: y.argmax(-1))
    return {
        "joined": lambda h: joined(h, head),
        "of stored logits": lambda h: largest(product(h, head)),
        "torch's argmax": lambda h: product(h, head).argmax(-1),
    }


HEADS: tuple[tuple[str, str], ...] = (("cuda", "bf16"), ("cuda", "all int4"), ("triton", "bf16"))


def measure_heads(decoder: Decoder, say: Callable[[dict[str, Any]], None]) -> None:
    """Measures the ways to the likeliest token, of weights larger than the cache."""
    for batch in (1, 2, 8):
        h = torch.randn(batch, decoder.sizes.hidden, device=decoder.device).bfloat16()
        for route, weights in HEADS:
            row: dict[str, Any] = {"head": weights, "route": route, "batch": batch}
            try:
                ways = heads_of(decoder, route, weights)
                found = {name: way(h) for name, way in ways.items()}
                row["equal"] = all(torch.equal(tokens, found["joined"]) for tokens in found.values())
                if decoder.device == "cuda":
                    graphs = {name: graph_of(functools.partial(way, h)) for name, way in ways.items()}
                    row |= {f"{name} us": round(ms * 1e3, 2) for name, ms in milliseconds(graphs, 30).items()}
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:600]
            say(row)


Work = tuple[Case, ...]
"""Cases that one process compiles: of one route and kind of weights, and prompts of Inductor each by itself."""
FEW = 12
"""Cases that have a process for each of their sizes."""


def works() -> dict[str, Work]:
    """Returns what each process compiles, by a name; a head's case has no tokens."""
    found: dict[str, Work] = {}
    for case in (*CASES, *(Case(*head, 1, 0) for head in HEADS)):
        alone = str(case.tokens) if case.route == "inductor" and case.tokens > 1 else ""
        alone = alone if len(CASES) > FEW else f"{case.batch} {case.tokens}"
        kind = "head" if not case.tokens else "step" if case.tokens == 1 else "prompt"
        name = " ".join((kind, case.route, case.weights.removeprefix("all "), alone)).strip()
        found[name] = (*found.get(name, ()), case)
    return found


def compile_all(sizes: Sizes, layers: int, device: str, work: Work) -> None:
    decoder = Decoder(sizes, layers if work[0].route == "inductor" else 1, device)
    for case in work:
        if case.tokens:
            whole, ends, _ = runs(decoder, case, inputs_of(decoder, case))
            whole(), ends()
        else:
            for batch in (1, 2, 8):
                h = torch.zeros(batch, sizes.hidden, device=device, dtype=torch.bfloat16)
                for way in heads_of(decoder, case.route, case.weights).values():
                    way(h)


def prebuild(options: argparse.Namespace) -> dict[str, subprocess.Popen[bytes]]:
    """Starts the processes that compile."""
    command = [sys.executable, "-m", "bench.decoder_steps", "--device", options.device, "--layers", str(options.layers)]
    command += ["--only", options.only, *["--small"] * options.small]
    jobs = max(2, len(os.sched_getaffinity(0)) // max(1, len(works())))
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "JITGEN_COMPILE_JOBS": str(jobs), "OMP_NUM_THREADS": "1"}
    return {
        name: subprocess.Popen([*command, "--work", name], env=os.environ | few, stdout=sys.stderr) for name in works()
    }


def finished(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Returns the exit codes of processes; None for one that is ended because it was not done in time."""
    stop = time.perf_counter() + seconds
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, stop - time.perf_counter())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(None)
    return codes


def read_bandwidth(device: str) -> float:
    """Measures the bytes a second at which a sum of 2 GiB reads."""
    if device != "cuda":
        return 1e10
    x = torch.ones(2**30, dtype=torch.bfloat16, device="cuda")
    x.sum()
    return x.nbytes / milliseconds({"sum": graph_of(lambda: x.sum())}, 10)["sum"] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--prebuild", type=float, default=60, help="seconds for the processes that compile")
    parser.add_argument("--only", default="", help="a regular expression: cases whose names have it, and no heads")
    parser.add_argument("--work", help="compiles the cases of one process, and measures nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = 64
    global CASES, HEADS
    sizes = SMALL if options.small else Sizes()
    if options.only:
        CASES, HEADS = tuple(case for case in CASES if re.search(options.only, case.name)), ()
    if options.small:  # prompts that fit
        CASES = tuple(replace(case, tokens=1 + case.tokens // 64) for case in CASES)
    if options.device == "cpu":
        CASES = tuple(replace(case, route=case.route.replace("cuda", "cpp").replace("triton", "cpp")) for case in CASES)
        HEADS = tuple(("cpp", weights) for _, weights in HEADS[:2])
    if options.work is not None:
        compile_all(sizes, options.layers, options.device, works()[options.work])
        return
    begun, rows = time.perf_counter(), []
    facts = made("bench.decoder_steps", device=options.device) | {"layers": options.layers} | asdict(sizes)

    def say(row: dict[str, Any]) -> None:
        rows.append(row | {"at s": round(time.perf_counter() - begun, 1)})
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")

    processes = prebuild(options) if options.prebuild else {}

    def wait(prompts: bool, until: float) -> None:
        some = {name: process for name, process in processes.items() if name.startswith("prompt") == prompts}
        codes = dict(zip(some, finished(tuple(some.values()), until - (time.perf_counter() - begun)), strict=True))
        say({"prebuilt s": round(time.perf_counter() - begun, 1), "exit codes": codes})

    decoder = Decoder(sizes, options.layers, options.device)
    for weights in dict.fromkeys(case.weights for case in CASES):
        decoder.weights(weights)
    if any(case.route == "inductor" for case in CASES):
        importlib.import_module("torch._inductor.compile_fx")
    wait(False, options.prebuild)
    bandwidth = read_bandwidth(options.device)
    say({"read bandwidth TB/s": round(bandwidth / 1e12, 3)})
    measure_heads(decoder, say)
    for prompts in (False, True):
        if prompts:
            wait(True, options.prebuild + 20)
        for group in dict.fromkeys(case.group for case in CASES if (case.tokens > 1) == prompts):
            measure(decoder, [case for case in CASES if case.group == group], bandwidth, say)
    end(rows)


if __name__ == "__main__":
    main()
