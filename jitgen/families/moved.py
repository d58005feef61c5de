"""Moves every view of a graph to its inputs, which is where a kernel can read it by strides.

What several views read (``several_views.py``), and some products that a graph both returns and reads, are stored first.
An expression that reads more tensors than a kernel may is divided, and so is a long one (``long_expressions.py``). An
argument whose elements are replaced before anyone reads them again is itself what later nodes read.

Neighbours: ``ir/views.py`` moves one view; ``families/partition.py`` partitions what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.families.changes import State, changes_of
from jitgen.families.family import Partition
from jitgen.families.long_expressions import LongExpressions, is_long
from jitgen.families.several_views import costs_less_where_chosen, stored_values
from jitgen.families.temporaries import Temporaries
from jitgen.families.windows import around_convolutions, product_with_windows
from jitgen.ir import symbols
from jitgen.ir.graph import Graph, Node, Shape, equal_sizes, keeps_all_elements, postorder, topological, walked
from jitgen.ir.index import Index
from jitgen.ir.nodes import CAT, CONVOLVE, GATHER, INPUT, PRODUCTS, REDUCE, SCALAR, SORT, TAKEN, VIEW
from jitgen.ir.regions import MAX_READS
from jitgen.ir.symbols import Expr, Scalar

MOST_READ_OF_MANY = 32
"""The most tensors that an expression of more than ``MANY_OPERATIONS`` reads. Compilers take time that grows with the
square of both, and a loop that is unrolled is equal kernels of some steps each."""

MANY_OPERATIONS = 60
"""Operations of an expression from which on ``MOST_READ_OF_MANY`` holds."""


class EqualSizes:
    """Knows which sizes of a graph its guards state to be equal.

    One size represents all that are equal to it: a product has an epilogue where their shapes are the same, be one of
    their sizes a number by a guard only; what is computed from products is one value in all places that have the same
    shape so; and an operand whose expansion is left out has the sizes that its readers have.
    """

    def __init__(self, graph: Graph, index: Index) -> None:
        self._pairs = dict.fromkeys(g.expr.args for g in graph.guards if g.expr.op == "eq" and g.value is True)
        sizes = frozenset(name for node in index.order for size in node.shape for name in symbols.symbols_of(size))
        self._representatives: dict[str, Scalar] = {**equal_sizes(graph.guards, sizes)}
        for first, second in self._pairs:
            self._represent(self.substituted(first), self.substituted(second))

    def _represent(self, first: Scalar, second: Scalar) -> None:
        """Lets a computed size, such as the heads that share a key, stand for a size that a guard states to be it."""
        for size, computed in ((first, second), (second, first)):
            if not (isinstance(size, Expr) and isinstance(computed, Expr)) or size.op != "symbol":
                continue
            (name,) = size.args
            if computed.op != "symbol" and name not in symbols.symbols_of(computed):
                known = self._representatives.items()
                self._representatives = {
                    other: symbols.substitute(value, {name: computed}) for other, value in known
                } | {name: computed}
                return

    def substituted(self, value: Any) -> Any:
        """Returns ``value``, an expression of sizes or what holds some, with each size represented."""
        return symbols.substitute(value, self._representatives)

    def shape(self, shape: Shape) -> Shape:
        """Returns ``shape`` with each size represented."""
        return tuple(map(self.substituted, shape))

    def same(self, left: Shape, right: Shape) -> bool:
        """Returns whether two shapes are equal: each pair of sizes is one expression, or a guard says that they are
        equal."""
        if len(left) != len(right):
            return False
        pairs = zip(self.shape(left), self.shape(right), strict=True)
        return all(a == b or (a, b) in self._pairs or (b, a) in self._pairs for a, b in pairs)


@dataclass(frozen=True)
class Moved:
    """Holds what a graph computes, with every view moved to the inputs.

    Attributes:
        outputs: in the graph's order.
        updates: the new value of each argument that is updated, by the input's number.
        changes: for arguments of which elements are replaced before others read them: each change, in order. Others
            read the argument itself.
        in_place: the arguments of which elements are replaced where they are, those of ``changes`` and others.
        states: the nodes that are arguments before the last of their ``changes``.
    """

    outputs: Sequence[Node]
    updates: Mapping[int, Node]
    changes: Mapping[int, Sequence[Node]]
    in_place: frozenset[int]
    states: Mapping[Node, State]


def move_views(graph: Graph, index: Index, sizes: EqualSizes, partition: Partition) -> Moved:
    """Moves the views of ``graph``.

    Args:
        index: of the graph's results.
    """
    changed = changes_of(graph, index)
    early = {number: changed.chains[number] for number in changed.early}
    states = {node: state for node, state in changed.states.items() if state.argument in early}
    stored = returned_products(graph, index, sizes) | stored_values(index, partition, sizes.same)
    stored |= around_convolutions(index, graph.results) | frozenset(map(id, changed.stored))

    def chosen_again(gather: Node, source: Node) -> bool:
        return costs_less_where_chosen(gather, source, index, partition)

    divided = LongExpressions(index, partition.temporaries) if is_long(index) else None
    rebuilt = _Rebuilt(sizes, partition.temporaries, stored, states, partition.device.is_gpu, chosen_again, divided)
    values = rebuilt.roots(graph.results)
    numbers = (number for number, _ in graph.mutated)
    updates = dict(zip(numbers, values[len(graph.outputs) :], strict=True))
    changes = {number: [rebuilt.changes[node] for node in chain] for number, chain in early.items()}
    before = {node: state for node, state in rebuilt.states.items() if state.changes < len(early[state.argument])}
    return Moved(values[: len(graph.outputs)], updates, changes, frozenset(changed.chains), before)


class _Rebuilt:
    """Rebuilds nodes with every view moved to the inputs.

    Attributes:
        stored: the ids of nodes that become temporaries.
        arguments: the nodes that are states of arguments. Others read an ``input`` node in their place.
        states: these nodes, as they are made.
        changes: by the nodes that change arguments, what they are rebuilt to.
        has_windows: whether convolutions are products with windows in memory.
        chosen_again: ``(gather, source)``: whether elements of the computed ``source`` are computed where they are
            chosen, instead of all of them stored.
        divided: where long expressions are divided; None in a graph that has none.
    """

    def __init__(
        self,
        sizes: EqualSizes,
        temporaries: Temporaries,
        stored: frozenset[int],
        arguments: Mapping[Node, State],
        has_windows: bool,
        chosen_again: Callable[[Node, Node], bool],
        divided: LongExpressions | None,
    ) -> None:
        self.sizes, self.temporaries, self.has_windows = sizes, temporaries, has_windows
        self.mover = temporaries.mover
        self.stored, self.arguments, self.chosen_again, self.divided = stored, arguments, chosen_again, divided
        self.states: dict[Node, State] = {}
        self.changes: dict[Node, Node] = {}
        self._reads: dict[Node, frozenset[Node]] = {}
        self._ranks: dict[int, Node] = {}
        """Sorts that become temporaries, by the ids of their nodes. What is taken at the places of ranks stays with the
        sort, whose kernel computes it as well."""

    def roots(self, roots: Sequence[Node]) -> list[Node]:
        """Returns ``roots``, rebuilt."""
        memo: dict[int, Node] = {}
        for node in topological(roots) if self.divided is None else self.divided.order:
            if self.divided is not None:
                self._move_again(node.inputs, memo)
            rebuilt = self._node(node, self._children(node, memo))
            while self.divided is not None and self.divided.stores_operand(node, rebuilt, memo):
                self._move_again(node.inputs, memo)
                rebuilt = self._node(node, self._children(node, memo))
            if id(node) in self.stored:
                if rebuilt.kind is SORT:
                    self._ranks[id(node)] = rebuilt
                rebuilt = self.temporaries.materialize(rebuilt)
            if node in self.arguments:
                self.changes[node], state = rebuilt, self.arguments[node]
                rebuilt = Node(INPUT.name, (), rebuilt.dtype, rebuilt.shape, (state.argument,))
                self.states[rebuilt] = state
            memo[id(node)] = rebuilt
            if self.divided is not None:
                self.divided.cut(node, memo)
        return [memo[id(root)] for root in roots]

    def _children(self, node: Node, memo: Mapping[int, Node]) -> list[Node]:
        """Returns the rebuilt inputs of ``node``."""
        children = [memo[id(child)] for child in node.inputs]
        if node.kind is TAKEN:
            children[1] = self._ranks.get(id(node.inputs[1]), children[1])
        return children

    def _move_again(self, operands: Sequence[Node], memo: dict[int, Node]) -> None:
        """Moves views among ``operands`` again, as what they are of may have been stored since."""
        for view in postorder(operands, lambda view: view.inputs if view.kind is VIEW else ()):
            if view.kind is VIEW and id(view) not in self.stored and view not in self.arguments:
                memo[id(view)] = self._node(view, [memo[id(view.inputs[0])]])

    def _node(self, node: Node, children: Sequence[Node]) -> Node:
        """Returns ``node`` over ``children``, its rebuilt inputs."""
        builder, shape = self.mover.builder, self.sizes.shape(node.shape)
        if node.kind is SCALAR:
            return builder.scalar(self.sizes.substituted(node.attrs.value), node.dtype)
        if node.kind is VIEW:
            if node.attrs == ("expand",) and self.sizes.same(children[0].shape, shape):
                return children[0]
            return self.mover.move(children[0], tuple(map(self.sizes.substituted, node.attrs)), shape)
        if node.kind is GATHER:
            source, *indices = children
            if not source.is_in_memory and self.chosen_again(node, source):
                return self._of_chosen(source, node, indices, shape)
            source = source if source.is_in_memory else self.temporaries.materialize(source)
            return builder.like(node, (source, *indices), shape)
        if node.kind is CONVOLVE:
            operands = [child if child.is_in_memory else self.temporaries.materialize(child) for child in children]
            convolution = builder.like(node, operands, shape)
            return product_with_windows(convolution, self.temporaries) if self.has_windows else convolution
        return self._narrowed(builder.like(node, children, shape))

    def _of_chosen(self, value: Node, gather: Node, indices: Sequence[Node], shape: Shape) -> Node:
        """Returns what is computed as ``value`` is, pointwise, of the elements that ``gather`` chooses."""
        memo: dict[Node, Node] = {}
        for node in topological([value], {INPUT, VIEW}):
            if node.kind.is_number:
                memo[node] = node
            elif node.is_in_memory:
                memo[node] = self.mover.builder.make(
                    GATHER.name, (node, *indices), node.dtype, shape, gather.attrs, gather.location
                )
            else:
                memo[node] = self.mover.builder.like(node, [memo[child] for child in node.inputs], shape)
        return memo[value]

    def _narrowed(self, node: Node) -> Node:
        """Replaces operands of ``node`` by temporaries until it reads at most ``MAX_READS`` tensors, or fewer where it
        is long. The operand that reads the most tensors is replaced first."""
        while node.kind.commutes and self._is_wide(node):
            widest = max(node.inputs, key=lambda child: len(self._read_by(child)))
            temporary = self.temporaries.materialize(widest)
            children = [temporary if child is widest else child for child in node.inputs]
            node = self.mover.builder.like(node, children)
        return node

    def _is_wide(self, node: Node) -> bool:
        count = len(self._read_by(node))
        if count <= MOST_READ_OF_MANY:
            return False
        computed = walked([node], lambda node: () if node.kind.read_whole else node.inputs)
        return count > MAX_READS or sum(node.kind.is_pointwise for node in computed) > MANY_OPERATIONS

    def _read_by(self, root: Node) -> frozenset[Node]:
        """Returns the tensors, or views of them, that one element of ``root`` is computed from."""
        reads = self._reads
        for node in postorder([root], lambda node: () if node in reads or node.kind.read_whole else node.inputs):
            if node in reads:
                continue
            if node.kind.read_whole:
                reads[node] = frozenset([node])
            elif node.kind is CAT:
                reads[node] = max((reads[child] for child in node.inputs), key=len)
            else:
                reads[node] = frozenset().union(*(reads[child] for child in node.inputs))
        return reads[root]


def returned_products(graph: Graph, index: Index, sizes: EqualSizes) -> frozenset[int]:
    """Returns the ids of products that ``graph`` returns and that are stored before anything is computed of them, as a
    backward's saved products are: those of which other products would be made, because a view that leaves out or
    repeats elements moves to their operands, and those that attention would compute again in its own kernel."""
    products = (node for node in graph.outputs if node.kind in PRODUCTS)
    return frozenset(id(product) for product in products if _is_computed_again(product, index, sizes))


def _is_computed_again(product: Node, index: Index, sizes: EqualSizes) -> bool:
    """Returns whether anything but pointwise operations, views of all elements, products and reductions reads
    ``product``, or a softmax does."""

    def ends(node: Node) -> bool:
        is_same = node.under_expand is not node and sizes.same(node.under_expand.shape, node.shape)
        return node is not product and not is_same and not keeps_all_elements(node)

    epilogue = index.reached([product], ends)
    kinds = {user.kind for node in epilogue for user in index.users[node] if user not in epilogue}
    is_softmax = REDUCE in kinds and any(node.op in ("exp", "exp2") for node in epilogue)
    return is_softmax or not kinds <= {*PRODUCTS, REDUCE}
