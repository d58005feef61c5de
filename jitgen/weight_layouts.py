"""Traced graphs with their quantised weights in another layout than the one they were traced with.

A trace reads a weight's parts as its backend has them (``weights.LAYOUTS``). A manifest has them ``portable``, so that
what was recorded with one backend can be built for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen import weights
from jitgen.families.layout import Memory
from jitgen.ir.graph import Builder, Graph, InputSpec, Node, input_shape, topological
from jitgen.ir.views import Strided, contiguous_strides
from jitgen.spec import dtype_name


@dataclass(frozen=True)
class Relaid:
    """A traced graph whose quantised weights lie in some layout, with a value for every symbol, and every input's
    memory."""

    graph: Graph
    environment: Mapping[str, Any]
    memory: Sequence[Memory]


def relaid(graph: Graph, environment: Mapping[str, Any], memory: Sequence[Memory], layout: str) -> Relaid:
    """``graph`` as it would have been traced with its quantised weights in ``layout``."""
    inputs, sizes, places = list(graph.inputs), dict(environment), list(memory)
    parts: dict[int, torch.Tensor] = {}
    for node in topological(graph.results):
        if node.op == "dequantize" and node.attrs[2] != layout:
            format, group_size, _ = node.attrs
            described = weights.described_parts(format, group_size, node.shape, layout)  # type: ignore[arg-type]
            parts |= {input.attrs[0]: part for input, part in zip(node.inputs, described, strict=True)}
    if not parts:
        return Relaid(graph, environment, memory)
    for index, part in parts.items():
        for dim in range(len(inputs[index].shape)):
            del sizes[f"s{index}_{dim}"]
        sizes |= {f"s{index}_{dim}": size for dim, size in enumerate(part.shape)}
        inputs[index] = InputSpec(dtype_name(part.dtype), input_shape(index, part.shape))
        places[index] = Memory(Strided(tuple(part.shape), contiguous_strides(part.shape)), places[index].alignment)
    builder, memo = Builder(), dict[int, Node]()
    for node in topological(graph.results):
        children = [memo[id(child)] for child in node.inputs]
        if node.op == "input":
            spec = inputs[node.attrs[0]]
            memo[id(node)] = builder.make("input", (), spec.dtype, spec.shape, node.attrs)
        else:
            attrs = (*node.attrs[:2], layout) if node.op == "dequantize" else node.attrs
            memo[id(node)] = builder.make(node.op, children, node.dtype, node.shape, attrs)
    outputs = tuple(memo[id(node)] for node in graph.outputs)
    mutated = tuple((index, memo[id(node)]) for index, node in graph.mutated)
    return Relaid(Graph(graph.name, tuple(inputs), outputs, graph.guards, mutated), sizes, places)
