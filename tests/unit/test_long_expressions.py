"""Long pointwise expressions are several kernels, whose texts compilers are quick with, and few of which differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jitgen
from jitgen.compilers import host
from jitgen.families import lengths, long_expressions
from jitgen.families.lengths import LONGEST

ROUTES = [("cpp", "x86-64-v3"), ("cuda", "sm_90a"), ("triton", "sm_90a")]


def chain(steps: int, *operations: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def function(x: Any, y: Any) -> Any:
        for step in range(steps):
            x = operations[step % len(operations)](x, y)
        return x

    return function


def scaled(x: Any, y: Any) -> Any:
    return x * 0.999 + y


def curved(x: Any, y: Any) -> Any:
    return torch.sin(x) - x * y


def bounded(x: Any, y: Any) -> Any:
    return torch.erf(torch.where(x > y, x, y * x))


def product(x: Any, y: Any) -> Any:
    return x * torch.where(x > y, 0.5, -x) + x


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Divides expressions of a sixteenth of the length."""
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    for module, name in ((lengths, "LONGEST"), (long_expressions, "LONGEST"), (long_expressions, "CHUNK")):
        monkeypatch.setattr(module, name, getattr(module, name) // 16)


@pytest.mark.parametrize(("backend", "target"), ROUTES)
@pytest.mark.parametrize("steps", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_kernels_of_an_unrolled_loop_are_equal(steps: int, backend: str, target: str) -> None:
    spec = jitgen.TensorSpec((1000,), torch.float32)
    low = jitgen.jit(chain(steps, scaled, curved, bounded)).lower(spec, spec, backend=backend, target=target)
    assert len(low.kernels) > steps // 30
    assert len({kernel.source for kernel in low.kernels}) <= 3
    assert f"rewritten: pointwise expressions of more than {LONGEST} operations" in low.explain()


def test_an_expression_that_is_not_too_long_is_one_kernel() -> None:
    spec = jitgen.TensorSpec((1000,), torch.float32)
    assert len(jitgen.jit(chain(LONGEST // 2, scaled)).lower(spec, spec, target="x86-64-v3").kernels) == 1
    assert len(jitgen.jit(chain(LONGEST // 2 + 1, scaled)).lower(spec, spec, target="x86-64-v3").kernels) > 1


def test_a_backward_computes_little_again_and_has_few_texts(short: None) -> None:
    x, y = torch.randn(5, 8, requires_grad=True), torch.randn(8)
    counts = []
    for steps in (60, 120):
        backward = jitgen.jit(chain(steps, product)).lower(x, y).backward
        sources = [kernel.source for kernel in backward.kernels]
        counts.append((len(set(sources)), sum(source.count(" > ") for source in sources)))
    (few, once), (many, twice) = counts
    assert few == many < 10
    assert twice < 2.2 * once


def test_results_that_are_long_together_are_several_kernels() -> None:
    spec = jitgen.TensorSpec((1000,), torch.float32)

    def apart(x: Any, y: Any) -> Any:
        return tuple(chain(20, bounded)(x + number, y) for number in range(3))

    def behind(x: Any, y: Any) -> Any:
        common = chain(20, bounded)(x, y)
        return tuple(chain(6, bounded)(common * number, y) for number in range(8))

    assert len(jitgen.jit(apart).lower(spec, spec, target="x86-64-v3").kernels) == 3
    text = jitgen.jit(behind).lower(spec, spec, target="x86-64-v3").source
    assert text.count("erf(") < 2.5 * (20 + 6 * 8)


def turns(states: int, steps: int) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        values = [x + number for number in range(states)]
        for step in range(steps):
            values[step % states] = values[step % states] * 0.5 + values[(step + 1) % states]
        return tuple(values)

    return function


@pytest.mark.parametrize("states", [2, 3, 8])
def test_all_states_of_a_loop_are_stored(states: int) -> None:
    """Each kernel goes on with all of them, and computes nothing that another one has computed."""
    spec = jitgen.TensorSpec((1000,), torch.float32)
    kernels = jitgen.jit(turns(states, 600)).lower(spec, target="x86-64-v3").lowered.program.kernels
    computed = [sum(lengths.length_of(one.op) for body in k.bodies for one in body.instructions) for k in kernels]
    assert max(computed) < 512
    assert sum(computed) < 1.1 * 1200


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_a_divided_expression_has_its_values_and_gradients(short: None) -> None:
    steps, states = chain(30, scaled, product, torch.maximum), turns(3, 60)

    def function(x: Any, y: Any) -> Any:
        first, second, third = states(steps(x, y) * 0.1)
        return first * second - third

    x, y = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 7), (7,)))
    found, wanted = jitgen.jit(function)(x, y), function(x, y)
    assert len(jitgen.jit(function).lower(x, y).kernels) > 1
    weights = torch.randn(5, 7, dtype=torch.float64)
    gradients = (torch.autograd.grad(result, (x, y), weights) for result in (found, wanted))
    for one, other in ((found, wanted), *zip(*gradients, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.slow
def test_what_a_divided_expression_stores_is_rounded(short: None) -> None:
    """Each step halves an error and compares nothing: of roundings of stored values (u of each, up to ``most``) the
    last ones count. A step's slope, up to 1/2, is off by half the error of its value."""

    def halved(x: Any, y: Any) -> Any:
        return torch.sin(x) * 0.5 + y

    function, unit = chain(30, halved), 2.0**-8
    x, y = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((5, 7), (7,)))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, y)]
    found, wanted = jitgen.jit(function)(x, y), function(*exact)
    assert len(jitgen.jit(function).lower(x, y).kernels) > 1
    weights = torch.randn(5, 7).bfloat16()
    gradients = torch.autograd.grad(found, (x, y), weights), torch.autograd.grad(wanted, exact, weights.double())
    most = 0.5 + float(y.detach().abs().max())
    error = 2 * unit * most
    assert (found.double() - wanted).abs().max() <= error
    # A gradient g of a step becomes g / 2 at most, off by (u + error) g: of all steps, and of all rows for y.
    bound = 4 * (unit + error) * weights.double().abs().sum(0)
    for one, other in zip(*gradients, strict=True):
        assert ((one.double() - other).abs() <= bound).all()
