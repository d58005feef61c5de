"""Rewrites a traced graph for quantised weights in another layout than the one it was traced with.

A traced graph takes the tensors of a weight in the layout that its backend reads (``weights.layout_of``), and is
otherwise the same for each of them. In a manifest they are in the portable layout, so that a graph recorded with one
backend can be built for another. A weight that a function
gathers rows of and multiplies too keeps its layout, and the graph is for backends with that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir.graph import Builder, Graph, InputSpec, Node, input_shape, topological
from jitgen.ir.nodes import DEQUANTIZE, INPUT, VIEW
from jitgen.ir.views import Memory, Strided, contiguous_strides
from jitgen.quant import weights
from jitgen.quant.weights import Layouts
from jitgen.spec import dtype_name


@dataclass(frozen=True)
class Relaid:
    """Holds a rewritten graph, with the values of its symbols (``environment``) and the memory of each of its
    inputs."""

    graph: Graph
    environment: Mapping[str, Any]
    memory: Sequence[Memory]


def relaid(graph: Graph, environment: Mapping[str, Any], memory: Sequence[Memory], layouts: Layouts) -> Relaid:
    """Rewrites ``graph``, and what belongs to it, as a trace for the backend that reads ``layouts`` would have made
    them. With the portable one all weights are in that.

    Raises:
        UnsupportedError: the layout is not the portable one, and the graph has a weight that keeps another layout.
    """
    inputs, sizes, memories = list(graph.inputs), dict(environment), list(memory)
    changed: dict[int, torch.Tensor] = {}  # by index of the input
    elsewhere = {id(i) for node in topological(graph.results) if node.kind is not DEQUANTIZE for i in node.inputs}
    matrices = {id(n.inputs[0]) for n in topological(graph.results) if n.kind is VIEW and n.attrs.kind == "reshape"}
    wanted = dict[int, str]()
    for node in topological(graph.results):
        if node.kind is not DEQUANTIZE:
            continue
        own = wanted[id(node)] = layouts.own
        if layouts.own != "portable" and node.attrs.activation and 0 not in node.shape:
            format, group_size, _, activation = node.attrs
            columns: Any = node.shape[1]
            described = format, group_size, columns, activation
            own = wanted[id(node)] = weights.layout_for_codes(*described, layouts, of_groups=id(node) in matrices)
        if node.attrs.layout != own:
            # An embedding of the weight has addresses in the layout that it was traced with, and keeps it.
            if any(id(tensor) in elsewhere for tensor in node.inputs):
                if layouts.own == "portable":
                    wanted[id(node)] = node.attrs.layout
                    continue
                raise UnsupportedError(
                    f"{graph.name} has an embedding and a product of one quantised weight, and was recorded with the "
                    f"layout {node.attrs.layout!r}; this backend reads {own!r}: record it with this backend"
                )
            format, group_size, *_ = node.attrs
            tensors = weights.described_tensors(format, group_size, node.shape, own)  # type: ignore[arg-type]
            changed |= {input.attrs.number: tensor for input, tensor in zip(node.inputs, tensors, strict=True)}
    if not changed:
        return Relaid(graph, environment, memory)
    for index, tensor in changed.items():
        for dim in range(len(inputs[index].shape)):
            del sizes[f"s{index}_{dim}"]
        sizes |= {f"s{index}_{dim}": size for dim, size in enumerate(tensor.shape)}
        inputs[index] = InputSpec(dtype_name(tensor.dtype), input_shape(index, tensor.shape))
        dense = Strided(tuple(tensor.shape), contiguous_strides(tensor.shape))
        memories[index] = Memory(dense, memories[index].alignment)
    builder, memo = Builder(), dict[int, Node]()
    for node in topological(graph.results):
        children = [memo[id(child)] for child in node.inputs]
        if node.kind is INPUT:
            spec = inputs[node.attrs.number]
            memo[id(node)] = builder.make("input", (), spec.dtype, spec.shape, node.attrs)
        else:
            attrs = node.attrs._replace(layout=wanted[id(node)]) if node.kind is DEQUANTIZE else node.attrs
            memo[id(node)] = builder.make(node.op, children, node.dtype, node.shape, attrs)
    outputs = tuple(memo[id(node)] for node in graph.outputs)
    mutated = tuple((index, memo[id(node)]) for index, node in graph.mutated)
    return Relaid(Graph(graph.name, tuple(inputs), outputs, graph.guards, mutated), sizes, memories)
