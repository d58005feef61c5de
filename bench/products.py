"""Matrix products with quantised and dense weights, on the layers of Llama-3-8B and 70B.

Every subject cycles through copies of its weights that together exceed the last-level cache, as the layers of a model
do; the activation and the result are the same in every call. The peers are what torch offers for the same work (its
4-bit operator, and the dense product with the dequantised weight) and humming, if it is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench import humming_products
from bench.measurement import Bench, Measurement, attempted, relative_error
from bench.timing import Call, medians, trial
from jitgen.quant.formats import find
from jitgen.quant.layouts.portable import unpack_codes
from jitgen.quant.qtensor import QTensor
from jitgen.spec import dtype_name

GROUP = 128
LLAMA = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B gate_up": (57344, 8192),
    "70B down": (8192, 28672),
}
"""(N, K) of the product y[M, N] = x[M, K] @ W[N, K].T of each layer."""
GPU_ROWS = (1, 4, 16, 64, 1024, 4096)
CPU_ROWS = (1, 16, 128)
CHECKED_ROWS = 128
"""The number of rows compared with float64: a quarter of them are the first, a quarter the last, the others random."""
MAX_COPIES = 16
"""The most copies of the weights."""

Maker = Callable[[torch.Tensor, Sequence[Any]], Sequence[Call]]
"""Makes the calls of a subject, from an activation and copies of the weights."""


@dataclass(frozen=True)
class Product:
    """One function of an activation and weights [N, K], and the operands that it is measured on.

    Attributes:
        name: the name of the case.
        function: ``(x, *weights) -> y``.
        weights: the number of weights that it takes.
        format: the format of the weights; None if they are dense.
        shape: (N, K) of each weight.
        dtype: the dtype of the activation, and of dense weights.
        group: columns that share a scale of a quantised weight, unless its format says how many.
    """

    name: str
    function: Callable[..., torch.Tensor]
    weights: int
    format: str | None
    shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    group: int = GROUP

    def bytes(self, rows: int) -> int:
        """The bytes that must be read and written at least once, for ``rows`` rows of the activation."""
        columns, length = self.shape
        bits: float = 8 * self.dtype.itemsize
        if self.format is not None:
            format = find(self.format)
            zeros = format.zero_dtype.itemsize if format.zero_point else 0
            bits = format.bits + 8 * (format.scale_dtype.itemsize + zeros) / (format.group_size or self.group)
        one = int(columns * length * bits / 8)
        return self.weights * one + rows * (length + columns) * self.dtype.itemsize


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _cases(bench: Bench) -> Iterator[tuple[Product, Sequence[int]]]:
    if bench.device == "cpu":
        shape = (14336, 4096)
        for format in ("int4", "int8"):
            yield Product(f"linear {format}", linear, 1, format, shape), CPU_ROWS
        yield Product("swiglu int4", swiglu, 2, "int4", shape), CPU_ROWS
        yield Product("linear dense", linear, 1, None, (4096, 4096)), CPU_ROWS
        yield Product("linear dense", linear, 1, None, (4096, 4096), torch.float32), (1, 64, 256)
        return
    for name, shape in LLAMA.items():
        yield Product(f"{name} int4", linear, 1, "int4", shape), GPU_ROWS
    yield Product("8B swiglu int4", swiglu, 2, "int4", (14336, 4096)), GPU_ROWS
    yield Product("8B gate_up int8", linear, 1, "int8", LLAMA["8B gate_up"]), (1, 16, 1024)
    for name in ("8B qkv", "8B gate_up", "8B down"):
        yield Product(f"{name} dense", linear, 1, None, LLAMA[name]), (1, 16, 4096)


# --------------------------------------------------------------------------------------------------------- subjects


def _int4_torch(product: Product, device: str) -> Maker | None:
    """torch's 4-bit operator. Its codes are 0 to 15 with a zero-point of 8; those of int4 are -8 to 7."""
    if product.format != "int4":
        return None

    def make(x: torch.Tensor, weights: Sequence[Any]) -> Sequence[Call]:
        first = tuple(map(_packed_for_torch, weights[0]))
        packed = [first, *(tuple((codes.clone(), scales.clone()) for codes, scales in first) for _ in weights[1:])]
        mm = torch.ops.aten._weight_int4pack_mm if device == "cuda" else torch.ops.aten._weight_int4pack_mm_for_cpu

        def call(operands: Any) -> torch.Tensor:
            results = [mm(x, codes, product.group, scales) for codes, scales in operands]
            return results[0] if len(results) == 1 else F.silu(results[0]) * results[1]

        return [partial(call, operands) for operands in packed]

    return make


