"""Decorated methods: every instance has its own traces, by identity, and what is remembered keeps none alive."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from jitgen_cases import compiled

import jitgen

x = torch.tensor([1.0, 2.0, 3.0])


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3), requires_grad=False)

    @jitgen.jit
    def scaled(self, x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        """Scales."""
        return x * self.weight * by


class Child:
    def __init__(self, parent: Any):
        self.parent = parent
        self.shift = 1.0


class Equal:
    """Equal to every other, with a child that refers to it."""

    def __init__(self, factor: float):
        self.factor = factor
        self.child = Child(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 1

    @jitgen.jit
    def scaled(self, x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * self.factor * by + self.child.parent.child.shift


@dataclasses.dataclass
class Unhashable:
    factor: float

    @jitgen.jit
    def scaled(self, x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * self.factor * by


class Slotted:
    """Without weak references."""

    __slots__ = ("factor",)

    def __init__(self, factor: float):
        self.factor = factor

    @jitgen.jit
    def scaled(self, x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * self.factor * by


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_methods_have_what_functions_have() -> None:
    module = Module()
    expected = x * module.weight * 2
    same(module.scaled(x), expected)
    same(module.scaled.reference(x), expected)
    same(module.scaled.bind(x, 2.0)(x, 3.0), x * module.weight * 3)
    (first, _) = module.scaled.specializations
    assert first.kernels[0].entry in module.scaled.source(x)
    (kernel,) = module.scaled.lower(jitgen.TensorSpec(("M", 3), torch.float32)).kernels
    assert kernel.backend == "cpp"
    assert isinstance(module.scaled, jitgen.JitFunction)
    assert module.scaled == module.scaled != Module().scaled
    assert list(inspect.signature(module.scaled).parameters) == ["x", "by"]
    assert (module.scaled.__name__, module.scaled.__doc__) == ("scaled", "Scales.")
    assert module.scaled.__module__ == __name__


def test_equal_instances_have_results_of_their_own() -> None:
    first, second = Equal(2.0), Equal(5.0)
    for instance in (first, second, first):
        same(instance.scaled(x), x * instance.factor * 2 + 1)
    first.child = Child(first)
    first.child.shift = 7.0
    same(first.scaled(x), x * 4 + 7)
    first.child.parent = second
    same(first.scaled(x), x * 4 + 1)


@pytest.mark.parametrize("instance", [Unhashable(2.0), Slotted(2.0)], ids=["unhashable", "no weak references"])
def test_instances_of_every_kind(instance: Any) -> None:
    for factor in (2.0, 3.0, 2.0):
        instance.factor = factor
        for _ in range(2):
            same(instance.scaled(x), x * factor * 2)


def test_look_ups_of_a_method_share_its_traces() -> None:
    instance = Unhashable(2.0)
    with compiled() as events:
        for _ in range(3):
            instance.scaled(x)
    assert len(events) <= 1
    assert len(instance.scaled.specializations) == 1


@pytest.mark.parametrize("make", [Module, lambda: Equal(2.0), lambda: Unhashable(2.0)])
@pytest.mark.quick(where=lambda make: make is Module)
def test_calls_keep_no_instance_alive(make: Any) -> None:
    instance = make()
    for _ in range(2):
        instance.scaled(x)
        instance.scaled(x, out=torch.empty(3))
    plan, method = instance.scaled.bind(x, 2.0), instance.scaled
    expected = method(x)
    gone = [weakref.ref(instance)]
    if isinstance(instance, Module):
        gone.append(weakref.ref(instance.weight))
    del instance
    gc.collect()
    same(plan(x, 2.0), expected)
    del plan
    gc.collect()
    same(method(x), expected)
    del method
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_weights_are_freed_with_their_module() -> None:
    module = Module()
    module.scaled(x)
    gc.collect()
    gone = weakref.ref(module.weight)
    gc.disable()
    try:
        del module
        assert gone() is None, "without waiting for the garbage collector"
    finally:
        gc.enable()


def test_a_method_keeps_its_instance_alive() -> None:
    method = Unhashable(2.0).scaled
    plan = Unhashable(3.0).scaled.bind(x, 2.0)
    gc.collect()
    same(method(x), x * 4)
    same(plan(x, 2.0), x * 6)


def test_instances_are_copied_after_a_call() -> None:
    module = Module()
    expected = module.scaled(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        same(other.scaled(x), expected)
        other.weight = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        same(other.scaled(x), torch.zeros(3))
        same(module.scaled(x), expected)


def test_methods_and_functions_are_copied_as_pythons_are() -> None:
    module = Module()
    for method in (copy.deepcopy(module.scaled), pickle.loads(pickle.dumps(module.scaled))):
        assert isinstance(method, jitgen.JitFunction)
        assert method.__wrapped__.__self__ is not module
        same(method(x), module.scaled(x))
    assert copy.deepcopy(Module.scaled) is pickle.loads(pickle.dumps(Module.scaled)) is Module.scaled


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.shift = 1.0

    @jitgen.jit
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.shift


class Derived(Base):
    @jitgen.jit
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor(x)

    @jitgen.jit
    def factor(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() - self.shift

    @property
    @jitgen.jit
    def doubled(self) -> torch.Tensor:
        return self.weight * 2


def test_decorated_methods_call_decorated_methods() -> None:
    module = Derived()

    def expected() -> torch.Tensor:
        return (x * module.weight + module.shift) * (x.exp() - module.shift)

    for change in (lambda: None, lambda: module.weight.fill_(3.0), lambda: setattr(module, "shift", 4.0)):
        change()
        for _ in range(2):
            torch.testing.assert_close(module(x), expected())
    module.weight = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    torch.testing.assert_close(module(x), expected())
    torch.testing.assert_close(module.forward.reference(x), expected())


class OfTheClass:
    factor = 2.0

    @jitgen.jit
    @classmethod
    def outside(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor

    @classmethod
    @jitgen.jit
    def inside(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor

    @jitgen.jit
    @staticmethod
    def static_outside(x: torch.Tensor) -> torch.Tensor:
        return x * OfTheClass.factor

    @staticmethod
    @jitgen.jit
    def static_inside(x: torch.Tensor) -> torch.Tensor:
        return x * OfTheClass.factor


class Heir(OfTheClass):
    factor = 11.0


@pytest.mark.parametrize("name", ["outside", "inside", "static_outside", "static_inside"])
@pytest.mark.quick(where=lambda name: name in ("outside", "static_inside"))
def test_class_and_static_methods_in_either_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for factor in (2.0, 5.0):
        monkeypatch.setattr(OfTheClass, "factor", factor)
        for owner in (OfTheClass, Heir, OfTheClass(), Heir()):
            same(getattr(owner, name)(x), x * (factor if "static" in name else owner.factor))


def test_a_decorated_property_is_an_error_with_the_remedy() -> None:
    with pytest.raises(TypeError, match="write @property above @jit"):
        jitgen.jit(property(lambda self: self))


def plain(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Holder:
    def __init__(self) -> None:
        self.by_name, self.made_here = Module.scaled, jitgen.jit(plain)
        self.of_method = jitgen.jit(self.shifted)
        self.shift = 1.0

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_holders_of_jit_functions_are_copied_after_a_call() -> None:
    holder = Holder()
    expected = holder.made_here(x)
    holder.of_method(x)
    for other in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        assert other.by_name is Module.scaled
        same(other.made_here(x), expected)
        other.shift = 5.0
        same(other.of_method(x), x + 5)
    same(holder.of_method(x), x + 1)


def test_plans_are_not_copied() -> None:
    plan = jitgen.jit(plain).bind(x)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="bind again"):
            copied(plan)
