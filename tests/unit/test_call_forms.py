"""Forms of a call: positional, by keyword, with ``out=``, nested. All give the same, and all are as short when warm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.call.resolver import Resolver

x, y = torch.randn(3, 4), torch.randn(3, 4)


def plain(x: Any, y: Any, scale: Any = 2.0) -> Any:
    return x * scale + y


def keyword_only(x: Any, *, y: Any, scale: float = 0.5) -> Any:
    return x * scale + y


def variadic(*xs: Any, scale: float = 2.0) -> Any:
    return sum(xs[1:], xs[0]) * scale


def any_keywords(x: Any, **rest: Any) -> Any:
    return x * rest.get("scale", 1.0) + rest["y"]


def nested(pair: Any, options: Any = None) -> Any:
    return pair[0] * (options or {}).get("scale", 3.0) + pair[1]


def names_of_generated_text(dispatchers: Any, arg0: Any, type: Any, plans: Any = 1.0) -> Any:
    return dispatchers + arg0 * type * plans


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))

    @jitgen.jit
    def forward(self, x: Any, y: Any = None) -> Any:
        return x * self.weight if y is None else x * self.weight + y


CALLS: dict[str, tuple[Callable[..., Any], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "plain": (
        plain,
        [
            *(((x, y), {}), ((x,), {"y": y}), ((), {"x": x, "y": y}), ((), {"y": y, "x": x})),
            *(((x, y, 3.0), {}), ((x, y), {"scale": 3.0}), ((), {"scale": 3, "y": y, "x": x}), ((x, y, y), {})),
        ],
    ),
    "keyword only": (keyword_only, [((x,), {"y": y}), ((x,), {"scale": 3.0, "y": y}), ((), {"x": y, "y": x})]),
    "variadic": (variadic, [((x, y), {}), ((x, y, x), {}), ((x, y), {"scale": 0.5}), ((x,), {"scale": 0.25})]),
    "any keywords": (
        any_keywords,
        [((x,), {"y": y}), ((x,), {"y": y, "scale": 2.0}), ((x,), {"scale": 2.0, "y": y, "not a name": 1, "class": 2})],
    ),
    "nested": (
        nested,
        [
            *((([x, y],), {}), (((x, y),), {}), ((), {"pair": [x, y]}), (([x, y], {"scale": 2.0}), {})),
            *((((x, y),), {"options": {"scale": 1.5}}), (({0: x, 1: y},), {}), (((x, [y][0]),), {})),
        ],
    ),
    "names": (names_of_generated_text, [((x, y), {"type": x}), ((x,), {"type": x, "arg0": y, "plans": 2.0})]),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.quick(where=lambda case: list(CALLS).index(case) % 2 == 0 or case == "names")
def test_every_form_of_a_call_gives_the_same(case: str) -> None:
    function, calls = CALLS[case]
    decorated = jitgen.jit(function)
    for _ in range(3):
        for args, kwargs in calls:
            want = function(*args, **kwargs)
            torch.testing.assert_close(decorated(*args, **kwargs), want)
            torch.testing.assert_close(decorated(*args, **kwargs, out=None), want)
            out = torch.full_like(want, torch.nan)
            assert decorated(*args, **kwargs, out=out) is out
            torch.testing.assert_close(out, want)


def test_forms_of_calls_with_quantised_weights() -> None:
    dense, inputs = torch.randn(16, 32), torch.randn(2, 32)

    def last(x: Any, *, w: Any) -> Any:
        return F.linear(x, w)

    for function in (lambda x, w: F.linear(x, w), last, lambda x, w: F.linear(x, w[0]) if type(w) is list else x):
        weight, other = jitgen.quantize(dense, "int8"), jitgen.quantize(dense * 2, "int4", group_size=32)
        decorated = jitgen.jit(function)
        calls = [lambda w: ((inputs,), {"w": w}), lambda w: ((), {"w": w, "x": inputs})]
        calls += [] if function is last else [lambda w: ((inputs, w), {})]
        for call in calls:
            for each in (weight, weight, other, weight, other):
                args, kwargs = call([each] if "list" in str(function.__code__.co_names) else each)
                want = decorated.reference(*args, **kwargs)
                for out in (None, torch.full((2, 16), torch.nan)):
                    got = decorated(*args, **kwargs, out=out) if out is not None else decorated(*args, **kwargs)
                    torch.testing.assert_close(got, want)


def test_methods_with_keywords_read_their_own_instance() -> None:
    with torch.no_grad():
        models = [Model(), Model()]
        for _ in range(3):
            for model in models:
                out = torch.empty(3, 4)
                torch.testing.assert_close(model.forward(x=x, y=y), x * model.weight + y)
                torch.testing.assert_close(model.forward(x, y=y, out=out), x * model.weight + y)
                torch.testing.assert_close(model.forward(y=None, x=x), x * model.weight)
        model.weight = torch.nn.Parameter(torch.randn(4))
        torch.testing.assert_close(model.forward(x, y=y, out=out), x * model.weight + y)
        shared = torch.randn(4)
        model.weight.data = shared
        function = jitgen.jit(lambda x: x.flip(0) * model.weight.flip(0))
        for _ in range(3):
            want = shared.flip(0) * shared.flip(0)
            torch.testing.assert_close(function(shared, out=shared), want)


def test_what_a_signature_does_not_take_is_a_type_error() -> None:
    decorated = jitgen.jit(plain)
    for args, kwargs in [((x, y), {"y": y}), ((), {"x": x}), ((x, y, 1.0, 2.0), {}), ((x, y), {"other": 1})]:
        for _ in range(2):
            with pytest.raises((TypeError, jitgen.JitgenError)):
                decorated(*args, **kwargs)


def test_out_within_a_trace_is_refused() -> None:
    inner = jitgen.jit(plain)
    inner(x, y, out=torch.empty(3, 4))
    inner(x=x, y=y)
    with pytest.raises(jitgen.TraceError, match="out= within a function"):
        jitgen.jit(lambda x, y: inner(x, y, out=y))(x, y)
    torch.testing.assert_close(jitgen.jit(lambda a: inner(x=x, y=a))(y), plain(x, y))


# ---------------------------------------------------------------------------------------------------------- warm calls


def python_calls(call: Callable[[], Any]) -> list[str]:
    """The names of the Python functions that a warm ``call`` enters, in order."""
    for _ in range(3):
        call()
    entered: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is not call.__code__:
            entered.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


def test_warm_calls_enter_no_more_functions_than_they_need() -> None:
    """Time is not measured here: each function that a call enters costs it 0.1 us at least."""
    out = torch.empty(3, 4)
    # Without constants: a number's dtype is torch's default, which is asked at each call.
    add, last = jitgen.jit(lambda x, y: x + y), jitgen.jit(lambda x, *, y: x + y)
    many, pair = jitgen.jit(lambda *xs: xs[0] + xs[1]), jitgen.jit(lambda pair: pair[0] + pair[1])
    positional = ["__call__", "dispatch", "launch"]
    keyword = ["__call__", "call", "dispatch", "launch"]
    into_out = ["__call__", "call", "__call__", "launch"]
    assert python_calls(lambda: add(x, y)) == positional
    assert python_calls(lambda: many(x, y)) == positional
    assert python_calls(lambda: add(x=x, y=y)) == keyword
    assert python_calls(lambda: add(y=y, x=x)) == keyword
    assert python_calls(lambda: add(x, y, out=None)) == keyword
    assert python_calls(lambda: last(x, y=y)) == keyword
    assert python_calls(lambda: add(x, y, out=out)) == into_out
    assert python_calls(lambda: add(x, y=y, out=out)) == into_out
    assert python_calls(lambda: last(y=y, x=x, out=out)) == into_out
    assert len(python_calls(lambda: pair([x, y]))) <= 12
    assert len(python_calls(lambda: pair([x, y], out=out))) <= 16
    linear = jitgen.jit(lambda x, w: F.linear(x, w))
    weight, inputs = jitgen.quantize(torch.randn(16, 32), "int8"), torch.randn(2, 32)
    out = torch.empty(2, 16)
    assert len(python_calls(lambda: linear(inputs, weight))) <= 7  # the precision of products is asked too
    assert len(python_calls(lambda: linear(inputs, w=weight))) <= 8
    assert len(python_calls(lambda: linear(inputs, weight, out=out))) <= 8


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that were resolved, and the functions that were traced, in order."""
    calls: list[str] = []
    for name in ("resolve", "_trace"):
        way = getattr(Resolver, name)

        def noted(self: Any, *args: Any, way: Any = way, name: str = name, **kwargs: Any) -> Any:
            calls.append(name)
            return way(self, *args, **kwargs)

        monkeypatch.setattr(Resolver, name, noted)
    return calls


