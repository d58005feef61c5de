"""Decides which values of a graph are in memory so that no product is computed twice.

A kernel computes products and the pointwise work after them, its *epilogue*. A value that is computed from a product
and that other kernels read would make each of them compute the product again; so it is stored, once, by the kernel that
completes it. The sum of a residual stream is such a value: the norm after it reads it, and so does the next sum.

``with_stored_values`` decides that for a whole graph, in one walk:

1. Every node has an *owner*, the kernel that computes it. A product's is that of all products of its activation that
   have its shape and format of weights. What is computed pointwise has the latest owner of its operands, and of equally
   late ones one with products, whose epilogue it is; anything else (a reduction, a concatenation, a slice of a product)
   is an owner of its own. What has no product and nothing else behind it has none: whoever reads it computes it.
2. Where an operand has another owner than the node that reads it, and its owner computes products, it *leaves* its
   kernel. Operands of products and results that leave are stored as they are, since they have to be in memory anyway.
3. What reads others can compute what it needs from any value on the way. Either one that all of them are computed from
   is stored, or they are, or else the products, from which each reader computes the pointwise work again: whichever
   costs less (``schedule/cost.py``), of equals the last, so that most of the work is in the epilogue.

What attention and its gradients compute in a kernel of their own is left to their families.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jitgen.families.blocks_of_rows import pairs
from jitgen.families.family import Partition
from jitgen.families.gemm.matrices import flattened, keeps_last_dimension, restored
from jitgen.families.gemm.orders import is_stored_along_rows
from jitgen.families.gemm.quantised_results import quantised_result
from jitgen.families.storage import for_elements, storage_of
from jitgen.ir import symbols
from jitgen.ir.graph import Node, kinds_of, walked
from jitgen.ir.index import Index
from jitgen.ir.nodes import CAT, CONTRACT, DEQUANTIZE, LARGEST, PRODUCTS, REDUCE, VIEW
from jitgen.ir.ops import OPS
from jitgen.ir.regions import Store
from jitgen.ir.views import inverse
from jitgen.kernel.operands import item_size
from jitgen.schedule.cost import Effort


@dataclass(eq=False)
class Owner:
    """Describes a kernel of which only the beginning is known.

    Attributes:
        number: of this owner, in the order in which they were met.
        depth: the greatest number of kernels that have to come before it, one after another.
        products: those that it computes; none for what computes no products.
        nodes: all that it computes, in order.
        is_fused: whether some product is computed inside the kernel of another family.
    """

    number: int
    depth: int
    products: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    is_fused: bool = False


def with_stored_values(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Makes ``values`` read temporaries where another kernel would compute a product again."""
    if PRODUCTS.isdisjoint(kinds_of(values)):
        return values
    index = Index(values)
    owners = _owners(index)
    roots = set(values)
    groups = [
        group
        for owner in dict.fromkeys(owners.values())
        if owner.products and not owner.is_fused and (group := _stored(owner, owners, index, roots, partition))
    ]
    if not groups:
        return values
    kept = {node for group in groups for node in group}
    temporaries = {node for node in kept.union(values) if partition.temporaries.get(node) is not None}
    inside: dict[Node, Node] = {}  # what a node becomes for its own kernel, and for what else reads it
    read: dict[Node, Node] = {}
    written: dict[Node, Node] = {}  # the temporaries that the kernels of ``kept`` write
    for node in index.order:
        own = [
            (inside if child in owners and owners[child] is owners.get(node) else read)[child] for child in node.inputs
        ]
        inside[node] = partition.mover.rebuilt(node, own)
        others = [read[child] for child in node.inputs]
        if node not in kept:
            read[node] = partition.mover.rebuilt(node, others)
        elif node in temporaries:
            read[node] = written[node] = partition.materialize(node)
        else:
            written[node], read[node] = _in_memory(inside[node], _is_activation(node, index, owners), partition)
    for group in groups:
        if len(group) > 1:
            partition.temporaries.compute_together([written[node] for node in group])
    return [(inside if value in temporaries else read)[value] for value in values]


def _is_activation(node: Node, index: Index, owners: Mapping[Node, Owner]) -> bool:
    """Returns whether a product has ``node``, or a view of it, as its left operand. Attention has its own products,
    which read operands in any order."""
    views = index.reached([node], lambda user: user is not node and user.kind is not VIEW)
    products = (user for view in views for user in index.users[view] if user.kind in PRODUCTS)
    return any(product.inputs[0] in views and not owners[product].is_fused for product in products)


