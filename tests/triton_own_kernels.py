"""Launches of users' Triton kernels in decorated functions, under Triton's interpreter: against float64 torch."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

import jitgen
from jitgen.errors import CompileError, UnsupportedError
from tests import own_kernels as kernels
from tests.interpreter import serve
from tests.own_kernel_programs import programs


def _add(x: Tensor, y: Tensor, launch: Any = kernels.add, **options: Any) -> Tensor:
    out = torch.empty_like(x)
    launch[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel(), **options)
    return out


@jitgen.jit
def between_operations(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(_add(x * 2, y, BLOCK=64) + bias)


@jitgen.jit
def tuned(x: Tensor, y: Tensor) -> Tensor:
    return _add(x, y, kernels.tuned_add) * 3


@jitgen.jit
def by_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], device=x.device)
    kernels.sums_by_lengths[(x.shape[0],)](x, lengths, out, x.shape[1])
    return out


@jitgen.jit
def by_heuristics(x: Tensor, y: Tensor) -> Tensor:
    return _add(x, y, kernels.add_by_heuristics)


@jitgen.jit
def in_place(x: Tensor, factor: float) -> Tensor:
    y = x + 1
    kernels.scale_in_place[(triton.cdiv(y.numel(), 32),)](y, y.numel(), factor, BLOCK=32)
    return y - 1


@jitgen.jit
def argument_in_place(x: Tensor) -> Tensor:
    before = x.sum()
    kernels.scale_in_place[(triton.cdiv(x.numel(), 32),)](x, x.numel(), 0.25, BLOCK=32)
    return x * before


@jitgen.jit
def two_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total, difference = torch.empty_like(x), torch.empty_like(x)
    kernels.sum_and_difference[(triton.cdiv(x.numel(), 32),)](x, y, total, difference, x.numel(), BLOCK=32)
    return total, difference * 2


@jitgen.jit
def one_of_two_results(x: Tensor, y: Tensor) -> Tensor:
    total, difference = torch.empty_like(x), torch.empty_like(x)
    kernels.sum_and_difference[(triton.cdiv(x.numel(), 32),)](x, y, total, difference, x.numel(), BLOCK=32)
    return difference


@jitgen.jit
def counts(x: Tensor, out: Tensor) -> Tensor:
    found = torch.zeros(10, dtype=torch.int32) + out
    kernels.histogram[(triton.cdiv(x.numel(), 32),)](x, found, x.numel(), BLOCK=32)
    return found


@jitgen.jit
def partly_written(x: Tensor, rest: Tensor) -> Tensor:
    out = rest.clone()
    kernels.first_elements[(1,)](x, out, x.numel(), BLOCK=64)
    return out


@jitgen.jit
def product(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    grid = lambda meta: (triton.cdiv(m, meta["BLOCK_SIZE_M"]) * triton.cdiv(n, meta["BLOCK_SIZE_N"]),)  # noqa: E731
    sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 2}
    strides = a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1)
    kernels.matmul[grid](a, b, c, m, n, k, *strides, **sizes, ACTIVATION="leaky_relu")
    return c


@jitgen.jit
def persistent_product(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    kernels.persistent_matmul[(3,)](
        a, b, c, m, n, k, a.stride(0), b.stride(0), c.stride(0), PROGRAMS=3, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16
    )
    return c


@jitgen.jit
def softmax(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    kernels.softmax[(rows, 1, 1)](out, x, x.stride(0), out.stride(0), columns, BLOCK_SIZE=block)
    return out


@jitgen.jit
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rows = torch.empty_like(x), x.shape[0]
    mean, rstd = torch.empty(rows, device=x.device), torch.empty(rows, device=x.device)
    kernels.layer_norm[(rows,)](x, y, weight, bias, mean, rstd, x.stride(0), x.shape[1], eps, BLOCK_SIZE=16)
    return y, rstd


@jitgen.jit
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    heads, seq, dim = q.shape
    kernels.flash_attention[(triton.cdiv(seq, 16), heads)](
        q, k, v, out, q.stride(0), q.stride(1), seq, dim**-0.5, BLOCK_M=16, BLOCK_N=16, DIM=dim, CAUSAL=True
    )
    return out


def _wrong(name: str, result: Tensor, expected: Tensor, tolerance: float = 1e-5) -> str | None:
    error = (result.double() - expected.double()).abs().max().item() if result.numel() else 0.0
    scale = max(1.0, expected.double().abs().max().item()) if result.numel() else 1.0
    if result.shape != expected.shape or not error <= tolerance * scale:
        return f"{name}: {tuple(result.shape)} off by {error}"
    return None


def _into(function: Any, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Has the plan of ``function`` write to ``out``, again and again."""
    plan = function.bind(x, y)
    for _ in range(3):
        assert plan(x, y, out=out.fill_(torch.nan)) is out
    return out


