"""Graphs of functions that are jitgen's own (``jitgen/trace/importing.py``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import jitgen
from jitgen.ir.graph import to_json
from jitgen.trace.guards import Guards
from jitgen.trace.importing import further_input, imported
from jitgen.trace.request import TraceRequest
from jitgen.trace.run import trace
from jitgen.trace.traced import Traced

CPU = torch.device("cpu")


def request(*leaves: Any) -> TraceRequest:
    return TraceRequest(leaves, pytree.tree_flatten((leaves, {}))[1], Guards({}), CPU)


def graph_of(function: Any, *leaves: Any) -> Traced:
    return imported(function, "function", request(*leaves))


def softmax(x: torch.Tensor, y: torch.Tensor) -> Any:
    scores = torch.nn.functional.layer_norm(x @ y, (y.shape[1],))
    return torch.softmax(scores, -1), scores.sum(0), x.shape[0] * 2


def test_an_import_makes_the_graph_of_a_trace() -> None:
    leaves = torch.randn(3, 4), torch.randn(4, 5)
    found, wanted = graph_of(softmax, *leaves), trace(softmax, "function", request(*leaves))
    assert to_json(found.graph) == to_json(wanted.graph)
    assert (found.leaves, found.tree, found.captured) == (wanted.leaves, wanted.tree, ())


def test_settings_are_guarded() -> None:
    found = graph_of(softmax, torch.randn(3, 4), torch.randn(4, 5))
    before = torch.get_float32_matmul_precision()
    assert all(guard.holds() for guard in found.guards)
    try:
        torch.set_float32_matmul_precision("medium" if before == "highest" else "highest")
        assert not all(guard.holds() for guard in found.guards)
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_an_import_cannot_express_is_refused() -> None:
    table = torch.ones(3)
    with pytest.raises(jitgen.JitgenError, match="neither an argument nor reachable"):
        graph_of(lambda x: x + table, torch.ones(3))
    with pytest.raises(jitgen.JitgenError, match="no row for"):
        graph_of(torch.fft.fft, torch.ones(3))
    with pytest.raises(jitgen.TraceError, match="known only when the kernel runs"):
        graph_of(lambda x: x if x.sum() > 0 else -x, torch.ones(3))
    with pytest.raises(AssertionError, match="no import"):
        further_input(torch.ones(3))


def test_a_further_input_stands_for_a_value_that_torch_computes() -> None:
    other = torch.empty(2, 1, device="meta")
    found = graph_of(lambda x: x * further_input(other), torch.ones(3))
    assert [spec.shape[-1] == 1 for spec in found.graph.inputs] == [False, True]
    assert len(found.graph.outputs[0].shape) == 2
