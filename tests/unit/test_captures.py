"""What a function reaches besides its arguments is read, or compared, at every call; what cannot be is refused."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import operator
import os
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jitgen
from jitgen.errors import TraceError
from jitgen.trace import captured
from tests import fresh

x = torch.tensor([1.0, -2.0, 3.0])
Change = Callable[[], Any]
Case = tuple[Callable[[torch.Tensor], Any], Change]
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Registers ``make``: it gives a function, and a change of something that the function reads."""
    CASES[make.__name__] = make
    return make


class Config:
    k: float


def config(**attributes: Any) -> Any:
    made = Config()
    vars(made).update(attributes)
    return made


# ---------------------------------------------------------------------------------------------------------- look-ups


@case
def getattr_of_a_constant_name() -> Case:
    c = config(k=2.0)
    return lambda x: x * getattr(c, "k"), lambda: setattr(c, "k", 3.0)  # noqa: B009


@case
def getattr_of_a_computed_name() -> Case:
    c = config(w0=2.0, w1=3.0)
    return lambda x: x * sum(getattr(c, f"w{index}") for index in range(2)), lambda: setattr(c, "w1", 5.0)


@case
def getattr_with_a_default() -> Case:
    c = config()
    return lambda x: x * getattr(c, "k", 2.0), lambda: setattr(c, "k", 3.0)


@case
def getattr_of_a_tensor() -> Case:
    c = config(weight=torch.ones(3))
    return lambda x: x * getattr(c, "wei" + "ght"), lambda: setattr(c, "weight", torch.full((3,), 4.0))


@case
def hasattr_of_what_is_missing() -> Case:
    c = config()
    return lambda x: x * 2 if hasattr(c, "flag") else x, lambda: setattr(c, "flag", True)


@case
def vars_of_an_object() -> Case:
    c = config(k=2.0)
    return lambda x: x * vars(c)["k"], lambda: setattr(c, "k", 3.0)


@case
def dict_of_an_object() -> Case:
    c = config(k=2.0)
    return lambda x: x * c.__dict__["k"], lambda: setattr(c, "k", 3.0)


@case
def super_of_a_method() -> Case:
    class Base:
        def factor(self) -> float:
            return 2.0

    class Derived(Base):
        def factor(self) -> float:
            return super().factor() + 1

    instance = Derived()
    return lambda x: x * instance.factor(), lambda: setattr(Base, "factor", lambda self: 7.0)


@case
def special_methods_of_an_object() -> Case:
    class Table:
        def __init__(self) -> None:
            self.values, self.length = [2.0, 3.0], 2

        def __getitem__(self, index: int) -> float:
            return self.values[index]

        def __len__(self) -> int:
            return self.length

    table = Table()
    return lambda x: x * table[0] + len(table), lambda: setattr(table, "length", 9)


@case
def a_descriptor_of_the_user() -> Case:
    class Doubled:
        def __get__(self, instance: Any, owner: Any = None) -> float:
            return 2.0 * float(instance.hidden)

    class Owner:
        factor = Doubled()
        hidden = 1.0

    instance = Owner()
    return lambda x: x * instance.factor, lambda: setattr(instance, "hidden", 3.0)


@case
def a_cached_property() -> Case:
    class Owner:
        @functools.cached_property
        def mask(self) -> torch.Tensor:
            return torch.full((3,), 2.0)

    instance = Owner()
    return lambda x: x * instance.mask, lambda: setattr(instance, "mask", torch.full((3,), 3.0))


@case
def a_method_of_a_dict() -> Case:
    values = {"k": 2.0}
    get = values.get
    return lambda x: x * get("k", 1.0), lambda: values.update(k=3.0)


@case
def a_weak_reference() -> Case:
    c = config(k=2.0)
    reference, kept = weakref.ref(c), [c]
    return lambda x: x * reference().k, lambda: setattr(kept[0], "k", 3.0)


@case
def a_cached_function() -> Case:
    c = config(k=2.0)

    @functools.lru_cache
    def factor() -> Any:
        return c.k

    def change() -> None:
        c.k = 3.0
        factor.cache_clear()

    return lambda x: x * factor(), change


