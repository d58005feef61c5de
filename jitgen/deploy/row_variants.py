"""Derives the calls of other sizes for which a recorded call is prewarmed.

Kernels differ between buckets of sizes that vary from call to call, such as the number of rows or of the matrices of a
batch. Families name these sizes and buckets (``Family.buckets``). A size of 1 is traced separately. One recorded call
therefore stands for calls of the same function in every bucket, with any of its row sizes equal to 1 and, if it was
recorded with one row, with more rows. Recording a prefill is enough for the decoding that follows it, and recording a
step of decoding is enough for the prefill.

A *row size* here is a symbolic size on which one of the sizes depends that families name, such as batch, heads or
sequence length. A number among the arguments that such a size depends on varies too: Dynamo passes the length of a
sequence as a number beside the tensors that have it, and guards say that they are equal. Tensors keep the structure of
their strides: gaps between rows stay, and so does the order of dimensions in memory.

``variants`` derives the other calls from a recorded one, when a manifest is prewarmed. ``enlarged`` does so when a call
is recorded: a graph has no symbols for sizes of 1, so that it cannot tell later which of them were row sizes.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from jitgen.device import Device
from jitgen.families import registry
from jitgen.families.family import SizeBuckets
from jitgen.ir import graph as graphs
from jitgen.ir import symbols
from jitgen.ir.fixed import with_sizes
from jitgen.ir.graph import Graph, Guard, Shape, equal_sizes
from jitgen.ir.symbols import Expr, Scalar, symbol
from jitgen.quant import weights

Entry = Mapping[str, Any]
"""An entry of a manifest, as JSON."""

MAX_ROW_SIZES = 5
"""The number of row sizes of which every combination is built: for batched products the batch, heads, M, N
and K."""
MOST_COMBINATIONS = 128
"""Combinations of buckets that are built, at most. Where there are more, each size is varied alone."""


def variants(entry: Entry, device: Device) -> list[Entry]:
    """Returns ``entry`` and, for kernels of ``device``, its variants with other row sizes; its other sizes stay as they
    are."""
    graph = graphs.from_json(entry["graph"])
    all_variants = [entry]
    for ties in ((), *_ties(graph, entry["environment"], device)):
        all_variants += _variants(entry, ties, device)
    return list(
        {tuple(sorted(variant["environment"].items())): variant for variant in reversed(all_variants)}.values()
    )[::-1]


def _variants(entry: Entry, ties: tuple[Guard, ...], device: Device) -> Iterator[Entry]:
    """Yields the variants of ``entry`` in which ``ties`` hold too."""
    graph = _tied(entry, ties)
    buckets = _buckets(graph, entry["environment"], device)
    names, together = _sizes_of_rows(buckets), _vary_together(_bounded(buckets))
    yield from _one_per_bucket(entry, graph, device)
    for count in range(1, len(names) + 1):
        for ones in itertools.combinations(names, count):
            smaller = _with_ones(entry, graph, ones)
            if smaller is not None:
                yield smaller
                if count == 1 or together:
                    yield from _one_per_bucket(smaller, _tied(smaller, ties), device)


def _tied(entry: Entry, ties: tuple[Guard, ...]) -> Graph:
    graph = graphs.from_json(entry["graph"])
    return dataclasses.replace(graph, guards=(*graph.guards, *ties))


def _ties(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[tuple[Guard, ...]]:
    """Returns, for each size of rows, guards that keep what was equal to it in the recorded call: numbers, which may be
    the length of a sequence, and sizes of other inputs, such as states of which ids of as many tokens choose rows. The
    graph has no guard that says so. Of several such sizes, of which some may be equal by chance as heads are, each is
    kept alone too."""
    names = [name for name, value in environment.items() if name.startswith("a") and type(value) is int]
    names += [name for spec in graph.inputs for size in spec.shape[:-1] or spec.shape for name in _names(size)]
    names = [name for name in names if name not in _equal_sizes(graph)]
    ties = []
    for size in _sizes_of_rows(_buckets(graph, environment, device)):
        equal = [name for name in names if environment[name] == environment[size] and name != size]
        guards = tuple(Guard(Expr("eq", (symbol(name), symbol(size)), "bool"), True) for name in equal)
        ties += [guards, *((guard,) for guard in guards)] if len(guards) > 1 else [guards] if guards else []
    return ties


def combinations_left_out(entry: Entry, device: Device) -> int:
    """Returns how many combinations of buckets have no variant because they exceed ``MOST_COMBINATIONS``."""
    buckets = _bounded(_buckets(graphs.from_json(entry["graph"]), entry["environment"], device))
    return 0 if _vary_together(buckets) else _combinations(buckets) - sum(len(size.ends) for size in buckets) - 1


def fixed_by_numbers(entry: Entry, variants: Sequence[Entry], device: Device) -> list[str]:
    """Returns, in words, the sizes that depend on a number among the arguments and stay in one bucket in all of
    ``variants``: guards tie the number to more than one size."""
    buckets = _bounded(_buckets(graphs.from_json(entry["graph"]), entry["environment"], device))
    reached = [{_bucket(size, variant["environment"]) for variant in variants} for size in buckets]
    return [
        symbols.format_expr(size.size)
        for size, indices in zip(buckets, reached, strict=True)
        if len(indices) == 1 and any(name.startswith("a") for name in _names(size.size))
    ]


def _bucket(buckets: SizeBuckets, environment: Mapping[str, Any]) -> int:
    """Returns the index of the size's bucket."""
    return bisect.bisect_left(buckets.ends, symbols.evaluate(buckets.size, environment))


