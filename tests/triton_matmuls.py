"""Matrix products in Triton against float64 torch, under Triton's interpreter on CPU tensors.

``tests/unit/test_gemm_triton.py`` runs them, as ``tests/interpreter.py`` says. ``tiled`` chooses the schedule where the
rule would not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from jitgen.families.gemm.mainloops import TritonSchedule, TritonSlices, TritonTokens, TritonWeights
from jitgen.families.gemm.schedules import triton as rule
from tests import batched_products
from tests.interpreter import Check, serve

TILES = {
    "tokens": TritonTokens(32, 32, 32, 4, 3, raster=2),
    "weights": TritonWeights(32, 64, 32, 4, 3, raster=2),
    "weights-many-rows": TritonWeights(128, 32, 32, 4, 3, raster=2),
    "weights-many-warps": TritonWeights(128, 32, 32, 8, 3, raster=2),
    "slices": TritonSlices(16, 16, 32, 4, 3),
    "tokens-split": TritonTokens(16, 32, 32, 4, 3, k_splits=2),
    "weights-split": TritonWeights(32, 32, 32, 4, 3, k_splits=3, raster=2),
}
"""Small ones of every form. How a group's scales are loaded and applied depends on a tile's rows and warps."""

SHAPES = ((1, 1, 1), (16, 16, 128), (33, 65, 257))
"""M, N, K."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GROUPS = (32, 96, None)

Function = Callable[..., Any]
CHECKS: dict[str, Check] = {}
QUICK = (
    *("dense-tokens-split-bfloat16", "dense-weights-float32", "int4-weights-split-float16", "int8-slices-float32"),
    *("uint4-weights-many-rows-float32", "int4-weights-many-warps-bfloat16"),
    *("epilogues-weights", "operands_of_epilogues-tokens", "strides-tokens", "infinities-weights"),
    *("nothing_to_add-weights-split", "wide_indices-slices", "poisoned_outputs-tokens-split"),
)
"""Of the checks of each form: every form, every format, every dtype and every check with some other."""


def is_quick(check: str) -> bool:
    return check in QUICK or ("-" not in check and check != "chosen_by_the_rule_for_every_format")


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def each_form(function: Callable[[str, TritonSchedule], Iterator[str | None]]) -> None:
    """A check for each form."""
    for form, tile in TILES.items():
        CHECKS[f"{function.__name__}-{form}"] = partial(function, form, tile)


@contextmanager
def tiled(tile: TritonSchedule | None) -> Iterator[None]:
    """Within this context every product is computed so; None leaves it to the rule."""
    before = rule.candidates
    if tile is not None:
        rule.candidates = lambda problem: [tile]
    try:
        yield
    finally:
        rule.candidates = before


def values(weight: Any) -> torch.Tensor:
    """A weight, dense or quantised, in float64."""
    return (weight.dequantize(torch.float32) if isinstance(weight, jitgen.QTensor) else weight).double()


def compare(function: Function, x: torch.Tensor, *rest: Any, tile: TritonSchedule | None = None) -> str | None:
    """How results differ from the float64 reference; None where they do not.

    Sums of K terms may be off by some roundings of what they add, weights by one rounding to a 16-bit x's dtype. A
    float32 result of a 16-bit x is a conversion, here, so its elements are numbers of x's dtype, as in eager torch.
    """
    with tiled(tile):
        results = jitgen.jit(function, backend="triton")(x, *rest)
    exact = function(x.double(), *map(values, rest))
    sizes = function(x.double().abs(), *(values(w).abs() for w in rest))
    length = x.shape[-1]
    relative = torch.finfo(torch.float32).eps * (8 + math.sqrt(length))
    if x.dtype != torch.float32 and any(isinstance(w, jitgen.QTensor) for w in rest):
        relative += torch.finfo(x.dtype).eps / 2
    for place, (got, want, size) in enumerate(zip(*map(_as_tuple, (results, exact, sizes)), strict=True)):
        if got.shape != want.shape:
            return f"result {place} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
        stored = x.dtype if got.dtype == torch.float32 else got.dtype
        if not torch.equal(got, got.to(stored).to(got.dtype)):
            return f"result {place} is not rounded to {stored} before it is converted"
        bound = torch.finfo(stored).eps * want.abs() + 2 * relative * size.abs() + 1e-7
        wrong = ~((got.double() - want).abs() <= bound)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            return (
                f"result {place}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {at}: {got[at]}, not {want[at]}"
            )
    return None


