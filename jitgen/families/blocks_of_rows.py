"""Finds values that are quantised in blocks of a row, and spells them as one region computes them.

Codes have a scale for each ``BLOCK`` neighbours of a row, which follows from the largest magnitude of the block. A
graph has that as a reduction of the value in the shape (rows, blocks, ``BLOCK``), of which the codes are computed as
well as the scales, (rows, blocks). In a region over (rows, columns) what is reduced is a ``blocked`` node, and a scale
is stored once for the columns of its block (``Store.block``).

A kernel of which each block of a row is in a warp computes both without a pass of its own: the families of products
(``gemm/quantised_results.py``) and of rows have such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.ir import symbols
from jitgen.ir.analysis import nearest
from jitgen.ir.graph import Node, Shape, topological, walked
from jitgen.ir.nodes import PRODUCTS, REDUCE, VIEW
from jitgen.ir.regions import Region, Store, row_axes
from jitgen.ir.views import Mover
from jitgen.kernel.operands import item_size
from jitgen.quant.codes import BLOCK, CODES

FEWEST_COLUMNS = 256
"""Columns of a row from which on its threads have whole blocks."""
MOST_BYTES = 4
"""Bytes of an element that is read, at most: of wider ones a lane has too few for a warp to have a block."""

UNUSED = -1
"""The number of no tensor, for a node that stands for another one."""


@dataclass(frozen=True)
class QuantisedResult:
    """Describes codes and scales of one value.

    Attributes:
        codes, scales: the values that are stored.
        extremum: the reduction of each block that both are computed from.
        inside: the reduction and the views of it, which are computed in the product's kernel.
    """

    codes: Node
    scales: Node
    extremum: Node
    inside: frozenset[Node]


def extremum_of(codes: Node, scales: Node) -> QuantisedResult | None:
    """Returns ``codes`` and ``scales`` as those of one value, if both are computed from one reduction of its blocks,
    and the scales from nothing else; else None."""
    extremes = list(nearest(scales, [REDUCE], passes))
    if len(extremes) != 1 or len(scales.shape) != 2:
        return None
    (extremum,) = extremes
    source, attrs = extremum.inputs[0], extremum.attrs
    last = len(source.shape) - 1
    if attrs.kind != "max" or attrs.dims != (last,) or source.shape[last] != BLOCK or source.dtype != "float32":
        return None
    inside = {extremum}
    for root, expanded in ((codes, True), (scales, False)):
        for node in _views_of(extremum, root):
            chain = _chain(node, extremum)
            kinds = [view.attrs.kind for view in chain]
            spread = "expand" in kinds
            if node.shape != root.shape or spread != expanded or not set(kinds) <= {"expand", "reshape", "squeeze"}:
                return None
            if spread and (kinds.index("expand") or chain[0].shape != source.shape or kinds.count("expand") > 1):
                return None
            inside.update(chain)
    between = topological([scales], leaves=[REDUCE, VIEW])
    plain = all(node in inside or node.kind.is_pointwise or node.under_views.kind.is_number for node in between)
    return QuantisedResult(codes, scales, extremum, frozenset(inside)) if plain else None


def over_matrix(x: Node, tensor: Node, value: Node, mover: Mover) -> tuple[Node, Node]:
    """Returns the codes and scales of ``x``, which are computed of ``tensor``, as those of its ``value``: of a matrix,
    as the codes are, so that products of several dimensions of rows are one in both."""
    codes, scales = x.inputs
    one = mover.builder.make("input", (), tensor.dtype, codes.shape, (UNUSED,))
    whole = {id(tensor): mover.move(one, ("reshape",), tensor.shape)}
    codes, scales = (mover.substituted(node, dict(whole)) for node in (codes, scales))
    result = extremum_of(codes, scales)
    if result is not None and len(result.extremum.shape) != 3 and len(codes.shape) == 2:
        blocks = (*scales.shape, BLOCK)
        source = mover.move(mover.move(result.extremum.inputs[0], ("reshape",), codes.shape), ("reshape",), blocks)
        extremum = mover.builder.make("reduce", (source,), "float32", (*scales.shape, 1), ("max", (2,)), codes.location)
        spread = mover.move(mover.move(extremum, ("expand",), blocks), ("reshape",), codes.shape)
        memo = dict.fromkeys(map(id, result.inside), mover.move(extremum, ("reshape",), scales.shape))
        memo |= {id(node): spread for node in result.inside if node.shape == codes.shape}
        codes, scales = (mover.substituted(node, dict(memo)) for node in (codes, scales))
    matrix = mover.move(value, ("reshape",), codes.shape)
    return mover.substituted(codes, {id(one): matrix}), mover.substituted(scales, {id(one): matrix})


def stored_values(result: QuantisedResult, stores: tuple[int, int], shape: Shape, mover: Mover) -> tuple[Store, Store]:
    """Returns ``result`` as values over ``shape``, the rows and columns of a region: what is reduced is a ``blocked``
    node there, and each scale is that of all columns of its block."""
    make, like = mover.builder.make, mover.builder.like
    movements = () if result.codes.shape == shape else ((("reshape",), shape),)
    if movements:  # one of its sizes equals the region's by a guard alone
        moved = extremum_of(mover.move(result.codes, *movements[0]), result.scales)
        assert moved is not None, "a reshape to an equal shape changes nothing"
        result = moved
    source = mover.move(result.extremum.inputs[0], ("reshape",), shape)
    blocked = make("blocked", (source,), "float32", shape, ("max", BLOCK), result.extremum.location)
    memo = dict.fromkeys(map(id, result.inside), blocked)
    codes = mover.substituted(result.codes, dict(memo))
    for node in topological([result.scales], leaves=[REDUCE, VIEW]):
        if id(node) in memo:
            continue
        if node.kind is VIEW:  # of a number
            memo[id(node)] = mover.move(node, ("expand",), shape)
        else:
            memo[id(node)] = like(node, [memo[id(child)] for child in node.inputs], shape) if node.inputs else node
    blocks = (*shape[:-1], result.scales.shape[-1])
    of_scales = () if result.scales.shape == blocks else ((("reshape",), blocks),)
    return Store(stores[0], codes, movements), Store(stores[1], memo[id(result.scales)], of_scales, block=BLOCK)


def of_rows(codes: Node, scales: Node, mover: Mover) -> QuantisedResult | None:
    """Returns what ``codes`` and ``scales`` are of, if that is computed from reductions of whole rows; else None. The
    codes have the shape of these rows."""
    result = extremum_of(codes, scales)
    reduced = [] if result is None else [n for n in topological([codes]) if n.kind is REDUCE and n not in result.inside]
    if result is None or not reduced:
        return None
    shape = reduced[0].inputs[0].shape
    last = len(shape) - 1
    if any(node.inputs[0].shape != shape or node.attrs.dims != (last,) for node in reduced):
        return None
    if codes.shape != shape:  # of more dimensions, or of columns that equal the row's by a guard
        result = extremum_of(mover.move(codes, ("reshape",), shape), scales)
    if result is None or not _are_rows(result, shape, mover):
        return None
    columns = shape[-1]
    whole = mover.decide(symbols.compare("eq", symbols.mod(columns, BLOCK), 0))
    return result if whole and mover.decide(symbols.compare("le", FEWEST_COLUMNS, columns)) else None


def _are_rows(result: QuantisedResult, shape: Shape, mover: Mover) -> bool:
    """Returns whether the value is computed over ``shape``, pointwise of tensors, numbers and reductions of rows."""
    source = mover.move(result.extremum.inputs[0], ("reshape",), shape)

    def below(node: Node) -> Sequence[Node]:
        return () if node in result.inside or node.is_in_memory else node.inputs

    for node in walked([source, result.codes], below):
        if node in result.inside or node.under_views.kind.is_number:
            continue
        if node.is_in_memory:
            if item_size(node.dtype) > MOST_BYTES:
                return False
        elif node.kind is VIEW:
            if node.inputs[0].kind is not REDUCE or node.shape != shape:
                return False
        elif node.kind is not REDUCE and not (node.kind.is_pointwise and node.shape == shape):
            return False
    return True


def pairs(
    values: Sequence[Node], described_by: Callable[[Node, Node], QuantisedResult | None]
) -> Mapping[tuple[int, int], QuantisedResult]:
    """Returns those of ``values`` that are codes and scales of one value as ``described_by`` describes them, by their
    numbers."""
    scales = [number for number, value in enumerate(values) if value.dtype == "float32" and REDUCE in value.kinds]
    result = {}
    for number, value in enumerate(values) if scales else ():
        for other in scales if value.dtype in CODES else ():
            if (described := described_by(value, values[other])) is not None:
                result[number, other] = described
                break
    return result


def region_of_rows(family: str, result: QuantisedResult, stores: tuple[int, int], shape: Shape, mover: Mover) -> Region:
    """Makes the region of ``family`` that stores ``result`` as the results ``stores``, of which the codes have
    ``shape``."""
    codes, scales = stored_values(result, stores, result.codes.shape, mover)
    movements = () if result.codes.shape == shape else ((("reshape",), result.codes.shape),)
    return Region(family, row_axes(result.codes.shape, 1), (replace(codes, movements=movements), scales))


def passes(node: Node) -> bool:
    return node.kind.is_pointwise or node.kind is VIEW


def _views_of(extremum: Node, root: Node) -> list[Node]:
    """Lists the values that pointwise nodes under ``root`` read of ``extremum``: itself, or views of it."""
    nodes = topological([root], leaves=[REDUCE, *PRODUCTS])
    read = {child for node in nodes if node.kind is not VIEW for child in node.inputs if child.under_views is extremum}
    return [*read, *([root] if root.under_views is extremum else [])]


def _chain(view: Node, base: Node) -> Sequence[Node]:
    """Returns the views from ``base`` to ``view``, that next to ``base`` first."""
    chain = []
    while view is not base:
        chain.append(view)
        view = view.inputs[0]
    return chain[::-1]
