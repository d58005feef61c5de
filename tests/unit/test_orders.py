"""There is an order in which to compute every function: each temporary comes after those that it is computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.families import steps
from jitgen.families.claims import Claims
from jitgen.families.partition import Partitioner
from jitgen.families.steps import Step, Steps, cycle

SHAPE = B, H, W, C = 2, 8, 12, 8
ROUTES = [("cpp", "x86-64-v3"), ("cuda", "sm_90a"), ("triton", "sm_90a")]


def windows(x: Any) -> Any:
    return x.view(B, H // 4, 4, W // 4, 4, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, C)


def whole(x: Any) -> Any:
    return x.view(B, H // 4, W // 4, 4, 4, C).permute(0, 1, 3, 2, 4, 5).reshape(SHAPE)


def heads_of_windows(x: Any) -> Any:
    return x.view(B, H // 4, 4, W // 4, 4, 2, C // 2).permute(0, 1, 3, 5, 2, 4, 6).reshape(-1, 2, 16, C // 2)


def attended(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.mT).softmax(-1) @ v


def of_windows(x: Any, y: Any, z: Any) -> Any:
    return attended(windows(x), windows(y), windows(z))


def of_shared_windows(x: Any, y: Any, z: Any) -> Any:
    return whole(attended(windows(x), windows(x), windows(y))) + z


def of_heads(x: Any, y: Any, z: Any) -> Any:
    return F.scaled_dot_product_attention(heads_of_windows(x), heads_of_windows(y), heads_of_windows(z))


def of_shifted_windows(x: Any, y: Any, z: Any) -> Any:
    moved = [windows(torch.roll(each, (-2, -2), (1, 2))) for each in (x, y, z)]
    return torch.roll(whole(attended(*moved)), (2, 2), (1, 2))


def of_columns(x: Any, y: Any, z: Any) -> Any:
    columns = [each.transpose(1, 2).reshape(B * W, H, C) for each in (x, y, z)]
    return attended(*columns).reshape(B, W, H, C).transpose(1, 2)


def twice(x: Any, y: Any, z: Any) -> Any:
    once = x + whole(attended(windows(x), windows(y), windows(z)))
    return once + F.layer_norm(of_columns(once, y, z), (C,))


def exponentials(x: Any, y: Any, z: Any) -> Any:
    return (windows(x) @ windows(y).mT * 0.1).exp() @ windows(z) * 1.5


def scanned_and_sorted(x: Any, y: Any, z: Any) -> Any:
    keys = whole(windows(y).cumsum(1) * 0.1)
    values = whole(windows(z).sort(-1)[0])
    return whole(attended(windows(x), windows(keys), windows(values)))


FUNCTIONS = [
    of_windows,
    of_shared_windows,
    of_heads,
    of_shifted_windows,
    of_columns,
    twice,
    exponentials,
    scanned_and_sorted,
]


def arguments(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def check(function: Callable[..., Any]) -> None:
    """AssertionError where the result or a gradient of ``function`` is not what float64 gives."""
    args = arguments(torch.float32)
    exact = [each.detach().double().requires_grad_() for each in args]
    found, wanted = jitgen.jit(function)(*args), function(*exact)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    weights = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((found * weights.float()).sum(), args)
    for gradient, right in zip(gradients, torch.autograd.grad((wanted * weights).sum(), exact), strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.quick(where=lambda function: function is of_windows)
def test_gradients_of_attention_over_windows(function: Callable[..., Any]) -> None:
    check(function)


@pytest.mark.parametrize(("backend", "target"), ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.quick(where=lambda function, dtype: function is of_windows and dtype == torch.float32)
def test_every_route_finds_kernels(function: Callable[..., Any], dtype: torch.dtype, backend: str, target: str) -> None:
    lowered = jitgen.jit(function).lower(*arguments(dtype), target=target, backend=backend)
    assert lowered.backward is not None
    assert lowered.backward.source


BESIDE_A_CAT: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "a sum and a view of it": lambda x: (x.sum(1), x.sum(1)[None], torch.cat([x, x])),
    "a norm and its transpose": lambda x: (
        F.rms_norm(x, x.shape[1:]),
        F.rms_norm(x, x.shape[1:]).t(),
        F.pad(x, (1, 1)),
    ),
    "a view of a sum": lambda x: (x.sum(1).view(2, -1), torch.cat([x, x]), x + 1),
}


@pytest.mark.parametrize(("backend", "target"), ROUTES)
@pytest.mark.parametrize("name", BESIDE_A_CAT)
def test_results_of_rows_beside_a_cat(name: str, backend: str, target: str) -> None:
    """A cat stores one result several times, also in the kernel of another region."""
    low = jitgen.jit(BESIDE_A_CAT[name], backend=backend).lower(torch.randn(6, 6), target=target)
    assert low.source
    x = torch.randn(6, 6)
    for found, wanted in zip(jitgen.jit(BESIDE_A_CAT[name])(x), BESIDE_A_CAT[name](x.double()), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_temporary_that_reads_itself_is_computed_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[Sequence[Step]] = []
    original = Steps._break

    def _break(self: Steps, around: Sequence[Step]) -> None:
        broken.append(around)
        original(self, around)

    monkeypatch.setattr(Claims, "_unwritable", lambda *_: set())
    monkeypatch.setattr(Steps, "_break", _break)
    check(of_windows)
    assert broken
    assert all(len(around) == 1 for around in broken)


@pytest.mark.parametrize("function", [of_windows, twice, scanned_and_sorted], ids=lambda function: function.__name__)
def test_every_temporary_may_be_computed_from_its_operands(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What breaks a cycle is right for every temporary of these functions, and for those that it adds."""
    asked: set[Step] = set()

    def each_once(after: Mapping[Step, Set[Step]]) -> list[Step]:
        new = [step for step in after if step.change is None and step not in asked]
        asked.update(new[:1])
        return new[:1] or cycle(after)

    def program(self: Partitioner) -> Any:
        asked.clear()
        return original(self)

    original = Partitioner.program
    monkeypatch.setattr(Partitioner, "program", program)
    monkeypatch.setattr(steps, "cycle", each_once)
    check(function)
    assert len(asked) > 3


def test_cycles_of_steps() -> None:
    a, b, c, d = (Step(number) for number in range(4))
    assert cycle({}) == []
    assert cycle({a: set(), b: {a}, c: {a, b}}) == []
    assert cycle({a: {d}, b: {a}}) == []  # d is no step that waits
    assert cycle({a: {a}, b: {a}}) == [a]
    assert cycle({a: set(), b: {a, c}, c: {b}, d: {c}}) == [b, c]
    around = cycle({d: {c}, c: {b}, b: {a}, a: {c}})
    assert sorted(around) == [a, b, c]


def test_a_long_chain_of_steps_is_looked_at_once() -> None:
    looked = 0

    class Before(set[Step]):
        def __and__(self, other: Set[object]) -> set[Step]:
            nonlocal looked
            looked += 1
            return super().__and__(other)

    chain = {Step(number): Before([Step(number - 1)] if number else []) for number in range(500)}
    assert cycle(chain) == []
    assert looked == len(chain)