def _in_memory(node: Node, is_activation: bool, partition: Partition) -> tuple[Node, Node]:
    """Stores ``node``: returns the temporary that is written, and what is read. The temporary has the rows and columns
    of its products, so that their kernel writes it, and what reads it reads a view. On a GPU a view whose last
    dimension is not contiguous is copied where it is an activation that products read along K alone (``orders.py``)."""
    store = flattened(0, node, partition.mover)
    if not store.movements:
        temporary = partition.materialize(node)
        return temporary, temporary
    matrix = partition.materialize(store.value)
    view = restored(Store(0, matrix, store.movements), node, partition.mover)
    is_across = is_activation and len(view.shape) > 1 and not keeps_last_dimension(store)
    is_copied = is_across and not is_stored_along_rows(view, partition)
    return matrix, partition.materialize(view) if is_copied else view


# ------------------------------------------------------------------------------------------------------------ owners


def _owners(index: Index) -> dict[Node, Owner]:
    """Returns the owner of each node of ``index`` that has one."""
    fused = _fused_products(index)
    inside = {node for result in pairs(index.roots, quantised_result).values() for node in result.inside}
    owners: dict[Node, Owner] = {}
    groups: dict[object, Owner] = {}
    for number, node in enumerate(index.order):
        before = [owners[child] for child in node.inputs if child in owners]
        latest = max(before, key=lambda owner: (owner.depth, bool(owner.products), owner.number), default=None)
        depth = 1 if latest is None else 1 + latest.depth
        if node.kind in PRODUCTS:
            key = node if node in fused else _group(node)
            owner = groups[key] = groups.get(key) or Owner(number, depth)
            owner.depth = max(depth, owner.depth)
            owner.is_fused = node in fused
            owner.products.append(node)
        elif latest is not None and (passes(node) or node in inside or (node.kind is VIEW and not latest.products)):
            owner = latest
        elif latest is not None or node.kind is REDUCE:
            owner = Owner(number, depth)
        else:
            continue
        owner.nodes.append(node)
        owners[node] = owner
    return owners


def passes(node: Node) -> bool:
    """Returns whether an epilogue computes ``node``: pointwise work, the largest of runs of columns, and views that are
    undone (``matrices.py``)."""
    return node.kind.is_pointwise or node.kind is LARGEST or (node.kind is VIEW and inverse(node.attrs) is not None)


def _group(product: Node) -> object:
    """Returns what the products that one region computes have in common."""
    x, weight, *groups = product.inputs
    base = weight.under_views
    return x, *groups, product.shape, product.attrs, base.attrs if base.kind is DEQUANTIZE else None


def _fused_products(index: Index) -> set[Node]:
    """Returns products with an exponential of other products as an operand, and these: attention and its gradients, as
    far as one can tell before their families have matched them."""
    powers: set[Node] = set()  # exponentials of products, and what is computed from these without another product
    products: set[Node] = set()  # what is computed from products, of the last ones before it
    fused: set[Node] = set()
    for node in index.order:
        if node.kind is CONTRACT:
            products.add(node)
            operands = [child for child in node.inputs if child in powers]
            fused |= {node, *_last_products(operands, powers, fused)} if operands else set()
        elif node.kind.is_pointwise or node.kind in (VIEW, REDUCE, CAT):
            if any(child in products for child in node.inputs):
                products.add(node)
            if any(child in powers for child in node.inputs) or (node.op in ("exp", "exp2") and node in products):
                powers.add(node)
    return fused


def _last_products(nodes: Iterable[Node], powers: Collection[Node], seen: Collection[Node]) -> set[Node]:
    """Returns the products that ``nodes`` are computed from without another one between, or a reduction of anything but
    ``powers``: the gradient of a result, of which a backward adds up rows, is in memory."""

    def below(node: Node) -> Iterable[Node]:
        passes = node.kind.is_pointwise or node.kind in (VIEW, CAT) or (node.kind is REDUCE and node in powers)
        return (child for child in node.inputs if child not in seen) if passes else ()

    return {node for node in walked((node for node in nodes if node not in seen), below) if node.kind is CONTRACT}


# ------------------------------------------------------------------------------------------------------------ stored


def _stored(
    owner: Owner, owners: Mapping[Node, Owner], index: Index, roots: Collection[Node], partition: Partition
) -> list[Node]:
    """Lists what ``owner`` stores for other kernels, with the results that it computes besides; empty if it has results
    alone."""
    own, whole, free = set(owner.nodes), list[Node](), dict[Node, set[Owner]]()
    results = [_without_views(node, own) for node in owner.nodes if node in roots]
    for node in owner.nodes:
        for user in index.users[node]:
            if user not in own and user.kind in PRODUCTS:
                whole.append(node)
            elif user not in own:
                free.setdefault(node, set()).add(owners[user])
    if not whole and not free:
        return []
    whole = [_without_views(node, own) for node in whole]
    kept = dict.fromkeys((*whole, *results))
    reached = _reached(owner, index, own, kept)
    left = {node: readers for node, readers in free.items() if node in reached and node not in kept}
    if left:
        kept |= dict.fromkeys(_cheapest(owner, owners, index, left, list(kept), partition))
    return list(kept)