def _combinations(buckets: Sequence[SizeBuckets]) -> int:
    return math.prod(len(size.ends) + 1 for size in buckets)


def _vary_together(buckets: Sequence[SizeBuckets]) -> bool:
    """Returns whether every combination of ``buckets`` is built."""
    return _combinations(buckets) <= MOST_COMBINATIONS


def _bounded(buckets: Sequence[SizeBuckets]) -> list[SizeBuckets]:
    """Keeps the sizes whose bucket a call can change."""
    return [size for size in buckets if size.ends and _names(size.size)]


def enlarged(leaves: Sequence[Any], tree: Any) -> Iterator[list[Any]]:
    """Yields the arguments of a recorded call with sizes of 1 replaced by 2, in every combination, as tensors without
    memory.

    Sizes at the same position counted from the right broadcast together, so that they change together. The last
    dimension is never a row size. Tensors of quantised weights are not enlarged.
    """
    weight_tensors = weights.tensor_positions(tree)
    dense = {
        index: leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and index not in weight_tensors
    }
    from_right = sorted({dim for leaf in dense.values() for dim in range(2, leaf.dim() + 1) if leaf.shape[-dim] == 1})
    for count in range(1, len(from_right) + 1):
        for chosen in itertools.combinations(from_right[:MAX_ROW_SIZES], count):
            larger = list(leaves)
            for index, leaf in dense.items():
                sizes = [2 if size == 1 and leaf.dim() - dim in chosen else size for dim, size in enumerate(leaf.shape)]
                strides = resized_strides(leaf.shape, leaf.stride(), sizes)
                with torch._C.DisableTorchFunction():
                    larger[index] = torch.empty_strided(sizes, strides, dtype=leaf.dtype, device="meta")
            yield larger


def _buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """Returns the sizes of ``graph`` that vary, each once, with the ends of the buckets of all families. Of sizes that
    guards require to be equal, one stands for all."""
    named: list[SizeBuckets] = []
    graph = with_sizes(graph, _equal_sizes(graph)) or graph
    inside: set[int] = set()
    for family in registry.FAMILIES:
        of_family = family.buckets(graph, environment, device)
        named += [varied for varied in of_family if id(varied.node) not in inside]
        inside |= {id(node) for varied in of_family for node in varied.inside}
    varying = {name for varied in named if varied.varies for name in _names(varied.size)}
    ends: dict[Scalar, set[int]] = {}
    for varied in named:
        if varied.varies or varying.issuperset(_names(varied.size)):
            ends.setdefault(varied.size, set()).update(varied.ends)
    return [SizeBuckets(size, tuple(sorted(bounds))) for size, bounds in ends.items()]


def _names(size: Scalar) -> list[str]:
    """Returns the names of the tensor sizes in ``size``, and then those of the numbers."""
    return sorted(set(symbols.symbols_of(size)), key=lambda name: (not name.startswith("s"), name))


def _sizes_of_rows(buckets: Sequence[SizeBuckets]) -> list[str]:
    """Returns the names of at most ``MAX_ROW_SIZES`` row sizes of tensors: a trace depends on whether these are 1, and
    not on a number."""
    names = dict.fromkeys(name for size in buckets for name in _names(size.size) if name.startswith("s"))
    return list(names)[:MAX_ROW_SIZES]


def _equal_sizes(graph: Graph) -> dict[str, Expr]:
    """Maps each symbol to the one that stands for all that guards require to be equal, a tensor's size if there is one
    among them."""
    stands = {name: size for name, size in equal_sizes(graph.guards).items() if isinstance(size, Expr)}
    for number in {size for size in stands.values() if not size.args[0].startswith("s")}:
        alike = [name for name, size in stands.items() if size == number]
        first = min((name for name in alike if name.startswith("s")), default=None)
        if first is not None:
            stands |= dict.fromkeys([*alike, number.args[0]], symbol(first))
            del stands[first]
    return stands