@case
def an_object_of_two_names() -> Case:
    both = config(k=2.0)
    c = config(first=both, second=both)
    return lambda x: x * c.first.k + c.second.k, lambda: setattr(c, "second", config(k=3.0))


# --------------------------------------------------------------------------------------------------------- containers


@case
def an_attribute_of_a_container() -> Case:
    class Values(list[float]):
        k = 2.0

    values = Values([1.0])
    return lambda x: x * values.k, lambda: setattr(values, "k", 3.0)


@case
def an_array_of_numpy() -> Case:
    a = np.array([2.0, 3.0])
    return lambda x: x * float(a[1]), lambda: a.fill(5.0)


@case
def a_number_of_numpy() -> Case:
    c = config(k=np.float32(2.0))
    return lambda x: x * float(c.k), lambda: setattr(c, "k", np.float32(3.0))


@case
def an_array_of_python() -> Case:
    a = array.array("d", [2.0])
    return lambda x: x * a[0], lambda: a.__setitem__(0, 3.0)


@case
def a_deque() -> Case:
    values = collections.deque([2.0])
    return lambda x: x * values[-1], lambda: values.append(3.0)


@case
def membership_of_a_set() -> Case:
    chosen = {1}
    return lambda x: x * 2 if 2 in chosen else x, lambda: chosen.add(2)


@case
def a_mapping_proxy() -> Case:
    values = {"k": 2.0}
    proxy = types.MappingProxyType(values)
    return lambda x: x * proxy["k"], lambda: values.update(k=3.0)


@case
def a_context_variable() -> Case:
    variable = contextvars.ContextVar("variable", default=2.0)
    return lambda x: x * variable.get(), lambda: variable.set(3.0)


@case
def a_context_variable_of_a_tensor() -> Case:
    variable: contextvars.ContextVar[torch.Tensor] = contextvars.ContextVar("variable")
    variable.set(torch.ones(3))
    return lambda x: x * variable.get(), lambda: variable.set(torch.full((3,), 4.0))


@case
def an_environment_variable() -> Case:
    os.environ["JITGEN_TEST"] = "2"
    return lambda x: x * float(os.environ["JITGEN_TEST"]), lambda: os.environ.update(JITGEN_TEST="3")


@case
def an_environment_variable_that_is_not_set() -> Case:
    os.environ.pop("JITGEN_TEST", None)
    return lambda x: x * float(os.getenv("JITGEN_TEST", "2")), lambda: os.environ.update(JITGEN_TEST="3")


@case
def the_names_of_environment_variables() -> Case:
    os.environ.pop("JITGEN_TEST", None)
    return lambda x: x * len(list(os.environ)), lambda: os.environ.update(JITGEN_TEST="3")


