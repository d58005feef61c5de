"""Makes the epilogue visitor tree of a region, CUTLASS's fused epilogue, from the instructions of its body.

The graph is a ``Sm90TopologicalVisitor``: one operation for each instruction, in their order, and for each the numbers
of the operations that are its arguments. A value that several others read is one operation.

=====================================  ==========================================================================
instruction                            operation
=====================================  ==========================================================================
``contract``                           ``Sm90AccFetch``: the accumulator, also where it is cast from int32
``load``, one for each column          ``Sm90RowBroadcast``: a row that is the same for all rows
``load``, one number                   ``Sm90ScalarBroadcast``, and so a run-time ``scalar``
``load``, a matrix                     the first that tensor maps describe: ``Sm90SrcFetch``, which is copied ahead;
                                       others, and one for each row: ``Sm90AuxLoad``
``round_to`` 16 bits                   ``Sm90Compute`` of ``Identity``, with that type as its output
operations (``codegen/evt.py``)        ``Sm90Compute``
``store``                              the first that tensor maps describe is the result of the whole graph; others
                                       are ``Sm90AuxStore``
=====================================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.codegen import evt
from jitgen.families.gemm.context import GemmOperand, GemmRegion
from jitgen.families.gemm.layout import GemmLayout
from jitgen.ir.body import Body
from jitgen.kernel.operands import ACCESS_BYTES, item_size
from jitgen.spec import e4m3fn_saturates

ROUNDED = "cutlass::FloatRoundStyle::round_to_nearest"


@dataclass(frozen=True)
class Operation:
    """Describes an operation of the graph.

    Attributes:
        name: of its type.
        type: its definition.
        edges: the numbers of the operations that are its arguments.
        arguments: its initializer.
        function: the expression of the function of one element that it applies; empty for CUTLASS's own.
        parameters: how many arguments that function has.
    """

    name: str
    type: str
    edges: tuple[int, ...]
    arguments: str = "{}"
    function: str = ""
    parameters: int = 0

    @property
    def sequence(self) -> str:
        """Returns the type of ``edges``."""
        return f"seq<{', '.join(map(str, self.edges))}>"


@dataclass(frozen=True)
class Epilogue:
    """Describes the epilogue of a region.

    Attributes:
        operations: of its graph, in order.
        result: the operand that is stored by a tensor map.
        source: the operand that is copied ahead by a tensor map; None without one.
    """

    operations: tuple[Operation, ...]
    result: int
    source: int | None


def lack(body: Body, layout: GemmLayout) -> str | None:
    """Returns why the epilogue of ``body`` has no graph; None if it has one."""
    dtypes = [instruction.dtype for instruction in body.instructions]
    for position, instruction in enumerate(body.instructions):
        if instruction.op in ("contract", "store") or evt.is_accumulator_cast(position, body.instructions):
            continue
        if instruction.op == "load":
            dtype = body.operands[instruction.attr].dtype
            if dtype not in evt.ELEMENTS:
                return f"the epilogue reads {dtype}, and an EVT reads floats of at most 32 bits"
        elif instruction.op == "scalar":
            if instruction.dtype != "float32":
                return f"the epilogue reads a number of {instruction.dtype}, and an EVT computes in float32"
        elif instruction.op == "iota":
            return "the epilogue computes with positions of elements, as random numbers do, which no EVT node has"
        elif reason := evt.lack(instruction, [dtypes[a] for a in instruction.args]):
            return f"an operation of the epilogue has no EVT node: {reason}"
    stored = [index for index, operand in enumerate(body.operands) if operand.kind == "store"]
    for index in stored:
        if body.operands[index].dtype not in evt.ELEMENTS:
            return f"a result is {body.operands[index].dtype}, and an EVT stores floats of at most 32 bits"
        if beyond := _beyond(body.operands[index].dtype):
            return (
                f"a result is {body.operands[index].dtype}, of which CUTLASS stores the largest number for "
                f"what is beyond, and this torch {beyond}"
            )
    if not any(is_mapped(body, layout, index) for index in stored):
        columns = min(ACCESS_BYTES // item_size(body.operands[index].dtype) for index in stored)
        return (
            f"no result is whole, with contiguous rows that begin at multiples of {ACCESS_BYTES} bytes, as tensor maps "
            f"need: it is a slice, transposed, or its number of columns is no multiple of {columns}, say"
        )
    return None


def _beyond(dtype: str) -> str:
    """Returns what torch makes of numbers beyond ``dtype``; empty where CUTLASS's conversion makes the same of them."""
    if dtype == "float8_e5m2":
        return "infinity"
    return "NaN" if dtype == "float8_e4m3fn" and not e4m3fn_saturates() else ""


def is_mapped(body: Body, layout: GemmLayout, index: int) -> bool:
    """Returns whether a tensor map describes operand ``index``, which the epilogue reads or writes."""
    whole = ACCESS_BYTES // item_size(body.operands[index].dtype)
    return layout.operands[index] == "full" and layout.units[index] >= whole


def mapped_operands(body: Body, layout: GemmLayout) -> tuple[int, int | None]:
    """Returns the operand that is stored by a tensor map, and the one that is copied ahead by one, if any."""
    result = next(i for i, o in enumerate(body.operands) if o.kind == "store" and is_mapped(body, layout, i))
    size = item_size(body.operands[result].dtype)
    sources = (
        instruction.attr
        for instruction in body.instructions
        if instruction.op == "load"
        and is_mapped(body, layout, instruction.attr)
        and item_size(body.operands[instruction.attr].dtype) == size > 1  # one memory is for both
    )
    return result, next(sources, None)


