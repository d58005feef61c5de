"""Decides which values are computed once and stored, because they are read through several views.

A view is moved to the operands of what it is of (``ir/views.py``), which costs nothing where one view is moved, or
where several choose disjoint elements, as the queries, keys and values of one product. Where several read the same
elements, each would have a scan, a sort or a product of its own, and a scan or sort of which disjoint slices are all
would be many short ones. These are stored instead, and the views are of the memory, unless it costs less to compute
them for each view (``storage.py``).

Neighbours: ``families/moved.py`` asks before it moves views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jitgen.families.family import Partition
from jitgen.families.storage import storage_of
from jitgen.ir import symbols
from jitgen.ir.analysis import at_own_coordinates, nearest
from jitgen.ir.graph import Movement, Node, Shape, topological, walked
from jitgen.ir.index import Index
from jitgen.ir.nodes import CAST, CAT, CONTRACT, COUNTED, GATHER, INPUT, PRODUCTS, REDUCE, SCAN, SORT, TAKEN, VIEW
from jitgen.ir.symbols import Scalar
from jitgen.ir.views import Decide
from jitgen.kernel.operands import item_size
from jitgen.quant.activations import BLOCKS_OF_ROWS
from jitgen.quant.codes import SIGNED
from jitgen.schedule.cost import Effort

MOST_CHAINS = 16
"""Chains of views of one value that are told apart; a value with more is read through several of them anyway."""

FEWEST_TERMS = 3
"""Slices from which on what is repeated along other dimensions is stored, and read in each."""

COMPARISONS = 500
"""Operations by which a sorted element is counted: a bitonic network of 1,024 elements has 55 stages, each of which
fetches and compares a neighbour."""

MOST_CHOSEN = 4
"""The most tensors that are each read at computed indices, in place of one that is computed of them."""

SAME_ORDER = ("reshape", "unsqueeze", "squeeze", "detach", "untracked_view")
"""Views whose elements are all of what they are of, in the same order."""

Chain = tuple[Movement, ...]
"""The views between a value and whoever reads it, the innermost first."""


def stored_values(index: Index, partition: Partition, same: Callable[[Shape, Shape], bool]) -> frozenset[int]:
    """Returns the ids of the nodes to store: scans and sorts, products with several views as results, values that are
    computed from reductions and returned in several orders, and operands of attention that are returned.

    Args:
        same: whether two shapes are equal, so that one is no expansion of the other.
    """
    decide = partition.mover.decide

    def is_stored(node: Node, read: Collection[Chain]) -> bool:
        is_of_several = not are_disjoint(read, node.attrs.dim) or _are_all(read, node.shape, decide)
        return is_of_several and _costs_less(node, node, read, partition)

    chains = _chains(index, frozenset(), same)
    scans = [node for node in index.order if node.kind is SCAN and not _is_of_slices(node, chains[node], index)]
    stored = {node for node in scans if is_stored(node, chains[node])}
    sorts: dict[tuple[object, ...], list[Node]] = {}
    for node in index.order:
        if node.kind is SORT:
            sorts.setdefault((id(node.inputs[0]), *node.attrs[1:3]), []).append(node)
    for several in sorts.values():
        ranks = {(node.attrs.start, node.shape) for node in several}
        read = set[Chain]().union(*(chains[node] for node in several))
        cut = [_ranks_read(node, index) for node in several]
        one = cut[0].kind is VIEW and len({(node.attrs[1:], node.shape) for node in cut}) == 1
        viewed = [node for node in cut if _is_viewed(node, index)]
        if one and any(len(set(index.users[node])) > 1 for node in viewed):
            stored.update(viewed)  # whatever it costs: a warp or a block has all ranks at once
        elif len(ranks) == 1 and is_stored(several[0], read):
            stored.update((viewed or cut) if one else several)
    stored |= _taken_apart(chains, index)
    counted = [node for node in index.order if node.kind is COUNTED]
    if any(index.users[node] for node in counted):  # one kernel has all that is counted of a row
        stored.update(counted)
    if counted or any(node.under_views.kind is SORT for node in stored):
        stored.update(node for node in index.order if _is_of_ranks(node, index))
    if any(node.kind in PRODUCTS or node.kind is REDUCE for node in index.order):
        returned = _chains(index, PRODUCTS | {REDUCE, SCAN, SORT}, same)
        for node in index.order:
            read = returned[node]
            if node.kind in PRODUCTS and not _is_weighted_mean(node) and not are_disjoint(read):
                end = _end_of_epilogue(node, index)
                stored |= {end} if _costs_less(node, end, read, partition) else set()
            elif _is_in_orders(node, returned) and any(_is_permuted(user) for user in index.users[node]):
                stored |= {node} if _costs_less(node, node, read, partition) else set()
        stored |= _returned_operands(index)
    stored |= _quantised_in_blocks(index)
    return frozenset(map(id, stored))


def _quantised_in_blocks(index: Index) -> set[Node]:
    """Returns what is computed from products or from reductions along whole rows, such as a norm, and quantised with a
    scale for each block of a row: a product's epilogue, or the kernel that goes along the rows, stores it, and another
    kernel goes along the blocks."""
    values: set[Node] = set()
    for codes in index.order:
        if codes.kind is not CAST or codes.dtype not in SIGNED or REDUCE not in codes.kinds:
            continue
        for node in walked([codes], _above_blocks):
            if _is_in_blocks(node) and _is_of_others(node.inputs[0]):
                values.add(_before_widening(node.inputs[0]))
    return values


def _is_reshape(node: Node) -> bool:
    """Returns whether ``node`` is a view in the same order; a row of one block is reshaped by a size of 1."""
    return node.kind is VIEW and node.attrs.kind in ("reshape", "unsqueeze", "squeeze")


def _is_in_blocks(node: Node) -> bool:
    """Returns whether ``node`` is a view of rows as blocks, and not of blocks as rows of one block."""
    if not _is_reshape(node) or not node.shape or node.shape[-1] not in BLOCKS_OF_ROWS:
        return False
    source = node.inputs[0].shape
    return source[-1:] != node.shape[-1:] or len(source) < len(node.shape)


def _above_blocks(node: Node) -> Sequence[Node]:
    return node.inputs if node.kind.is_pointwise or (_is_reshape(node) and not _is_in_blocks(node)) else ()


def _is_of_others(node: Node) -> bool:
    """Returns whether ``node`` is computed from a product or a reduction, by pointwise operations and views."""
    kinds = PRODUCTS | {REDUCE}
    return node.kind.is_pointwise and any(
        True for _ in nearest(node, kinds, lambda inner: inner.kind.is_pointwise or inner.kind is VIEW)
    )


def _before_widening(node: Node) -> Node:
    """Returns what ``node`` is a cast of, if that has fewer bytes; else ``node``."""
    is_wider = node.kind is CAST and item_size(node.inputs[0].dtype) < item_size(node.dtype)
    return node.inputs[0] if is_wider else node


def _is_of_slices(scan: Node, read: Collection[Chain], index: Index) -> bool:
    """Returns whether ``scan`` is read as a whole and in slices along its rows by what is computed pointwise of it, and
    returned: its kernel stores the slices. Slices that are results themselves may be views of one temporary."""
    dim = scan.attrs.dim
    if any(chain and (len(chain) > 1 or chain[0][0][0] != "slice" or chain[0][0][1] != dim) for chain in read):
        return False
    if any(attrs[3] != 1 for chain in read for attrs, _ in chain):
        return False
    reached = index.reached([scan], lambda node: not (node is scan or node.kind.is_pointwise or node.kind is VIEW))
    users = {user for node in reached for user in index.users[node]} - reached
    if not users and are_disjoint(read) and not any(node.kind.is_pointwise for node in reached):
        return False
    return all(user.kind is CAT and user in index.roots for user in users)


def _is_of_ranks(node: Node, index: Index) -> bool:
    """Returns whether ``node`` is computed of a row's ranks, as weights of a top-k are, and read in another shape:
    what selects the ranks computes it too, in its own shape."""
    users = set(index.users[node])
    if not node.kind.is_pointwise or node in index.roots or not users:
        return False
    if not all(user.kind is VIEW and user.attrs.kind in ("reshape", "unsqueeze") for user in users):
        return False
    ranks = nearest(
        node, (SORT, TAKEN), lambda inner: inner.kind.is_pointwise or (inner.kind is VIEW and inner.shape == node.shape)
    )
    return any(True for _ in ranks)


def _is_viewed(node: Node, index: Index) -> bool:
    """Returns whether a view of ``node`` is read; else its readers can be in the kernel of it."""
    return any(user.kind is VIEW for user in index.users[node])


def _taken_apart(chains: Mapping[Node, Collection[Chain]], index: Index) -> set[Node]:
    """Returns what is computed for a view that is repeated and taken apart into slices of one index each: the terms of
    a sum that is unrolled would compute it again for each repetition."""

    def is_term(chain: Chain) -> bool:
        return bool(chain) and any(attrs[0] == "expand" for attrs, _ in chain) and _is_one_index(chain[-1])

    values: set[Node] = set()
    inside: set[Node] = set()
    for node in reversed(index.order):
        if node in inside or (node.kind.is_pointwise and len(chains[node]) >= FEWEST_TERMS):
            is_viewed = any(user.kind is VIEW for user in index.users[node])
            if node not in inside and is_viewed and all(map(is_term, chains[node])):
                values.add(node)
                inside.add(node)
            if node in inside and (node.kind.is_pointwise or node.kind is VIEW):
                inside.update(node.inputs)
    return values


def _is_one_index(movement: Movement) -> bool:
    attrs, shape = movement
    return attrs[0] == "slice" and shape[attrs[1]] == 1


def _ranks_read(node: Node, index: Index) -> Node:
    """Returns the ranks of the sort ``node`` that all its readers read: a slice of it, or the node itself."""
    users = set(index.users[node])
    if node in index.roots or len(users) != 1:
        return node
    (user,) = users
    is_slice = user.kind is VIEW and user.attrs.kind == "slice" and user.attrs[1] == node.attrs.dim
    return user if is_slice and user.attrs.step == 1 else node


def _costs_less(node: Node, end: Node, read: Collection[Chain], partition: Partition) -> bool:
    """Returns whether it costs less to store ``end``, which is computed from ``node``, than to compute it for each of
    the views ``read``. A row's bits may depend on that, so that a batch-invariant plan always stores it."""
    if partition.device.batch_invariant:
        return True
    size, bytes_ = symbols.product(end.shape), item_size(end.dtype)
    views = [size if not chain else symbols.product(chain[-1][1]) for chain in read]
    others = [size for chain, size in zip(read, views, strict=True) if chain]
    written = 0 if () in read else size  # a result that is the value itself is written anyway
    moved = symbols.mul(bytes_, symbols.total([written, *others]))
    once = _effort(node, size)
    stored = once._replace(moved=symbols.add(once.moved, moved), launches=1 + bool(others))
    again = Effort(dtype=once.dtype)
    for chain, elements in zip(read, views, strict=True):
        if node.kind is SORT or (node.kind is SCAN and any(_cuts(attrs, node.attrs.dim) for attrs, _ in chain)):
            # All of it is computed into a temporary, and the view is computed from that.
            whole, copied = _effort(node, size), symbols.mul(bytes_, symbols.add(size, elements))
            again = _sum_of(again, whole._replace(moved=symbols.add(whole.moved, copied), launches=2))
        else:
            again = _sum_of(again, _effort(node, elements)._replace(launches=int(node.kind not in PRODUCTS)))
    if node.kind in PRODUCTS:  # views in one order are of one kernel, because they are of one activation
        orders = {tuple(attrs for attrs, _ in chain if attrs[0] == "permute") for chain in read}
        again = again._replace(launches=len(orders))
        if partition.device.is_gpu and any(orders):  # operands are copied so that they are contiguous along K
            copies = Effort(moved=symbols.mul(2, _effort(node, 0).moved), launches=1)
            again = _sum_of(again, copies)
    return partition.decide("", storage_of(end, stored, again)).fused