# ------------------------------------------------------------------------------------------------------------ imports


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored after each test."""
    monkeypatch.setenv("JITGEN_TEST", "1")


def module_of_the_user(**names: Any) -> types.ModuleType:
    module = types.ModuleType("jitgen_test_constants")
    vars(module).update(names)
    sys.modules[module.__name__] = module
    return module


@case
def a_module_imported_inside() -> Case:
    module = module_of_the_user(k=2.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        import jitgen_test_constants as constants  # type: ignore[import-not-found]

        return x * constants.k

    return function, lambda: setattr(module, "k", 3.0)


@case
def a_name_imported_inside() -> Case:
    module = module_of_the_user(k=2.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        from jitgen_test_constants import k

        return x * k

    return function, lambda: setattr(module, "k", 3.0)


# ------------------------------------------------------------------------------------------------------ torch's modules


@case
def a_replaced_member_of_sequential() -> Case:
    module = nn.Sequential(nn.ReLU(), nn.Tanh())
    return lambda x: module(x), lambda: module.__setitem__(1, nn.Sigmoid())


@case
def a_new_member_of_sequential() -> Case:
    module = nn.Sequential(nn.ReLU())
    return lambda x: module(x), lambda: module.append(nn.Sigmoid())


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


@case
def a_new_member_of_a_module_that_goes_over_its_members() -> Case:
    module = Chain()
    return lambda x: module(x), lambda: module.add_module("second", nn.Sigmoid())


@case
def a_member_of_another_class() -> Case:
    module = Chain()
    return lambda x: module.first(x), lambda: setattr(module, "first", nn.Tanh())


@case
def a_module_list() -> Case:
    layers = nn.ModuleList([nn.ReLU(), nn.Tanh()])

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return function, lambda: layers.__setitem__(0, nn.Sigmoid())


@case
def a_forward_of_an_instance() -> Case:
    module = nn.ReLU()
    return lambda x: module(x), lambda: setattr(module, "forward", lambda x: x * 3)


@case
def a_forward_hook() -> Case:
    module = nn.ReLU()
    return lambda x: module(x), lambda: module.register_forward_hook(lambda module, inputs, output: output * 2)


@case
def a_forward_pre_hook() -> Case:
    module = nn.ReLU()
    return lambda x: module(x), lambda: module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


@case
def what_a_hook_closes_over() -> Case:
    module, c = nn.ReLU(), config(k=2.0)
    module.register_forward_hook(lambda module, inputs, output: output * c.k)
    return lambda x: module(x), lambda: setattr(c, "k", 3.0)


@case
def names_that_dir_lists() -> Case:
    c = config(k=2.0)
    return lambda x: x * len(dir(c)), lambda: setattr(c, "further", 3.0)


@case
def a_chain_of_maps() -> Case:
    chain = collections.ChainMap({"a": 1.0}, {"b": 2.0})
    return lambda x: x * chain["b"], lambda: chain.maps[1].__setitem__("b", 3.0)


@case
def a_dict_written_in_python() -> Case:
    values = collections.UserDict(k=2.0)
    return lambda x: x * values["k"], lambda: values.__setitem__("k", 3.0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(where=lambda name: list(CASES).index(name) % 2 == 0)
def test_changes_are_seen(name: str) -> None:
    function, change = CASES[name]()
    jitted = jitgen.jit(function)
    for step in range(2):
        expected = function(x)
        for _ in range(3):
            torch.testing.assert_close(jitted(x), expected)
        if not step:
            change()
            assert not torch.equal(function(x), expected), "the change makes a difference"


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_change_is_traced_once(name: str) -> None:
    function, change = CASES[name]()
    jitted = jitgen.jit(function)
    for _ in range(3):
        jitted(x)
    assert len(jitted.specializations) == 1
    del change  # until here what it refers to is alive


def test_hooks_of_all_modules_are_seen() -> None:
    module = nn.ReLU()
    jitted = jitgen.jit(lambda x: module(x))
    torch.testing.assert_close(jitted(x), x.relu())
    hook = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        torch.testing.assert_close(jitted(x), x.relu() * 2)
    finally:
        hook.remove()
    torch.testing.assert_close(jitted(x), x.relu())


def test_a_module_is_imported_by_the_first_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "jitgen_test_late.py").write_text("k = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def function(x: torch.Tensor) -> torch.Tensor:
        import jitgen_test_late  # type: ignore[import-not-found]

        return x * jitgen_test_late.k

    jitted = jitgen.jit(function)
    torch.testing.assert_close(jitted(x), x * 2)
    monkeypatch.setattr(sys.modules["jitgen_test_late"], "k", 3.0)
    torch.testing.assert_close(jitted(x), x * 3)


def test_a_function_that_is_traced_again_and_again_warns_once() -> None:
    c = config(calls=0)

    def function(x: torch.Tensor) -> torch.Tensor:
        c.calls += 1
        return x * 2

    jitted = jitgen.jit(function)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(40):
            torch.testing.assert_close(jitted(x), x * 2)
    (warning,) = warned
    assert "c.calls has changed" in str(warning.message)
    assert c.calls == 40


def helper(x: torch.Tensor, c: Config) -> torch.Tensor:
    return x * c.k


def test_attributes_that_another_function_mentions_are_followed() -> None:
    c = config(k=2.0)
    jitted = jitgen.jit(lambda x: helper(x, c))
    for k in (2.0, 3.0):
        c.k = k
        torch.testing.assert_close(jitted(x), x * k)


def test_functions_of_the_same_code_have_closures_of_their_own() -> None:
    def scaled(k: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * k

    c = config()
    jitted = jitgen.jit(lambda x: c.function(x))
    for k in (2.0, 3.0, 2.0):
        c.function = scaled(k)
        torch.testing.assert_close(jitted(x), x * k)
    assert len(jitted.specializations) == 2


def test_names_of_attributes_are_not_names_of_variables() -> None:
    """A global that the code does not use may be anything."""
    jitted = jitgen.jit(lambda x: x * holder.generator)
    torch.testing.assert_close(jitted(x), x * 2)


holder = config(generator=2.0)
generator = (number for number in range(3))
getter = operator.attrgetter("k")
large = np.zeros(1000)

REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "attrgetter": (lambda x: x * getter(holder), "getter looks attributes up"),
    "attrgetter made inside": (
        lambda x: x * operator.attrgetter("generator")(holder),
        "attrgetter looks attributes up",
    ),
    "attrgetter by its name": (lambda x: x * attrgetter("generator")(holder), "attrgetter looks attributes up"),
    "iterator": (lambda x: x * next(generator), "generator is an iterator"),
    "random": (lambda x: x * random.random(), "random.random draws a random number"),
    "globals": (lambda x: x * globals()["holder"].generator, r"globals\(\) reaches values"),
    "eval": (lambda x: x * eval("2"), r"eval\(\) reaches values"),
    "large array": (lambda x: x * float(large[0]), "large is no buffer of 4096 bytes"),
    "set of objects": (lambda x: x * len(objects), "objects is a set of objects"),
    "weak values": (lambda x: x * weak_values["a"].k, "weak_values is a weak container"),
    "weak keys": (lambda x: weak_keys.__setitem__(holder, x), "weak_keys is a weak container"),
    "weak set": (lambda x: x * len(weak_set), "weak_set is a weak container"),
}
objects = {holder}
weak_values = weakref.WeakValueDictionary(a=config(k=2.0))
weak_keys: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
weak_set = weakref.WeakSet([holder])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(TraceError, match=words) as refused:
        jitgen.jit(function)(x)
    message = str(refused.value)
    assert f"{__file__}:{function.__code__.co_firstlineno}" in message, "the user's line"
    assert message.count("\n") >= 2, "and a remedy"


def test_builtins_are_restored_and_other_code_is_not_traced() -> None:
    before = getattr, hasattr, vars, dir, isinstance, os._Environ.__getitem__
    c = config(k=2.0)
    jitgen.jit(lambda x: x * getattr(c, "k"))(x)  # noqa: B009
    with pytest.raises(TraceError):
        jitgen.jit(REFUSED["eval"][0])(x)
    assert (getattr, hasattr, vars, dir, isinstance, os._Environ.__getitem__) == before


def test_dynamo_is_not_imported_within_a_trace() -> None:
    """It would keep what stands for ``getattr`` there, and break graphs at the true one from then on."""
    program = """
