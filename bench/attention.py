"""Attention of several rules, and a decoder's step, beside torch's kernels: cuDNN, flash and FlexAttention.

Floating-point operations are counted as a user would: two for each multiply-add of the scores that a mask leaves, in
both products. A sweep draws batch, heads, rows, keys, depth and rule; nothing of it is rounded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import Bench, Measurement, attempted, condensed, relative_error
from bench.sizes import log_uniform
from bench.timing import medians
from jitgen.spec import dtype_name

WINDOW, CAP = 1024, 20.0
FEWEST_KEYS, MOST_KEYS, FEWEST_CAUSAL, MOST_MOVED = 16, 16384, 64, 2**28
SWEEP, WORST = "attention sweep", 10
RULES = ("full", "causal", "window", "cap", "alibi")
"""Rules of scores. All but ``full`` hide later keys; ``window`` hides also those ``WINDOW`` before."""


@dataclass(frozen=True)
class Case:
    """One attention.

    Attributes:
        batch, heads, shared: B, the heads of the query, and those of keys and values.
        rows, keys, depth: M, N and D; E is D.
        rule: one of ``RULES``.
    """

    batch: int
    heads: int
    shared: int
    rows: int
    keys: int
    depth: int
    rule: str

    def __str__(self) -> str:
        sizes = f"B{self.batch} H{self.heads}/{self.shared} M{self.rows} N{self.keys} D{self.depth}"
        return f"{self.rule}, {sizes}"

    @property
    def scores(self) -> int:
        """Scores of one head that the mask leaves."""
        if self.rule == "full":
            return self.rows * self.keys
        window = WINDOW if self.rule == "window" else self.keys
        return sum(max(0, min(row + 1, self.keys) - max(row - window, 0)) for row in range(self.rows))

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.scores * self.depth

    @property
    def moved(self) -> int:
        """Elements that are read or written once."""
        return self.batch * self.depth * (2 * self.heads * self.rows + 2 * self.shared * self.keys)


CASES = (
    *(Case(4, 32, 8, 4096, 4096, 128, rule) for rule in RULES),
    *(Case(1, 32, 8, 16384, 16384, 128, rule) for rule in RULES),
    *(Case(4, 32, 32, 4096, 4096, 64, rule) for rule in RULES),
    *(Case(batch, 32, 8, 1, keys, 128, "full") for batch, keys in ((1, 1024), (1, 8192), (16, 2048), (16, 8192))),
    Case(64, 32, 8, 1, 4096, 128, "full"),
)
CPU_CASES = (
    *(Case(1, 12, 12, 128, 128, 64, rule) for rule in ("full", "causal")),
    *(Case(1, 32, 32, 512, 512, 128, rule) for rule in ("full", "causal", "cap", "alibi")),
    *(Case(4, 8, 8, 2048, 2048, 64, rule) for rule in ("full", "causal")),
    Case(1, 32, 32, 1, 2048, 128, "full"),
)


def function_of(rule: str) -> Callable[..., Any]:
    """The attention of ``rule`` as plain torch; ``slopes`` are those of ALiBi, one for each head."""
    if rule in ("full", "causal"):
        return lambda q, k, v, slopes: F.scaled_dot_product_attention(
            q, k, v, is_causal=rule == "causal", enable_gqa=True
        )

    def attend(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        i = torch.arange(q.shape[-2], device=q.device)[:, None]
        j = torch.arange(k.shape[-2], device=q.device)
        hidden = j > i
        if rule == "window":
            hidden = hidden | (i - j > WINDOW)
        elif rule == "cap":
            scores = CAP * torch.tanh(scores / CAP)
        else:
            scores = scores + slopes[:, None, None] * (j - i)
        return torch.softmax(scores.masked_fill(hidden, -math.inf).float(), -1).to(v.dtype) @ v

    return attend


def operands(case: Case, bench: Bench, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query, keys, values and slopes."""
    shapes = ((case.heads, case.rows), (case.shared, case.keys), (case.shared, case.keys))
    tensors = (torch.randn(case.batch, *shape, case.depth, device=bench.device).to(dtype) for shape in shapes)
    slopes = torch.exp2(torch.arange(1, case.heads + 1, device=bench.device) * (-8.0 / case.heads))
    return (*tensors, slopes)


