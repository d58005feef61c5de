"""Matrix products on the CPU: against float64 of the dequantised operands, over shapes, formats, instruction sets."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_numeric import FLOATS, FORMATS, GROUPS, ROWS, assert_near, bounds, operands, product, run

import jitgen
from jitgen.spec import Target, runs_here

LEVELS = [level for level in ("generic", "x86-64-v2", "x86-64-v3", "x86-64-v4") if runs_here(Target.parse(level))]
COLUMNS = (1, 15, 16, 17, 33, 63, 64, 65, 100, 161)
LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 300, 513, 1025)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> random.Random:
    """The data of a test depends on its name alone."""
    torch.manual_seed(sum(map(ord, request.node.name)))
    return random.Random(request.node.name)


def check(function: Any, x: torch.Tensor, weight: Any) -> None:
    exact, spread = product(x, weight)
    assert_near(run(function, (x, weight), exact.shape, x.dtype), exact, spread)


def linear() -> Any:
    return jitgen.jit(lambda x, w: F.linear(x, w))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.quick(where=lambda dtype: dtype == torch.float32)
def test_dense(dtype: torch.dtype, seeded: random.Random) -> None:
    function = linear()
    for rows in ROWS:
        check(function, *operands(rows, seeded.choice(COLUMNS), seeded.choice(LENGTHS), dtype))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.quick(where=lambda format, group: (format, group) in (("uint4", 64), ("int8", None)))
def test_quantized(format: str, group: int | None, seeded: random.Random) -> None:
    number = GROUPS.index(group) + FORMATS.index(format)
    dtype, columns = FLOATS[number % len(FLOATS)], COLUMNS[3 + number]
    function = linear()
    for rows in ROWS:
        check(function, *operands(rows, columns, seeded.choice(LENGTHS), dtype, format, group))


@pytest.mark.parametrize(("format", "group"), [(None, None), ("int4", 32), ("uint4", 128), ("int8", None)])
@pytest.mark.quick(where=lambda format, group: format == "uint4")
def test_matrix_registers_multiply_pairs(format: str | None, group: int | None) -> None:
    """Some rows of bfloat16 are multiplied by matrix registers where the processor has such; a single one never is, nor
    any whose sums must not depend on other rows."""
    function = linear()
    for rows, columns, length in ((2, 17, 65), (7, 40, 130), (33, 31, 2100), (250, 65, 96)):
        check(function, *operands(rows, columns, length, torch.bfloat16, format, group))
    weight = jitgen.TensorSpec((48, 128), torch.bfloat16, format=format, group_size=group)
    for rows, options, asks in ((7, {}, True), (1, {}, False), (7, {"batch_invariant": True}, False)):
        lowered = jitgen.jit(lambda x, w: F.linear(x, w), **options).lower(
            jitgen.TensorSpec((rows, 128), torch.bfloat16), weight, target="x86-64-v4"
        )
        assert ("jitgen::has_pair_matrices()" in lowered.source) == asks


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("dtype", "format", "group"),
    [
        *((dtype, None, None) for dtype in FLOATS),
        (torch.bfloat16, "int4", 32),
        (torch.float32, "uint4", 64),
        (torch.float64, "uint4", None),
        (torch.float16, "int8", 128),
        (torch.float64, "int8", None),
    ],
    ids=str,
)
@pytest.mark.quick(where=lambda level, dtype: level == "generic" and dtype == torch.bfloat16)
def test_instruction_sets(
    level: str, dtype: torch.dtype, format: str | None, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITGEN_CPU_TARGET", level)
    function = linear()
    for rows, columns, length in [(1, 70, 150), (53, 70, 1301)]:
        check(function, *operands(rows, columns, length, dtype, format, group))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sizes", [[(1, 65, 130)], [(8, 48, 77)]], ids=["a row", "rows"])
@pytest.mark.quick(where=lambda dtype, sizes: dtype == torch.float32 and sizes[0][0] > 1)
def test_any_strides(dtype: torch.dtype, sizes: list[tuple[int, int, int]]) -> None:
    function, ends = linear(), jitgen.jit(lambda x, w: x @ w)
    for rows, columns, length in sizes:
        x, w = operands(rows, columns, length, dtype)
        for other in (x.t().contiguous().t(), torch.stack([x, x], -1)[..., 1], x.repeat(1, 2)[:, length:]):
            assert torch.equal(other, x)
            check(function, other, w)
        for other in (w.t().contiguous().t(), torch.stack([w, w], -1)[..., 0], w.repeat(2, 1)[columns:]):
            check(function, x, other)
        exact, spread = product(x, w)
        assert_near(run(ends, (x, w.t()), exact.shape, dtype), exact, spread)
        assert_near(run(ends, (x, w.t().contiguous()), exact.shape, dtype), exact, spread)
        out = torch.full((columns, rows), float("nan"), dtype=dtype).t()
        function.bind(x, w)(x, w, out=out)
        assert_near(out, exact, spread)


def test_nothing_to_add() -> None:
    """K = 0: the accumulator is 0, and the epilogue runs."""
    function = jitgen.jit(lambda x, w, b: F.linear(x, w) + b)
    for format in (None, "int4"):
        for rows in (1, 30):
            x, w = operands(rows, 20, 0, torch.float32, format, 32 if format else None)
            bias = torch.randn(20)
            assert torch.equal(run(function, (x, w, bias), (rows, 20), x.dtype), bias.expand(rows, 20))


EPILOGUES = {
    "relu": (1, lambda a: a.relu(), ()),
    "bias and gelu": (1, lambda a, b: F.gelu(a + b), ("column",)),
    "swiglu": (2, lambda a, b: F.silu(a) * b, ()),
    "residual": (1, lambda a, y: y + a, ("full",)),
    "scaled rows": (1, lambda a, s, y: (a * s).tanh() - 0.5 * y, ("row", "full")),
    "three": (3, lambda a, b, c, s: a * b.sigmoid() + c.clamp(-1, 1) * s, ("column",)),
    "transposed residual": (1, lambda a, y: a - y, ("strided",)),
}


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "quantized"])
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.quick(where=lambda name, quantized: (name, quantized) in (("swiglu", True), ("scaled rows", False)))
def test_epilogues(name: str, quantized: bool, seeded: random.Random) -> None:
    dtype = FLOATS[(list(EPILOGUES).index(name) + quantized) % len(FLOATS)]
    format = "int4" if quantized else None
    count, epilogue, kinds = EPILOGUES[name]
    function = jitgen.jit(_fused(epilogue, count))
    columns = seeded.choice(COLUMNS[3:])
    for rows in (3, 31):
        length = seeded.choice(LENGTHS)
        pairs = [operands(rows, columns, length, dtype, format, 64 if format else None) for _ in range(count)]
        x, weights = pairs[0][0], [weight for _, weight in pairs]
        shapes = {"column": (columns,), "row": (rows, 1), "full": (rows, columns)}
        extras = [
            torch.randn(columns, rows).to(dtype).t() if kind == "strided" else torch.randn(shapes[kind]).to(dtype)
            for kind in kinds
        ]
        exact, spread = bounds(epilogue, [product(x, weight) for weight in weights], extras)
        found = run(function, (x, *weights, *extras), exact.shape, dtype)
        # A function's tail may be small by cancellation, in the reference too.
        unit = 2.0 ** (-53 if dtype == torch.float64 else -24)
        assert_near(found, exact, spread + 64 * unit * exact.abs().clamp(min=1), operations=64)


def _fused(epilogue: Any, count: int) -> Any:
    if count == 1:
        return lambda x, a, *extras: epilogue(F.linear(x, a), *extras)
    if count == 2:
        return lambda x, a, b, *extras: epilogue(F.linear(x, a), F.linear(x, b), *extras)
    return lambda x, a, b, c, *extras: epilogue(F.linear(x, a), F.linear(x, b), F.linear(x, c), *extras)


@pytest.mark.parametrize(("dtype", "format"), [(torch.bfloat16, "int4"), (torch.float32, None)])
def test_regions_of_different_widths(dtype: torch.dtype, format: str | None) -> None:
    """Query, key and value projections share one kernel."""

    def project(x: torch.Tensor, q: Any, k: Any, v: Any, b: torch.Tensor) -> Any:
        return F.linear(x, q, b), F.linear(x, k), F.linear(x, v) * 2.0

    function = jitgen.jit(project)
    for rows in (7, 40):
        group = 32 if format else None
        x, q = operands(rows, 130, 96, dtype, format, group)
        k, v = (operands(rows, width, 96, dtype, format, group)[1] for width in (33, 16))
        bias = torch.randn(130).to(dtype)
        outs = [torch.full((rows, width), float("nan"), dtype=dtype) for width in (130, 33, 16)]
        assert len(function.lower(x, q, k, v, bias).kernels) == 1
        function.bind(x, q, k, v, bias)(x, q, k, v, bias, out=tuple(outs))
        for out, weight, epilogue, extras in [
            (outs[0], q, lambda a, b: a + b, [bias]),
            (outs[1], k, lambda a: a, []),
            (outs[2], v, lambda a: a * 2, []),
        ]:
            assert_near(out, *bounds(epilogue, [product(x, weight)], extras), operations=4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_prologues(dtype: torch.dtype) -> None:
    """The activation is computed while it is packed, and rounded to its dtype as eager torch would."""
    function = jitgen.jit(lambda x, g, s, w: F.linear(x * g + s, w))
    for rows, columns, length in [(1, 50, 300), (29, 40, 1100)]:
        x, w = operands(rows, columns, length, dtype)
        gain, shift = torch.randn(length).to(dtype), torch.randn(rows, 1).to(dtype)
        activation = (
            (x.float() * gain.float() + shift.float()).to(dtype) if dtype != torch.float64 else x * gain + shift
        )
        exact, spread = product(activation, w)
        assert len(function.lower(x, gain, shift, w).kernels) == 1
        found = run(function, (x, gain, shift, w), exact.shape, dtype)
        # The odd element may be rounded the other way.
        unit = torch.finfo(dtype).eps
        assert_near(found, exact, spread + unit * F.linear(activation.double().abs(), w.double().abs()))


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.quick(where=lambda format: format == "int4")
def test_any_number_of_threads_gives_the_same_bits(format: str | None) -> None:
    function, before = linear(), torch.get_num_threads()
    try:
        for rows, columns in [(1, 700), (40, 300), (300, 20)]:
            x, w = operands(rows, columns, 1024, torch.bfloat16, format, 128 if format else None)
            found = []
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                found.append(run(function, (x, w), (rows, columns), x.dtype))
            assert all(torch.equal(other, found[0]) for other in found[1:])
    finally:
        torch.set_num_threads(before)


def test_special_values() -> None:
    """NaN and infinities of the activation reach the results they belong to, and no others."""
    function = linear()
    x, w = operands(40, 33, 200, torch.bfloat16)
    x[3, 7], x[20, 199] = float("nan"), float("inf")
    found, plain = run(function, (x, w), (40, 33), x.dtype), F.linear(x.float(), w.float())
    assert torch.equal(found.isnan(), plain.isnan())
    assert torch.equal(found.isinf(), plain.isinf())


@pytest.mark.parametrize(
    ("stored", "multiplied"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float8_e4m3fn, torch.bfloat16)],
    ids=str,
)
def test_an_activation_is_cast_while_it_is_packed(stored: torch.dtype, multiplied: torch.dtype) -> None:
    x, w = torch.randn(5, 40).to(stored), torch.randn(7, 40).to(multiplied)
    function = jitgen.jit(lambda x, w: x.to(multiplied) @ w.t())
    exact = x.double() @ w.double().t()
    bound = torch.finfo(multiplied).eps * exact.abs() + 40 * 2**-23 * (x.double().abs() @ w.double().abs().t())
    assert ((function(x, w).double() - exact).abs() <= bound).all()
    assert len(function.lower(x, w).kernels) == 1