def costs_less_where_chosen(gather: Node, source: Node, index: Index, partition: Partition) -> bool:
    """Returns whether it costs less to compute the elements of ``source`` that ``gather`` chooses than to store all of
    them; False where they are computed by more than pointwise operations of a few tensors.

    Args:
        gather: of the graph; ``source`` is its source with views moved.
    """
    read = [node for node in topological([source], {INPUT, VIEW}) if not node.kind.is_number]
    tensors = [node for node in read if node.is_in_memory]
    computed = [node for node in read if not node.is_in_memory]
    plain = all(node.kind.is_pointwise and node.shape == source.shape for node in computed)
    if not plain or not tensors or len(tensors) > MOST_CHOSEN or any(t.shape != source.shape for t in tensors):
        return False
    value = gather.inputs[0]
    if value in index.roots or partition.device.batch_invariant:
        return False
    gathers = sum(user.kind is GATHER for user in index.users[value])
    size, chosen = symbols.product(source.shape), symbols.mul(gathers, symbols.product(gather.shape))
    once, again = _effort(source, size), _effort(source, chosen)
    bytes_ = symbols.mul(item_size(source.dtype), symbols.add(size, chosen))
    stored = once._replace(moved=symbols.add(once.moved, bytes_), launches=2)
    return not partition.decide("", storage_of(value, stored, again._replace(launches=1))).fused


