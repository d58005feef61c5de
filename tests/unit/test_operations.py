"""Every row of the trace's table, in every dtype and dialect, against eager torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jitgen_cases import lowered_graph
from numeric import DTYPES, FLOATS, INTEGERS, failures, mismatch, sample, widened
from operations import CALLS, COMPOSED, OPERATORS, applied, canonical, cases, spellings

import jitgen
from jitgen import settings
from jitgen.codegen.cpp import CPP
from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import row_text
from jitgen.codegen.triton import TRITON
from jitgen.errors import JitgenError
from jitgen.ir.graph import topological
from jitgen.ir.ops import OPS
from jitgen.trace import table
from jitgen.trace.proxy import TensorProxy

SHAPE = (10, 20)
BATCH = 64
"""Operations per function: one kernel or two, where a kernel each would take minutes to compile."""

MODULO = ("fmod", "remainder", "mod")
"""torch's vectorised float64 fmod gives NaN where the quotient is huge; the kernels' is exact."""

INTERPRETED = settings.interpreting_triton()


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, y, z, a bool tensor, and a weight for prelu; integers y are divisors that do not trap in eager torch."""
    x, y, z = (sample(dtype, seed).reshape(SHAPE) for seed in (1, 2, 3))
    if dtype in INTEGERS:
        y = torch.where((y == 0) | ((y == -1) & (x == torch.iinfo(dtype).min)), torch.full_like(y, 5), y)
    return x, y, z, sample(torch.bool, 4).reshape(SHAPE), sample(dtype, 5)[: SHAPE[1]]


def expected(function: Any, tensors: tuple[torch.Tensor, ...], want: torch.Tensor) -> tuple[Any, Any]:
    """(the exact result, eager torch's in at least float32)."""
    dtype = tensors[0].dtype
    if dtype.is_floating_point:
        return function(*map(widened, tensors)), function(*(t.float() if t.itemsize == 2 else t for t in tensors))
    if not want.is_floating_point():
        return want, want
    double = tuple(t.double() if t.dtype == dtype != torch.bool else t for t in tensors)
    try:
        exact = function(*double)
    except (RuntimeError, TypeError):
        exact = want
    return exact, want


def supported(
    tensors: tuple[torch.Tensor, ...], every: bool
) -> tuple[list[tuple[str, str, Any, torch.Tensor]], list[str]]:
    """The cases eager torch computes for these tensors, with its results: ``every`` one, or the first of each row, but
    of integers none that is computed in float32, as that of floats is; and those that jitgen alone accepts."""
    found, liberties, rows = [], [], set()
    for row, label, function in cases():
        if row in rows and not every:
            continue
        try:
            want = function(*tensors)
        except (RuntimeError, TypeError, NotImplementedError):
            try:
                jitgen.jit(function).lower(*tensors)
            except JitgenError:
                continue
            liberties.append(label)
        else:
            rows.add(row)
            if every or want.is_floating_point() <= tensors[0].is_floating_point():
                found.append((row, label, function, want))
    return found, liberties


@pytest.mark.parametrize("every", [False, True], ids=["first calls", "every call"])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.quick(where=lambda dtype, every: dtype == torch.float32 and not every)
def test_rows_agree_with_eager_torch(dtype: torch.dtype, every: bool) -> None:
    tensors = operands(dtype)
    if INTERPRETED:
        tensors = tuple(tensor[..., :4] for tensor in tensors)
    magnitude = 1 + sum(tensor.double().nan_to_num(0, 0, 0).abs() for tensor in tensors[:3])
    chosen, liberties = supported(tensors, every)
    wrong: list[str | None] = []
    for first in range(0, len(chosen), BATCH):
        part = chosen[first : first + BATCH]
        results = jitgen.jit(lambda *given, part=part: tuple(function(*given) for _, _, function, _ in part))(*tensors)
        for (row, _, function, want), got in zip(part, results, strict=True):
            if (got.dtype, got.shape) != (want.dtype, want.shape):
                wrong.append(f"{got.dtype} {tuple(got.shape)}, torch has {want.dtype} {tuple(want.shape)}")
                continue
            exact, eager = expected(function, tensors, want)
            if row in MODULO:
                exact = torch.where(exact.isnan() & tensors[0].isfinite() & tensors[1].isfinite(), got, exact)
            wrong.append(mismatch(got, exact, eager, magnitude if row in COMPOSED else 0.0))
    assert not any(wrong), failures([label for _, label, _, _ in chosen], wrong)
    # Only that integer division by zero raises in eager torch depends on data, which a kernel cannot do.
    divisions = ("floor_divide", "remainder", "fmod", "floordiv", "mod", "div")
    assert [label for label in liberties if not any(name in label for name in divisions)] == []


SPELLED = [(name, call) for name, calls in CALLS.items() for call in calls]


