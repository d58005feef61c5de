"""Tensors that a function fills by slices: one kernel, whose values and gradients are those of eager torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitgen
from tests.interpreter import Interpreter

ROUTES = {"cpp": "x86-64-v3", "cuda": "sm_90a", "triton": "sm_90a"}


def joined(a: Any, b: Any) -> Any:
    """Fills keys as DeepSeek's attention does."""
    k = a.new_empty(*a.shape[:-1], 24)
    k[..., :16].copy_(a * 2)
    k[..., 16:].copy_(b)
    return k


def of_any_width(a: Any, b: Any) -> Any:
    width = b.shape[-1]
    k = a.new_empty(*a.shape[:-1], width + a.shape[-1])
    k[..., :width] = b
    k[..., width:] = a
    return k.tanh()


def interleaved(a: Any, b: Any) -> Any:
    k = torch.empty(*b.shape[:-1], 2 * b.shape[-1])
    k[..., ::2] = a[..., :8] - b
    k[..., 1::2] = b
    return k


def steps(a: Any, b: Any) -> Any:
    out = torch.zeros(a.shape[0], 5)
    for i in range(5):
        out[:, i] = a[:, 0, i] * (i + 1)
    return out


def elements(a: Any, b: Any) -> Any:
    out = torch.empty(4, 4)
    for i in range(4):
        for j in range(4):
            out[i, j] = a[0, i, j] * b[0, j, i]
    return out


def selected(a: Any, b: Any) -> Any:
    out = torch.zeros_like(b)
    out.select(1, 0).copy_(b[:, 1])
    out.select(1, -1).copy_(a[:, 0, :8])
    return out


def with_a_border(a: Any, b: Any) -> Any:
    out = torch.ones(a.shape[0] + 2, a.shape[1] + 2, a.shape[2])
    out[1:-1, 1:-1] = a
    return out


def overlapping(a: Any, b: Any) -> Any:
    out = torch.zeros_like(a)
    out[:, 1:] = a[:, 1:] * 3
    out[:, :2, 3:] = 5
    out[:, 1:3, :8] = b[:, :2]
    return out


def read_between(a: Any, b: Any) -> Any:
    out = torch.zeros_like(b)
    out[:, 0] = b[:, 0]
    for i in range(1, 4):
        out[:, i] = out[:, i - 1] * 0.5 + b[:, i]
    return out


FUNCTIONS = [joined, of_any_width, interleaved, steps, elements, selected, with_a_border, overlapping, read_between]


def operands(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4, 16), torch.randn(rows, 4, 8)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_values_and_gradients(function: Callable[..., Any]) -> None:
    jitted = jitgen.jit(function)
    for rows in (3, 1, 7):
        pair = operands(rows)
        torch.testing.assert_close(jitted(*pair), function(*pair))
        a, b = (x.clone().requires_grad_() for x in pair)
        result, expected = jitted(a, b), function(a, b)
        weights = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (a, b), weights, allow_unused=True)
        found = torch.autograd.grad(result, (a, b), weights, allow_unused=True)
        for gradient, reference in zip(found, wanted, strict=True):
            if reference is None:
                assert gradient is None or not gradient.any()
            else:
                torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("backend", ROUTES)
def test_what_is_filled_by_slices_is_one_kernel_without_scatters(function: Callable[..., Any], backend: str) -> None:
    specs = jitgen.TensorSpec((3, 4, 16), torch.float32), jitgen.TensorSpec((3, 4, 8), torch.float32)
    low = jitgen.jit(function).lower(*specs, backend=backend, target=ROUTES[backend])
    assert [kernel.family for kernel in low.lowered.program.kernels] == ["elementwise"]
    assert low.source
    if function not in (steps, elements, read_between):
        assert low.balance.bytes_ratio <= 1.25  # two of the slices that are interleaved read one operand


def test_torch_compile() -> None:
    for function in (joined, interleaved, read_between):
        pair = operands()
        compiled = torch.compile(function, backend="jitgen", fullgraph=True)
        torch.testing.assert_close(compiled(*pair), function(*pair))