def _without_views(node: Node, own: Collection[Node]) -> Node:
    """Returns what ``node`` is a view of, of the nodes ``own``."""
    while node.kind is VIEW and node.inputs[0] in own:
        node = node.inputs[0]
    return node


def _reached(owner: Owner, index: Index, own: Collection[Node], kept: Collection[Node]) -> set[Node]:
    """Returns the nodes of ``owner`` that are computed from its products otherwise than through ``kept``."""

    def readers(node: Node) -> Iterable[Node]:
        return (user for user in index.users[node] if user in own and user not in kept)

    return set(walked((product for product in owner.products if product not in kept), readers))


def _cheapest(
    owner: Owner,
    owners: Mapping[Node, Owner],
    index: Index,
    leaving: Mapping[Node, Collection[Owner]],
    kept: Sequence[Node],
    partition: Partition,
) -> Sequence[Node]:
    """Returns the values of ``owner`` to store so that all of ``leaving`` can be computed from them.

    Args:
        leaving: the values that other kernels read, and which kernels.
        kept: values that are stored anyway.
    """
    own = set(owner.nodes)
    order, common = _on_the_way(owner, index, own, leaving)
    products = [node for node in order if node.kind in PRODUCTS]
    readers = dict.fromkeys(reader for several in leaving.values() for reader in several)

    def cost(stored: Sequence[Node]) -> Effort:
        """Counts, for each element, the epilogue that computes ``stored``, and what each reader does behind."""
        moved, operations = _work(stored, (), owner, owners)
        moved += sum(item_size(node.dtype) for node in stored)
        for reader in readers:
            read = [node for node, several in leaving.items() if reader in several]
            more = _work(read, {*stored, *kept}, owner, owners)
            moved, operations = moved + more[0], operations + more[1]
        return Effort(moved, operations)

    ends = list(dict.fromkeys(_without_views(node, own) for node in leaving))
    latest: dict[int, Node] = {}  # of equal sizes the last one: each reader computes less behind it
    for node in reversed(common):
        if [node] != products:
            latest.setdefault(item_size(node.dtype), node)
    values = [[node] for node in latest.values()] + [ends] * (ends != products)
    if not values:
        return products
    best = min(values, key=lambda stored: cost(stored).microseconds(partition.device))
    elements = symbols.product(products[0].shape)
    costs = (for_elements(cost(stored), elements) for stored in (best, products))
    question = storage_of(best[-1], *costs)
    return best if partition.decide("gemm", question).fused else products


def _on_the_way(
    owner: Owner, index: Index, own: Collection[Node], leaving: Iterable[Node]
) -> tuple[list[Node], list[Node]]:
    """Returns the nodes of ``owner`` that ``leaving`` are computed from, and those of them that all are computed from
    alone."""
    needed = set(walked(leaving, lambda node: (child for child in node.inputs if child in own)))
    order = [node for node in owner.nodes if node in needed]
    position = {node: number for number, node in enumerate(order)}
    last_start = max(position[node] for node in order if node.kind in PRODUCTS)
    first_end = min(position[node] for node in leaving)
    reach, common = 0, list[Node]()  # the position up to which values are read of nodes before the one at hand
    for number, node in enumerate(order):
        if last_start <= number <= first_end and reach <= number and node.kind is not VIEW:
            common.append(node)
        reach = max(reach, *(position[user] for user in index.users[node] if user in position), 0)
    return order, common


def _work(
    values: Iterable[Node], stored: Collection[Node], owner: Owner, owners: Mapping[Node, Owner]
) -> tuple[int, int]:
    """Counts the bytes that are read and the operations that are done for an element of ``values``: from the products
    of ``owner`` in registers, from ``stored`` values and whatever else is in memory. What is repeated along some
    dimension counts for nothing."""
    moved = operations = 0

    def is_read(node: Node) -> bool:
        return node in stored or owners.get(node, owner) is not owner

    def below(node: Node) -> Sequence[Node]:
        is_inside = node.kind.is_pointwise or (node.kind is VIEW and node.under_expand is node)
        return node.inputs if is_inside and not is_read(node) else ()

    for node in walked(values, below):
        if is_read(node):
            moved += item_size(node.dtype)
        elif node.kind.is_pointwise:
            operations += OPS[node.op].flops if node.op in OPS else 0
        elif node.kind is not VIEW and node.kind not in PRODUCTS and not node.kind.is_number:
            moved += item_size(node.dtype)
    return moved, operations