def _as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def linear(x: torch.Tensor, w: Any) -> torch.Tensor:
    return F.linear(x, w)


def dense(n: int, k: int, dtype: torch.dtype, order: str = "rows") -> torch.Tensor:
    """A weight whose rows or columns are contiguous, or neither."""
    if order == "columns":
        return torch.randn(k, n).to(dtype).t()
    if order == "neither":
        return torch.randn(n, 2 * k + 1).to(dtype)[:, 1::2]
    return torch.randn(n, k).to(dtype)


def quantized(n: int, k: int, format: str, group: int | None, dtype: torch.dtype = torch.bfloat16) -> jitgen.QTensor:
    return jitgen.quantize(torch.randn(n, k).to(dtype), format, group_size=group)


def _said(wrong: str | None, *facts: Any) -> str | None:
    return wrong and f"{' '.join(map(str, facts))}: {wrong}"


# --------------------------------------------------------------------------------------------------- forms and formats


def _dense(form: str, dtype: torch.dtype) -> Check:
    def run() -> Iterator[str | None]:
        for m, n, k in SHAPES:
            for order in ("rows", "columns", "neither"):
                x = torch.randn(m, k).to(dtype)
                yield _said(compare(linear, x, dense(n, k, dtype, order), tile=TILES[form]), m, n, k, order)

    return run


def _quantized(form: str, format: str, dtype: torch.dtype) -> Check:
    def run() -> Iterator[str | None]:
        for m, n, k in SHAPES:
            for group in GROUPS:
                x = torch.randn(m, k).to(dtype)
                yield _said(compare(linear, x, quantized(n, k, format, group), tile=TILES[form]), m, n, k, group)

    return run


def reads_quantized(form: str) -> bool:
    return not form.startswith("tokens")


for _form in TILES:
    for _name, _dtype in DTYPES.items():
        CHECKS[f"dense-{_form}-{_name}"] = _dense(_form, _dtype)
        for _format in ("int4", "uint4", "int8") if reads_quantized(_form) else ():
            CHECKS[f"{_format}-{_form}-{_name}"] = _quantized(_form, _format, _dtype)


@check
def chosen_by_the_rule() -> Iterator[str | None]:
    for m in (5, 130):
        for w in (dense(97, 160, torch.bfloat16), quantized(97, 160, "uint4", 32)):
            yield _said(compare(linear, torch.randn(m, 160).bfloat16(), w), m)


@check
def chosen_by_the_rule_for_every_format() -> Iterator[str | None]:
    for m in (1, 5, 16, 33, 130, 300):
        x = torch.randn(m, 160).bfloat16()
        for w in (dense(97, 160, x.dtype), *(quantized(97, 160, format, 32) for format in ("int4", "uint4", "int8"))):
            yield _said(compare(linear, x, w), m, getattr(w, "format", "dense"))
        for weights in ([dense(40, 160, x.dtype)] * 3, [quantized(40, 160, "uint4", 32)] * 3):
            yield _said(compare(lambda x, a, b, c: three(x, a, b, c), x / 4, *weights), m, "three products")


# ----------------------------------------------------------------------------------------------------------- epilogues


def swiglu(x: torch.Tensor, gate: Any, up: Any) -> torch.Tensor:
    # Not silu: bounds are computed by the same function of absolute values, which then must grow with them.
    return torch.relu(F.linear(x, gate)) * F.linear(x, up)


def three(x: torch.Tensor, a: Any, b: Any, c: Any) -> torch.Tensor:
    return F.linear(x, a) * F.linear(x, b) + F.linear(x, c)


def projections(x: torch.Tensor, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, ...]:
    return F.linear(x, q), F.linear(x, k) + 1, F.linear(x, v).float()