def epilogue(body: Body, layout: GemmLayout, region: GemmRegion) -> Epilogue:
    """Makes the graph of ``body``, which ``lack`` finds nothing wrong with."""
    return _Graph(body, layout, region.operands).made()


class _Graph:
    """Holds the graph of a body while it is made."""

    def __init__(self, body: Body, layout: GemmLayout, operands: Sequence[GemmOperand]) -> None:
        self.body, self.layout, self.operands = body, layout, operands
        self.result, self.source = mapped_operands(body, layout)
        self.operations: list[Operation] = []
        self.numbers: dict[int, int] = {}  # of the operation of each instruction

    def made(self) -> Epilogue:
        stores: list[tuple[int, int]] = []
        for position, instruction in enumerate(self.body.instructions):
            if instruction.op == "const":
                continue
            if instruction.op == "store":
                stores.append((instruction.attr, instruction.args[0]))
                continue
            if evt.is_accumulator_cast(position, self.body.instructions):
                self.numbers[position] = self.numbers[instruction.args[0]]
                continue
            self.numbers[position] = self._add(*self._operation(position))
        for operand, value in stores:
            if operand != self.result:
                element, strides = self._memory(operand)
                type = f"Sm90AuxStore<0, EpilogueTile, {element}, {ROUNDED}, {strides}, void, void, 1, false>"
                self._add(type, (self._number(value),), self._address(operand))
        value = next(value for operand, value in stores if operand == self.result)
        element = evt.ELEMENTS[self.operands[self.result].dtype]
        self._add(f"Sm90Compute<Identity, {element}, float, {ROUNDED}>", (self._number(value),))
        return Epilogue(tuple(self.operations), self.result, self.source)

    def _add(
        self, type: str, edges: tuple[int, ...], arguments: str = "{}", function: str = "", parameters: int = 0
    ) -> int:
        number = len(self.operations)
        name = f"Node{number}"
        self.operations.append(Operation(name, type.replace("@", name), edges, arguments, function, parameters))
        return number

    def _number(self, position: int) -> int:
        """Returns the operation of instruction ``position``; a constant that is stored as it is becomes one."""
        if position not in self.numbers:
            constant = evt.node_of(position, self.body.instructions).expression
            self.numbers[position] = self._add("Sm90ScalarBroadcast<float>", (), f"{{{{{constant}}}}}")
        return self.numbers[position]

    def _operation(self, position: int) -> tuple[str, tuple[int, ...], str, str, int]:
        """Returns type, edges, initializer, function and number of parameters of an instruction's operation."""
        instruction = self.body.instructions[position]
        if instruction.op == "contract":
            return "Sm90AccFetch", (), "{}", "", 0
        if instruction.op == "load":
            return *self._load(instruction.attr), "", 0
        if instruction.op == "scalar":
            return "Sm90ScalarBroadcast<float>", (), f"{{{{params.scalar{instruction.attr}}}}}", "", 0
        if instruction.op == "round_to" and instruction.attr in ("float16", "bfloat16"):
            element = evt.ELEMENTS[instruction.attr]
            return f"Sm90Compute<Identity, {element}, float, {ROUNDED}>", self._edges(instruction.args), "{}", "", 0
        node = evt.node_of(position, self.body.instructions)
        functor = node.functor or "@::Fragment"
        count = 0 if node.functor else len(node.arguments)
        type = f"Sm90Compute<{functor}, float, float, {ROUNDED}>"
        return type, self._edges(node.arguments), "{}", node.expression, count

    def _edges(self, positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._number(position) for position in positions)

    def _load(self, operand: int) -> tuple[str, tuple[int, ...], str]:
        """Returns type, edges and initializer of what reads ``operand``."""
        element, strides = self._memory(operand)
        kind = self.layout.operands[operand]
        if operand == self.source:
            return f"Sm90SrcFetch<{element}>", (), "{}"
        if kind == "column":
            type = f"Sm90RowBroadcast<0, BlockTile, {element}, float, Stride<_0, _1, int64_t>, 1, false>"
            return type, (), f"{{{self._pointer(operand)}, {element}(0), {{}}}}"
        if kind == "scalar":
            return f"Sm90ScalarBroadcast<{element}>", (), f"{{{{{element}(0)}}, {{{self._pointer(operand)}}}}}"
        type = f"Sm90AuxLoad<0, EpilogueTile, {element}, {strides}, void, void, 1, false>"
        return type, (), self._address(operand, f"{element}(0), ")

    def _memory(self, operand: int) -> tuple[str, str]:
        """Returns the element of ``operand``, and the type of its strides."""
        own = self.operands[operand]
        static = ["_0" if stride == "0" else "_1" if stride == "1" else "int64_t" for stride in own.own]
        return evt.ELEMENTS[own.dtype], f"Stride<{', '.join(static)}, int64_t>"

    def _pointer(self, operand: int) -> str:
        own = self.operands[operand]
        const = "" if own.role == "store" else " const"
        return f"reinterpret_cast<{evt.ELEMENTS[own.dtype]}{const}*>({own.pointer})"

    def _address(self, operand: int, between: str = "") -> str:
        strides = ["{}" if stride in "01" else f"int64_t({stride})" for stride in self.operands[operand].own]
        return f"{{{self._pointer(operand)}, {between}{{{', '.join(strides)}, 0}}}}"