@pytest.mark.skipif(INTERPRETED, reason="traces are the same for every dialect")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool], ids=names)
@pytest.mark.quick(where=lambda dtype: dtype == torch.float32)
def test_spellings_are_one_row(dtype: torch.dtype) -> None:
    """Every name, method and in-place method of a row traces to what its first spelling does, where torch has both."""
    tensors = operands(dtype)
    checked = 0
    for name, call in SPELLED:
        usable = []
        for label, function in spellings(name):
            try:
                want = applied(function, call)(*tensors)
            except (RuntimeError, TypeError, NotImplementedError, AttributeError):
                continue
            in_place = label.endswith("_")
            got = lowered_graph(applied(function, call), *tensors)
            assert got.outputs[0].dtype == names(want.dtype), (label, call)
            if not in_place:
                usable.append((label, [(node.op, node.attrs) for node in topological(got.outputs)]))
        for label, nodes in usable[1:]:
            assert nodes == usable[0][1], (label, usable[0][0], call)
        checked += len(usable)
    assert checked > 150


POINTWISE = {f"jitgen.trace.{name}" for name in ("pointwise", "selection", "casts", "activations")}
OTHER_ROWS = {name for name, row in table.rows().items() if row.function.__module__ not in POINTWISE}
"""Rows that move, make, ask, reduce or multiply matrices: see test_shapes.py, test_trace.py, test_reduction_rows.py and
test_contractions.py."""


@pytest.mark.skipif(INTERPRETED, reason="about the tables")
def test_every_row_has_sample_calls() -> None:
    missing = {canonical(name) for name in table.rows() if name not in OTHER_ROWS and canonical(name) not in CALLS}
    assert missing - {"detach", "alias", "nonzero"} == set()  # nonzero is refused


@pytest.mark.skipif(INTERPRETED, reason="about the tables")
@pytest.mark.parametrize("dialect", [CPP, CUDA, TRITON], ids=lambda dialect: dialect.name)
def test_dialects_have_a_row_for_every_operation(dialect: Any) -> None:
    pairs = [(op.name, dtype) for op in OPS.values() for dtype in op.domain]
    missing = [(name, dtype) for name, dtype in pairs if not row_text(dialect.rows, name, dtype)]
    assert missing == []


@pytest.mark.skipif(INTERPRETED, reason="about the tables")
def test_every_operation_is_reached_by_a_row() -> None:
    reached = set()
    for dtype in (torch.float32, torch.int32, torch.bool):
        tensors = operands(dtype)
        for _, _, function in cases():
            try:
                graph = lowered_graph(function, *tensors)
            except JitgenError:
                continue
            reached |= {node.op for node in topological(graph.outputs)}
    # Two are passes' to make (families/rows/reduction/powers.py), and random numbers are compared with no other's.
    assert set(OPS) - reached == {"fma", "exp2_normal", "philox"}


# ---------------------------------------------------------------------------------------------------- promotion


def test_promotion_of_every_pair_of_dtypes() -> None:
    """Dimensioned with dimensioned, with 0-d, and with numbers."""
    tensors = [torch.tensor([1, 0, 1], dtype=dtype) for dtype in DTYPES]
    scalars = [torch.tensor(1, dtype=dtype) for dtype in DTYPES]
    count = len(DTYPES)
    mask = torch.tensor([True, False, True])

    def combine(operation: Any, *given: torch.Tensor) -> list[torch.Tensor]:
        dense, zero = given[:count], given[count:]
        results = [operation(left, right) for left in dense for right in (*dense, *zero, True, 2, 2.5)]
        return results + [operation(left, right) for left in zero for right in (*zero, True, 2, 2.5)]

    for operation in (torch.add, torch.mul, torch.true_divide, torch.eq, lambda a, b: torch.where(mask, a, b)):
        want = combine(operation, *tensors, *scalars)
        function = jitgen.jit(lambda *given, o=operation: combine(o, *given))
        nodes = lowered_graph(function, *tensors, *scalars).outputs
        assert [node.dtype for node in nodes] == [names(result.dtype) for result in want]
        assert [len(node.shape) for node in nodes] == [result.ndim for result in want]


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.slow
def test_promoted_values(dtype: torch.dtype) -> None:
    left = torch.tensor([1, 0, 1], dtype=dtype)
    others = [torch.tensor(value, dtype=other) for other in DTYPES for value in ([1, 0, 1], 1)]
    function = jitgen.jit(lambda x, *others: [x + other for other in (*others, True, 2, 2.5)])
    for got, want in zip(function(left, *others), function.reference(left, *others), strict=True):
        torch.testing.assert_close(got, want)