def pointwise() -> Iterator[str | None]:
    for shape in ((37, 50), (3, 5), (1, 1), (64, 32), (0, 5)):
        x, y, bias = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
        expected = F.gelu(x.double() * 2 + y + bias)
        yield _wrong(f"between operations {shape}", between_operations(x, y, bias), expected)
        yield _wrong(f"tuned {shape}", tuned(x, y), (x.double() + y) * 3)
        for out in (torch.empty(shape), torch.empty(shape[::-1]).permute(*reversed(range(len(shape))))):
            yield _wrong(f"into out {shape}", _into(tuned, x, y, out), (x.double() + y) * 3)
        if 0 not in shape:
            yield _wrong(f"heuristics {shape}", by_heuristics(x, y), x.double() + y)


def updates() -> Iterator[str | None]:
    x, y = torch.randn(7, 11), torch.randn(7, 11)
    for factor in (0.5, 3.0):
        yield _wrong("in place", in_place(x, factor), (x.double() + 1) * factor * 2 - 1)
    argument = x.clone()
    yield _wrong("argument in place", argument_in_place(argument), x.double() * 0.5 * x.double().sum())
    yield _wrong("the argument", argument, x.double() * 0.5)
    total, difference = two_results(x, y)
    yield _wrong("sum", total, x.double() + y)
    yield _wrong("difference", difference, (x.double() - y) * 2)
    yield _wrong("one of two", one_of_two_results(x, y), x.double() - y)
    integers = torch.randint(0, 10, (100,), dtype=torch.int32)
    ones = torch.ones(10, dtype=torch.int32)
    yield _wrong("histogram", counts(integers, ones), torch.bincount(integers, minlength=10) + 1)
    rest = torch.randn(100)
    rows, lengths = torch.randn(3, 150), torch.tensor([150, 0, 65], dtype=torch.int32)
    shorter = torch.where(torch.arange(150) < lengths[:, None], rows.double(), 0.0)
    yield _wrong("sums by lengths", by_lengths(rows, lengths), shorter.sum(1))
    yield _wrong("partly written", partly_written(x[0].contiguous(), rest), torch.cat([x[0], rest[11:]]))


