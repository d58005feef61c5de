"""Programs that equal graphs share (``jitgen/dynamo/program.py``): what is remembered of them, and for whom."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import jitgen
from jitgen.compilers import host
from jitgen.dynamo import program
from jitgen.dynamo.program import Program, called, program_of

ADD = 2
"""The number of the sum in the graph of ``function``."""


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) + 1


def shared(function: Callable[..., Any], *arguments: torch.Tensor) -> tuple[Program, list[Any]]:
    """The program of the graph of ``function``, and what is known of its values."""
    graph = fx.symbolic_trace(function).graph
    *nodes, output = graph.nodes
    inputs = graph.find_nodes(op="placeholder")
    for node, value in zip(inputs, arguments, strict=True):
        node.meta["example_value"] = value
    known: dict[fx.Node, Any] = dict(zip(inputs, arguments, strict=True))
    for node in nodes[len(inputs) :]:
        known[node] = called(node, known)
    return program_of(inputs, nodes[len(inputs) :], (output.args[0],), "shared"), list(known.values())


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> program._Programs:
    """An empty table of programs."""
    found = program._Programs()
    monkeypatch.setattr(program, "_programs", found)
    return found


@pytest.fixture
def trials(programs: program._Programs, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """The (specs, differentiable) of each import that is tried."""
    found, specialize = list[tuple[Any, bool]](), program.specialize

    def noted(resolver: Any, parameters: Any, specs: Any, device: Any, differentiable: bool) -> None:
        found.append((specs, differentiable))
        specialize(resolver, parameters, specs, device, differentiable)

    monkeypatch.setattr(program, "specialize", noted)
    return found


def refuse(monkeypatch: pytest.MonkeyPatch, target: Any, where: Callable[[], bool]) -> None:
    """Have calls of ``target`` refused where ``where()``."""
    before = program.called

    def refusing(node: fx.Node, values: Any) -> Any:
        if node.target is target and where():
            raise jitgen.UnsupportedError("no")
        return before(node, values)

    monkeypatch.setattr(program, "called", refusing)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("other", ["call", "trial"])
def test_a_trial_is_of_its_thread_alone(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3)
    shared_program, known = shared(function, x)
    ours, met = threading.get_ident(), list[Any]()

    def elsewhere() -> Any:
        try:
            return shared_program(x) if other == "call" else shared_program.refused(known)
        except jitgen.JitgenError as error:
            return str(error)

    def is_refused() -> bool:
        if threading.get_ident() != ours:
            return True
        if not met:  # the other thread does all its work within this trial
            with ThreadPoolExecutor(1) as pool:
                met.append(pool.submit(elsewhere).result(60))
        return False

    refuse(monkeypatch, operator.add, is_refused)
    assert shared_program.refused(known) == {}, "what another thread met is none of this trial's"
    assert met == ["no" if other == "call" else {ADD: "no"}]


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.usefixtures("programs")
def test_a_call_during_the_trial_of_another_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ours, met = torch.randn(3), threading.get_ident(), list[Any]()
    shared_program, known = shared(function, x)

    def call_elsewhere() -> bool:
        if threading.get_ident() == ours and not met:
            with ThreadPoolExecutor(1) as pool:
                met.append(pool.submit(shared_program, x).result(60))
        return False

    refuse(monkeypatch, torch.tanh, lambda: threading.get_ident() == ours)
    refuse(monkeypatch, operator.add, call_elsewhere)
    assert shared_program.refused(known) == {1: "no"}
    torch.testing.assert_close(met[0][0], function(x))


def test_equal_graphs_are_tried_where_gradients_are_others(
    trials: list[tuple[Any, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3)
    refuse(monkeypatch, operator.add, lambda: trials[-1][1])
    first, known = shared(function, x)
    second, with_gradients = shared(function, x.clone().requires_grad_())
    assert first is second
    assert first.refused(with_gradients) == {ADD: "no"}
    assert first.refused(known) == {}
    with torch.no_grad():
        assert first.refused(with_gradients) == {}
    assert first.refused(with_gradients) == {ADD: "no"}
    assert [differentiable for _, differentiable in trials] == [True, False], "equal ones are tried once"


def test_equal_graphs_are_tried_at_other_sizes(trials: list[tuple[Any, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, operator.add, lambda: trials[-1][0][0].shape[0] > 4)
    first, large = shared(function, torch.randn(5))
    second, small = shared(function, torch.randn(3))
    assert first is second
    assert [first.refused(known) for known in (large, small, large)] == [{ADD: "no"}, {}, {ADD: "no"}]
    assert len(trials) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert first.refused(large) == {ADD: "no"}
    assert len(trials) == 3


def test_nothing_is_remembered_where_nothing_was_tried(
    trials: list[tuple[Any, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_program, known = shared(function, torch.randn(3))
    assert shared_program.refused([None, *known[1:]]) == {}, "what cannot be tried"
    assert not trials

    def fault() -> bool:
        if len(trials) == 1:
            raise KeyError("a fault")
        return True

    refuse(monkeypatch, operator.add, fault)
    assert shared_program.refused(known) == {ADD: "'a fault'"}, "a mistake refuses the operation that it is made in"


def test_what_reads_an_unknown_value_is_not_refused_for_it(trials: list[tuple[Any, bool]]) -> None:
    def reader(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).real + 1

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        assert mode.shape_env is not None
        size = mode.shape_env.create_unbacked_symint()
        unknown = [None, size, torch.empty(size), mode.shape_env.create_unbacked_symfloat()]
    for count, value in enumerate(unknown):
        shared_program, known = shared(reader, torch.randn(count + 2))
        assert list(shared_program.refused([known[0], value, *known[2:]])) == [1]
    assert len(trials) == len(unknown)


def test_a_full_table_keeps_the_programs_of_the_model_at_hand(
    programs: program._Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program._Programs, "limit", 4)

    def layer(number: int) -> Program:
        return shared(lambda x: torch.tanh(x) + number, torch.randn(3))[0]

    made = [layer(number) for number in range(5)]
    assert len(programs) == 3
    assert [layer(number) for number in (2, 3, 4)] == made[2:]
    assert layer(0) is not made[0]


def test_a_program_is_there_though_another_thread_empties_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied(program._Programs):
        __slots__ = ()

        def __setitem__(self, key: Any, value: Program) -> None:
            super().__setitem__(key, value)
            self.clear()

    monkeypatch.setattr(program, "_programs", Emptied())
    assert isinstance(shared(function, torch.randn(3))[0], Program)
