"""Movement without arithmetic: the ``view`` nodes, pushed toward the inputs, and what they are in memory.

A ``view`` node's attrs are one of

* ``("permute", permutation)``
* ``("slice", dim, start, step)``: the node's shape gives the length; a negative step walks backward
* ``("expand",)``: sizes of 1 become the node's sizes
* ``("unsqueeze", dim)``, ``("squeeze", dim)``
* ``("reshape",)``: row-major order kept, to the node's shape

Pointwise nodes commute with every movement, so ``move`` builds a view by rewriting the operands instead, until it meets
a tensor input (whose strides then absorb it) or a concatenation it cannot pass (``ir/regions.py`` deals with those).
tinygrad's movement operations work this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.graph import Builder, Node, Shape, topological, under_views
from jitgen.ir.symbols import Scalar, Size

ROW_TILE = 16
"""Rows of a quantised weight that its layouts keep together, at most."""

Decide = Callable[[Scalar], bool]
"""Decides a symbolic comparison from the sizes at hand, and records the decision as a guard."""


def decide_static(condition: Scalar) -> bool:
    """A ``Decide`` for code that has no sizes at hand: only what the normal form proves."""
    return condition is True


# ------------------------------------------------------------------------------------------------ symbolic movement


class Mover:
    """Applies movements to nodes, pushing them toward the inputs; memoised over one graph."""

    def __init__(self, builder: Builder, decide: Decide = decide_static, environment: Mapping[str, Any] | None = None):
        self.builder = builder
        self.decide = decide
        self.environment = environment or {}
        self.general = True
        self._done: dict[tuple[Any, ...], Node] = {}

    def likely(self, conditions: Sequence[Scalar]) -> bool:
        """Whether all ``conditions`` hold for the sizes at hand; assumes nothing, but that is then for these sizes."""
        found = all(symbols.evaluate(condition, self.environment) for condition in conditions)
        self.general = self.general and found
        return found

    def move(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        """``node`` under the movement ``attrs``, with result ``shape``."""
        if shape == node.shape and (attrs[0] in ("reshape", "expand") or (attrs[0] == "slice" and attrs[2:] == (0, 1))):
            return node
        if attrs[0] == "permute" and attrs[1] == tuple(range(len(shape))):
            return node
        # Through a chain of pointwise nodes from its inputs on: it may be longer than Python's stack is deep.
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = self._waiting(top, attrs, shape)
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            key = (id(top), attrs, shape)
            if key not in self._done:
                self._done[key] = self._move(top, attrs, shape)
        return self._done[id(node), attrs, shape]

    def _waiting(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> list[Node]:
        """The operands of a pointwise ``node`` that have to be moved before it."""
        if node.op in BARRIERS or (id(node), attrs, shape) in self._done:
            return []
        return [child for child in node.inputs if child.inputs and (id(child), attrs, shape) not in self._done]

    def _move(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        base = node.inputs[0] if node.op == "view" else node
        if base.op in ("const", "scalar"):
            return self.builder.make("view", (base,), node.dtype, shape, ("expand",)) if shape else base
        if node.op == "cat":
            moved = self._move_cat(node, attrs, shape)
            if moved is not None:
                return moved
        elif node.op in ("reduce", "matmul"):
            moved = (self._move_reduce if node.op == "reduce" else self._move_matmul)(node, attrs, shape)
            if moved is not None:
                return moved
        elif node.op == "view":
            if attrs[0] == "unsqueeze" and node.attrs == ("squeeze", attrs[1]):
                return node.inputs[0]
            if attrs[0] == "squeeze" and node.attrs == ("unsqueeze", attrs[1]):
                return node.inputs[0]
            if attrs[0] == node.attrs[0] == "permute":
                order = tuple(node.attrs[1][dim] for dim in attrs[1])
                return self.move(node.inputs[0], ("permute", order), shape)
            if node.attrs[0] == "expand" and node.inputs[0].op == "reduce" and attrs[0] in ("permute", "unsqueeze"):
                return self._move_spread(node.inputs[0], attrs, shape)
            if attrs[0] == "reshape" and node.attrs[0] in ("reshape", "unsqueeze", "squeeze"):
                return self.move(node.inputs[0], ("reshape",), shape)
        elif node.inputs and node.op not in BARRIERS:
            children = [c if c.op in ("const", "scalar") else self.move(c, attrs, shape) for c in node.inputs]
            return self.builder.like(node, children, shape)
        return self.builder.make("view", (node,), node.dtype, shape, attrs, node.location)

    def _move_reduce(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """The movement applied to what ``node`` reduces; None where it touches a reduced dimension."""
        kind, dims, operand = attrs[0], node.attrs[1], node.inputs[0]
        if kind == "permute":
            moved = tuple(sorted(attrs[1].index(dim) for dim in dims))
            whole = tuple(operand.shape[dim] for dim in attrs[1])
        elif kind == "unsqueeze":
            moved = tuple(dim + (attrs[1] <= dim) for dim in dims)
            whole = (*operand.shape[: attrs[1]], 1, *operand.shape[attrs[1] :])
        elif kind == "squeeze" and attrs[1] not in dims:
            moved = tuple(dim - (attrs[1] < dim) for dim in dims)
            whole = (*operand.shape[: attrs[1]], *operand.shape[attrs[1] + 1 :])
        elif kind == "slice" and attrs[1] not in dims:
            moved = dims
            whole = (*operand.shape[: attrs[1]], shape[attrs[1]], *operand.shape[attrs[1] + 1 :])
        else:
            return None
        value = self.move(operand, attrs, whole)
        return self.builder.make("reduce", (value,), node.dtype, shape, (node.attrs[0], moved), node.location)

    def _move_matmul(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """The movement applied to the activation's rows or the weight's; None where it mixes rows and columns."""
        x, weight = node.inputs
        kind, last, length = attrs[0], len(node.shape) - 1, x.shape[-1]
        if kind == "slice" and attrs[1] == last:
            if under_views(weight).op == "input" or self._is_tiles_of_weight(weight, attrs):
                moved = self.move(weight, ("slice", 0, *attrs[2:]), (shape[last], length))
                return self.builder.make("matmul", (x, moved), node.dtype, shape, node.attrs, node.location)
            return None
        rows_only = (
            (kind == "slice")
            or (kind == "unsqueeze" and attrs[1] <= last)
            or (kind == "squeeze" and attrs[1] < last)
            or (kind == "permute" and attrs[1][-1] == last)
            or (kind == "reshape" and shape and shape[-1] == node.shape[-1])
        )
        if not rows_only:
            return None
        moved = self.move(x, attrs, (*shape[:-1], length))
        return self.builder.make("matmul", (moved, weight), node.dtype, shape, node.attrs, node.location)

    def _is_tiles_of_weight(self, weight: Node, attrs: tuple[Any, ...]) -> bool:
        """Whether a slice of a quantised weight's rows is of whole tiles, which every layout keeps together."""
        while weight.op == "view" and weight.attrs[:2] == ("slice", 0):
            weight = weight.inputs[0]
        _, _, start, step = attrs
        whole = symbols.compare("eq", symbols.mod(start, ROW_TILE), 0)
        return weight.op == "dequantize" and step == 1 and self.decide(whole)

    def _move_spread(self, reduction: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        """A reduction spread over its row, moved: the reduction is moved, and spread again."""
        sizes = reduction.shape
        if attrs[0] == "permute":
            moved = tuple(sizes[dim] for dim in attrs[1])
        else:
            moved = (*sizes[: attrs[1]], 1, *sizes[attrs[1] :])
        return self.move(self.move(reduction, attrs, moved), ("expand",), shape)

    def _move_cat(self, cat: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """The movement applied to each part of ``cat``, or None where the parts would not stay contiguous runs."""
        dim, kind = cat.attrs[0], attrs[0]
        if kind == "permute":
            target = attrs[1].index(dim)
        elif kind == "unsqueeze":
            target = dim + (attrs[1] <= dim)
        elif kind == "squeeze":
            target = dim - (attrs[1] < dim)
            if attrs[1] == dim:
                return None
        elif kind == "slice" and attrs[1] == dim:
            return self._slice_cat(cat, attrs, shape)
        elif kind == "expand" and cat.shape[dim] == 1 and shape[dim] != 1:
            return None
        elif kind == "reshape":
            found = _leading_dim(cat.shape, dim, shape)
            if found is None:
                return None
            target, rest = found
            parts = [
                self.move(part, attrs, (*shape[:target], symbols.mul(part.shape[dim], rest), *shape[target + 1 :]))  # type: ignore[arg-type]
                for part in cat.inputs
            ]
            return self.builder.make("cat", parts, cat.dtype, shape, (target,), cat.location)
        else:
            target = dim
        parts = [
            self.move(part, attrs, (*shape[:target], part.shape[dim], *shape[target + 1 :])) for part in cat.inputs
        ]
        return self.builder.make("cat", parts, cat.dtype, shape, (target,), cat.location)

    def _slice_cat(self, cat: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """A slice along the concatenated dimension: the parts it touches, each cut to what is kept."""
        _, dim, start, step = attrs
        if step != 1:
            return None
        stop = symbols.add(start, shape[dim])
        parts: list[Node] = []
        begin: Size = 0
        for part in cat.inputs:
            end = symbols.add(begin, part.shape[dim])
            if self.decide(symbols.compare("le", end, start)) or self.decide(symbols.compare("ge", begin, stop)):
                begin = end  # type: ignore[assignment]
                continue
            low = start if self.decide(symbols.compare("ge", start, begin)) else begin
            high = stop if self.decide(symbols.compare("le", stop, end)) else end
            length = symbols.sub(high, low)
            cut = (*shape[:dim], length, *shape[dim + 1 :])
            parts.append(self.move(part, ("slice", dim, symbols.sub(low, begin), 1), cut))  # type: ignore[arg-type]
            begin = end  # type: ignore[assignment]
        if len(parts) == 1:
            return parts[0]
        return self.builder.make("cat", parts, cat.dtype, shape, (dim,), cat.location) if parts else None

    def substituted(self, root: Node, memo: dict[int, Node]) -> Node:
        """``root`` with the nodes in ``memo`` (by id) replaced, and views of what was replaced moved on; fills it."""
        for node in topological([root]):
            if id(node) in memo:
                continue
            children = [memo[id(child)] for child in node.inputs]
            if all(a is b for a, b in zip(children, node.inputs, strict=True)):
                memo[id(node)] = node
            elif node.op == "view":
                memo[id(node)] = self.move(children[0], node.attrs, node.shape)
            else:
                memo[id(node)] = self.builder.like(node, children)
        return memo[id(root)]

    def slice(self, node: Node, dim: int, start: Size, length: Size) -> Node:
        if start == 0 and length == node.shape[dim]:
            return node
        return self.move(node, ("slice", dim, start, 1), (*node.shape[:dim], length, *node.shape[dim + 1 :]))


BARRIERS = frozenset({"input", "iota", "cat", "view", "reduce", "matmul", "dequantize"})
"""Operations that a movement does not simply commute with."""


def _leading_dim(before: Shape, dim: int, after: Shape) -> tuple[int, Size] | None:
    """Where ``dim`` of ``before`` leads a dimension of ``after`` under a reshape: (that dimension, elements behind).

    Row-major order splits both shapes into groups with equal products. ``dim`` keeps its parts as contiguous runs when
    the dimensions before it match a prefix of ``after`` and it is merged only with dimensions that follow it.
    """
    outer = symbols.product(before[:dim])
    prefix: Size = 1
    for target in range(len(after) + 1):
        if prefix == outer and (target == len(after) or after[target] != 1 or before[dim] == 1):
            break
        if target == len(after):
            return None
        prefix = symbols.mul(prefix, after[target])  # type: ignore[assignment]
    if target == len(after):
        return None
    rest: Size = 1
    for size in (*before[dim + 1 :], None):
        if symbols.mul(before[dim], rest) == after[target]:
            return target, rest
        if size is not None:
            rest = symbols.mul(rest, size)  # type: ignore[assignment]
    return None


# -------------------------------------------------------------------------------------------------- in memory


@dataclass(frozen=True)
class Strided:
    """A concrete strided piece of memory, in elements relative to a base pointer."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


class NotViewable(Exception):
    """A reshape whose memory is not strided: the value must be copied first."""


def apply(memory: Strided, attrs: Sequence[Any], sizes: tuple[int, ...]) -> Strided:
    """``memory`` under one movement with concrete result ``sizes``; NotViewable when no strides describe it."""
    kind = attrs[0]
    strides, offset = memory.strides, memory.offset
    if kind == "permute":
        return Strided(sizes, tuple(strides[source] for source in attrs[1]), offset)
    if kind == "slice":
        _, dim, start, step = attrs
        moved = (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])
        return Strided(sizes, moved, offset + start * strides[dim])
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
    """Strides of ``memory`` reshaped to ``sizes``, matching runs of dimensions that are dense in both."""
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
    """Row-major strides of a dense tensor, as torch computes them (sizes of 0 count as 1)."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