def _sum_of(left: Effort, right: Effort) -> Effort:
    moved, operations, products = map(symbols.add, left[:3], right[:3])
    return Effort(moved, operations, products, left.dtype, left.launches + right.launches)


def _effort(node: Node, elements: Scalar) -> Effort:
    """Returns what it takes to compute ``elements`` elements of ``node`` from what is in memory."""
    if node.kind in PRODUCTS:
        moved = symbols.total(symbols.mul(item_size(x.dtype), symbols.product(x.shape)) for x in node.inputs)
        return Effort(moved, 0, symbols.mul(elements, node.kind.flops(node)), node.inputs[0].dtype)
    leaves = PRODUCTS | {INPUT, VIEW, SCAN, SORT}
    element = 0
    operations = [symbols.mul(elements, COMPARISONS if node.kind is SORT else node.kind.flops(node))]
    for operand in topological(node.inputs, leaves):
        if operand.kind in leaves:  # one that is repeated along rows counts for nothing
            element += item_size(operand.dtype) * (operand.under_expand is operand)
        else:  # of a reduction, an operation for each element of its rows
            operations.append(symbols.mul(elements, 1 if operand.kind is REDUCE else operand.kind.flops(operand)))
    return Effort(symbols.mul(elements, element), symbols.total(operations))