def test_what_nobody_wrote_of_empty_is_zero() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(3, 6)
        out[:, 1:3] = x
        return out

    x = torch.randn(3, 2)
    found = jitgen.jit(function)(x)
    assert torch.equal(found[:, 1:3], x)
    assert not found[:, 0].any()
    assert not found[:, 3:].any()


def test_what_a_tensor_is_copied_into_is_another_one() -> None:
    def filled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.copy_(x)
        return out

    def by_a_slice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = x * 2
        out = torch.empty_like(x)
        out[:] = value
        return out, value

    def piece(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(5, 3)
        out[:2] = x
        return out[:2]

    x = torch.randn(2, 3)
    for function in (filled, piece):
        found = jitgen.jit(function)(x)
        assert torch.equal(found, x)
        assert found.data_ptr() != x.data_ptr()
    out, value = jitgen.jit(by_a_slice)(x)
    assert torch.equal(out, value)
    assert out.data_ptr() != value.data_ptr()


@st.composite
def index(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index of some leading dimensions of ``shape`` that chooses an element at least."""
    items: list[Any] = []
    for size in shape[: draw(st.integers(1, len(shape)))]:
        if draw(st.booleans()):
            items.append(draw(st.integers(-size, size - 1)))
            continue
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        step = draw(st.sampled_from([1, 1, 1, 2, 3]))
        first = draw(st.sampled_from([start, start - size]))
        last = draw(st.sampled_from([stop, stop - size or None, stop + (4 if stop == size else 0)]))
        items.append(slice(first, last, step))
    return tuple(items)


@st.composite
def writes(draw: st.DrawFn) -> tuple[tuple[int, ...], str, list[tuple[str, tuple[Any, ...]]]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    kinds = st.sampled_from(["set", "number", "copy", "add", "mul", "row", "view"])
    listed = draw(st.lists(st.tuples(kinds, index(shape)), min_size=1, max_size=5))
    return shape, draw(st.sampled_from(["zeros", "ones", "cat"])), listed


def program(made: str, listed: list[tuple[str, tuple[Any, ...]]]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that makes a tensor and writes into it, one write after the other."""

    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.cat([x, x * 2])[: x.shape[0]] if made == "cat" else getattr(torch, made)(x.shape)
        for number, (kind, at) in enumerate(listed):
            part = x[at] * (number + 0.5)
            if kind == "set":
                out[at] = part
            elif kind == "number":
                out[at] = number - 0.25
            elif kind == "copy":
                out[at].copy_(part)
            elif kind == "add":
                out[at] += part
            elif kind == "mul":
                out[at].mul_(part)
            elif kind == "row":
                out[at[:1]] = out[at[:1]] + part.sum()
            else:
                out.transpose(0, -1)[0] = x.transpose(0, -1)[-1]
        return out * 1.5

    return function


@settings(deadline=None, max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "10")))
@given(writes())
def test_random_writes(case: tuple[tuple[int, ...], str, list[Any]]) -> None:
    shape, made, listed = case
    function = program(made, listed)
    x = torch.randn(shape)
    torch.testing.assert_close(jitgen.jit(function)(x), function(x))


def interpreted() -> Iterator[None]:
    for function in FUNCTIONS:
        pair = operands()
        torch.testing.assert_close(jitgen.jit(function, backend="triton")(*pair), function(*pair))
        yield None


CHECKS = {"values": interpreted}


def test_values_under_the_interpreter_of_triton() -> None:
    pytest.importorskip("triton")
    with Interpreter("tests.unit.test_pieces") as interpreter:
        assert interpreter["values"] == []


def test_a_row_of_equal_elements_is_added_to_zeros() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 2)
        out[0] = out[0] + x[0].sum()
        return out * 1.5

    x = torch.randn(2, 2)
    torch.testing.assert_close(jitgen.jit(function)(x), function(x))