def products() -> Iterator[str | None]:
    for m, n, k in ((33, 18, 40), (1, 16, 7), (16, 1, 16), (5, 50, 1)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        expected = a.double() @ b.double()
        yield _wrong(f"product {m, n, k}", product(a, b), F.leaky_relu(expected, 0.01))
        turned = product(a.t().contiguous().t(), b.t().contiguous().t())
        yield _wrong(f"product {m, n, k} of turned operands", turned, F.leaky_relu(expected, 0.01))
        yield _wrong(f"persistent {m, n, k}", persistent_product(a, b), expected)
    half = torch.randn(20, 24, dtype=torch.float16), torch.randn(24, 17, dtype=torch.float16)
    yield _wrong("halves", product(*half), F.leaky_relu(half[0].double() @ half[1].double(), 0.01), 2e-3)


def rows() -> Iterator[str | None]:
    for shape in ((5, 17), (1, 1), (3, 64)):
        x = torch.randn(shape)
        yield _wrong(f"softmax {shape}", softmax(x), x.double().softmax(1))
        weight, bias = torch.randn(shape[1]), torch.randn(shape[1])
        y, rstd = layer_norm(x, weight, bias, 1e-5)
        expected = F.layer_norm(x.double(), shape[1:], weight.double(), bias.double())
        yield _wrong(f"layer norm {shape}", y, expected, 1e-3 if shape[1] == 1 else 1e-5)
        yield _wrong(f"rstd {shape}", rstd, (x.double().var(1, correction=0) + 1e-5).rsqrt())


def attentions() -> Iterator[str | None]:
    for heads, seq, dim in ((2, 33, 16), (1, 16, 32)):
        q, k, v = torch.randn(3, heads, seq, dim)
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        yield _wrong(f"attention {heads, seq, dim}", attention(q, k, v), expected)


@jitgen.jit
def in_another_shape(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    out = torch.empty(x.shape[0] * x.shape[1], x.shape[2])
    kernels.add[(triton.cdiv(x.numel(), 32),)](x, y, out, x.numel(), BLOCK=32)
    return out.view(x.shape) * bias


@jitgen.jit
def with_dropout(x: Tensor, y: Tensor) -> Tensor:
    return F.dropout(_add(x, y, BLOCK=64), 0.5)


@jitgen.jit
def several_stores(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    total = _add(x.half(), y, BLOCK=64)
    positive = total.relu()
    return total, positive > 0, positive.double().sqrt()


@jitgen.jit
def by_its_own_rows(x: Tensor, y: Tensor) -> Tensor:
    total = _add(x, y, BLOCK=64)
    return (total - total.amax(1, keepdim=True)).exp()


@jitgen.jit
def of_another_launch(x: Tensor, y: Tensor) -> Tensor:
    return _add(_add(x, y, BLOCK=64) * 2, _add(y, y, BLOCK=32), BLOCK=32) + 1


@jitgen.jit
def read_back(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.doubled_twice[(triton.cdiv(x.numel(), 32),)](x, out, x.numel(), BLOCK=32)
    return out + y


@jitgen.jit
def of_set_values(x: Tensor, rest: Tensor) -> Tensor:
    out = rest * 1
    kernels.first_elements[(1,)](x, out, x.numel(), BLOCK=64)
    return out + 1


def fused() -> Iterator[str | None]:
    x, y = torch.randn(6, 50), torch.randn(6, 50)
    both = x.double() + y
    cube, bias = torch.randn(2, 3, 4, 5), torch.randn(4, 1)
    yield _wrong("another shape", in_another_shape(cube[0], cube[1], bias), (cube[0].double() + cube[1]) * bias)
    dropped = with_dropout(x, y)
    kept = dropped != 0
    yield _wrong("kept by dropout", dropped, torch.where(kept, both * 2, 0.0))
    yield None if 90 < kept.sum() < 210 else f"dropout keeps {kept.sum()} of 300"
    total, is_positive, root = several_stores(x, y)
    yield _wrong("total", total, x.half().double() + y, 1e-3)
    yield _wrong("positive", is_positive, (total > 0).double())
    yield _wrong("root", root, total.double().relu().sqrt(), 1e-6)
    yield _wrong("by rows", by_its_own_rows(x, y), (both - both.amax(1, keepdim=True)).exp())
    yield _wrong("another launch", of_another_launch(x, y), both * 2 + y * 2 + 1)
    yield _wrong("read back", read_back(x, y), x.double() * 4 + y)
    rest = torch.randn(100)
    yield _wrong("set values", of_set_values(x[0].contiguous(), rest), torch.cat([x[0], rest[50:]]) + 1)


@jitgen.jit
def before_an_update(x: Tensor, y: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The rule reads what ``other`` was between two updates; ``out`` is returned after one, too."""
    other.mul_(2)
    out = _add(x, y, BLOCK=32)
    kept = out + other
    other.add_(1)
    out.add_(1)
    return kept, out


@jitgen.jit
def of_an_updated_argument(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    out = _add(x, y, BLOCK=32)
    x.mul_(3)
    return out.relu()


@jitgen.jit
def into_parts(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.empty(2, *x.shape)
    for part, source in enumerate((x, y)):
        kernels.add[(triton.cdiv(x.numel(), 32),)](source, source, both[part], x.numel(), BLOCK=32)
    return both.sum(0), both * 2


@jitgen.jit
def in_a_loop(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        x = _add(x, y, BLOCK=32).tanh()
    return x


def orders() -> Iterator[str | None]:
    x, y, other = torch.randn(3, 5, 7)
    changed = other.clone()
    kept, out = before_an_update(x, y, changed)
    yield _wrong("kept", kept, x.double() + y + other * 2)
    yield _wrong("out", out, x.double() + y + 1)
    yield _wrong("other", changed, other.double() * 2 + 1)
    changed = x.clone()
    yield _wrong("of an updated argument", of_an_updated_argument(changed, y), (x.double() + 1 + y).relu())
    yield _wrong("the argument", changed, (x.double() + 1) * 3)
    total, both = into_parts(x, y)
    yield _wrong("total of parts", total, (x.double() + y) * 2)
    yield _wrong("parts", both, torch.stack([x, y]).double() * 4)
    expected = x.double()
    for _ in range(3):
        expected = (expected + y).tanh()
    yield _wrong("in a loop", in_a_loop(x, y), expected)


def _scale(x: Tensor, factor: float) -> None:
    kernels.scale_in_place[(triton.cdiv(x.numel(), 32),)](x, x.numel(), factor, BLOCK=32)


@jitgen.jit
def rows_in_place(x: Tensor, y: Tensor) -> Tensor:
    """Views of an argument are written by launches, between other updates of it."""
    before = x[1] + 0
    _scale(x[1], 0.25)
    x[0].add_(1)
    kernels.add[1,](y[0] * 2, y[1], x[2:3, :], y.shape[1], BLOCK=32)
    _scale(x[2], 2.0)
    x[1].mul_(x[2])
    return before + x[1]


@jitgen.jit
def two_arguments(x: Tensor, y: Tensor) -> Tensor:
    total = torch.empty_like(x)
    kernels.sum_and_difference[1,](x[0].clone(), y[0], total[1], x[2], x.shape[1], BLOCK=32)
    kernels.first_elements[1,](y[1].clone(), y[2], 3, BLOCK=4)
    return total[1]


@jitgen.jit
def every_row(x: Tensor) -> Tensor:
    for row, factor in zip(x, range(1, 4), strict=True):
        _scale(row, factor)
    return x.sum(0)


@jitgen.jit
def written_whole(x: Tensor) -> None:
    _scale(x, 0.5)


@jitgen.jit
def updated_before(x: Tensor) -> None:
    x.add_(1)
    _scale(x, 0.5)


def views() -> Iterator[str | None]:
    x, y = torch.randn(2, 3, 5)
    wide = x.double()
    changed, last = x.clone(), (y[0].double() * 2 + y[1]) * 4
    yield _wrong("of rows", rows_in_place(changed, y), wide[1] + wide[1] * 0.5 * last)
    yield _wrong("rows", changed, torch.stack([wide[0] + 1, wide[1] * 0.5 * last, last]))
    changed, other = x.clone(), y.clone()
    yield _wrong("sum into a view", two_arguments(changed, other), wide[0] + y[0])
    yield _wrong("difference into a view", changed, torch.stack([wide[0], wide[1], wide[0] - y[0]]))
    yield _wrong("first elements of a view", other, torch.stack([y[0], y[1], torch.cat([y[1, :3], y[2, 3:]])]))
    changed = x.clone()
    yield _wrong("of every row", every_row(changed), (wide * torch.tensor([[2], [4], [6]])).sum(0))
    columns = torch.randn(5, 9)[:, 2:7]
    changed = columns.clone()
    rows_in_place(columns, y), rows_in_place(changed, y)
    yield _wrong("rows of columns", columns, changed.double())
    for function in (rows_in_place, written_whole, updated_before, every_row):
        for tensor in (torch.randn(5, 3).t(), torch.randn(3, 10)[:, ::2]):
            try:
                function(tensor, y) if function is rows_in_place else function(tensor)
                yield f"{function.__name__} takes strides {tensor.stride()}"
            except UnsupportedError as error:
                yield None if "pass" in str(error) and "contiguous" in str(error) else str(error)


@jitgen.jit
def with_strides(x: Tensor, values: Tensor) -> Tensor:
    """The strides of an argument that was updated are still its own."""
    x[0].add_(1)
    values.mul_(2)
    return x.stride(0) * 100.0 + values.stride(1) * 10.0 + values.t().is_contiguous() + x


def strides() -> Iterator[str | None]:
    for x, values in ((torch.randn(3, 5), torch.randn(3, 5)), (torch.randn(5, 3).t(), torch.randn(3, 10)[:, ::2])):
        expected = x.stride(0) * 100.0 + values.stride(1) * 10.0 + values.t().is_contiguous() + x.double()
        expected[0] += 1
        yield _wrong(f"strides {x.stride()}", with_strides(x, values), expected)


@jitgen.jit
def not_a_power_of_two(x: Tensor) -> Tensor:
    return _add(x, x, BLOCK=33)


def mistakes() -> Iterator[str | None]:
    try:
        not_a_power_of_two(torch.randn(12))
        yield "a block of 33 elements runs"
    except CompileError as error:
        told = "power of 2" in str(error) and "triton_own_kernels.py" in str(error) and "tl.arange" in str(error)
        yield None if told else str(error)


@jitgen.jit
def writing_too_far(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.too_far[(1,)](x, out, x.numel(), BLOCK=32)
    return out


@jitgen.jit
def writing_within(x: Tensor) -> Tensor:
    return _add(x, x, BLOCK=64) + 1


def zones() -> Iterator[str | None]:
    x = torch.randn(20)
    with patch.dict(os.environ, {"JITGEN_DEBUG": "5"}), redirect_stderr(io.StringIO()):
        yield _wrong("within", writing_within(x), x.double() * 2 + 1)
        try:
            writing_too_far(x)
            yield "nobody notices what is written behind a tensor"
        except jitgen.JitgenError as error:
            expected = r"kernel launched at .*triton_own_kernels.py:\d+ has written to byte 80 of a tensor of 80 bytes"
            yield None if re.search(expected, str(error)) else f"another error: {error}"


def _launched(kernel: Any, x: Tensor, *numbers: Any, BLOCK: int = 64) -> Tensor:
    out = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), *numbers, BLOCK=BLOCK)
    return out


def _softmax(x: Tensor) -> Tensor:
    out, block = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
    kernels.softmax[(x.shape[0],)](out, x, x.stride(0), out.stride(0), x.shape[1], BLOCK_SIZE=block)
    return out


@jitgen.jit
def pair(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.relu(_launched(kernels.scaled, _add(x * 2, y, BLOCK=64), 3.0) + z)


@jitgen.jit
def three_of_rows(x: Tensor) -> Tensor:
    return _softmax(_softmax(_softmax(x)))


@jitgen.jit
def pair_of_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total, n = _add(x, y, BLOCK=16), x.numel()
    out, sums = torch.empty_like(x), torch.empty(triton.cdiv(n, 16), device=x.device)
    kernels.read_twice[(triton.cdiv(n, 16),)](total, out, sums, n, BLOCK=16)
    return out, sums


def _apart(kernel: Any, first: Any = None, **options: Any) -> Any:
    def apart(x: Tensor, y: Tensor) -> Tensor:
        between = _add(x, y, BLOCK=64) if first is None else _launched(first, x)
        return _launched(kernel, between, **options)

    return jitgen.jit(apart)


shifted, of_wider_mask, of_changed_number = map(
    _apart, (kernels.shifted, kernels.of_wider_mask, kernels.of_changed_number)
)
of_a_branch = _apart(kernels.shifted, kernels.stored_in_a_branch)
of_other_rows = _apart(kernels.of_other_rows, kernels.of_other_rows)
of_another_grid = _apart(kernels.stored_in_a_branch, BLOCK=32)


@jitgen.jit
def read_elsewhere(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    between = _add(x, y, BLOCK=64)
    return _launched(kernels.scaled, between, 2.0), between


def pairs() -> Iterator[str | None]:
    for shape in ((5, 77), (1, 1), (3, 64)):
        x, y, z = torch.randn(3, *shape)
        yield _wrong("a pair", pair(x, y, z), torch.relu((x.double() * 2 + y) * 3 + z))
        yield _wrong("three of rows", three_of_rows(x), x.double().softmax(1).softmax(1).softmax(1))
        out, sums = pair_of_results(x, y)
        right = (x.double() + y) * 4
        yield _wrong("two results", out, right)
        padded = F.pad(right.flatten(), (0, -right.numel() % 16))
        yield _wrong("sums", sums, padded.reshape(-1, 16).sum(1))
        yield _wrong("shifted", shifted(x, y), (x.double() + y).flatten().roll(-1).reshape(shape))
        for function in (of_wider_mask, of_changed_number):
            yield _wrong("another mask", function(x, y), x.double() + y)
        if x.numel() % 64 == 0:
            yield _wrong("other rows", of_other_rows(x, y), x.double() + 2)
        scaled, between = read_elsewhere(x, y)
        yield _wrong("read elsewhere", scaled, 2 * (x.double() + y))
        yield _wrong("what is read", between, x.double() + y)


_FILE = Path(__file__).parents[1] / "templates/launch/include/jitgen_launch.py"
_SPEC = importlib.util.spec_from_file_location("jitgen_launch", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
rules = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(rules)


@triton.jit
def erfc(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, rules.coarse_erfc(tl.load(x_ptr + offsets)))


def coarse() -> Iterator[str | None]:
    """Compares erfc as rules of 16-bit results have it with torch's: of random numbers, and at the ends."""
    ends = torch.tensor([0.0, -0.0, 20.0, -20.0, math.inf, -math.inf, math.nan, 11.0])
    for first, last, tolerance in ((-9.0, 5.5, 2**-16), (5.5, 9.1, 2**-14)):
        x = torch.cat([torch.empty(1016).uniform_(first, last), ends])
        out = torch.empty_like(x)
        erfc[(1,)](x, out, BLOCK=1024)
        exact = torch.special.erfc(x.double())
        error = (out[:1016] / exact[:1016] - 1).abs().max().item()
        yield None if error <= tolerance else f"erfc from {first} to {last} is off by {error}"
        if not torch.equal(out[1016:].double().nan_to_num(7), exact[1016:].round(decimals=30).nan_to_num(7)):
            yield f"erfc of {ends.tolist()} is {out[1016:].tolist()}"


CHECKS: dict[str, Callable[[], Iterator[str | None]]] = {
    "pointwise": pointwise,
    "updates": updates,
    "products": products,
    "rows": rows,
    "attentions": attentions,
    "fused": fused,
    "pairs": pairs,
    "zones": zones,
    "coarse": coarse,
    "orders": orders,
    "views": views,
    "strides": strides,
    "mistakes": mistakes,
    "programs": lambda: programs(0, 6),
    "more programs": lambda: programs(6, 60),
}
SLOW = ("more programs",)

if __name__ == "__main__":
    serve(CHECKS)