def _cuts(attrs: Any, dim: int) -> bool:
    """Returns whether the view ``attrs`` leaves out elements along ``dim``, which is walked, or reorders dimensions so
    that this is not told."""
    return attrs[0] != "slice" or attrs[1] == dim


def _chains(index: Index, ends: Collection[object], same: Callable[[Shape, Shape], bool]) -> Mapping[Node, set[Chain]]:
    """Returns the chains of views through which each node is read, across pointwise operations.

    Args:
        ends: kinds of nodes whose reading of their operands does not count.
    """
    chains: dict[Node, set[Chain]] = {node: set() for node in index.order}
    for root in index.roots:
        chains[root].add(())
    for node in reversed(index.order):
        if node.kind in ends:
            continue
        read: Iterable[Chain] = chains[node]
        if node.under_expand is not node and same(node.under_expand.shape, node.shape):
            pass
        elif node.kind is VIEW:
            read = [((node.attrs, node.shape), *chain) for chain in chains[node]]
        elif not node.kind.commutes:
            read = [()]
        for child in node.inputs:
            if len(chains[child]) < MOST_CHAINS:
                chains[child].update(chain if _reorders(chain) else () for chain in read)
    return chains


def _end_of_epilogue(product: Node, index: Index) -> Node:
    """Returns the last value that all readers of ``product`` read, by pointwise operations alone: its kernel computes
    that before anything is rounded."""
    node = product
    while node not in index.roots and len(users := set(index.users[node])) == 1:
        (user,) = users
        if not user.kind.is_pointwise or user.shape != node.shape:
            break
        node = user
    return node


