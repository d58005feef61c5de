"""Views: nodes that move elements without arithmetic, how they are pushed to the inputs, and what strides they have.

The attrs of a ``view`` node are one of these *movements*:

* ``("permute", permutation)``
* ``("slice", dim, start, step)``: the node's shape gives the length; a negative step walks backward
* ``("expand",)``: sizes of 1 become the node's sizes
* ``("unsqueeze", dim)``, ``("squeeze", dim)``
* ``("reshape",)``: to the node's shape, in row-major order

Pointwise nodes commute with every movement. So ``Mover.move`` applies a movement to the operands of a node instead of
its result, until it reaches a tensor input, whose strides absorb the movement, or a node that does not commute with it;
that node is then computed into a temporary. tinygrad's movement operations work this way.

Neighbours: ``families/partition.py`` moves every view of a graph, ``kernel/operands.py`` turns movements into
strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.equations import axes, equation
from jitgen.ir.gathers import moved_gather
from jitgen.ir.graph import Builder, Node, Shape, is_weight, topological, under_views
from jitgen.ir.scans import PLACES
from jitgen.ir.symbols import Scalar, Size

ROW_TILE = 16
"""Rows of a quantised weight that the widest tile of any layout holds (``quant/layouts``)."""

MOST_STEPS = 1_000_000
"""Steps of one graph's rewriting, at most. Graphs of whole models take some ten thousand; rewrites that undo one
another would take steps without an end."""

Decide = Callable[[Scalar], bool]
"""Decides a symbolic comparison by the sizes of the current call, and records the decision as a guard."""


def decide_static(condition: Scalar) -> bool:
    """A ``Decide`` where no call is known: True only for what the normal form of the expressions proves."""
    return condition is True


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
        self._done: dict[tuple[Any, ...], Node] = {}
        self._rules: dict[str, Callable[[Node, tuple[Any, ...], Shape], Node | None]] = {
            "cat": self._move_cat,
            "contract": self._move_contract,
            "gather": lambda *of: moved_gather(self, *of),
            "reduce": self._move_reduce,
            "scan": self._move_scan,
            "sort": self._move_sort,
        }

    def step(self, node: Node) -> None:
        """Counts a step of a search or of rewrites to a fixed point, which is at ``node``.

        Raises:
            UnsupportedError: there were more than ``MOST_STEPS`` for this graph.
        """
        self._steps += 1
        if self._steps > MOST_STEPS:
            where = f" at {node.location}" if node.location else ""
            raise UnsupportedError(
                f"jitgen found no kernels within {MOST_STEPS} rewrites; the latest is of {node.op}{where}\n"
                "  this is a mistake of jitgen, please report it; until it is mended, compute a part of this "
                "expression in another decorated function"
            )

    def likely(self, conditions: Sequence[Scalar]) -> bool:
        """Whether all ``conditions`` hold in the current call. No guard is recorded; a False clears ``general``."""
        found = all(symbols.evaluate(condition, self.environment) for condition in conditions)
        self.general = self.general and found
        return found

    def move(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        """``node`` under the movement ``attrs``, whose result has shape ``shape``."""
        if shape == node.shape and (attrs[0] in ("reshape", "expand") or (attrs[0] == "slice" and attrs[2:] == (0, 1))):
            return node
        if attrs[0] == "permute" and attrs[1] == tuple(range(len(shape))):
            return node
        self.step(node)
        # A loop and not a recursion: a chain of pointwise nodes may be longer than Python's stack is deep.
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
        """The operands of a pointwise ``node`` that have not been moved yet and must be before it is."""
        if node.op in BARRIERS or (id(node), attrs, shape) in self._done:
            return []
        return [child for child in node.inputs if child.inputs and (id(child), attrs, shape) not in self._done]

    def _move(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        base = node.inputs[0] if node.op == "view" else node
        if base.op in ("const", "scalar"):
            return self.builder.make("view", (base,), node.dtype, shape, ("expand",)) if shape else base
        if node.op in self._rules:
            moved = self._rules[node.op](node, attrs, shape)
            if moved is not None:
                return moved
        elif node.op == "view":
            if attrs[0] == "unsqueeze" and node.attrs == ("squeeze", attrs[1]):
                return node.inputs[0]
            if attrs[0] == "squeeze" and node.attrs == ("unsqueeze", attrs[1]):
                return node.inputs[0]
            if attrs[0] in ("squeeze", "unsqueeze") and node.attrs[0] == "reshape" and node.inputs[0].shape == shape:
                return node.inputs[0]
            if attrs[0] == node.attrs[0] == "permute":
                order = tuple(node.attrs[1][dim] for dim in attrs[1])
                return self.move(node.inputs[0], ("permute", order), shape)
            of_reduction = node.attrs[0] == "expand" and node.inputs[0].op == "reduce"
            if of_reduction and attrs[0] in ("permute", "unsqueeze", "slice"):
                return self._move_broadcast_reduction(node.inputs[0], attrs, shape)
            if attrs[0] == "reshape" and node.attrs[0] in ("reshape", "unsqueeze", "squeeze"):
                return self.move(node.inputs[0], ("reshape",), shape)
        elif node.inputs and node.op not in BARRIERS:
            children = [c if c.op in ("const", "scalar") else self.move(c, attrs, shape) for c in node.inputs]
            return self.builder.like(node, children, shape)
        return self.builder.make("view", (node,), node.dtype, shape, attrs, node.location)

    def _move_reduce(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """The movement applied to the operand of a reduction; None where it affects a reduced dimension."""
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

    def _move_contract(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """The movement applied to the operands of a product; None where it mixes batch, row and column axes."""
        x, weight = node.inputs
        batch, last, length = len(axes(node.attrs[0]).batch), len(node.shape) - 1, x.shape[-1]
        kind, dim = attrs[0], attrs[1] if len(attrs) > 1 else None
        if kind == "slice" and dim == last:
            if under_views(weight).op == "input" or self._slices_whole_tiles(weight, attrs):
                moved = self.move(weight, ("slice", batch, *attrs[2:]), (*shape[:batch], shape[last], length))
                return self._contract(node, x, moved, batch, shape)
            return None
        if batch and (kind != "permute" and isinstance(dim, int) and dim < batch):
            if kind == "slice" and is_weight(weight):
                return None
            batch += {"unsqueeze": 1, "squeeze": -1}.get(kind, 0)
            weight_shape = (*shape[:batch], *weight.shape[-2:])
            return self._contract(
                node, self.move(x, attrs, (*shape[:-1], length)), self.move(weight, attrs, weight_shape), batch, shape
            )
        if kind == "permute" and batch and attrs[1][:batch] != tuple(range(batch)):
            if attrs[1][-1] != last or max(attrs[1][:batch]) >= batch:
                return None
            order = (*attrs[1][:batch], batch, batch + 1)
            moved = self.move(weight, ("permute", order), tuple(weight.shape[source] for source in order))
            return self._contract(node, self.move(x, attrs, (*shape[:-1], length)), moved, batch, shape)
        rows_only = (
            (kind == "slice")
            or (kind == "unsqueeze" and dim is not None and dim <= last)
            or (kind == "squeeze" and dim is not None and dim < last)
            or (kind == "permute" and attrs[1][-1] == last)
            or (
                kind == "reshape"
                and len(shape) > batch
                and (*shape[:batch], shape[-1]) == (*node.shape[:batch], node.shape[-1])
            )
        )
        if not rows_only:
            return None
        return self._contract(node, self.move(x, attrs, (*shape[:-1], length)), weight, batch, shape)

    def _contract(self, node: Node, x: Node, weight: Node, batch: int, shape: Shape) -> Node:
        """The product ``node`` over moved operands, with the equation for the axes that they have now."""
        attrs = (equation(batch, len(shape) - 1 - batch), *node.attrs[1:])
        return self.builder.make("contract", (x, weight), node.dtype, shape, attrs, node.location)

    def _move_scan(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """The movement applied to what ``node`` scans; None where it cuts or merges the scanned dimension.

        A scan seen from its other end is the scan of what it combines seen so, in the other direction.
        """
        (kind, dim, reverse), movement = node.attrs, attrs[0]
        if movement == "permute":
            moved = attrs[1].index(dim)
        elif movement == "unsqueeze":
            moved = dim + (attrs[1] <= dim)
        elif movement == "squeeze" and attrs[1] != dim:
            moved = dim - (attrs[1] < dim)
        elif movement == "slice" and attrs[1] != dim:
            moved = dim
        elif attrs == ("slice", dim, symbols.sub(node.shape[dim], 1), -1) and shape == node.shape:
            moved, reverse = dim, not reverse
            if kind in PLACES:
                return None
        else:
            return None
        value = self.move(node.inputs[0], attrs, shape)
        return self.builder.make("scan", (value,), node.dtype, shape, (kind, moved, reverse), node.location)

    def _move_sort(self, node: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """The movement applied to what ``node`` sorts. Of the sorted dimension, a slice gives fewer ranks of it."""
        (what, dim, descending, start), operand, movement = node.attrs, node.inputs[0], attrs[0]
        if movement == "permute":
            moved = attrs[1].index(dim)
        elif movement == "unsqueeze":
            moved = dim + (attrs[1] <= dim)
        elif movement == "squeeze" and attrs[1] != dim:
            moved = dim - (attrs[1] < dim)
        elif movement == "slice" and (attrs[1] != dim or attrs[3] == 1):
            moved = dim
        else:
            return None
        if movement == "slice" and attrs[1] == dim:
            start = symbols.add(start, attrs[2])
        else:
            whole: Any = (*shape[:moved], operand.shape[dim], *shape[moved + 1 :])
            operand = self.move(operand, attrs, whole)
        return self.builder.make("sort", (operand,), node.dtype, shape, (what, moved, descending, start), node.location)

    def _slices_whole_tiles(self, weight: Node, attrs: tuple[Any, ...]) -> bool:
        """Whether a slice of a quantised weight's rows starts at a tile, so that every layout can be sliced so."""
        while weight.op == "view" and weight.attrs[:2] == ("slice", 0):
            weight = weight.inputs[0]
        _, _, start, step = attrs
        whole = symbols.compare("eq", symbols.mod(start, ROW_TILE), 0)
        return weight.op == "dequantize" and step == 1 and self.decide(whole)

    def _move_broadcast_reduction(self, reduction: Node, attrs: tuple[Any, ...], shape: Shape) -> Node:
        """A reduction that is broadcast over its row, moved: the reduction is moved and then broadcast."""
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

    def _move_cat(self, cat: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """The movement applied to each tensor that ``cat`` joins; None where the result would not be joined of them."""
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
            pieces = [
                self.move(piece, attrs, (*shape[:target], symbols.mul(piece.shape[dim], rest), *shape[target + 1 :]))  # type: ignore[arg-type]
                for piece in cat.inputs
            ]
            return self.builder.make("cat", pieces, cat.dtype, shape, (target,), cat.location)
        else:
            target = dim
        pieces = [
            self.move(piece, attrs, (*shape[:target], piece.shape[dim], *shape[target + 1 :])) for piece in cat.inputs
        ]
        return self.builder.make("cat", pieces, cat.dtype, shape, (target,), cat.location)

    def _slice_cat(self, cat: Node, attrs: tuple[Any, ...], shape: Shape) -> Node | None:
        """A slice along the concatenated dimension: the joined tensors that it overlaps, each sliced."""
        _, dim, start, step = attrs
        if step != 1:
            return None
        stop = symbols.add(start, shape[dim])
        pieces: list[Node] = []
        begin: Size = 0
        for piece in cat.inputs:
            end = symbols.add(begin, piece.shape[dim])
            if self.decide(symbols.compare("le", end, start)) or self.decide(symbols.compare("ge", begin, stop)):
                begin = end  # type: ignore[assignment]
                continue
            low = start if self.decide(symbols.compare("ge", start, begin)) else begin
            high = stop if self.decide(symbols.compare("le", stop, end)) else end
            length = symbols.sub(high, low)
            overlap = (*shape[:dim], length, *shape[dim + 1 :])
            pieces.append(self.move(piece, ("slice", dim, symbols.sub(low, begin), 1), overlap))  # type: ignore[arg-type]
            begin = end  # type: ignore[assignment]
        if len(pieces) == 1:
            return pieces[0]
        return self.builder.make("cat", pieces, cat.dtype, shape, (dim,), cat.location) if pieces else None

    def substituted(self, root: Node, memo: dict[int, Node]) -> Node:
        """``root`` with nodes replaced, and views of a replaced node pushed on toward the inputs.

        Args:
            memo: the replacement of each node, by the id of the node that it replaces; the replacements of all other
                nodes under ``root`` are added to it.
        """
        for node in topological([root], known=memo):
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


BARRIERS = frozenset({"input", "iota", "cat", "view", "reduce", "scan", "sort", "gather", "scatter", "contract"})
BARRIERS |= {"dequantize"}
"""Operations that are not pointwise: a movement of the result is not always the same movement of the operands."""


def _leading_dim(before: Shape, dim: int, after: Shape) -> tuple[int, Size] | None:
    """The dimension of ``after`` whose outermost factor is ``dim`` of ``before``, for a reshape of a concatenation.

    Tensors joined along ``dim`` are joined along that dimension of the reshaped result if the dimensions in front of
    ``dim`` match a prefix of ``after``, and ``dim`` is merged only with dimensions that follow it.

    Returns:
        (dimension of ``after``, product of the sizes that ``dim`` is merged with); None where there is none.
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

    @property
    def is_row_major(self) -> bool:
        """Whether torch's ``is_contiguous`` holds: the strides of sizes of 1, and all strides of nothing, are free."""
        facts = zip(self.sizes, self.strides, contiguous_strides(self.sizes), strict=True)
        return 0 in self.sizes or all(size == 1 or stride == expected for size, stride, expected in facts)


ACCESS_BYTES = 16
"""Bytes of the widest memory access; larger alignments are not distinguished."""


@dataclass(frozen=True)
class Memory:
    """A buffer of the current call: its sizes and strides in elements, and the alignment of its address in bytes."""

    view: Strided
    alignment: int = ACCESS_BYTES


class NotViewable(Exception):
    """No strides describe the result of a reshape: the value must be copied before it."""


def apply(memory: Strided, attrs: Sequence[Any], sizes: tuple[int, ...]) -> Strided:
    """``memory`` under one movement whose result has ``sizes``; NotViewable where no strides describe it."""
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
    """Strides of ``memory`` reshaped to ``sizes``: adjacent dense dimensions are merged, then divided as asked."""
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
