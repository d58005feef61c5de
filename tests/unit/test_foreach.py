"""``torch._foreach_*`` in decorated functions and under ``torch.compile``, and optimisers that are made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen.errors import TraceError
from jitgen.trace import foreach
from jitgen.trace.table import find, rows

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Tensor = torch.Tensor
UNARY = [
    name
    for name in foreach._NAMES.split()
    if name not in ["add", "sub", "mul", "div", "pow", "clamp_max", "clamp_min", "lerp"]
]


def lists(count: int, sizes: tuple[tuple[int, ...], ...] = ((3, 4), (5,), (1,)), seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.rand(*size, generator=generator) * 0.8 + 0.1 for size in sizes] for _ in range(count)]


def unary(xs: list[Tensor]) -> Any:
    return [getattr(torch, f"_foreach_{name}")(xs) for name in UNARY]


def unary_in_place(xs: list[Tensor]) -> None:
    for name in ["exp", "sqrt", "neg", "sin", "abs", "reciprocal", "tanh"]:
        getattr(torch, f"_foreach_{name}_")(xs)


def binary(xs: list[Tensor], ys: list[Tensor], zs: list[Tensor], number: Tensor) -> Any:
    found = []
    for name in ["add", "sub", "mul", "div"]:
        function = getattr(torch, f"_foreach_{name}")
        found += [function(xs, ys), function(xs, 2.5), function(xs, [1, 2.0, 3])]
    found += [torch._foreach_add(xs, ys, alpha=0.5), torch._foreach_sub(xs, other=ys, alpha=2)]
    found += [torch._foreach_mul(xs, number), torch._foreach_div(xs, number), torch._foreach_add(xs, number, alpha=2)]
    for name in ["maximum", "minimum", "clamp_max", "clamp_min"]:
        function = getattr(torch, f"_foreach_{name}")
        found += [function(xs, ys), function(xs, 0.5), function(xs, [0.2, 0.4, 0.6])]
    found += [torch._foreach_pow(xs, ys), torch._foreach_pow(xs, 2), torch._foreach_pow(2.0, xs)]
    found += [torch._foreach_pow(xs, exponent=[2, 3, 0.5])]
    found += [torch._foreach_lerp(xs, ys, zs), torch._foreach_lerp(xs, ys, 0.25)]
    for name in ["addcmul", "addcdiv"]:
        function = getattr(torch, f"_foreach_{name}")
        found += [function(xs, ys, zs), function(xs, ys, zs, 0.5), function(xs, ys, zs, scalars=[1.0, 2.0, 3.0])]
    found += [torch._foreach_norm(xs), torch._foreach_norm(xs, 1), torch._foreach_norm(xs, ord=float("inf"))]
    found += [torch._foreach_clone(xs)] if hasattr(torch, "_foreach_clone") else []  # torch 2.11 has none
    return [*found, torch._foreach_max(xs)]


def binary_in_place(xs: list[Tensor], ys: list[Tensor], zs: list[Tensor]) -> None:
    torch._foreach_add_(xs, ys, alpha=0.5)
    torch._foreach_sub_(xs, 0.25)
    torch._foreach_mul_(xs, [1.5, 2.5, 3.5])
    torch._foreach_div_(xs, ys)
    torch._foreach_maximum_(xs, zs)
    torch._foreach_minimum_(xs, 3.0)
    torch._foreach_clamp_min_(xs, 0.1)
    torch._foreach_lerp_(xs, zs, weight=0.75)
    torch._foreach_addcmul_(xs, ys, zs, value=0.5)
    torch._foreach_addcdiv_(xs, ys, zs, [0.5, 1.0, 2.0])
    torch._foreach_pow_(xs, 2)
    torch._foreach_copy_(ys, xs)
    torch._foreach_zero_(zs)


@pytest.mark.covering(1)
@pytest.mark.parametrize("function", [unary, unary_in_place, binary, binary_in_place])
@pytest.mark.parametrize("compiled", [False, True])
def test_values(function: Any, compiled: bool) -> None:
    count = {"unary": 1, "unary_in_place": 1}.get(function.__name__, 3)
    extra = [torch.tensor(1.5)] if function is binary else []
    made = torch.compile(function, backend="jitgen") if compiled else jitgen.jit(function)
    for seed in range(1 if compiled else 2):
        given, eager = [*lists(count, seed=seed), *extra], [*lists(count, seed=seed), *extra]
        found, wanted = made(*given), function(*eager)
        torch.testing.assert_close((found, given), (wanted, eager), rtol=1e-5, atol=1e-6)


def keywords(xs: list[Tensor], ys: list[Tensor], zs: list[Tensor], factors: Any) -> Any:
    found = [torch._foreach_lerp(xs, weights=zs, tensors1=ys), torch._foreach_add(alpha=2, other=ys, self=xs)]
    for name in ["addcmul", "addcdiv"]:
        function = getattr(torch, f"_foreach_{name}")
        found += [function(tensor2=zs, tensor1=ys, self=xs), function(xs, tensor1=ys, tensor2=zs, value=0.5)]
        found += [function(xs, ys, zs, factors), function(xs, ys, zs, scalars=factors)]
    found += [torch._foreach_norm(xs, dtype=torch.float64), torch._foreach_powsum(xs, 3)]
    found += [torch._foreach_mm(ys[:1], ys[:1])] if hasattr(torch, "_foreach_mm") else []  # torch 2.11 has none
    updated = torch._foreach_addcdiv_(xs, ys, scalars=factors, tensor2=zs)
    return [*found, updated, torch._foreach_mul_(self=ys, scalars=[1, 2.0, 3])]


@pytest.mark.parametrize("compiled", [False, True])
def test_arguments_are_bound_by_torchs_schemas(compiled: bool) -> None:
    made = torch.compile(keywords, backend="jitgen") if compiled else jitgen.jit(keywords)
    sizes = ((3, 3), (5,), (1,))
    factors = [0.5, 1.0, 2.0]
    packed = factors if compiled else torch.tensor(factors)  # Dynamo refuses tensors of numbers
    given, eager = ([*lists(3, sizes), packed] for _ in range(2))
    found, wanted = made(*given), keywords(*eager)
    torch.testing.assert_close((found, given), (wanted, eager), rtol=1e-5, atol=1e-6)
    assert all(left is right for left, right in zip(found[-1], given[1], strict=True))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda xs: torch._foreach_addcmul(xs, xs, xs, torch.ones(2)), "one number for each tensor"),
        (
            lambda xs: torch._foreach_lerp([x.int() for x in xs], xs, torch.tensor(0.5)),
            "beside integers; pass a number",
        ),
        (lambda xs: torch._foreach_powsum([x.int() for x in xs]), "floating point"),
    ],
)
def test_numbers_that_are_refused(function: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        jitgen.jit(function)(*lists(1))


def test_every_row_is_found_by_torchs_function() -> None:
    for name in foreach.EACH:
        row, _ = find(getattr(torch, name))
        assert row is rows()[name]


def test_every_function_has_a_row() -> None:
    names = {name for name in dir(torch) if name.startswith("_foreach_")}
    assert not names - foreach.EACH.keys(), "each of them has a row"


@pytest.mark.parametrize(
    "function",
    [
        lambda xs, ys: torch._foreach_add(xs, ys[:2]),
        lambda xs, ys: torch._foreach_mul_(xs, [1.0]),
        lambda xs, ys: torch._foreach_exp([]),
    ],
)
def test_lists_of_other_lengths(function: Any) -> None:
    with pytest.raises(TraceError, match="one length"):
        jitgen.jit(function)(*lists(2))


def test_a_list_is_updated_in_its_order() -> None:
    """A tensor may be updated twice, and by one that was updated before, as in torch on a CPU."""

    def function(x: Tensor, y: Tensor) -> None:
        torch._foreach_add_([x, y, x], [y, x, x])

    given, eager = lists(1, ((3,), (3,)))[0], lists(1, ((3,), (3,)))[0]
    jitgen.jit(function)(*given)
    function(*eager)
    torch.testing.assert_close(given, eager)


def test_tensors_made_in_the_function_are_told_apart() -> None:
    def function(x: Tensor) -> Any:
        made = [torch.zeros_like(x), torch.zeros_like(x)]
        torch._foreach_add_(made, [1.0, 2.0])
        return made

    torch.testing.assert_close(jitgen.jit(function)(torch.rand(3)), function(torch.rand(3)))


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}, 2),
    "AdamW of amsgrad": (torch.optim.AdamW, {"amsgrad": True}, 2),
    "Adam": (torch.optim.Adam, {}, 2),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, 1),
    "Nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 1),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}, 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_of_an_optimizer(name: str) -> None:
    kind, options, most = OPTIMIZERS[name]
    torch._dynamo.reset()
    parameters = [torch.rand(*size, requires_grad=True) for size in ((4, 3), (7,), (2, 1, 5))]
    copies = [each.detach().clone().requires_grad_() for each in parameters]
    mine, eager = (kind(each, lr=0.1, foreach=True, **options) for each in (parameters, copies))
    step = torch.compile(mine.step, backend="jitgen")
    for _ in range(3):
        for left, right in zip(parameters, copies, strict=True):
            left.grad = torch.rand_like(left)
            right.grad = left.grad.clone()
        step()
        eager.step()
    torch.testing.assert_close(parameters, copies)
    report = jitgen.report(step)
    assert not [line for line in str(report).splitlines() if line.startswith("in torch")]
    assert len(report.kernels) <= most * report.graphs
