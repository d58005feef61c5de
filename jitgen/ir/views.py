"""Defines views: nodes that move elements without arithmetic, how they are pushed to the inputs, and what strides they
have.

The attrs of a ``view`` node are one of these *movements*:

* ``("permute", permutation)``
* ``("slice", dim, start, step)``: the node's shape gives the length; a negative step walks backward
* ``("expand",)``: sizes of 1 become the node's sizes
* ``("unsqueeze", dim)``, ``("squeeze", dim)``
* ``("reshape",)``: to the node's shape, in row-major order

Pointwise nodes commute with every movement, and most other kinds have a rule for some of them (``ir/moves.py``). So
``Mover.move`` applies a movement to the operands of a node instead of its result, until it reaches a tensor input,
whose strides absorb the movement, or a node that does not commute with it; that node is then computed into a temporary.
tinygrad's movement operations work this way.

Neighbours: ``families/moved.py`` moves every view of a graph, ``kernel/operands.py`` turns movements into strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.errors import InternalError
from jitgen.ir import symbols
from jitgen.ir.graph import Builder, Node, Shape, postorder, topological
from jitgen.ir.nodes import BLOCKS, DEQUANTIZE, REDUCE, VIEW
from jitgen.ir.symbols import Scalar, Size

ROW_TILE = 16
"""Rows of a quantised weight that the widest tile of any layout holds (``quant/layouts``)."""

MOST_STEPS = 1_000_000
"""The most steps of one graph's rewriting. Graphs of whole models take some ten thousand; rewrites that undo one
another would take steps without an end."""

MOST_MOVEMENTS = 16
"""Views behind a result that a family undoes; with more of them the result is read from a temporary."""

Decide = Callable[[Scalar], bool]
"""Decides a symbolic comparison by the sizes of the current call, and records the decision as a guard."""


def decide_static(condition: Scalar) -> bool:
    """Decides without a known call: True only for what the normal form of the expressions proves."""
    return condition is True


def at_tile(start: Scalar, step: int = 1) -> Scalar:
    """Returns the condition that rows of a quantised weight, from ``start`` on, are whole tiles of every layout."""
    return step == 1 and symbols.compare("eq", symbols.mod(start, ROW_TILE), 0)


def is_transposed(node: Node) -> bool:
    """Returns whether ``node`` is a view that has another dimension of its tensor last."""
    while node.kind is VIEW:
        (source,) = node.inputs
        if node.attrs.kind == "permute" and any(size != 1 for size in source.shape[node.attrs.order[-1] + 1 :]):
            return True
        node = source
    return False


def inverse(attrs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Returns the attrs of the movement that undoes one with ``attrs``; None where that leaves out or repeats
    elements."""
    kind = attrs[0]
    if kind == "permute":
        return "permute", tuple(attrs[1].index(dim) for dim in range(len(attrs[1])))
    if kind in ("squeeze", "unsqueeze"):
        return "unsqueeze" if kind == "squeeze" else "squeeze", attrs[1]
    return ("reshape",) if kind == "reshape" else None


# ------------------------------------------------------------------------------------------------ symbolic movement


