"""Defines the body of a kernel: straight-line instructions in compute dtypes, which a dialect prints.

Storage dtypes end at loads and stores. Each value has a *compute dtype*: float32 for float16, bfloat16, float32 and the
8-bit floats, and the dtype itself for every other. A ``load`` widens an element to it, a ``store`` rounds it to the
storage dtype, and a cast to a narrower float is a ``round_to``: the value keeps its compute dtype but loses the bits
that it would lose in memory.

Neighbours: ``ir/body_builder.py`` makes bodies of regions, ``codegen/printing.py`` prints instructions, and the
templates of a family load and store the operands around them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.ir.graph import Movement, Shape, walked
from jitgen.ir.ops import OPS
from jitgen.ir.regions import Axis, Stage, row_rank_of, shape_of
from jitgen.ir.rounding import NARROW
from jitgen.ir.symbols import Size

_WIDENED = set(NARROW)


def compute_dtype(dtype: str) -> str:
    """Returns the dtype in which arithmetic on ``dtype`` is done."""
    return "float32" if dtype in _WIDENED else dtype


FLOAT_FACTORS = ("float64", "float32", "float16", "bfloat16")
FACTORS = (*FLOAT_FACTORS, "uint8", "int8", "int16", "int32", "int64")
"""Dtypes that a function may multiply by ``@``. A kernel also multiplies codes (``quant/codes.py``)."""


def accumulator_dtype(dtype: str) -> str:
    """Returns the dtype in which products of ``dtype`` operands are summed. Sums of integers wrap around; those of 8
    and 16 bits are summed in int32, which gives the same low bits."""
    return "int32" if dtype in ("uint8", "int8", "int16") else compute_dtype(dtype)


@dataclass(frozen=True)
class Instruction:
    """Represents one step of a body; its result is named by its position.

    Attributes:
        op: a name of ``ir/ops.py``, or ``load``, ``iota`` (operand index in ``attr``), ``const`` (number), ``scalar``
            (index of the kernel's run-time scalar), ``cast`` (compute to compute dtype), ``round_to`` (the storage
            dtype in ``attr`` and back), ``bits`` (of one storage dtype taken for those of another; both in ``attr``),
            ``store`` (operand index in ``attr``), ``gather`` (likewise; its arguments are
            the indices), ``scatter`` ((operand index, kind) in ``attr``; its arguments are the value and the indices),
            ``own`` (its node's attributes in ``attr``).
        args: positions of earlier instructions.
        dtype: the result's compute dtype; for a store, that of the value stored.
        location: the user's line, for error messages only.
        row: in a body with rows: one value for a row rather than one for each element.
        stage: in a body with rows: the pass over the row in which an element's value is computed, or before which a
            row's value is known. A ``reduce`` (its kind in ``attr``) of stage-0 elements is of stage 1, and so is a
            ``scan`` (likewise), which is a value for each element again. Of a scan in chunks, further arguments are the
            components of the state of every chunk of the row (``ir/scans.py``), and a ``state`` (the component's number
            in ``attr``) gives one of them. A ``sort`` of stage-0 elements, and a ``merge`` of the values and indices of
            sorted chunks, are of stage 1; their ``attr`` is what they give, and the ``Order`` (``ir/sorts.py``). A
            ``blocked`` (its kind and the size of blocks in ``attr``) is a value for each element, of the stage of its
            argument.
    """

    op: str
    args: tuple[int, ...]
    dtype: str
    attr: Any = None
    location: str | None = None
    row: bool = False
    stage: int = 0

    @property
    def is_number(self) -> bool:
        """Returns whether it is a number that all elements share."""
        return self.op in ("const", "scalar")

    @property
    def is_conversion(self) -> bool:
        """Returns whether it gives its operand in another dtype, or rounded to one."""
        return self.op in ("cast", "round_to")

    @property
    def is_pointwise(self) -> bool:
        """Returns whether it is computed from its operands' values at the same element."""
        return self.is_conversion or self.op in OPS or self.op in ("own", "bits")


def unvarying(instructions: Sequence[Instruction], are_loads: Callable[[Instruction], bool]) -> list[bool]:
    """Returns, for each instruction, whether all elements have one value of it.

    Args:
        are_loads: whether that is so for an instruction that is neither a number nor pointwise, such as a load.
    """
    flags: list[bool] = []
    for instruction in instructions:
        if instruction.is_pointwise:
            flags.append(all(flags[argument] for argument in instruction.args))
        else:
            flags.append(instruction.is_number or are_loads(instruction))
    return flags


_TENSORS_OF_PRODUCTS = ("x", "weight", "codes", "scales", "zeros", "tensor_scale", "groups", "group_scales")
WHOLE = (*_TENSORS_OF_PRODUCTS, "gather", "query", "key", "value", "score")
"""Kinds of operand that are read at other elements than the computed one: those of a contraction, which reads many for
each element of its result, and gathered ones."""


@dataclass(frozen=True)
class Operand:
    """Represents a tensor that a body reads or writes, element by element.

    Attributes:
        kind: ``"load"``, ``"store"``, ``"iota"`` (an index, which is in no memory) or ``"gather"``, whose dimensions
            are the region's, followed by those that computed indices choose along. A contraction's are ``"x"`` (the
            activation, read at (row, k)), ``"weight"`` (a dense weight, read at (column, k)), ``"codes"``,
            ``"scales"``, ``"zeros"`` and ``"tensor_scale"`` (the tensors of a quantised weight), ``"groups"`` (offsets
            or ids), and ``"group_scales"`` (groups, 1, columns): the sums of a group's rows are multiplied by its row.
            A weight of groups has their number as its first dimension. A user's kernel reads an
            ``"argument"`` where it wants.
        buffer: index of the program's buffer; None for an iota.
        dtype: storage dtype.
        shape: of the whole buffer (of the index space, for an iota).
        movements: from the whole buffer to the region's iteration space, outermost first.
        dim: the dimension an iota counts along.
        row: in a body with rows: one element for a row.
        gathered: of a gather, the number of its last dimensions, along which indices choose.
        within: of a store, the range of indices of a row at which elements are stored; None where all are.
        run: of a store, of how many neighbouring columns one element is the largest.
        block: of a store, how many neighbours of a row have one element of it; 0 where each has its own.
    """

    kind: str
    buffer: int | None
    dtype: str
    shape: Shape
    movements: tuple[Movement, ...] = ()
    dim: int | None = None
    row: bool = False
    gathered: int = 0
    within: tuple[Size, Size] | None = None
    run: int = 1
    block: int = 0


@dataclass(frozen=True)
class Window:
    """Says how pixels and filters meet in each dimension of an image (``ir/convolutions.py``); ``kernel`` are the
    filter's sizes there."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    offset: tuple[int, ...]
    spread: tuple[int, ...]
    kernel: Shape


@dataclass(frozen=True)
class Contraction:
    """Represents a product over ``length`` of an activation (rows, length) and a weight (columns, length).

    Attributes:
        x: the instructions that give an element of the activation, the last one its value: a single load where it is
            a tensor, more where a prologue computes it.
        weight: operands: one dense weight, or the tensors of a quantised one (``spec.weight_tensors``).
        length: K.
        dtype: of the activation, as it meets the weight.
        precision: of a float32 product: ``"ieee"`` or ``"tf32"``; of 8-bit floats ``"ieee"`` or ``"fast"``.
        format, group_size, layout: of a quantised weight; None where it is dense. A group size of None is one scale
            for a row.
        k_splits: the number of ranges of K whose sums are stored separately (split-K).
        w: the instructions that give an element of a weight that a prologue computes, the last one its value: keys
            and values of attention. ``weight`` is then what they read.
        window: of a convolution, whose activation are images and whose weight filters.
        groups: the operand that divides rows, or K, among groups; None where nothing is grouped.
        grouping: what it divides, and how: ``"offsets"`` or ``"ids"`` of rows, or ``"lengths"``, offsets of K.
        settled: whether these ids, and the weights, were complete before the kernel ahead in the program began.
        blocks: of codes with scales of blocks (``quant/codes.py``), which of the operands have such:
            ``"x"``, ``"weight"`` or both. Their scales follow the codes among the operands of ``weight``, those of the
            weight (columns / BLOCK, length / BLOCK) first, then those of x (rows, length / BLOCK). Beside a quantised
            weight with a ``format`` x alone has such, a scale for each of the weight's groups.
        constant: whether the weight is the codes of a quantised one, which no kernel writes.
    """

    x: tuple[Instruction, ...]
    weight: tuple[int, ...]
    length: Size
    dtype: str
    precision: str
    format: str | None = None
    group_size: int | None = None
    layout: str | None = None
    k_splits: int = 1
    w: tuple[Instruction, ...] = ()
    window: Window | None = None
    groups: int | None = None
    grouping: str = ""
    blocks: tuple[str, ...] = ()
    constant: bool = False
    settled: bool = False

    @property
    def activation(self) -> int | None:
        """Returns the operand that is the activation; None if a prologue computes it."""
        return self.x[0].attr if len(self.x) == 1 and self.x[0].op == "load" else None


@dataclass(frozen=True)
class Body:
    """Represents a region that is ready for a dialect.

    Attributes:
        axes: the iteration space; see ``ir/regions.py``.
        stages: what a kernel runs over it, in order.
        operands: what is read and written, stores last.
        instructions: of the stages. ``contract`` (its contraction's index in ``attr``) is a product's accumulator.
        contractions: the products.
        coarse: all that the program returns of it are floats of 16 bits or fewer, be it by way of temporaries; see
            ``codegen/dialect.py``.
        chunks: in a body with rows: into how many chunks a row is cut, each walked by itself.
    """

    axes: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    operands: tuple[Operand, ...]
    instructions: tuple[Instruction, ...]
    contractions: tuple[Contraction, ...] = ()
    coarse: bool = False
    chunks: int = 1

    @property
    def shape(self) -> Shape:
        """Returns the sizes of the axes that index results: (rows, columns) of a product."""
        return shape_of(self.axes)

    @property
    def row_rank(self) -> int:
        """Returns how many of these axes, the last, are walked in sequence."""
        return row_rank_of(self.axes)

    @property
    def is_grouped(self) -> bool:
        """Returns whether its products divide rows, or K, among groups."""
        return any(contraction.groups is not None for contraction in self.contractions)

    @property
    def stores(self) -> tuple[int, ...]:
        return tuple(index for index, operand in enumerate(self.operands) if operand.kind == "store")

    @property
    def has_blocks(self) -> bool:
        """Returns whether something stored is of a block of neighbours of a row."""
        return any(operand.block for operand in self.operands)

    @property
    def has_runs(self) -> bool:
        """Returns whether something stored is the largest of a run of columns."""
        return any(operand.run > 1 for operand in self.operands)

    @property
    def computed(self) -> tuple[Any, ...] | None:
        """Returns what decides the results of a pointwise body besides the tensors that it reads, as a key: bodies with
        equal ones do the same to several tensors. None for a body that reads anything but elements of whole tensors at
        its own coordinates."""
        if self.row_rank or any(o.buffer is None or o.gathered or o.movements or o.within for o in self.operands):
            return None
        operands = tuple((operand.kind, operand.dtype) for operand in self.operands)
        return operands, tuple(map(identity_of, self.instructions)), self.coarse


def placed(instruction: Instruction, before: Sequence[Instruction], operands: Sequence[Operand]) -> Instruction:
    """Gives ``instruction`` the row and stage that follow from those of its arguments among ``before``."""
    arguments = [before[position] for position in instruction.args]
    stage = max((argument.stage for argument in arguments), default=0)
    if instruction.op == "contract":
        return replace(instruction, row=False)
    if instruction.op == "reduce":
        return replace(instruction, row=True, stage=stage + 1)
    if instruction.op in ("scan", "sort"):
        return replace(instruction, row=False, stage=stage + 1)
    if instruction.op == "state":
        return replace(instruction, row=True, stage=stage)
    if instruction.op in ("load", "iota"):
        return replace(instruction, row=operands[instruction.attr].row)
    if instruction.op == "store":
        return replace(instruction, row=operands[instruction.attr].row, stage=stage)
    return replace(instruction, row=all(argument.row for argument in arguments), stage=stage)


def elements_under(body: Body, roots: Sequence[int]) -> set[int]:
    """Returns the element instructions from which ``roots`` are computed."""

    def below(position: int) -> Iterator[int]:
        return (argument for argument in body.instructions[position].args if not body.instructions[argument].row)

    return set(walked((argument for root in roots for argument in below(root)), below))


def behind(instructions: Sequence[Instruction], roots: Iterable[int], stops: Container[int] = ()) -> set[int]:
    """Returns ``roots`` and the positions that they are computed from, but not what is only behind ``stops``."""
    return set(walked(roots, lambda position: () if position in stops else instructions[position].args))


def with_all_behind(instructions: Sequence[Instruction], roots: Iterable[int]) -> tuple[Instruction, ...]:
    """Returns the instructions at ``roots`` and all that they are computed from, in their order."""
    needed = sorted(behind(instructions, roots))
    now = {position: number for number, position in enumerate(needed)}
    return tuple(replace(instructions[p], args=tuple(now[a] for a in instructions[p].args)) for p in needed)


def identity_of(instruction: Instruction) -> tuple[Any, ...]:
    """Returns the fields of an instruction that decide its result: instructions equal in these are computed once."""
    return (instruction.op, instruction.args, instruction.dtype, _exact(instruction.attr))


def _exact(value: Any) -> Any:
    return (type(value), value.hex() if isinstance(value, float) else value)