def peers(case: Case, bench: Bench) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What computes the same, by name."""
    if bench.device == "cpu":
        yield "SDPA" if case.rule in ("full", "causal") else "eager", function_of(case.rule)
        return
    if case.rule in ("full", "causal"):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def chosen(backend: SDPBackend, *args: Any) -> Any:
            with sdpa_kernel(backend):
                return function_of(case.rule)(*args)

        yield "cuDNN", partial(chosen, SDPBackend.CUDNN_ATTENTION)
        yield "flash", partial(chosen, SDPBackend.FLASH_ATTENTION)
    if bench.compile_peer:
        yield "flex", _flex(case)


def _flex(case: Case) -> Callable[..., Any]:
    """FlexAttention, compiled for this case alone: beyond Dynamo's limit of recompilations it would not be."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j <= WINDOW) if case.rule == "window" else i >= j

    mask = None if case.rule == "full" else create_block_mask(visible, None, None, case.rows, case.keys, device="cuda")

    def call(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + slopes[h] * (j - i)

        def cap(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return CAP * torch.tanh(s / CAP)

        change = {"alibi": alibi, "cap": cap}.get(case.rule)
        return compiled(q, k, v, score_mod=change, block_mask=mask, enable_gqa=True)

    return call


def run(bench: Bench) -> Iterator[Measurement]:
    dtypes = (torch.bfloat16,) if bench.device == "cuda" else (torch.float32, torch.bfloat16)
    with torch.no_grad():
        for case in CASES if bench.device == "cuda" else CPU_CASES:
            for dtype in dtypes:
                yield from _attempted(case, dtype, bench, "attention")


def draw(source: random.Random, device: str) -> Case:
    """A random case: at most 2**20 (CUDA) or 2**14 (CPU) rows of all heads, and as many keys."""
    most = 2**20 if device == "cuda" else 2**14
    while True:
        batch, shared, group = source.randrange(1, 9), source.randrange(1, 17), source.choice((1, 1, 2, 4, 8))
        rows, keys = (int(log_uniform(source, 1, MOST_KEYS + 1)) for _ in range(2))
        depth = _depth(source)
        rule = source.choice(RULES)
        if rule != "full" and keys < rows:
            rows, keys = keys, rows
        case = Case(batch, shared * group, shared, rows, keys, depth, rule)
        if 0 < batch * case.heads * max(rows, keys) <= most and case.flops < (2e13 if device == "cuda" else 2e10):
            return case


def draw_rows(source: random.Random, rows: int, most_flops: float) -> Case:
    """A random case of so many rows that SDPA's kernels take: of all keys, or, from ``FEWEST_CAUSAL`` rows on, half of
    the time of as many keys as rows, of which later ones are hidden."""
    while True:
        batch, shared, group = source.randrange(1, 9), source.randrange(1, 17), source.choice((1, 1, 2, 4, 8))
        causal = source.random() < 0.5 and rows >= FEWEST_CAUSAL
        keys = rows if causal else int(log_uniform(source, FEWEST_KEYS, MOST_KEYS + 1))
        case = Case(batch, shared * group, shared, rows, keys, _depth(source), "causal" if causal else "full")
        if case.moved < MOST_MOVED and case.flops < most_flops:
            return case


def _depth(source: random.Random) -> int:
    return source.choice((64, 128, 8 * source.randrange(4, 33)))


def sweep(bench: Bench) -> Iterator[Measurement]:
    """``bench.cases`` random cases, drawn with ``bench.seed``."""
    source = random.Random(bench.seed)
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    with torch.no_grad():
        for _ in range(bench.cases):
            yield from _attempted(draw(source, bench.device), dtype, bench, SWEEP)


def _attempted(case: Case, dtype: torch.dtype, bench: Bench, group: str) -> Iterator[Measurement]:
    return attempted(measure(case, dtype, bench, group), bench, group, str(case), dtype_name(dtype))


def measure(case: Case, dtype: torch.dtype, bench: Bench, group: str) -> Iterator[Measurement]:
    """``case`` on each backend. Peers that do not take it are noted. In a sweep FlexAttention, whose compilation takes
    longer than all else, is a peer only where SDPA's kernels do not take a case. The error is the larger one of the
    first head and of the last."""
    copies = [operands(case, bench, dtype) for _ in range(max(1, min(6, 4 * bench.elements // (2 * case.moved))))]
    function, first = function_of(case.rule), copies[0]
    calls: dict[str, list[Callable[[], Any]]] = {}
    notes = []
    for name, peer in peers(case, bench):
        if name == "flex" and calls and group == SWEEP:
            continue
        try:
            peer(*first)
            calls[name] = [partial(peer, *each) for each in copies]
        except Exception as refusal:  # whatever a peer raises where it does not take a case
            notes.append(f"{name}: {type(refusal).__name__}")
    for backend in bench.backends:
        plan = jitgen.jit(backend=backend)(function).bind(*first)
        error = error_of(function, first, plan(*first, out=torch.full_like(first[0], math.nan)))
        own: list[Callable[[], Any]] = [partial(plan, *each) for each in copies]
        yield Measurement(
            group=group,
            name=str(case),
            device=bench.device,
            backend=backend,
            dtype=dtype_name(dtype),
            shape=tuple(first[0].shape),
            seconds=medians({"jitgen": own, **calls}, bench.device, bench.budget),
            error=error,
            moved=case.moved * dtype.itemsize,
            flops=case.flops,
            notes=tuple(notes),
        )


def error_of(function: Callable[..., Any], args: Sequence[torch.Tensor], out: torch.Tensor) -> float:
    """The larger relative error of the first and the last head against float64."""
    q, k, v, slopes = args
    found = 0.0
    for head in (slice(0, 1), slice(-1, None)):
        one = (tensor[head, head].double() for tensor in (q, k, v))
        found = max(found, relative_error(out[head, head], function(*one, slopes[head].double())))
    return found


def summary(measurements: Sequence[Measurement]) -> list[str]:
    """Of a sweep, for each backend: the geometric mean, the 5th percentile and the worst cases of the best peer's time
    divided by jitgen's."""
    lines = []
    cases: dict[str, list[tuple[float, str]]] = {}
    for found in measurements:
        if found.group == SWEEP and found.ratios:
            peer, ratio = min(found.ratios.items(), key=lambda one: one[1])
            cases.setdefault(f"{found.backend}, {found.dtype}", []).append(
                (ratio, f"{ratio:.2f} of {peer}: {found.name}")
            )
    for kind, ratios in cases.items():
        ratios.sort()
        lines.append(f"{kind}: {condensed([ratio for ratio, _ in ratios])}:")
        lines += [f"  {text}" for _, text in ratios[:WORST]]
    return lines
