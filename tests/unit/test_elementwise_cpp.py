"""Pointwise kernels in C++: results past the cache, groups that are not whole, places that are not aligned."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable

import pytest
import torch
from jitgen_cases import lowered
from numeric import reference

import jitgen
from jitgen.compilers import host
from jitgen.runtime import cpu

GROUP, RUN = 64, 1024
LENGTHS = (1, 15, GROUP - 1, GROUP, GROUP + 1, 200, RUN - 1, RUN, RUN + 1, 3 * RUN + 17)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22, torch.float64: 2**-50}


@pytest.fixture(params=[False, True], ids=["cached", "past the cache"])
def streaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cpu, "last_level_cache", lambda: 0 if request.param else 2**40)
    return bool(request.param)


def check(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    out.fill_(torch.nan)
    exact = reference(function, *inputs)
    jitgen.jit(backend="cpp")(function).bind(*inputs)(*inputs, out=out)
    spread = EPSILON[out.dtype]
    torch.testing.assert_close(out.double(), exact.double(), rtol=spread, atol=spread)


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * y - torch.exp(-y.abs())


def places(shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Of results: aligned, one element further, with others between the rows, and by columns."""
    rows, length = shape
    return [
        torch.empty(shape, dtype=dtype),
        torch.empty(rows * length + 1, dtype=dtype)[1:].view(shape),
        torch.empty(rows, length + 5, dtype=dtype)[:, 2:-3],
        torch.empty(length, rows, dtype=dtype).t(),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_every_length_and_place(dtype: torch.dtype, streaming: bool) -> None:
    for length in LENGTHS:
        x, y = (torch.randn(5, length).to(dtype) for _ in range(2))
        for out in places((5, length), dtype):
            check(chain, (x, y), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_inputs_of_every_layout(dtype: torch.dtype, streaming: bool) -> None:
    """By columns, broadcast along rows and columns, a number in memory, overlapping rows."""
    wide = torch.randn(200, 300).to(dtype)
    others = (
        wide.t()[:200, :200].t(),
        torch.randn(300).to(dtype),
        torch.randn(200, 1).to(dtype),
        torch.randn(()).to(dtype),
        torch.randn(500).to(dtype).as_strided((200, 300), (1, 1)),
    )
    for other in others:
        x = wide[: other.shape[0]] if other.dim() == 2 else wide
        x = x[:, : other.shape[1]] if other.dim() == 2 and other.shape[1] != 1 else x
        check(chain, (x, other), torch.empty(x.shape, dtype=dtype))
        turned = other.t() if other.dim() == 2 else other.view(-1)[:1]
        check(chain, (x.t(), turned), torch.empty(x.shape[::-1], dtype=dtype))


def test_several_results_of_several_widths(streaming: bool) -> None:
    def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + y, (x * y).to(torch.bfloat16), x > y, (x * 100).to(torch.int8), x.double() * 3

    for length in (1, 63, 64, 65, 2000):
        x, y = torch.randn(3, length), torch.randn(3, length)
        assert len(lowered(several, x, y).program.kernels) == 1
        for got, want in zip(jitgen.jit(several)(x, y), several(x, y), strict=True):
            torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6)


def test_parts_of_a_concatenation(streaming: bool) -> None:
    """Runs shorter than a group, each region with places of its own."""

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1) * x

    for tokens, size in itertools.product((1, 7, 300), (2, 48, 128, 4096)):
        x = torch.randn(tokens, 3, size).to(torch.bfloat16)
        check(rotated, (x,), torch.empty_like(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_in_place(dtype: torch.dtype, streaming: bool) -> None:
    def update(x: torch.Tensor, y: torch.Tensor) -> None:
        x.mul_(y).add_(1)

    for length in (63, 5000, 5001):
        x, y = torch.randn(length + 1).to(dtype)[1:], torch.randn(length).to(dtype)
        want = x.double() * y.double() + 1
        jitgen.jit(update)(x, y)
        torch.testing.assert_close(x.double(), want, rtol=EPSILON[dtype], atol=EPSILON[dtype])


@pytest.mark.optimised
@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for an x86 instruction")
def test_long_chains_are_computed_several_vectors_at_a_time() -> None:
    """In a loop over vectors they would wait for one another: here every vector of a group has its own instructions."""
    tools = host.toolchain()
    if tools is None or tools.compiler != "gcc":
        pytest.skip("what is asked for is asked of GCC")

    def power(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(100):
            y = y * x
        return y

    x = torch.rand(4096)
    assembly = jitgen.jit(backend="cpp")(power).lower(x, target="x86-64-v3").compile().asm["asm"]
    assert isinstance(assembly, str)
    assert assembly.count("vmulps") > 100 * (GROUP // 8)
    torch.testing.assert_close(jitgen.jit(backend="cpp")(power)(x), power(x))


def by_lengths(x: torch.Tensor, of_rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return (x + of_rows.exp() * 2) / (lengths + 1) ** 0.6


@pytest.mark.parametrize("length", [1, 7, GROUP + 3, RUN + 17])
def test_what_is_equal_in_a_run_is_computed_before_it(length: int) -> None:
    x, of_rows, lengths = torch.randn(3, 4, length), torch.randn(3, 4, 1), torch.randint(0, 40, (3, 4, 1))
    source = jitgen.jit(by_lengths).source(x, of_rows, lengths)
    if length > 1:  # else every operand has an element for each
        before, within = source.split("jitgen::groups(")
        assert "jitgen::pow(" in before
        assert "jitgen::exp(" in before
        assert "jitgen::pow(" not in within
        assert "jitgen::exp(" not in within
    check(by_lengths, (x, of_rows, lengths), torch.empty_like(x))
