"""The other numbers of rows for which a recorded call is prewarmed.

Kernels differ between buckets of row counts, which a family names (``Family.buckets``), and a size of 1 is traced
separately. One recorded call therefore stands for calls of the same function with a row count in each bucket, with any
of its row sizes equal to 1 and, if it was recorded with one row, with more rows. Recording a prefill is enough for the
decoding that follows it, and recording a step of decoding is enough for the prefill.

A *row size* here is a symbolic size that is a factor of the row count, such as batch, heads or sequence length.

``variants`` derives the other calls from a recorded one, when a manifest is prewarmed. ``enlarged`` does so when a call
is recorded: a graph has no symbols for sizes of 1, so that it cannot tell later which of them were row sizes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from jitgen.families import registry
from jitgen.ir import graph as graphs
from jitgen.ir import symbols
from jitgen.ir.graph import Builder, Graph, Guard, InputSpec, Node, equal_sizes, topological
from jitgen.ir.symbols import Expr, Scalar
from jitgen.ir.views import contiguous_strides
from jitgen.quant import weights
from jitgen.spec import DTYPES

Entry = Mapping[str, Any]
"""An entry of a manifest, as JSON."""

MAX_ROW_SIZES = 3
"""The number of row sizes of which every combination is built. Three are batch, heads and sequence length."""


def variants(entry: Entry) -> list[Entry]:
    """``entry`` and its variants with other row sizes; all other sizes are those of ``entry``."""
    graph = graphs.from_json(entry["graph"])
    names = _row_sizes(_row_buckets(graph, entry["environment"])[0])
    found = [entry, *_one_per_bucket(entry, graph)]
    for count in range(1, len(names) + 1):
        for ones in itertools.combinations(names, count):
            smaller = _with_ones(entry, graph, ones)
            if smaller is not None:
                found += [smaller, *_one_per_bucket(smaller, graphs.from_json(smaller["graph"]))]
    return found


def enlarged(leaves: Sequence[Any], tree: Any) -> Iterator[list[Any]]:
    """The arguments of a recorded call with sizes of 1 replaced by 2, in every combination, as tensors without memory.

    Sizes at the same position counted from the right broadcast together, so that they change together. The last
    dimension is never a row size. Only contiguous tensors are enlarged, and no tensors of quantised weights.
    """
    weight_tensors = weights.tensor_positions(tree)
    dense = {
        index: leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.is_contiguous() and index not in weight_tensors
    }
    from_right = sorted({dim for leaf in dense.values() for dim in range(2, leaf.dim() + 1) if leaf.shape[-dim] == 1})
    for count in range(1, len(from_right) + 1):
        for chosen in itertools.combinations(from_right[:MAX_ROW_SIZES], count):
            larger = list(leaves)
            for index, leaf in dense.items():
                sizes = [2 if size == 1 and leaf.dim() - dim in chosen else size for dim, size in enumerate(leaf.shape)]
                with torch._C.DisableTorchFunction():
                    larger[index] = torch.empty(sizes, dtype=leaf.dtype, device="meta")
            yield larger


def _row_buckets(graph: Graph, environment: Mapping[str, Any]) -> tuple[Scalar, list[int]]:
    """The row count of ``graph``, by the first family that counts rows, and the bucket ends of all families."""
    answers = [family.buckets(graph, environment) for family in registry.FAMILIES]
    found = [buckets for buckets in answers if buckets is not None]
    return found[0].rows, sorted({end for buckets in found for end in buckets.ends})


def _row_sizes(rows: Scalar) -> list[str]:
    """The names of the row sizes in the expression ``rows``, ``MAX_ROW_SIZES`` at most."""
    return sorted(name for name in symbols.symbols_of(rows) if name.startswith("s"))[:MAX_ROW_SIZES]


def _equal_names(graph: Graph, name: str) -> set[str]:
    """The names of the sizes that guards require to be equal to ``name``, including ``name``."""
    first = {other: size.args[0] for other, size in equal_sizes(graph.guards).items()}
    return {name} | {other for other in (*first, *first.values()) if first.get(other, other) == first.get(name, name)}


def _with_equal_sizes(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """``sizes``, and the same value for every size that guards require to be equal to one of them."""
    return {other: size for name, size in sizes.items() for other in _equal_names(graph, name)}


def _one_per_bucket(entry: Entry, graph: Graph) -> Iterator[Entry]:
    """One variant of ``entry`` for every bucket of row counts but its own that row sizes of 2 or more can reach."""
    recorded = entry["environment"]
    rows, ends = _row_buckets(graph, recorded)
    names = _row_sizes(rows)
    if not names or not ends:
        return
    seen = {bisect.bisect_left(ends, symbols.evaluate(rows, recorded))}
    for end in (*ends, 2 * ends[-1]):
        # The other row sizes are those recorded or, where their product exceeds the bucket, 2 each.
        for others in ({name: recorded[name] for name in names}, dict.fromkeys(names, 2)):
            rest = symbols.evaluate(rows, {**recorded, **others, names[0]: 1})
            sizes = _with_equal_sizes(graph, {**others, names[0]: max(2, end // max(rest, 1))})
            environment = {**recorded, **sizes}
            bucket = bisect.bisect_left(ends, symbols.evaluate(rows, environment))
            if bucket not in seen and all(guard.holds(environment) for guard in graph.guards):
                varied = _resized(entry, graph, environment)
                if varied is not None:
                    seen.add(bucket)
                    yield varied


def _with_ones(entry: Entry, graph: Graph, names: tuple[str, ...]) -> Entry | None:
    """``entry`` as if recorded with the sizes ``names`` equal to 1; None if its guards or strides rule that out."""
    ones = _with_equal_sizes(graph, dict.fromkeys(names, 1))
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
            memo[id(node)] = children[0]  # a trace at these sizes has no such view
        elif node.op == "scalar":
            value = symbols.substitute(node.attrs[0], ones)
            known = DTYPES[node.dtype].is_floating_point and not isinstance(value, Expr)
            memo[id(node)] = builder.scalar(float(value) if known else value, node.dtype)  # type: ignore[arg-type]
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
    """``value``, an attribute of a node, with ``sizes`` in place of their symbols."""
    if isinstance(value, tuple):
        return tuple(_substituted(item, sizes) for item in value)
    return symbols.substitute(value, sizes)


def _resized(entry: Entry, graph: Graph, environment: dict[str, Any]) -> Entry | None:
    """``entry`` with the sizes of ``environment``.

    None if a tensor whose sizes change is not contiguous, or if the caller owns the memory of the results: the strides
    that they would have are unknown.
    """
    if entry["results"]:
        return None
    inputs = []
    for memory, spec in zip(entry["inputs"], graph.inputs, strict=True):
        sizes = [int(symbols.evaluate(size, environment)) for size in spec.shape]
        if sizes == memory["sizes"]:
            inputs.append(memory)
        elif tuple(memory["strides"]) == contiguous_strides(memory["sizes"]):
            inputs.append({**memory, "sizes": sizes, "strides": list(contiguous_strides(sizes))})
        else:
            return None
    return {**entry, "environment": environment, "inputs": inputs}