import torch, jitgen

@jitgen.jit
def doubled(x):
    try:
        import torch._dynamo
    except Exception:
        return x
    return x * 2

assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
compiled = torch.compile(lambda x: getattr(x, "T") + hasattr(x, "T"), backend="eager", fullgraph=True)
assert compiled(torch.ones(2, 3)).shape == (3, 2)
"""
    ended = fresh.run(program)
    assert ended.returncode == 0, ended.stderr


def test_captured_values_are_read_by_expressions() -> None:
    holder: Any = types.SimpleNamespace(scale=2.0, layer=torch.nn.Linear(2, 2))
    setattr(holder, "class", "a")
    variables = {"holder": holder}
    root = captured.variable("holder", variables)
    layer = captured.attribute(root, "layer")
    values = [root, captured.attribute(root, "scale"), captured.attribute(root, "class")]
    tensors = [captured.attribute(layer, "weight"), captured.attribute(layer, "bias")]
    read = captured.together(values, tensors)
    for name, other in (("scale", 3.0), ("class", "b")):
        (weight, bias), value = read() or (None, None), getattr(holder, name)
        assert weight is holder.layer.weight
        assert bias is holder.layer.bias
        setattr(holder, name, other)
        assert read() is None
        delattr(holder, name)
        assert read() is None
        setattr(holder, name, value)
    holder.layer = torch.nn.Linear(3, 3)
    assert [tensor.numel() for tensor in read() or ()] == [9, 3]
    del holder.layer.bias
    assert read() is None
    variables.clear()
    assert read() is None
