"""Claims every ``scatter`` node that is a result.

Its base is left to do, into the same memory, unless the result is an argument that is updated and the base is that
argument; a region that updates memory runs after all that write it (``families/partition.py``). What the values and the
indices need other than pointwise operations is materialized, and so is a scatter that is no result itself. A scatter
that replaces distinct elements of an argument is left to pointwise kernels, which compute it beside other results.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.families.family import Claim, Partition
from jitgen.families.scatter import NAME
from jitgen.families.scatter.by_element import by_element, question
from jitgen.ir.gathers import to_iteration_space
from jitgen.ir.graph import Node, kinds_of
from jitgen.ir.nodes import CAT, REDUCE, SCAN, SCATTER, SORT
from jitgen.ir.regions import Region, Store, row_axes
from jitgen.ir.scatters import in_order


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims a region for each scatter among ``values``; from the others, scatters are taken out."""
    regions: list[Region] = []
    rest: list[Node | None] = []
    for position, node in enumerate(values):
        update = _pointwise_update(node, len(values) == 1, partition) if node.kind is SCATTER else None
        if update is not None:
            rest.append(update)
        elif node.kind is SCATTER and not partition.decide(NAME, question(node)).fused:
            rest.append(partition.temporaries.without(SCATTER, by_element(node, partition.mover)))
        elif node.kind is SCATTER:
            regions.append(_region(position, node, partition))
            rest.append(None if partition.is_updated(node) else partition.temporaries.without(SCATTER, node.inputs[0]))
        else:
            rest.append(partition.temporaries.without(SCATTER, node))
    return Claim(regions, rest)


def _pointwise_update(node: Node, is_alone: bool, partition: Partition) -> Node | None:
    """Returns ``node`` as a scatter that replaces distinct elements of an argument, with values and indices that a
    pointwise kernel can compute; None if it is none, or if a walk of its values is one kernel on a CPU."""
    if node.attrs.kind != "set" or not partition.is_updated(node):
        return None
    from jitgen.families.scatter.by_pairs import with_last_values
    from jitgen.families.scatter.distinct import is_distinct

    distinct: Node | None = node
    if not is_distinct(node, partition):
        is_one_kernel = is_alone and CAT not in kinds_of(node.inputs[1:])
        is_walked = is_one_kernel and not partition.device.is_gpu
        distinct = None if is_walked else with_last_values(node, partition, NAME)
    if distinct is None:
        return None
    base, *sources = distinct.inputs
    materialized = []
    for source in sources:
        source = partition.temporaries.without(SCATTER, source)
        # Reductions are left to their family, whose rows may be short enough for a pointwise kernel.
        is_left = source.kinds.isdisjoint((SCAN, SORT)) and (REDUCE not in source.kinds or source is sources[0])
        materialized.append(source if is_left else partition.materialize(source))
    return partition.mover.builder.like(node, (base, *materialized))


def _region(position: int, node: Node, partition: Partition) -> Region:
    base, *sources = node.inputs
    kind, coordinates, movements = node.attrs
    sources = [partition.temporaries.pointwise(source) for source in sources]
    walked = sum(dim not in coordinates for dim in range(len(sources[0].shape)))
    shape, coordinates, sources = in_order(sources, coordinates, partition.mover)
    target = movements[-1][1] if movements else base.shape
    movements = (*movements, *to_iteration_space(target, shape, coordinates))
    # The region reads its result and not the base, for which a number stands.
    nothing = partition.mover.builder.const(0, "int64")
    value = partition.mover.builder.make(
        "scatter", (nothing, *sources), node.dtype, shape, (kind, coordinates, ()), node.location
    )
    return Region(NAME, row_axes(shape, walked), (Store(position, value, movements),))