def _packed_for_torch(weight: QTensor) -> tuple[torch.Tensor, torch.Tensor]:
    portable: QTensor = weight.detach().with_layout("portable")  # type: ignore[attr-defined]
    codes = unpack_codes(find(weight.format), portable.codes).int() + 8
    scales = portable.scales.t().contiguous()
    both = torch.stack([scales, torch.zeros_like(scales)], -1)
    if weight.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), both
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs, 8), both


def _dense_torch(product: Product, copied_bytes: int) -> Maker:
    """torch's own function of dense weights, of as many copies as take ``copied_bytes`` together, at least two."""

    def make(x: torch.Tensor, weights: Sequence[Any]) -> Sequence[Call]:
        one = product.weights * product.shape[0] * product.shape[1] * x.element_size()
        kept = weights[: max(2, -(-copied_bytes // one))]
        dense = [[w.dequantize(x.dtype) if isinstance(w, QTensor) else w for w in copy] for copy in kept]
        return [partial(product.function, x, *copy) for copy in dense]

    return make


def _humming(product: Product, device: str) -> Maker | None:
    return (
        partial(humming_products.calls, product) if device == "cuda" and humming_products.multiplies(product) else None
    )


PEERS: dict[str, Callable[[Product, Bench, int], Maker | None]] = {
    "F.linear": lambda product, bench, copied_bytes: _dense_torch(product, copied_bytes),
    "int4pack_mm": lambda product, bench, copied_bytes: _int4_torch(product, bench.device),
    "humming": lambda product, bench, copied_bytes: _humming(product, bench.device),
}
"""What makes the calls of each peer, given the bytes that copies of its weights take together."""


def measure(
    product: Product,
    rows: Sequence[int],
    bench: Bench,
    group: str = "products",
    copied_bytes: int | None = None,
    patience: float = math.inf,
    peers: Collection[str] = tuple(PEERS),
    epilogue: Callable[..., torch.Tensor] | None = None,
) -> Iterator[Measurement]:
    """Measure ``product`` and its peers at each number of ``rows``, on each backend, for the group ``group``.

    Args:
        copied_bytes: that copies of the weights take together at least, where ``MAX_COPIES`` are enough; by default
            four times the last-level cache.
        patience: a peer that takes so many times as long as the fastest peer, in three calls one after another, is not
            timed, and a note says so.
        peers: names of ``PEERS``.
        epilogue: ``(x, weight, bias) -> y``, the product with an epilogue. It is timed in alternation with the bare
            one, and a second measurement, of the group ``f"{group} epilogues"``, has both and torch's own.
    """
    device = torch.device(bench.device)
    columns, length = product.shape
    copied_bytes = copied_bytes or 4 * bench.elements * 4
    copies = max(2, min(MAX_COPIES, copied_bytes // max(1, product.bytes(0))))
    first = [_weight(product, device) for _ in range(product.weights)]
    weights = [first, *([weight.clone() for weight in first] for _ in range(copies - 1))]
    makers = {name: PEERS[name](product, bench, copied_bytes) for name in peers}
    for count in rows:
        x = torch.randn(count, length, dtype=product.dtype, device=device)
        notes: list[str] = []
        others = {name: _made(name, maker, x, weights, notes) for name, maker in makers.items() if maker}
        others = _within(patience, {name: calls for name, calls in others.items() if calls}, bench, notes)
        for backend in bench.backends:
            own = [tuple(w.detach() if isinstance(w, QTensor) else w for w in copy) for copy in weights]
            calls, error = _own_calls(product.function, backend, x, own)
            subjects = {"jitgen": calls, **others}
            found = Measurement(
                group=group,
                name=f"{product.name}, M={count}",
                device=bench.device,
                backend=backend,
                dtype=dtype_name(product.dtype),
                shape=(count, columns, length),
                seconds={},
                error=error,
                moved=product.bytes(count),
                flops=2 * count * columns * length * product.weights,
                notes=tuple(notes),
            )
            if epilogue is None:
                yield replace(found, seconds=medians(subjects, bench.device, bench.budget))
                continue
            bias = torch.randn(columns, dtype=product.dtype, device=device)
            fused, error = _own_calls(epilogue, backend, x, own, bias)
            dense = _dense_torch(replace(product, function=partial(_with, epilogue, bias)), copied_bytes)(x, weights)
            seconds = medians(subjects | {"fused": fused, "torch's": dense}, bench.device, bench.budget)
            yield replace(found, seconds={name: seconds[name] for name in subjects})
            ends = {"jitgen": seconds["fused"], "bare": seconds["jitgen"], "F.linear and the rest": seconds["torch's"]}
            yield replace(found, group=f"{group} epilogues", seconds=ends, error=error, notes=())


def _with(function: Callable[..., torch.Tensor], last: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
    return function(*arguments, last)


def _own_calls(
    function: Callable[..., torch.Tensor], backend: str, x: torch.Tensor, weights: Sequence[Any], *rest: torch.Tensor
) -> tuple[Sequence[Call], float]:
    """jitgen's calls for each copy of the weights, and the error of the first."""
    compiled = jitgen.jit(backend=backend)(function)
    out = torch.full((len(x), weights[0][0].shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    plan = compiled.bind(x, *weights[0], *rest)
    for copy in weights[1:]:
        compiled(x, *copy, *rest)  # converts the weights to the layout that the backend reads
    plan(x, *weights[0], *rest, out=out)
    error = product_error(function, x, weights[0], out, *rest)
    return [partial(plan, x, *copy, *rest, out=out) for copy in weights], error


def _weight(product: Product, device: torch.device) -> Any:
    dense = (torch.randn(product.shape, device=device) * 0.02).to(product.dtype)
    return dense if product.format is None else jitgen.quantize(dense, product.format, product.group, method="absmax")


def _made(name: str, maker: Maker, x: torch.Tensor, weights: Sequence[Any], notes: list[str]) -> Sequence[Call]:
    """The calls of a peer. If the peer raises there are none, and ``notes`` gets the reason."""
    try:
        calls = maker(x, weights)
        calls[0]()
        return calls
    except Exception as error:
        notes.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        return []


def _within(
    patience: float, peers: dict[str, Sequence[Call]], bench: Bench, notes: list[str]
) -> dict[str, Sequence[Call]]:
    """Those of ``peers`` that take less than ``patience`` times as long as the fastest; ``notes`` names the others."""
    if len(peers) < 2 or patience == math.inf:
        return peers
    seconds = {name: trial(calls, bench.device) for name, calls in peers.items()}
    fastest = min(seconds.values())
    notes += [
        f"{name}: left out, took {seconds[name] / fastest:.1f} times as long as the fastest peer"
        for name in peers
        if seconds[name] >= patience * fastest
    ]
    return {name: calls for name, calls in peers.items() if seconds[name] < patience * fastest}


def product_error(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[Any],
    out: torch.Tensor,
    *rest: torch.Tensor,
) -> float:
    """The relative error against float64 of the dequantised weights, in ``CHECKED_ROWS`` rows."""
    quarter = CHECKED_ROWS // 4
    rows = torch.arange(len(x), device=x.device)
    if len(x) > CHECKED_ROWS:
        between = quarter + torch.randperm(len(x) - 2 * quarter, device=x.device)[: 2 * quarter]
        rows = torch.cat([rows[:quarter], between, rows[-quarter:]])
    exact = [w.dequantize(torch.float64) if isinstance(w, QTensor) else w.double() for w in weights]
    return relative_error(out[rows], function(x[rows].double(), *exact, *(each.double() for each in rest)))


def run(bench: Bench) -> Iterator[Measurement]:
    with torch.no_grad():
        for product, rows in _cases(bench):
            found = measure(product, rows, bench)
            yield from attempted(found, bench, "products", product.name, dtype_name(product.dtype))