def _with_equal_sizes(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns ``sizes``, with the same value for every size that guards require to be equal to one of them."""
    first = {name: size.args[0] for name, size in _equal_sizes(graph).items()}
    value = {first.get(name, name): size for name, size in sizes.items()}
    return {name: value[first.get(name, name)] for name in (*value, *first) if first.get(name, name) in value}


def _one_per_bucket(entry: Entry, graph: Graph, device: Device) -> Iterator[Entry]:
    """Yields one variant of ``entry`` for every reachable combination of buckets but its own; if these are too many,
    for every other bucket of every single size."""
    recorded = entry["environment"]
    buckets = _bounded(_buckets(graph, recorded, device))
    # A size such as batch * length is set by the length once the batch is what another size asks for.
    buckets.sort(key=lambda size: len(_names(size.size)))

    def combination(environment: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(_bucket(size, environment) for size in buckets)

    seen = {combination(recorded)}
    groups = [buckets] if _vary_together(buckets) else [[size] for size in buckets]
    for sizes in itertools.chain.from_iterable(_reaching(group, recorded, frozenset()) for group in groups):
        environment = {**recorded, **_with_equal_sizes(graph, sizes)}
        if combination(environment) not in seen and all(guard.holds(environment) for guard in graph.guards):
            seen.add(combination(environment))
            yield _resized(entry, graph, environment)


def _reaching(
    buckets: Sequence[SizeBuckets], environment: Mapping[str, Any], fixed: frozenset[str]
) -> Iterator[dict[str, int]]:
    """Yields row sizes with which the sizes of ``buckets`` are in every combination of buckets; names in ``fixed`` keep
    the value that they have in ``environment``."""
    if not buckets:
        yield {}
        return
    (first, *others), ends = buckets, buckets[0].ends
    free = [name for name in _names(first.size) if name not in fixed]
    if not free:
        yield from _reaching(others, environment, fixed)
        return
    # What is recorded stands for its own bucket: guards may fix a size, such as heads by the rows of a weight.
    recorded = {name: environment[name] for name in free}
    for further in _reaching(others, environment, fixed | set(free)):
        yield {**recorded, **further}
    for end in (*ends, 2 * ends[-1]):
        # The other row sizes are those recorded or, where their product exceeds the bucket, 2 each.
        for rest in (recorded, dict.fromkeys(free, 2)):
            factor = symbols.evaluate(first.size, {**environment, **rest, free[0]: 1})
            least = 2 if free[0].startswith("s") else 1  # a tensor's size of 1 is another trace, a number of 1 is not
            sizes = {**rest, free[0]: max(least, end // max(factor, 1))}
            for further in _reaching(others, {**environment, **sizes}, fixed | set(free)):
                yield {**sizes, **further}


def _with_ones(entry: Entry, graph: Graph, names: tuple[str, ...]) -> Entry | None:
    """Returns ``entry`` as if recorded with the sizes ``names`` equal to 1; None if guards or strides rule that out."""
    ones = _with_equal_sizes(graph, dict.fromkeys(names, 1))
    smaller = with_sizes(
        graphs.from_json(entry["graph"]), {name: size for name, size in ones.items() if name.startswith("s")}
    )
    environment = {**entry["environment"], **ones}
    if smaller is None or not all(guard.holds(environment) for guard in (*smaller.guards, *graph.guards)):
        return None
    return _resized({**entry, "graph": graphs.to_json(smaller)}, smaller, environment)


def _resized(entry: Entry, graph: Graph, environment: dict[str, Any]) -> Entry:
    """Returns ``entry`` with the sizes of ``environment``."""

    def resized(memory: Mapping[str, Any], shape: Shape) -> Mapping[str, Any]:
        sizes = [int(symbols.evaluate(size, environment)) for size in shape]
        return {**memory, "sizes": sizes, "strides": resized_strides(memory["sizes"], memory["strides"], sizes)}

    inputs = [resized(memory, spec.shape) for memory, spec in zip(entry["inputs"], graph.inputs, strict=True)]
    results = [resized(memory, node.shape) for memory, node in zip(entry["results"], graph.outputs, strict=False)]
    return {**entry, "environment": environment, "inputs": inputs, "results": results}


def resized_strides(sizes: Sequence[int], strides: Sequence[int], resized: Sequence[int]) -> list[int]:
    """Returns the strides, in elements, that a tensor of these ``sizes`` and ``strides`` has when its sizes are
    ``resized``.

    Dimensions keep their order in memory. A dimension that follows the one inside it without a gap still does. The
    stride of one with a gap, such as the rows of ``h[:, :64]``, stays as it is, or becomes the least multiple of it
    that is large enough. Dimensions that overlap, such as expanded ones, keep their strides.
    """
    result = list(strides)
    extent = grown = 1  # of the dimensions inside, in elements: as recorded and as resized
    for dim in sorted(range(len(sizes)), key=lambda dim: (strides[dim], -dim)):
        stride = strides[dim]
        if stride == extent:
            result[dim] = grown
        elif stride > extent:
            result[dim] = stride * -(-grown // stride)
        if stride:
            extent, grown = stride * max(sizes[dim], 1), result[dim] * max(resized[dim], 1)
    return result
