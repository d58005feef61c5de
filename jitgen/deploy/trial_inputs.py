"""Makes the tensors on which schedules are timed: ordinary numbers, and integers that leave a kernel all of its work.

An integer input may decide how much a program does, or where it reads. What it decides is found in the graph, by the
range that every integer has when the input lies between two numbers (``_ranges``, by ``ir/intervals.py``):

    indices     of rows, slots or pages, and ids of groups: drawn at random below the least size that they choose from,
                and different ones where there are enough
    lengths     that a position is compared with: the least number for which the comparison hides nothing
    positions   that are both: ascending along the last dimension, to the largest that both allow
    ends        of the groups of a grouped product, or their lengths: divided at random, all rows belong to a group
    masks       of bool: an eighth is hidden, at random, and nothing at the beginning of a row
    data        integers that are only computed with: random small ones

What no rule covers is 0, such as the integers that a user's own kernel takes: these are those of the recorded call, or
what the user states (``own_integers``), and 0 where nobody has said what they are (``undecided``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import intervals, symbols
from jitgen.ir.equations import LENGTHS_OF_GROUPS
from jitgen.ir.gathers import gathered_dims
from jitgen.ir.graph import Graph, Node, topological
from jitgen.ir.intervals import Range
from jitgen.ir.nodes import (
    CAST,
    CAT,
    CONST,
    CUSTOM_GRADIENT,
    DEQUANTIZE,
    GATHER,
    GROUPED,
    INPUT,
    IOTA,
    LAUNCH,
    SCALAR,
    SCAN,
    SCATTER,
    SORT,
    VIEW,
)
from jitgen.ir.views import Strided
from jitgen.quant.formats import Float, find
from jitgen.spec import DTYPES

BYTES = ("uint8", "int8")
COUNTERS = ("int16", "int32", "int64")
INDICES = (*BYTES, *COUNTERS)
"""The dtypes of integers that may decide work; bytes that do not are codes."""
EQUALITIES, ORDERS = ("eq", "ne"), ("lt", "le", "gt", "ge")
COMPARISONS = (*EQUALITIES, *ORDERS)
BYTES_OF_SCALES = {"e8m0": (119, 128), "e4m3": (0x20, 0x50)}
"""By the kind of scales that are bytes, the first of those that are ordinary numbers, and the one after the last."""
MOST = 2**31 - 1
"""The largest integer that is tried as an index or a length."""
MOST_SHUFFLED = 2**24
"""Numbers that are shuffled at most to draw different indices."""
DATA = (1, 32)
"""The least of the integers that are only computed with, and the one after the largest: shifts by them are defined."""
HIDDEN = 0.125
"""The share of a mask that hides."""

Filler = Callable[[torch.Tensor, torch.Generator], object]
"""Fills a tensor, with random numbers of a generator."""


def filled(view: Strided, dtype: str, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Returns a tensor of random numbers; of integers zeros, and of bytes, random codes."""
    torch_dtype = DTYPES[dtype]
    made = torch.empty_strided(view.sizes, view.strides, dtype=torch_dtype, device=device)
    if torch_dtype.is_floating_point:
        numbers = torch.empty(made.shape, dtype=torch.float32, device=device).normal_(0.0, 0.1, generator=generator)
        return made.copy_(numbers)
    if torch_dtype == torch.uint8:
        return made.random_(0, 256, generator=generator)
    if torch_dtype == torch.int8:
        return made.random_(-127, 128, generator=generator)
    if torch_dtype in (torch.bool, torch.int16, torch.int32, torch.int64):
        return made.zero_()
    raise UnsupportedError(f"no tensors of {dtype} are made to time a program")


def fillers(graph: Graph, environment: Mapping[str, Any]) -> dict[int, Filler]:
    """Returns, by the numbers of inputs of ``graph``, what fills a tensor that decides work, or whose bytes are floats.

    Args:
        environment: a value for every symbol of the graph.
    """
    return {
        **_Integers(graph, environment).fillers(),
        **{number: _bytes(*ends) for number, *ends in _bytes_of_weights(graph)},
        **dict(_divisions(graph, environment)),
    }


def undecided(graph: Graph, environment: Mapping[str, Any]) -> set[int]:
    """Returns the numbers of the integer inputs that are 0 because no rule covers them."""
    return {number for number, fill in fillers(graph, environment).items() if fill is _zeros}