class Slots:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = torch.randn(4)

    @jitgen.jit
    def scaled(self, x: Any) -> Any:
        return x * self.weight


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.weight = torch.randn(4)

    @jitgen.jit
    def scaled(self, x: Any) -> Any:
        return x * self.weight


def varying(function: Callable[..., Any], *arguments: Callable[[int], Any]) -> Callable[[int], Any]:
    decorated = jitgen.jit(function)
    return lambda step: decorated(*(argument(step) for argument in arguments))


slots, unhashable, model = Slots(), Unhashable(), Model()
config = SimpleNamespace(eps=1e-5, axes=(0, 1), name="relu", options={"scale": 2.0})
REPEATED: dict[str, Callable[[int], Any]] = {
    "numbers that change": varying(lambda x, k: x * k, lambda i: x, lambda i: i + 0.5),
    "ints that change": varying(lambda x, k: x + k, lambda i: x, lambda i: i),
    "a number that is NaN": varying(lambda x, k: x * k, lambda i: x, lambda i: float("nan")),
    "views that are not contiguous": varying(lambda x: x + 1, lambda i: x.t()),
    "new tensors": varying(lambda x: x + 1, lambda i: torch.randn(3, 4)),
    "0-d tensors": varying(lambda x, k: x * k, lambda i: x, lambda i: torch.tensor(float(i))),
    "offsets": varying(lambda x: x + 1, lambda i: torch.randn(32)[i : i + 8]),
    "an empty tensor": varying(lambda x: x + 1, lambda i: torch.empty(0, 3)),
    "one tensor twice": varying(lambda x, y: x + y, lambda i: x, lambda i: x),
    "new lists": varying(lambda pair: pair[0] + pair[1], lambda i: [x, y]),
    "new strings": varying(lambda x, s: x if s == "ab" else x + 1, lambda i: x, lambda i: "".join(["a", "b"])),
    "a branch on a number": varying(lambda x, k: x + k if k > 0 else x, lambda i: x, lambda i: 2.0),
    "no tensors": varying(lambda n: torch.ones(3) * n, lambda i: 2.0),
    "values that are read": varying(
        lambda x: x.sum(config.axes) * config.eps * config.options["scale"] if config.name == "relu" else x, lambda i: x
    ),
    "an instance with __slots__": lambda i: slots.scaled(x),
    "an instance without a hash": lambda i: unhashable.scaled(x),
    "a module": torch.no_grad()(lambda i: model.forward(x)),
    "arguments that require grad": torch.no_grad()(varying(lambda x, w: x * w, lambda i: x, lambda i: model.weight)),
}


@pytest.mark.parametrize("case", REPEATED)
def test_nothing_is_resolved_twice(case: str, resolved: list[str]) -> None:
    for step in range(3):
        REPEATED[case](step)
    del resolved[:]
    for step in range(3, 8):
        REPEATED[case](step)
    assert resolved == []


def test_two_layouts_that_alternate_are_resolved_once_each(resolved: list[str]) -> None:
    decorated, out = jitgen.jit(lambda x: x + 1), torch.empty(3, 4)
    for _ in range(2):
        for each in (x, x[:2], x.t().contiguous().t()):
            decorated(each)
            decorated(each, out=out[: len(each)])
    del resolved[:]
    for each in (x, x[:2], x.t().contiguous().t()):
        decorated(each)
        decorated(each, out=out[: len(each)])
    assert resolved == []