class Mover:
    """Applies movements to the nodes of one graph, pushing them toward the inputs; results are memoised.

    Attributes:
        builder: makes the nodes.
        decide: decides symbolic comparisons; each decision becomes a guard.
        environment: the sizes of the current call, for ``likely``.
        general: False once ``likely`` has answered False: then the rewritten graph fits only the current call.
        fired: the names of the rewrites that were done (``ir/patterns.py``), in the order of their first times.
    """

    def __init__(self, builder: Builder, decide: Decide = decide_static, environment: Mapping[str, Any] | None = None):
        self.builder = builder
        self.decide = decide
        self.environment = environment or {}
        self.general = True
        self.fired: dict[str, None] = {}
        self._steps = 0
        self._without: dict[Callable[[Node], bool], set[int]] = {}
        self._done: dict[tuple[Any, ...], Node] = {}

    def step(self, node: Node) -> None:
        """Counts a step of a search or of rewrites to a fixed point, which is at ``node``.

        Raises:
            InternalError: there were more than ``MOST_STEPS`` for this graph.
        """
        self._steps += 1
        if self._steps > MOST_STEPS:
            where = f" at {node.location}" if node.location else ""
            raise InternalError(
                f"jitgen found no kernels within {MOST_STEPS} rewrites; the latest is of {node.op}{where}"
            )

    def any_behind(self, roots: Sequence[Node], test: Callable[[Node], bool]) -> bool:
        """Returns whether ``test`` holds for some node that ``roots`` depend on. Nodes without one behind them are
        remembered: a graph is not walked again for each of its temporaries. ``roots`` are nodes of ``builder``."""
        without = self._without.setdefault(test, set())
        for node in topological(roots, known=without):
            if id(node) not in without and test(node):
                return True
            without.add(id(node))
        return False

    def likely(self, conditions: Sequence[Scalar]) -> bool:
        """Returns whether all ``conditions`` hold in the current call. No guard is recorded; a False clears
        ``general``."""
        holds = all(symbols.evaluate(condition, self.environment) for condition in conditions)
        self.general = self.general and holds
        return holds

    def move(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        """Moves ``node`` by ``attrs``, which gives it ``shape``."""
        if shape == node.shape and (attrs[0] in ("reshape", "expand") or (attrs[0] == "slice" and attrs[2:] == (0, 1))):
            return node
        if attrs[0] == "permute" and attrs[1] == tuple(range(len(shape))):
            return node
        self.step(node)
        for one in postorder([node], lambda one: self._waiting(one, attrs, shape)):
            key = (id(one), attrs, shape)
            if key not in self._done:
                self._done[key] = self._move(one, attrs, shape)
        return self._done[id(node), attrs, shape]

    def _waiting(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> list[Node]:
        """Returns the operands of a pointwise ``node`` that have not been moved yet and must be before it is."""
        if not node.kind.commutes or (id(node), attrs, shape) in self._done:
            return []
        return [child for child in node.inputs if child.inputs and (id(child), attrs, shape) not in self._done]

    def _move(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        base = node.inputs[0] if node.kind is VIEW else node
        if base.kind.is_number:
            return self.builder.make("view", (base,), node.dtype, shape, ("expand",)) if shape else base
        if node.kind.move is not None:
            moved = node.kind.move(self, node, attrs, shape)
            if moved is not None:
                return moved
        elif node.kind is VIEW:
            moved = self._move_view(node, attrs, shape)
            if moved is not None:
                return moved
        elif node.inputs and node.kind.commutes:
            children = [c if c.kind.is_number else self.move(c, attrs, shape) for c in node.inputs]
            return self.builder.like(node, children, shape)
        if attrs[0] == "reshape" and REDUCE not in (base.kind, node.kind):
            attrs = _without_one(node.shape, shape) or attrs
        return self.builder.make("view", (node,), node.dtype, shape, attrs, node.location)

    def _move_view(self, view: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """Returns a view and the movement after it as one view, or none where they undo one another; None if they stay
        two."""
        (source,), before, after = view.inputs, view.attrs.kind, attrs[0]
        if after in ("squeeze", "unsqueeze") and (
            inverse(view.attrs) == attrs or (before == "reshape" and source.shape == shape)
        ):
            return source
        if before == after == "permute":
            return self.move(source, ("permute", tuple(view.attrs.order[dim] for dim in attrs[1])), shape)
        if before == "expand" and source.kind is REDUCE and after in ("permute", "unsqueeze", "slice"):
            return self._move_broadcast_reduction(source, attrs, shape)
        if (before, after) == ("reshape", "squeeze") or (
            after == "reshape" and before in ("reshape", "unsqueeze", "squeeze")
        ):
            return self.move(source, ("reshape",), shape)
        return None

    def slices_whole_tiles(self, weight: Node, attrs: tuple[Any, ...]) -> bool:
        """Returns whether a slice of a quantised weight's rows starts at a tile, so that every layout can be sliced
        so."""
        while weight.kind is VIEW and (
            weight.attrs.kind == "reshape" or weight.attrs[:2] == ("slice", len(weight.shape) - 2)
        ):
            weight = weight.inputs[0]
        # A slice of rows that share scales of blocks may cut these. Its product is computed whole.
        in_tiles = weight.kind is DEQUANTIZE and weight.attrs.layout != BLOCKS
        return in_tiles and self.decide(at_tile(*attrs[2:]))

    def _move_broadcast_reduction(self, reduction: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        """Moves a reduction that is broadcast over its row: the reduction is moved and then broadcast."""
        sizes = reduction.shape
        if attrs[0] == "permute":
            moved = tuple(sizes[dim] for dim in attrs[1])
        elif attrs[0] == "slice":
            if sizes[attrs[1]] == 1:
                return self.move(reduction, ("expand",), shape)
            moved = (*sizes[: attrs[1]], shape[attrs[1]], *sizes[attrs[1] + 1 :])
        else:
            moved = (*sizes[: attrs[1]], 1, *sizes[attrs[1] :])
        return self.move(self.move(reduction, attrs, moved), ("expand",), shape)

    def substituted(self, root: Node, memo: dict[int, Node]) -> Node:
        """Replaces nodes under ``root``, and pushes views of a replaced node on toward the inputs.

        Args:
            memo: the replacement of each node, by the id of the node that it replaces; the replacements of all other
                nodes under ``root`` are added to it.
        """
        for node in topological([root], known=memo):
            if id(node) in memo:
                continue
            memo[id(node)] = self.rebuilt(node, [memo[id(child)] for child in node.inputs])
        return memo[id(root)]

    def rebuilt(self, node: Node, inputs: Sequence[Node]) -> Node:
        """Rebuilds ``node`` over ``inputs``; a view of another node is pushed on toward the inputs of that."""
        if node.kind is VIEW and inputs[0] is not node.inputs[0]:
            return self.move(inputs[0], node.attrs, node.shape)
        return self.builder.rebuilt(node, inputs)

    def permute(self, node: Node, order: tuple[int, ...]) -> Node:
        """Puts the dimensions of ``node`` into ``order``; a number is the same for every order."""
        if node.kind.is_number:
            return node
        return self.move(node, ("permute", order), tuple(node.shape[dim] for dim in order))

    def unsqueeze(self, node: Node, dim: int) -> Node:
        """Inserts a dimension of size 1 as number ``dim``; a number is the same with it."""
        if node.kind.is_number:
            return node
        return self.move(node, ("unsqueeze", dim), (*node.shape[:dim], 1, *node.shape[dim:]))

    def slice(self, node: Node, dim: int, start: Size, length: Size) -> Node:
        if start == 0 and length == node.shape[dim]:
            return node
        return self.move(node, ("slice", dim, start, 1), (*node.shape[:dim], length, *node.shape[dim + 1 :]))


def _without_one(shape: Shape, reshaped: Shape) -> tuple[str, int] | None:
    """Returns the view that a reshape of ``shape`` is if it only drops a size of 1: the same value has one spelling."""
    if len(reshaped) != len(shape) - 1:
        return None
    dropped = (dim for dim, size in enumerate(shape) if size == 1 and (*shape[:dim], *shape[dim + 1 :]) == reshaped)
    return next((("squeeze", dim) for dim in dropped), None)


# -------------------------------------------------------------------------------------------------- in memory


@dataclass(frozen=True)
class Strided:
    """Describes a concrete strided piece of memory, in elements relative to a base pointer."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def is_row_major(self) -> bool:
        """Returns whether torch's ``is_contiguous`` holds: the strides of sizes of 1, and all strides of nothing, are
        free."""
        facts = zip(self.sizes, self.strides, contiguous_strides(self.sizes), strict=True)
        return 0 in self.sizes or all(size == 1 or stride == expected for size, stride, expected in facts)


ACCESS_BYTES = 16
"""Bytes of the widest memory access; larger alignments are not distinguished."""


@dataclass(frozen=True)
class Memory:
    """Describes a buffer of the current call: its sizes and strides in elements, and the alignment of its address in
    bytes."""

    view: Strided
    alignment: int = ACCESS_BYTES


class NotViewable(Exception):
    """Reports that no strides describe the result of a reshape: the value must be copied before it."""


def apply(memory: Strided, attrs: Sequence[Any], sizes: tuple[int, ...]) -> Strided:
    """Applies one movement to ``memory``, which gives it ``sizes``; NotViewable if no strides describe the result."""
    kind = attrs[0]
    strides, offset = memory.strides, memory.offset
    if kind == "permute":
        return Strided(sizes, tuple(strides[source] for source in attrs[1]), offset)
    if kind == "slice":
        _, dim, start, step = attrs
        moved = (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])
        first = start if memory.sizes[dim] else 0  # a flip of nothing starts at -1, before the memory
        return Strided(sizes, moved, offset + first * strides[dim])
    if kind == "unsqueeze":
        return Strided(sizes, (*strides[: attrs[1]], 0, *strides[attrs[1] :]), offset)
    if kind == "squeeze":
        return Strided(sizes, (*strides[: attrs[1]], *strides[attrs[1] + 1 :]), offset)
    if kind == "expand":
        moved = tuple(
            0 if old == 1 and new != 1 else stride
            for old, new, stride in zip(memory.sizes, sizes, strides, strict=True)
        )
        return Strided(sizes, moved, offset)
    return Strided(sizes, _reshape_strides(memory, sizes), offset)


def _reshape_strides(memory: Strided, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of ``memory`` reshaped to ``sizes``: adjacent dense dimensions are merged, then divided as
    asked."""
    if 0 in sizes:
        return contiguous_strides(sizes)
    old = [(size, stride) for size, stride in zip(memory.sizes, memory.strides, strict=True) if size != 1]
    runs: list[tuple[int, int]] = []
    for size, stride in old:
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    result = [0] * len(sizes)
    position = len(sizes) - 1
    for run, stride in reversed(runs):
        while run > 1:
            while position >= 0 and sizes[position] == 1:
                position -= 1
            if position < 0 or run % sizes[position]:
                raise NotViewable
            result[position] = stride
            stride *= sizes[position]
            run //= sizes[position]
            position -= 1
    return tuple(result)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the row-major strides of a dense tensor, as torch computes them (sizes of 0 count as 1)."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