FEW_DTYPES = (torch.int32, torch.bool, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtypes", [FEW_DTYPES, DTYPES], ids=["few", "all"])
@pytest.mark.quick(where=lambda dtypes: dtypes is FEW_DTYPES)
def test_run_time_numbers_promote_as_python_numbers_do(dtypes: Sequence[torch.dtype]) -> None:
    tensors = [torch.tensor([1, 2, 3], dtype=dtype) for dtype in dtypes]
    function = jitgen.jit(lambda i, f, *given: [t * i for t in given] + [t + f for t in given] + [t > f for t in given])
    for i, f in ((3, 2.5), (-2, 0.1), (2**40, -1e30)):
        chosen = tensors if abs(i) < 100 else [tensors[0], tensors[-1]]
        got, want = function(i, f, *chosen), function.reference(i, f, *chosen)
        for left, right in zip(got, want, strict=True):
            assert left.dtype == right.dtype
            torch.testing.assert_close(left, right)


# ----------------------------------------------------------------------------------------------------- edges


def test_integer_division_does_not_trap() -> None:
    """Where eager torch stops the process, the lowest number over -1, the result wraps; a zero divisor is an error."""
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        x = torch.tensor([limits.min, limits.max, 7, 0], dtype=dtype)
        zero, one = torch.zeros_like(x), torch.full_like(x, -1 if limits.min else 1)
        function = jitgen.jit(lambda x, y: (x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc")))
        if INTERPRETED:  # as on a GPU, whose kernels report nothing
            assert [part.tolist() for part in function(x, zero)] == [[0] * 4] * 4
        else:
            with pytest.raises(RuntimeError, match="integer division by zero"):
                function(x, zero)
        assert function(x, one)[0].tolist() == ([limits.min, -limits.max, -7, 0] if limits.min else x.tolist())


@pytest.mark.parametrize("dtype", FLOATS, ids=names)
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_minimum_and_maximum_propagate_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, 1.0, math.nan, -0.0], dtype=dtype)
    y = torch.tensor([1.0, math.nan, math.nan, 0.0], dtype=dtype)
    function = jitgen.jit(lambda x, y: (torch.minimum(x, y), torch.maximum(x, y), x.clamp(min=y), x.clamp(-1, 1)))
    for got, want in zip(function(x, y), function.reference(x, y), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


def test_intermediate_values_are_not_rounded() -> None:
    """A chain on 16-bit tensors is computed in float32: at least as exact as eager torch, which rounds in between."""
    x = torch.tensor([1.0, 3.0, 1000.0], dtype=torch.bfloat16)
    got = jitgen.jit(lambda x: (x + 0.0078125) * 128 - x * 128)(x)
    assert got.tolist() == [1.0, 1.0, 1.0]


def test_casts_round_even_within_a_kernel() -> None:
    x = sample(torch.float32, 7)
    function = jitgen.jit(
        lambda x: tuple(
            x.to(dtype).float() for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
        )
    )
    for got, want in zip(function(x), function.reference(x), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=names)
@pytest.mark.quick(where=lambda dtype: dtype == torch.float8_e4m3fn)
def test_float8_is_stored_moved_and_cast(dtype: torch.dtype) -> None:
    x = sample(torch.float32, 8).to(dtype)
    function = jitgen.jit(lambda x: (x.float() * 2, x.half(), torch.cat([x, x]), x[::2].clone(), x.clone()))
    for got, want in zip(function(x), function.reference(x), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.float().nan_to_num(7), want.float().nan_to_num(7))
    with pytest.raises(jitgen.UnsupportedError, match="convert it first"):
        jitgen.jit(lambda x: x + 1)(x)


def test_constants_are_stored_as_their_dtype() -> None:
    x = torch.ones(3)
    function = jitgen.jit(
        lambda x: (
            torch.full((3,), 0.1, dtype=torch.bfloat16).double(),
            torch.tensor(0.1).double() + x.double(),
            torch.tensor(300).to(torch.uint8).long() + x.long(),
            x.double() * torch.tensor(0.1),
        )
    )
    for got, want in zip(function(x), function.reference(x), strict=True):
        assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------- other targets

CHECKED_ELSEWHERE = "rows_agree or minimum or divide or trap or casts_round or promot"


def _pytest(chosen: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    command += ["-m", chosen, "-k", environment.pop("only")]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="this is what starts it")
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_under_tritons_interpreter(chosen: str) -> None:
    pytest.importorskip("triton")
    _pytest(chosen, TRITON_INTERPRET="1", JITGEN_BACKEND="triton", only=CHECKED_ELSEWHERE)


@pytest.mark.skipif(INTERPRETED, reason="about the CPU")
@pytest.mark.parametrize("level", ["x86-64-v3", "generic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=names)
@pytest.mark.slow  # test_cpp_math.py has every operation at every level
def test_other_instruction_sets(level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from jitgen.spec import Target, runs_here

    if not runs_here(Target.parse(level)):
        pytest.skip(f"this processor is no {level}")
    monkeypatch.setenv("JITGEN_CPU_TARGET", level)
    test_rows_agree_with_eager_torch(dtype, every=False)


def test_operator_functions_are_the_operators() -> None:
    """``OPERATORS`` names what fx's proxies install: none is missing on a proxy."""
    assert all(
        hasattr(TensorProxy, f"__{name.strip('_')}__") for name in OPERATORS if name not in ("where", "copy_", "zero_")
    )