def operands(x: torch.Tensor, w: Any, bias: Any, scale: Any, one: Any, skip: Any) -> tuple[torch.Tensor, ...]:
    """A row, a column, a single element and a whole matrix, and results of two dtypes."""
    y = F.linear(x, w, bias) * scale * one + skip
    return y, (y + torch.arange(y.shape[-1])).float()


def in_two_orders(x: torch.Tensor, w: Any, bias: Any, scale: Any, one: Any, skip: Any) -> tuple[torch.Tensor, ...]:
    y = F.linear(x, w, bias) * scale * one + skip
    return y, y.t()


EPILOGUES: dict[str, tuple[Function, int]] = {
    "swiglu": (swiglu, 2),
    "three": (three, 3),
    "projections": (projections, 3),
}


@each_form
def epilogues(form: str, tile: TritonSchedule) -> Iterator[str | None]:
    for name, (function, count) in EPILOGUES.items():
        for m, k in ((5, 64), (40, 96)):
            x = torch.randn(m, k).bfloat16() / 4
            columns = (33, 16, 70) if name == "projections" else (33,) * count
            weights: list[Any] = [dense(n, k, x.dtype) for n in columns]
            yield _said(compare(function, x, *weights, tile=tile), form, name, m, k)
            if reads_quantized(form):
                weights = [quantized(n, k, "uint4", 32) for n in columns]
                yield _said(compare(function, x, *weights, tile=tile), form, name, m, k, "uint4")


@each_form
def operands_of_epilogues(form: str, tile: TritonSchedule) -> Iterator[str | None]:
    for m, n, k in ((5, 33, 64), (40, 70, 50)):
        x = torch.randn(m, k).half() / 4
        rest = (torch.randn(n).half(), torch.randn(m, 1).half(), torch.randn(1, 1).half())
        for skip in (torch.randn(m, n + 3)[:, :n].half(), torch.randn(n, 2 * m).half().t()[::2]):
            for function in (operands, in_two_orders):
                yield _said(compare(function, x, dense(n, k, x.dtype), *rest, skip, tile=tile), form, m, n, k)


def shares_one_kernel(function: Function, *arguments: Any) -> bool:
    return len(jitgen.jit(function, backend="triton").lower(*arguments, target="sm_90a").kernels) == 1


@check
def fusion() -> Iterator[str | None]:
    x = torch.randn(5, 64).bfloat16()
    for function, count in EPILOGUES.values():
        for weights in ([dense(48, 64, x.dtype)] * count, [quantized(48, 64, "int4", 32) for _ in range(count)]):
            yield None if shares_one_kernel(function, x, *weights) else f"{function.__name__} is several kernels"


# ------------------------------------------------------------------------------------------------- sizes and strides


@each_form
def nothing_to_add(form: str, tile: TritonSchedule) -> Iterator[str | None]:
    for m, n, k in ((3, 5, 0), (0, 5, 32), (3, 0, 32)):
        x, bias = torch.randn(m, k).bfloat16(), torch.randn(n).bfloat16()
        weights: list[Any] = [dense(n, k, x.dtype)]
        if reads_quantized(form) and k:
            weights += [quantized(n, k, "uint4", 32), quantized(n, k, "int8", None)]
        for w in weights:
            yield _said(compare(lambda x, w, b: F.linear(x, w, b), x, w, bias, tile=tile), form, m, n, k)


@each_form
def strides(form: str, tile: TritonSchedule) -> Iterator[str | None]:
    for x in (torch.randn(50, 40).t(), torch.randn(40, 120)[:, 3:103:2], torch.randn(1, 50).expand(40, 50)):
        for order in ("rows", "columns", "neither"):
            w = dense(33, 50, torch.float16, order)
            yield _said(compare(linear, x.half(), w, tile=tile), form, tuple(x.stride()), order)


@each_form
def wide_indices(form: str, tile: TritonSchedule) -> Iterator[str | None]:
    wide = replace(tile, wide=True)
    x = torch.randn(35, 70)
    yield _said(compare(linear, x, dense(40, 70, x.dtype), tile=wide), form)
    if reads_quantized(form):
        yield _said(compare(linear, x, quantized(40, 70, "uint4", 32), tile=wide), form, "uint4")


