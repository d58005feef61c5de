"""Which other numbers of rows a recorded call stands for.

A matmul kernel is one for each bucket of rows (``families/gemm/schedule.py``), a reduction of long rows, of very short
ones or of columns one for few of them and one for many (``families/reduction/schedule.py``), and a size of 1 is a trace
of its own.
From one recorded call follow the calls of the same function with as many rows as each bucket has, with each of the
sizes that count rows being 1, and, where it has one row, with more: a recorded prefill is enough for the decoding that
comes after it, and a recorded step of decoding for the prefill.

``variants`` says what prewarming builds beside the recorded call; ``enlarged`` is asked when a call is recorded, since
sizes of 1 leave nothing in a graph that says which of them count rows.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from jitgen import weights
from jitgen.ir import graph as graphs
from jitgen.ir import symbols
from jitgen.ir.graph import Builder, Graph, Guard, InputSpec, Node, equal_sizes, topological
from jitgen.ir.rows import are_columns
from jitgen.ir.symbols import Expr, Scalar
from jitgen.ir.views import contiguous_strides

Entry = Mapping[str, Any]
"""One entry of a manifest."""

MOST_SIZES = 3
"""Sizes that count rows of which every combination is built: batch, heads and sequence."""


def variants(entry: Entry) -> list[Entry]:
    """``entry``, and the same at other numbers of rows. Every size that does not count rows stays."""
    graph = graphs.from_json(entry["graph"])
    names = _row_sizes(graph)
    found = [entry, *_buckets(entry, graph)]
    for count in range(1, len(names) + 1):
        for ones in itertools.combinations(names, count):
            smaller = _with_ones(entry, graph, ones)
            if smaller is not None:
                found += [smaller, *_buckets(smaller, graphs.from_json(smaller["graph"]))]
    return found


def enlarged(leaves: Sequence[Any], tree: Any) -> Iterator[list[Any]]:
    """The arguments of a call with 2 in place of sizes of 1, tensors without memory.

    Sizes are taken together as they broadcast, by their place from the right; the last place counts no rows. Only dense
    tensors grow, and no parts of quantised weights.
    """
    parts = weights.part_positions(tree)
    grow = {
        index: leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.is_contiguous() and index not in parts
    }
    places = sorted({place for leaf in grow.values() for place in range(2, leaf.dim() + 1) if leaf.shape[-place] == 1})
    for count in range(1, len(places) + 1):
        for chosen in itertools.combinations(places[:MOST_SIZES], count):
            larger = list(leaves)
            for index, leaf in grow.items():
                sizes = [2 if size == 1 and leaf.dim() - dim in chosen else size for dim, size in enumerate(leaf.shape)]
                with torch._C.DisableTorchFunction():
                    larger[index] = torch.empty(sizes, dtype=leaf.dtype, device="meta")
            yield larger


def _first(graph: Graph, op: str) -> Node | None:
    return next((node for node in topological(graph.results) if node.op == op), None)


def _rows(graph: Graph) -> Scalar:
    """How many rows the first product of ``graph`` has, or its first reduction, or, where there is neither, its first
    result."""
    product, reduction = _first(graph, "matmul"), _first(graph, "reduce")
    if product is None and reduction is not None:
        sizes = reduction.inputs[0].shape
        return symbols.product(size for dim, size in enumerate(sizes) if dim not in reduction.attrs[1])
    first = product or graph.results[0]
    return symbols.product(first.shape[:-1]) if first.shape else 1


def _ends(graph: Graph, environment: Mapping[str, Any]) -> list[int]:
    """Upper ends of the buckets of rows that its kernels tell apart, of rows as long as ``environment`` says."""
    from jitgen.families.gemm.schedule import ROW_BUCKETS
    from jitgen.families.reduction.schedule import row_buckets

    ends: set[int] = set()
    for node in topological(graph.results):
        if node.op == "reduce":
            length = symbols.product(node.inputs[0].shape[dim] for dim in node.attrs[1])
            ends.update(row_buckets(symbols.evaluate(length, environment), are_columns(node)))
    return sorted(ends.union(ROW_BUCKETS if _first(graph, "matmul") else ()))


def _row_sizes(graph: Graph) -> list[str]:
    return sorted(name for name in symbols.symbols_of(_rows(graph)) if name.startswith("s"))[:MOST_SIZES]


def _tied(graph: Graph, name: str) -> set[str]:
    """Sizes that a guard holds equal to ``name``, itself among them."""
    first = {other: size.args[0] for other, size in equal_sizes(graph.guards).items()}
    return {name} | {other for other in (*first, *first.values()) if first.get(other, other) == first.get(name, name)}


def _sized(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """``sizes`` for every size that is tied to one of them too."""
    return {other: size for name, size in sizes.items() for other in _tied(graph, name)}


def _buckets(entry: Entry, graph: Graph) -> Iterator[Entry]:
    """``entry`` in every bucket of rows but its own, as far as sizes of 2 or more reach it."""
    names, rows, recorded = _row_sizes(graph), _rows(graph), entry["environment"]
    ends = _ends(graph, recorded)
    if not names or not ends:
        return
    seen = {bisect.bisect_left(ends, symbols.evaluate(rows, recorded))}
    for end in (*ends, 2 * ends[-1]):
        # The other sizes as they were recorded, or, where those are too many rows, two each.
        for others in ({name: recorded[name] for name in names}, dict.fromkeys(names, 2)):
            rest = symbols.evaluate(rows, {**recorded, **others, names[0]: 1})
            sizes = _sized(graph, {**others, names[0]: max(2, end // max(rest, 1))})
            environment = {**recorded, **sizes}
            number = bisect.bisect_left(ends, symbols.evaluate(rows, environment))
            if number not in seen and all(guard.holds(environment) for guard in graph.guards):
                varied = _resized(entry, graph, environment)
                if varied is not None:
                    seen.add(number)
                    yield varied


def _with_ones(entry: Entry, graph: Graph, names: tuple[str, ...]) -> Entry | None:
    """``entry`` as it would have been recorded with these sizes 1; None where its guards do not allow that."""
    ones = _sized(graph, dict.fromkeys(names, 1))
    guards = []
    for guard in graph.guards:
        expr = symbols.substitute(guard.expr, ones)
        if isinstance(expr, Expr):
            guards.append(Guard(expr, guard.value))
        elif expr != guard.value:
            return None
    builder, memo = Builder(), dict[int, Node]()
    for node in topological(graph.results):
        shape = tuple(symbols.substitute(size, ones) for size in node.shape)
        children = [memo[id(child)] for child in node.inputs]
        if node.op == "view" and node.attrs[0] in ("expand", "reshape") and shape == children[0].shape:
            memo[id(node)] = children[0]  # which a trace at these sizes would not have
        else:
            memo[id(node)] = builder.make(node.op, children, node.dtype, shape, _substituted(node.attrs, ones))  # type: ignore[arg-type]
    inputs = tuple(
        InputSpec(spec.dtype, tuple(symbols.substitute(size, ones) for size in spec.shape))  # type: ignore[misc]
        for spec in graph.inputs
    )
    smaller = Graph(
        graph.name,
        inputs,
        tuple(memo[id(node)] for node in graph.outputs),
        tuple(dict.fromkeys(guards)),
        tuple((index, memo[id(node)]) for index, node in graph.mutated),
    )
    return _resized({**entry, "graph": graphs.to_json(smaller)}, smaller, {**entry["environment"], **ones})


def _substituted(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_substituted(part, sizes) for part in value)
    return symbols.substitute(value, sizes)


def _resized(entry: Entry, graph: Graph, environment: dict[str, Any]) -> Entry | None:
    """``entry`` for other sizes; None where a tensor is not dense or is the caller's: its strides are unknown there."""
    if entry["results"]:
        return None
    places = []
    for place, spec in zip(entry["inputs"], graph.inputs, strict=True):
        sizes = [int(symbols.evaluate(size, environment)) for size in spec.shape]
        if sizes == place["sizes"]:
            places.append(place)
        elif tuple(place["strides"]) == contiguous_strides(place["sizes"]):
            places.append({**place, "sizes": sizes, "strides": list(contiguous_strides(sizes))})
        else:
            return None
    return {**entry, "environment": environment, "inputs": places}
