"""Answers where the tensors of one call lie, and records what of a partition follows from that.

Strides of a call only decide what needs a copy, before or after. A partition that has asked for the lines of matrices
is valid for calls of the same answers (``LinesOf``); after any other question, for calls of the same strides alone.

Neighbours: ``families/partition.py`` makes one for each graph; families ask it as ``Partition.memory``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jitgen.ir import symbols
from jitgen.ir.attributes import CHANNELS_LAST, CONTIGUOUS
from jitgen.ir.graph import Movement, Node, Shape
from jitgen.ir.nodes import INPUT, IOTA, VIEW
from jitgen.ir.views import ACCESS_BYTES, Memory, NotViewable, Strided, apply, contiguous_strides
from jitgen.kernel.operands import channels_last_memory, item_size, locate, ordered_like, output_strides


class Lines(NamedTuple):
    """Says how matrices (..., rows, columns) lie in memory.

    Attributes:
        along: "columns" where the elements of a row are neighbours, "rows" where those of a column are, or "" for
            neither, and where elements are repeated or no strides describe the matrices.
        unit: the bytes, a power of two, that lines begin at multiples of.
    """

    along: str
    unit: int

    @property
    def are_mapped(self) -> bool:
        """Returns whether a tensor map describes the matrices."""
        return bool(self.along) and self.unit == ACCESS_BYTES


@dataclass(frozen=True)
class LinesOf:
    """Asks for the lines of an input, or of a view of one.

    Attributes:
        number: of the input.
        movements: from the input to its view.
        dtype: of an element.
        unit: the largest that is of interest.
    """

    number: int
    movements: tuple[Movement, ...]
    dtype: str
    unit: int = ACCESS_BYTES

    def at(self, inputs: Sequence[Memory], environment: Mapping[str, Any]) -> Lines:
        """Answers for a call whose ``inputs`` lie so."""
        memory = inputs[self.number]
        try:
            view = locate(self.movements, memory.view, environment)
        except NotViewable:
            return Lines("", 1)
        *batch, outer, inner = view.strides
        if 0 in (outer, inner) or 1 not in (outer, inner):
            return Lines("", 1)
        along, step = ("columns", outer) if inner == 1 else ("rows", inner)
        size = item_size(self.dtype)
        return Lines(along, math.gcd(self.unit, memory.alignment, *(size * s for s in (view.offset, step, *batch))))


class CallMemory:
    """Knows the sizes and strides of one call.

    Attributes:
        environment: a value for every symbol.
        inputs: the strides of every input.
        out: for each result, the memory of the caller's ``out=`` tensor, if there is one.
        is_general: whether nothing that was asked depends on strides, besides ``asked``.
        asked: the answers of questions for lines.
    """

    def __init__(self, environment: Mapping[str, Any], inputs: Sequence[Memory], out: Sequence[Strided | None]) -> None:
        self.environment, self.inputs, self.out = environment, [memory.view for memory in inputs], out
        self.is_general = True
        self.asked: dict[LinesOf, Lines] = {}
        self._inputs = inputs

    def depends_on_strides(self) -> None:
        """Records that the partition is valid only for calls with these strides."""
        self.is_general = False

    def contiguous(self, shape: Shape) -> Strided:
        """Returns the memory of a row-major tensor of ``shape``."""
        sizes = self._sizes(shape)
        return Strided(sizes, contiguous_strides(sizes))

    def input(self, number: int, shape: Shape) -> Strided:
        """Returns the memory of input ``number``, whose shape is ``shape``."""
        return self.inputs[number] if number < len(self.inputs) else self.contiguous(shape)

    def result(self, position: int, node: Node) -> Strided:
        """Returns the memory of ``node``, which is result ``position``: the caller's, or what will be allocated."""
        caller_output = self.out[position] if position < len(self.out) else None
        if caller_output is not None:
            return caller_output
        sizes = self._sizes(node.shape)
        like = ordered_like(sizes, node.attrs == CONTIGUOUS, node.attrs == CHANNELS_LAST, self.inputs)
        return Strided(sizes, output_strides(sizes, like))

    def strides(self, node: Node) -> Strided | None:
        """Returns the memory of ``node``, an input or views of one; None where no strides describe it."""
        if node.kind is VIEW:
            source = self.strides(node.inputs[0])
            if source is None:
                return None
            attrs = symbols.evaluated(node.attrs, self.environment)
            try:
                return apply(source, attrs, self._sizes(node.shape))
            except NotViewable:
                self.depends_on_strides()
                return None
        if node.kind is INPUT:
            return self.input(node.attrs.number, node.shape)
        if node.kind is IOTA:
            sizes = self._sizes(node.shape)
            return Strided(sizes, tuple(int(dim == node.attrs.dim) for dim in range(len(sizes))))
        return self.contiguous(node.shape)

    def lines(self, node: Node, unit: int = ACCESS_BYTES) -> Lines:
        """Returns how the matrices ``node`` lie, with units up to ``unit``. The answer is recorded where they are an
        input, or views of one; how what a program computes lies follows from its sizes."""
        base = node.under_views
        if base.kind is INPUT and base.attrs.number < len(self._inputs):
            question = LinesOf(base.attrs.number, node.movements, node.dtype, unit)
            self.asked[question] = question.at(self._inputs, self.environment)
            return self.asked[question]
        computed = Memory(self.contiguous(base.shape))
        return LinesOf(0, node.movements, node.dtype, unit).at([computed], self.environment)

    def located(self, movements: Sequence[Movement], memory: Strided) -> Strided | None:
        """Returns what ``movements`` of ``memory`` are; None where no strides describe it."""
        try:
            return locate(tuple(movements), memory, self.environment)
        except NotViewable:
            self.depends_on_strides()
            return None

    def without_needless_copy(self, node: Node) -> Node:
        """Returns what ``node`` copies, if torch returns that itself: it is to be in an order and is so already."""
        if node.attrs not in (CONTIGUOUS, CHANNELS_LAST) or not node.inputs[0].is_in_memory:
            return node
        self.depends_on_strides()
        source = self.strides(node.inputs[0])
        return node.inputs[0] if source is not None and has_order(source, node) else node

    def _sizes(self, shape: Shape) -> tuple[int, ...]:
        return symbols.evaluated(shape, self.environment)


def has_order(memory: Strided, node: Node) -> bool:
    """Returns whether ``memory`` is in the order that ``node`` asks for, if it asks for one."""
    if node.attrs == CHANNELS_LAST:
        return memory.strides == channels_last_memory(memory.sizes).strides
    return node.attrs != CONTIGUOUS or memory.is_row_major