def _bytes(least: int, end: int) -> Filler:
    return lambda tensor, generator: tensor.random_(least, end, generator=generator)


def _bytes_of_weights(graph: Graph) -> Iterator[tuple[int, int, int]]:
    """Yields the inputs of ``graph`` whose bytes are floats of a quantised weight, with the range of bytes that are
    ordinary numbers: of 8-bit codes and of scales."""
    for node in topological(graph.results):
        if node.kind is DEQUANTIZE:
            codes, scales, *_ = (tensor.attrs.number for tensor in node.inputs)
            format = find(node.attrs.format)
            if isinstance(format.code, Float) and format.bits == 8 and graph.inputs[codes].dtype == "uint8":
                yield codes, 0, 0x60
            if format.scale in BYTES_OF_SCALES:
                yield scales, *BYTES_OF_SCALES[format.scale]


def _divisions(graph: Graph, environment: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yields the inputs of ``graph`` that are ends or lengths of groups, among which rows, or K, are divided, with what
    fills them."""
    for node in topological(graph.results):
        if node.kind is GROUPED and node.attrs.by == "offsets":
            x, _, groups = node.inputs
            are_lengths = False
            while groups.kind in (VIEW, CAST, SCAN):
                are_lengths |= groups.kind is SCAN
                groups = groups.inputs[0]
            if groups.kind is INPUT:
                extent = x.shape[-1 if node.attrs.equation == LENGTHS_OF_GROUPS else 0]
                yield groups.attrs.number, _division(symbols.evaluate(extent, environment), are_lengths)


def _division(extent: int, are_lengths: bool) -> Filler:
    """Returns what fills a tensor with ascending ends of groups of ``extent`` rows, which then are as unlike as
    ``families/gemm/groups.py`` takes them to be, or with their lengths."""

    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        ends = torch.randint(extent + 1, tensor.shape, generator=generator, device=tensor.device).sort().values
        ends[..., -1:] = extent
        tensor.copy_(ends.diff(prepend=torch.zeros_like(ends[..., :1])) if are_lengths else ends)

    return fill


# ---------------------------------------------------------------------------------------------------------- integers


class _Integers:
    """Finds what the integers and the masks among the inputs of ``graph`` decide."""

    def __init__(self, graph: Graph, environment: Mapping[str, Any]):
        self._environment = environment
        self._drawn: dict[int, Range] = {}
        """The range of each input that is decided."""
        nodes = topological(graph.results)
        self._inputs: dict[Node, frozenset[int]] = {}
        """The integer inputs that the range of a node depends on."""
        for node in nodes:
            own = {node.attrs.number} if node.kind is INPUT and node.dtype in INDICES else set()
            self._inputs[node] = frozenset(own).union(*(self._inputs[operand] for operand in _bounding(node)))
        self._tensors = [node for node in nodes if node.kind is INPUT]
        self._visible = _visible_where(nodes)
        compared = [node for node in nodes if node.op in COMPARISONS and self._inputs[node]]
        self._ordered = [node for node in compared if node.op in ORDERS]
        unbounded = [*compared, *(node for node in nodes if node.kind in (GROUPED, LAUNCH))]
        self._unbounded = set[int]().union(*(self._inputs[operand] for node in unbounded for operand in node.inputs))
        self._nodes = topological(compared)
        self._indices = [one for node in nodes for one in self._choosing(node) if self._inputs[one[0]]]
        self._nodes = topological([*compared, *(index for index, _ in self._indices)])

    def fillers(self) -> dict[int, Filler]:
        made: dict[int, Filler] = {}
        for node in self._tensors:
            if node.dtype == "bool":
                made[node.attrs.number] = _mask(self._visible.get(node, True))
            elif node.dtype in INDICES and (node.dtype not in BYTES or self._chooses(node)):
                made[node.attrs.number] = self._filler(node)
        return made

    def _chooses(self, input: Node) -> bool:
        return any(input.attrs.number in self._inputs[index] for index, _ in self._indices)

    def _filler(self, input: Node) -> Filler:
        number, most = input.attrs.number, torch.iinfo(DTYPES[input.dtype]).max
        indices = [(index, extent) for index, extent in self._indices if number in self._inputs[index]]
        lengths = [node for node in self._ordered if self._decides(number, node)]
        if not indices and not lengths:
            return _zeros if number in self._unbounded else _data
        last = None
        if indices:
            last = self._largest(number, lambda v: self._all_within(indices, number, v), min(most, MOST))
            if last is None:
                return _zeros
            widest = self._ends_of(indices, number, last)
            narrower = self._largest(number, lambda v: self._ends_of(indices, number, v) != widest, last)
            last = 0 if narrower is None else narrower + 1  # beyond it all choose the same where they are clamped
        length = max((self._length(number, node) for node in lengths), default=0)
        top = min(length if last is None else min(length, last), most)
        self._drawn[number] = (0, last if last is not None and not length else top)
        if length:
            return _ascending(top) if last is not None else _constant(top)
        return _zeros if last is None else _indices(last)

    def _choosing(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Yields the operands of ``node`` that choose, with the number of what they choose from."""
        if node.kind is GATHER:
            chosen, coordinates, indices = node.inputs[0].shape, node.attrs, node.inputs[1:]
        elif node.kind is SCATTER:
            movements, indices = node.attrs.movements, node.inputs[2:]
            chosen = movements[-1][1] if movements else node.inputs[0].shape
            coordinates = node.attrs.coordinates
        elif node.kind is GROUPED and node.attrs.by == "ids":
            chosen, coordinates, indices = node.inputs[1].shape[:1], (-1,), node.inputs[2:]
        else:
            yield from self._matched(node) if node.op in EQUALITIES else ()
            return
        for index, dim in zip(indices, gathered_dims(coordinates), strict=True):
            yield index, symbols.evaluate(chosen[dim], self._environment)

    def _matched(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Yields the operand of an equality that inputs decide, where the other one counts up to a number, as in a
        one-hot encoding."""
        for one, other in (node.inputs, node.inputs[::-1]):
            if self._inputs[one] and not self._inputs[other]:
                ends = self._ranges({})[other]
                if ends is not None and ends[0] == 0 < ends[1]:
                    yield one, ends[1] + 1

    def _decides(self, number: int, comparison: Node) -> bool:
        """Returns whether ``comparison`` is one of what depends on the input ``number`` with what depends on none."""
        sides = [self._inputs[operand] for operand in comparison.inputs]
        return any(number in side for side in sides) and not all(sides)

    def _all_within(self, indices: Sequence[tuple[Node, int]], number: int, largest: int) -> bool:
        ends_of = self._ends_of(indices, number, largest)
        return all(ends and ends[0] >= 0 and ends[1] < n for ends, (_, n) in zip(ends_of, indices, strict=True))

    def _ends_of(self, indices: Sequence[tuple[Node, int]], number: int, largest: int) -> list[Range | None]:
        ranges = self._ranges({number: (0, largest)})
        return [ranges[index] for index, _ in indices]

    def _length(self, number: int, comparison: Node) -> int:
        """Returns the least value of the input ``number`` with which ``comparison`` hides nothing; 0 if there is
        none."""
        if comparison not in self._visible:
            return 0
        wanted = int(self._visible[comparison])
        shortest = self._largest(number, lambda v: self._ranges({number: (v, v)})[comparison] != (wanted, wanted), MOST)
        return 0 if shortest is None or shortest == MOST else shortest + 1

    def _largest(self, number: int, holds: Callable[[int], bool], most: int) -> int | None:
        """Returns the largest integer up to ``most`` for which ``holds``, which then holds of smaller ones; None if it
        does not of 0."""
        if not holds(0):
            return None
        least, end = 0, most + 1
        while end - least > 1:
            middle = (least + end) // 2
            least, end = (middle, end) if holds(middle) else (least, middle)
        return least

    def _ranges(self, values: Mapping[int, Range]) -> dict[Node, Range | None]:
        """Returns the range of every node, None where it is not known, where inputs have these ``values``; others have
        those that were decided, or are 0."""
        ranges: dict[Node, Range | None] = {}
        for node in self._nodes:
            ranges[node] = self._range(node, [ranges[operand] for operand in node.inputs], values)
        return ranges

    def _range(self, node: Node, operands: Sequence[Range | None], values: Mapping[int, Range]) -> Range | None:
        if node.kind is INPUT:
            if node.dtype in INDICES:
                return values.get(node.attrs.number, self._drawn.get(node.attrs.number, (0, 0)))
            return (0, 1) if node.dtype == "bool" else None
        if node.kind in (CONST, SCALAR):
            value = symbols.evaluate(node.attrs.value, self._environment)
            return (int(value), int(value)) if isinstance(value, int) else None
        if node.kind is IOTA:
            return 0, max(0, symbols.evaluate(node.shape[node.attrs.dim], self._environment) - 1)
        if node.kind is SORT and node.attrs.what == "indices":
            return 0, max(0, symbols.evaluate(node.inputs[0].shape[node.attrs.dim], self._environment) - 1)
        if node.kind is CAST and node.dtype == "bool":
            return 0, 1
        if node.kind in (VIEW, CAST, CUSTOM_GRADIENT, GATHER, SORT):
            return operands[0]
        if node.kind is CAT:
            known = [ends for ends in operands if ends is not None]
            return intervals.hull(known) if len(known) == len(operands) else None
        return intervals.of_result(node.op, node.dtype, operands)


def _bounding(node: Node) -> tuple[Node, ...]:
    """Returns the operands that may decide the range of ``node``: not where it reads, and none of what sorts, or of
    floats that are no function of one element each."""
    if node.kind is GATHER:
        return node.inputs[:1]
    is_element = node.kind.is_pointwise or node.kind in (VIEW, CAST, CUSTOM_GRADIENT, CAT)
    is_sorted = node.kind is SORT and node.attrs.what == "indices"
    return () if is_sorted or (DTYPES[node.dtype].is_floating_point and not is_element) else node.inputs


def _visible_where(nodes: Sequence[Node]) -> dict[Node, bool]:
    """Returns of conditions whether what they select is visible where they are true, or where they are false: a
    selection hides with the constant of its two operands, of two constants with the smaller one, and a factor with 0.
    Conditions that nothing is known of are left out."""
    visible: dict[Node, bool] = {}
    for node in reversed(nodes):
        if node.op == "where":
            chosen, other = (_constant_of(operand) for operand in node.inputs[1:])
            hides = chosen is not None and (other is None or chosen < other)
            visible.setdefault(node.inputs[0], not hides)
        elif node.kind is CAST and DTYPES[node.dtype].is_floating_point and node.inputs[0].dtype == "bool":
            visible.setdefault(node.inputs[0], True)
        elif node in visible and (node.op in ("bitwise_not", "bitwise_and", "bitwise_or") or node.kind is VIEW):
            for operand in node.inputs:
                visible.setdefault(operand, visible[node] ^ (node.op == "bitwise_not"))
    return visible


def _constant_of(node: Node) -> float | None:
    while node.kind in (VIEW, CAST):
        node = node.inputs[0]
    return node.attrs.value if node.kind is CONST else None


def _zeros(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.zero_()


def _data(tensor: torch.Tensor, generator: torch.Generator) -> None:
    tensor.random_(*DATA, generator=generator)


def _constant(value: int) -> Filler:
    return lambda tensor, generator: tensor.fill_(value)


def _ascending(last: int) -> Filler:
    """Returns what fills a tensor with neighbouring integers along its last dimension, up to ``last``."""

    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        count = tensor.shape[-1] if tensor.dim() else 1
        tensor.copy_(
            (torch.arange(count, device=tensor.device) + (last + 1 - count)).clamp(min=0).view(tensor.shape[-1:])
        )

    return fill


def _indices(last: int) -> Filler:
    """Returns what fills a tensor with random integers up to ``last``, each at most once if there are enough."""

    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        if tensor.numel() <= last < MOST_SHUFFLED:
            drawn = torch.randperm(last + 1, generator=generator, device=tensor.device)[: tensor.numel()]
            tensor.copy_(drawn.view(tensor.shape))
        else:
            tensor.random_(0, last + 1, generator=generator)

    return fill


def _mask(visible: bool) -> Filler:
    """Returns what fills a mask of which ``visible`` elements let others through."""

    def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
        hidden = torch.rand(tensor.shape, generator=generator, device=tensor.device) < HIDDEN
        if tensor.dim():
            hidden[..., :1] = False
        tensor.copy_(~hidden if visible else hidden)

    return fill