def _reorders(chain: Chain) -> bool:
    return any(attrs[0] not in SAME_ORDER for attrs, _ in chain)


def _is_weighted_mean(product: Node) -> bool:
    """Returns whether ``product`` is one by the softmax of another: attention stores its result through several
    views."""
    weights = product.inputs[0]
    spread = nearest(weights, [REDUCE], lambda node: node.kind.is_pointwise or node.under_expand is not node)
    return any(spread) and any(at_own_coordinates(weights, CONTRACT))


def _returned_operands(index: Index) -> set[Node]:
    """Returns what is returned and is an operand of attention through views, such as keys that were appended to a
    cache: attention reads the result. What a product computes is stored by its kernel anyway."""
    returned = {root.under_views for root in index.roots}
    means = [node for node in index.order if node.kind is CONTRACT and _is_weighted_mean(node)]
    scores = [node for mean in means for node in at_own_coordinates(mean.inputs[0], CONTRACT)]
    read = (*(mean.inputs[1] for mean in means), *(operand for product in scores for operand in product.inputs))
    operands = {operand.under_views for operand in read}
    return {node for node in operands & returned if node.inputs and (node.kind.is_pointwise or node.kind is CAT)}


def _is_permuted(node: Node) -> bool:
    return node.kind is VIEW and node.attrs.kind == "permute"


def _is_in_orders(node: Node, returned: Mapping[Node, set[Chain]]) -> bool:
    """Returns whether all elements of ``node``, which is computed from reductions, are returned in several orders."""
    if not node.kind.is_pointwise or REDUCE not in node.kinds:
        return False
    whole = [chain for chain in returned[node] if all(attrs[0] in ("permute", *SAME_ORDER) for attrs, _ in chain)]
    return len(whole) > 1


def are_disjoint(chains: Collection[Chain], walked: int | None = None) -> bool:
    """Returns whether no two of ``chains`` read an element of what they are views of.

    Args:
        walked: the dimension along which a slice is not computed by itself.
    """
    if len(chains) < 2:
        return True
    if () in chains:
        return False
    following: dict[Movement, set[Chain]] = {}
    for first, *rest in chains:
        following.setdefault(first, set()).add(tuple(rest))
    if len(following) > 1 and not _are_disjoint_slices(following, walked):
        return False
    return all(are_disjoint(rest) for rest in following.values())


def _are_all(chains: Collection[Chain], shape: Shape, decide: Decide) -> bool:
    """Returns whether ``chains``, which are disjoint, are several slices of one dimension that leave nothing of
    ``shape``."""
    slices = {chain[0] for chain in chains if chain}
    if len(slices) < 2 or any(attrs[0] != "slice" for attrs, _ in slices):
        return False
    dim = next(iter(slices))[0][1]
    total = symbols.total(sliced[dim] for _, sliced in slices)
    return decide(symbols.compare("eq", total, shape[dim]))


def _are_disjoint_slices(movements: Iterable[Movement], walked: int | None) -> bool:
    """Returns whether ``movements`` are slices of one dimension that have no index in common."""
    spans = []
    dims = set()
    for attrs, shape in movements:
        if attrs[0] != "slice" or attrs[3] != 1:
            return False
        _, dim, start, _ = attrs
        dims.add(dim)
        spans.append((start, symbols.add(start, shape[dim])))
    if len(dims) > 1 or walked in dims:
        return False
    return all(
        symbols.compare("le", end, other) is True or symbols.compare("le", other_end, start) is True
        for number, (start, end) in enumerate(spans)
        for other, other_end in spans[:number]
    )