@each_form
def poisoned_outputs(form: str, tile: TritonSchedule) -> Iterator[str | None]:
    """Every element is written, and nothing beyond: into a slice of a larger tensor."""
    x, w = torch.randn(21, 40), dense(37, 40, torch.float32)
    room = torch.full((23, 40), 7.0)
    with tiled(tile):
        jitgen.jit(linear, backend="triton").bind(x, w)(x, w, out=room[1:-1, 1:-2])
    wrong = (room[1:-1, 1:-2] - F.linear(x, w)).abs().max() > 1e-4
    yield f"{form}: not its result" if wrong else None
    room[1:-1, 1:-2] = 7.0
    yield None if (room == 7.0).all() else f"{form} wrote beyond its result"


@each_form
def largest_columns(form: str, tile: TritonSchedule) -> Iterator[str | None]:
    """The argmax of columns is taken of runs of them; sums of small integers are exact, and many are equal."""
    x = torch.randint(-3, 4, (5, 64)).float()
    weights: list[Any] = [torch.randint(-3, 4, (1040, 64)).float()]
    if reads_quantized(form):
        weights.append(jitgen.quantize(torch.randint(-127, 128, (1040, 64)).float(), "int8", None, method="absmax"))
    for w in weights:
        with tiled(tile):
            found = jitgen.jit(lambda x, w: F.linear(x, w).argmax(-1), backend="triton")(x, w)
        want = F.linear(x.double(), values(w))
        lost = want.amax(-1) - want.gather(-1, found[:, None])[:, 0]
        bound = 64 * torch.finfo(torch.float32).eps * want.abs().amax(-1)
        yield None if (lost <= bound).all() else f"{form}, {getattr(w, 'format', 'dense')}: {found}"
        exact = isinstance(w, jitgen.QTensor) or torch.equal(found, want.argmax(-1))
        yield None if exact else f"{form}: {found} is not the first of equal columns"


@each_form
def infinities(form: str, tile: TritonSchedule) -> Iterator[str | None]:
    """An infinite element of x makes its row's sums infinite, or NaN, as the weights' signs have it."""
    x = torch.randn(6, 64).bfloat16()
    x[2, 9], x[4, 63] = math.inf, math.nan
    weights: list[Any] = [dense(40, 64, x.dtype)]
    if reads_quantized(form):
        formats = ("int4", "uint4", "int8")
        weights += [quantized(40, 64, format, group) for format in formats for group in (32, None)]
    for w in weights:
        with tiled(tile):
            got = jitgen.jit(linear, backend="triton")(x, w).double()
        want = F.linear(x.double(), values(w))
        same = (got == want) | (got.isnan() & want.isnan()) | (want.isfinite() & got.isfinite())
        yield None if same.all() else f"{form}, {getattr(w, 'format', 'dense')}: {int((~same).sum())} differ"


@check
def batches() -> Iterator[str | None]:
    """Batched products in every spelling; see ``tests/batched_products.py``."""
    for name, (function, shapes, _) in batched_products.CASES.items():
        arguments = batched_products.tensors(shapes, torch.float32)
        found = jitgen.jit(function, backend="triton")(*arguments)
        yield _said(batched_products.difference(function, arguments, found), name)


@check
def integers() -> Iterator[str | None]:
    """int8 by ``tl.dot``, other dtypes by reductions; all wrap around."""
    shapes = (
        (torch._int_mm, (33, 40), (40, 24)),
        (torch.matmul, (5, 100), (100, 7)),
        (torch.bmm, (3, 17, 40), (3, 40, 9)),
    )
    for function, *sizes in shapes:
        for dtype in (torch.int8, torch.int64):
            if function is not torch._int_mm or dtype is torch.int8:
                limits = torch.iinfo(dtype)
                operands = [torch.randint(limits.min, limits.max, size, dtype=dtype) for size in sizes]
                found = jitgen.jit(function, backend="triton")(*operands)
                yield None if torch.equal(found, function(*operands)) else f"{function.__name__} of {dtype}"


if __name__ == "__main__":
    serve(CHECKS)
