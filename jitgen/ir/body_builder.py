"""Lowers a region's pointwise expressions to a ``Body``: instructions in compute dtypes.

The result of a torch function that is read by what can tell the difference is rounded to the bits that it would lose in
memory (``ir/rounding.py``). Nothing else is rounded between operations, so a fused chain is at least as exact as eager
torch.

Neighbours: ``ir/regions.py`` says what a region is, ``ir/body.py`` what a body is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.analysis import varies
from jitgen.ir.attributes import ROUNDED
from jitgen.ir.body import (
    Body,
    Contraction,
    Instruction,
    Operand,
    Window,
    accumulator_dtype,
    compute_dtype,
    identity_of,
    placed,
)
from jitgen.ir.equations import LENGTHS_OF_GROUPS
from jitgen.ir.gathers import to_iteration_space
from jitgen.ir.graph import Movement, Node, Shape, postorder
from jitgen.ir.nodes import (
    BITS,
    BLOCKED,
    BLOCKS,
    CAST,
    CONST,
    CONVOLVE,
    COUNTED,
    DEQUANTIZE,
    GATHER,
    GROUPED,
    INPUT,
    IOTA,
    LIMITED,
    OWN,
    PRODUCTS,
    REDUCE,
    ROWS,
    SCALAR,
    SCAN,
    SCATTER,
    SORT,
    TAKEN,
    VIEW,
)
from jitgen.ir.ops import FLOATS, OPS
from jitgen.ir.regions import Region, Store
from jitgen.ir.rounding import EXACT_IN, KEEPS, NARROW, holds, sees_rounded
from jitgen.ir.sorts import Order
from jitgen.ir.symbols import Expr, Scalar, Size
from jitgen.ir.views import ROW_TILE
from jitgen.spec import weight_tensors

MOST_WITHIN_ONE = 4
"""The most operations within one torch function between its argument and what sees how that is rounded."""


class BodyBuilder:
    """Lowers one region. ``scalars`` collects the kernel's run-time scalars over all its regions."""

    def __init__(self, buffers: Sequence[Shape], scalars: list[tuple[Expr, str]]):
        self.buffers = buffers
        self.scalars = scalars
        self.instructions: list[Instruction] = []
        self.operands: list[Operand] = []
        self._positions: dict[Any, int] = {}
        self._noted: set[int] = set()
        self._seen: set[int] = set()
        self._row_dims: tuple[int, ...] = ()
        self._has_rows = False
        self._contractions: list[Contraction] = []
        self._load, self._iota, self._chosen = "load", "iota", "gather"

    def lower(self, region: Region, result_buffer: Sequence[int]) -> Body:
        rank = len(region.shape)
        self._row_dims = tuple(range(rank - region.row_rank, rank))
        # A product's epilogue reduces blocks of a row: what is reduced has the region's shape, its result a block's.
        self._has_rows = bool(self._row_dims) or any(REDUCE in store.value.kinds for store in region.stores)
        for store in region.stores:
            for source in store.sources:
                self._note_what_is_seen(source)
        stored = [(store, stored_of(store.value)) for store in region.stores if not store.is_update]
        values = [self.value(node) for _, node in stored]
        for (store, node), value in zip(stored, values, strict=True):
            buffer = result_buffer[store.result]
            row = self._has_rows and store.value.shape != region.shape
            row = row and all(store.value.shape[dim] == 1 for dim in self._row_dims)  # else equal to it, by a guard
            described = ("store", buffer, node.dtype, self.buffers[buffer], store.movements)
            operand = Operand(*described, row=row, within=store.within, run=store.run, block=store.block)
            self.operands.append(operand)
            dtype = compute_dtype(node.dtype)
            value = self._before_rounding(value, operand.dtype)
            ends = tuple(map(self._size, store.within or ()))
            self._emit(Instruction("store", (value, *ends), dtype, len(self.operands) - 1, store.value.location))
        for store in region.stores if region.is_update else ():
            self._scatter(store, result_buffer[store.result])
        return Body(
            region.axes, region.stages, tuple(self.operands), tuple(self.instructions), tuple(self._contractions)
        )

    def _before_rounding(self, value: int, dtype: str) -> int:
        """Returns the position of what is rounded to ``dtype`` at ``value``, since the store rounds: of 8-bit floats,
        whose rounding takes ten instructions where the target has none for it, and of results of products of codes,
        whose epilogues take as long as those of other products while their mainloops take half the time."""
        instruction = self.instructions[value]
        is_rounded = instruction.op == "round_to" and instruction.attr == dtype
        codes = ("float8", "int8", "uint8")
        of_codes = any(product.dtype.startswith(codes) for product in self._contractions)
        return instruction.args[0] if is_rounded and (of_codes or dtype.startswith("float8")) else value

    def _emit(self, instruction: Instruction) -> int:
        if self._has_rows:
            instruction = placed(instruction, self.instructions, self.operands)
        key = identity_of(instruction)
        if key not in self._positions:
            self._positions[key] = len(self.instructions)
            self.instructions.append(instruction)
        return self._positions[key]

    def value(self, node: Node) -> int:
        """Returns the position of the instruction that computes ``node``; instructions for its inputs are emitted
        before it."""
        self._note_what_is_seen(node)
        for one in postorder([node], lambda one: () if id(one) in self._positions else self._awaited(one)):
            if id(one) not in self._positions:
                position = self._lower(one)
                if id(one) in self._seen:
                    position = self._rounded(position, one.dtype, one.location)
                self._positions[id(one)] = position
        return self._positions[id(node)]

    def _awaited(self, node: Node) -> Sequence[Node]:
        """Lists the nodes whose instructions come before that of ``node``."""
        node = _word(node) or node
        return () if _is_leaf(node) and not _is_row_value(node) else node.inputs[node.kind is GATHER :]

    def _lower(self, node: Node) -> int:
        dtype = compute_dtype(node.dtype)
        if node.kind is CONST:
            return self._emit(Instruction("const", (), dtype, node.attrs.value))
        if node.kind is SCALAR:
            return self._scalar(node.attrs.value, dtype)
        if _is_row_value(node):
            return self._positions[id(node.inputs[0])]
        if node.kind in PRODUCTS:
            self._contractions.append(self._contraction(node))
            accumulator = node.attrs.accumulator
            scales = _scales_of_groups(node)
            if scales is not None:
                accumulator = accumulator_dtype(self._contractions[-1].dtype)
            total = self._emit(Instruction("contract", (), accumulator, len(self._contractions) - 1, node.location))
            if scales is not None:
                total = self._scaled(total, node, scales)
                accumulator = "float32"
            return total if accumulator == dtype else self._emit(Instruction("cast", (total,), dtype))
        if node.kind is CONVOLVE:
            return self._convolution(node, dtype)
        read = _word(node) or node
        if _is_leaf(read):
            return self._leaf(read, node.dtype)
        if read.kind is GATHER:
            return self._gather(read, node.dtype)
        arguments = tuple(self._positions[id(child)] for child in node.inputs)
        if node.kind is SORT:
            what, dim, descending, start = node.attrs
            order = Order(descending, start, node.shape[dim], node.inputs[0].dtype)
            return self._emit(Instruction("sort", arguments, dtype, (what, order), node.location))
        if node.kind is COUNTED:
            what, bound = node.attrs
            (operand,) = node.inputs
            order = Order(False, 0, operand.shape[-1], operand.dtype, bound=bound)
            return self._emit(Instruction("sort", arguments, dtype, (what, order), node.location))
        if node.kind in (BLOCKED, LIMITED, TAKEN):
            return self._emit(Instruction(node.op, arguments, dtype, tuple(node.attrs) or None, node.location))
        if node.kind in (REDUCE, SCAN):
            return self._emit(Instruction(node.op, arguments, dtype, node.attrs.kind, node.location))
        if node.kind is CAST:
            if node.attrs == ROUNDED:
                return self._rounded(arguments[0], node.dtype, node.location)
            return self._cast(arguments[0], node.inputs[0].dtype, node.dtype, node.location)
        if node.kind is BITS:
            dtypes = node.inputs[0].dtype, node.dtype
            return self._emit(Instruction("bits", arguments, dtype, dtypes, node.location))
        if node.kind is OWN:
            return self._emit(Instruction("own", arguments, dtype, tuple(node.attrs), node.location))
        if node.op not in OPS:
            raise AssertionError(f"{node.op} is not pointwise; a pass should have taken it out of this body")
        return self._emit(Instruction(node.op, arguments, dtype, None, node.location))

    def _contraction(self, node: Node) -> Contraction:
        """Makes the product that ``node`` is; its operands are added to the body's."""
        x, weight = node.inputs[:2]
        inner = BodyBuilder(self.buffers, self.scalars)
        inner.operands, inner._load = self.operands, "x"
        if BLOCKS in (getattr(x.attrs, "layout", None), getattr(weight.attrs, "layout", None)):
            return self._divided(self._product_of_blocks(inner, node), node)
        inner.value(x)
        nested = [i.op for i in inner.instructions if i.op in ("contract", "reduce", "scan")]
        if nested:
            raise AssertionError(f"a {nested[0]} in the activation of a product: a pass should have materialized it")
        base = weight.under_views
        operands: tuple[int, ...]
        described: tuple[Any, Any, Any]
        if _scales_of_groups(node) is not None:
            codes = base.inputs[0]
            moved = tuple(_of_tiles(movement, codes, 1) for movement in weight.movements)
            whole = (("slice", len(weight.shape) - 1, 0, 1), weight.shape)  # without columns of padding
            padded = () if codes.shape[-1] == weight.shape[-1] else (whole,)
            operands, described = (self._operand("weight", codes, (*moved, *padded)),), (None, None, None)
        elif base.kind is not DEQUANTIZE:
            operands, described = (self._operand("weight", weight),), (None, None, None)
        else:
            operands, described = self._tensors(weight), base.attrs[:3]
        precision = _precision(node, x)
        product = Contraction(tuple(inner.instructions), operands, x.shape[-1], x.dtype, precision, *described)
        return self._divided(product, node)

    def _tensors(self, weight: Node) -> tuple[int, ...]:
        """Adds the tensors of ``weight``, a quantised one or rows of it, to the body's operands."""
        base = weight.under_views
        tile = 1 if base.attrs.layout == "portable" else ROW_TILE
        return tuple(
            self._operand(kind, tensor, tuple(_of_tiles(movement, tensor, tile) for movement in weight.movements))
            for kind, tensor in zip(weight_tensors(base.attrs.format), base.inputs, strict=True)
        )

    def _divided(self, product: Contraction, node: Node) -> Contraction:
        """Adds to ``product``, which is that of ``node``, what divides rows, or K, among groups, if anything does."""
        if node.kind is not GROUPED:
            return product
        groups = node.inputs[2]
        as_row = (("unsqueeze", 0), (1, *groups.shape))
        grouping = "lengths" if node.attrs.equation == LENGTHS_OF_GROUPS else node.attrs.by
        return replace(product, groups=self._operand("groups", groups, (as_row,)), grouping=grouping)

    def _scaled(self, total: int, node: Node, scales: Node) -> int:
        """Multiplies the sums ``total`` of codes by the scales of the weight's rows."""
        weight = node.inputs[1]
        moved = tuple(_of_tiles(movement, scales, 1) for movement in weight.movements)
        groups, columns, _ = weight.shape
        across = (("permute", (0, 2, 1)), (groups, 1, columns))
        index = self._operand("group_scales", scales, (*moved, across))
        wide = self._emit(Instruction("cast", (total,), "float32"))
        factor = self._emit(Instruction("load", (), "float32", index))
        return self._emit(Instruction("mul", (wide, factor), "float32", None, node.location))

    def _product_of_blocks(self, inner: BodyBuilder, node: Node) -> Contraction:
        """Makes the product of codes of which one operand or both have scales of blocks; a weight may have its own."""
        left, weight = node.inputs[:2]
        x, *scales_of_x = left.inputs if left.kind is DEQUANTIZE else (left,)
        inner.value(x)
        base = weight.under_views
        if base.kind is DEQUANTIZE and base.attrs.layout != BLOCKS:
            tensors = (*self._tensors(weight), *(self._operand("weight", one) for one in scales_of_x))
            kept = tuple(inner.instructions), tensors, x.shape[-1], x.dtype, _precision(node, x)
            format, group, layout = base.attrs[:3]
            return Contraction(*kept, format, group, layout, blocks=("x",))
        codes, *scales = weight.inputs if weight.kind is DEQUANTIZE else (weight,)
        blocks = (*(("weight",) if scales else ()), *(("x",) if scales_of_x else ()))
        operands = tuple(self._operand("weight", one) for one in (codes, *scales, *scales_of_x))
        precision = _precision(node, x)
        return Contraction(tuple(inner.instructions), operands, x.shape[-1], x.dtype, precision, blocks=blocks)

    def _convolution(self, node: Node, dtype: str) -> int:
        """Makes the convolution that ``node`` is; images are the operand ``"x"``, filters ``"weight"``."""
        images, filters = node.inputs
        inner = BodyBuilder(self.buffers, self.scalars)
        inner.operands, inner._load = self.operands, "x"
        inner.value(images)
        weight, length = self._operand("weight", filters), symbols.product(filters.shape[2:])
        stride, dilation, offset, spread, *_ = node.attrs
        window = Window(stride, dilation, offset, spread, filters.shape[3:])
        self._contractions.append(
            Contraction(tuple(inner.instructions), (weight,), length, images.dtype, node.attrs.precision, window=window)
        )
        accumulator = node.attrs.accumulator
        total = self._emit(Instruction("contract", (), accumulator, len(self._contractions) - 1, node.location))
        return total if accumulator == dtype else self._emit(Instruction("cast", (total,), dtype))

    def _operand(self, kind: str, node: Node, slices: tuple[Movement, ...] = ()) -> int:
        """Returns the operand that is ``node``, an input or views of one, under further ``slices``; a new one is
        added."""
        base, movements = node.under_views, node.movements
        operand = Operand(kind, base.attrs.number, node.dtype, base.shape, (*movements, *slices))
        if operand not in self.operands:
            self.operands.append(operand)
        return self.operands.index(operand)

    def _scatter(self, store: Store, buffer: int) -> None:
        """Adds an update of ``buffer``, the only store of its region."""
        node, kind = store.value, "set"
        sources: Sequence[Node] = (node, *store.indices)
        if node.kind is SCATTER:
            sources, kind = node.inputs[1:], node.attrs.kind
        if kind == "set":
            sources = (stored_of(sources[0]), *sources[1:])
        dtype = sources[0].dtype if kind == "set" else node.dtype
        arguments = tuple(self.value(source) for source in sources)
        shape = self.buffers[buffer]
        self.operands.append(Operand("store", buffer, dtype, shape, store.movements, gathered=len(sources) - 1))
        attr = (len(self.operands) - 1, kind)
        self._emit(Instruction("scatter", arguments, compute_dtype(dtype), attr, node.location))

    def _gather(self, node: Node, dtype: str) -> int:
        source, *indices = node.inputs
        base, movements = source.under_views, source.movements
        movements = (*movements, *to_iteration_space(source.shape, node.shape, node.attrs))
        row = bool(self._row_dims) and not varies(node, self._row_dims)
        operand = Operand(self._chosen, base.attrs.number, dtype, base.shape, movements, None, row, len(indices))
        if operand not in self.operands:
            self.operands.append(operand)
        arguments = tuple(self._positions[id(index)] for index in indices)
        number = self.operands.index(operand)
        return self._emit(Instruction("gather", arguments, compute_dtype(dtype), number, node.location))

    def _leaf(self, node: Node, dtype: str) -> int:
        base, movements = node.under_views, node.movements
        movements = _in_one_spelling(base.shape, movements)
        row = bool(self._row_dims) and not varies(node, self._row_dims)
        if base.kind is INPUT:
            operand = Operand(self._load, base.attrs.number, dtype, base.shape, movements, None, row)
        elif base.kind is IOTA:
            operand = Operand(self._iota, None, dtype, base.shape, movements, base.attrs.dim, row)
        elif base.kind.is_number:
            return self.value(base)
        else:
            raise AssertionError(f"a view of {base.op} reached code generation; a pass should have moved it")
        if operand not in self.operands:
            self.operands.append(operand)
        read = "iota" if base.kind is IOTA else "load"
        return self._emit(Instruction(read, (), compute_dtype(dtype), self.operands.index(operand)))

    def _scalar(self, value: Scalar, dtype: str) -> int:
        """Returns a run-time scalar. A float is passed in its compute dtype; any other is an int64 that the kernel
        casts."""
        assert isinstance(value, Expr)
        passed = (value, dtype if dtype in FLOATS else "int64")
        if passed not in self.scalars:
            self.scalars.append(passed)
        position = self._emit(Instruction("scalar", (), passed[1], self.scalars.index(passed)))
        return position if passed[1] == dtype else self._emit(Instruction("cast", (position,), dtype))

    def _size(self, size: Size) -> int:
        """Returns a size: a number of the source, or a run-time scalar."""
        return (
            self._scalar(size, "int64")
            if isinstance(size, Expr)
            else self._emit(Instruction("const", (), "int64", size))
        )

    def _cast(self, value: int, source: str, to: str, location: str | None) -> int:
        if compute_dtype(source) != compute_dtype(to):
            value = self._emit(Instruction("cast", (value,), compute_dtype(to), None, location))
        return self._rounded(value, to, location) if to in NARROW and source not in EXACT_IN[to] else value

    def _note_what_is_seen(self, root: Node) -> None:
        """Collects the nodes under ``root`` whose rounded number something sees. They are rounded for all that read
        them, so that a value is one number in a body."""
        stack = [root]
        while stack:
            node = stack.pop()
            if id(node) in self._noted:
                continue
            self._noted.add(id(node))
            stack.extend(self._awaited(node))
            for child in node.inputs:
                if self._sees_rounded(node, child.dtype):
                    self._note_seen(child)

    def _sees_rounded(self, node: Node, dtype: str) -> bool:
        return sees_rounded(node, dtype)

    def _note_seen(self, node: Node, depth: int = MOST_WITHIN_ONE) -> None:
        if node.kind.is_number:
            return  # a number is rounded in the trace where eager torch makes an element of it; a quotient's is not
        if node.dtype in NARROW:
            self._seen.add(id(node))
            if id(node) in self._positions:
                self._positions[id(node)] = self._rounded(self._positions[id(node)], node.dtype, node.location)
        elif depth and node.dtype == "float32" and node.op in KEEPS:
            # ``isinf`` may be that of ``abs`` of the argument: what is within one function has float32 instead.
            for child in node.inputs:
                self._note_seen(child, depth - 1)

    def _rounded(self, value: int, dtype: str, location: str | None) -> int:
        """Returns the position of ``value`` rounded to ``dtype``: its own if rounding changes nothing."""
        if self._is_exact(value, dtype):
            return value
        return self._emit(Instruction("round_to", (value,), compute_dtype(dtype), dtype, location))

    def _is_exact(self, value: int, dtype: str) -> bool:
        """Returns whether ``dtype`` has every number that instruction ``value`` may give."""
        stack, seen = [value], set()
        while stack:
            position = stack.pop()
            if position in seen:
                continue
            seen.add(position)
            instruction = self.instructions[position]
            if instruction.dtype == "bool" or instruction.dtype in EXACT_IN[dtype]:
                continue
            if instruction.op in ("load", "gather") and self.operands[instruction.attr].dtype in EXACT_IN[dtype]:
                continue
            if instruction.op == "round_to" and instruction.attr in EXACT_IN[dtype]:
                continue
            if instruction.op == "const" and holds(dtype, instruction.attr):
                continue
            keeps = instruction.op in KEEPS or instruction.op == "cast"
            extremum = instruction.op in ("reduce", "scan") and instruction.attr in ("max", "min")
            if not instruction.args or not (keeps or extremum):
                return False
            stack.extend(instruction.args)
        return True


def stored_of(value: Node) -> Node:
    """Returns what a store of ``value`` stores: of a narrow float that is made of bits, these."""
    node = _without_copies(value)
    return node.inputs[0] if node.kind is BITS and node.dtype in NARROW else value


def _without_copies(node: Node) -> Node:
    """Returns what ``node`` is a copy of, if it is one: a conversion to the dtype that is there."""
    while node.kind is CAST and node.inputs[0].dtype == node.dtype:
        node = node.inputs[0]
    return node


def _word(node: Node) -> Node | None:
    """Returns the narrow float that is read from memory if ``node`` is the bits of one, else None. They are loaded as
    an integer: a conversion to float32 and back would change those of a NaN."""
    if node.kind is not BITS or node.inputs[0].dtype not in NARROW:
        return None
    source = _without_copies(node.inputs[0])
    return source if source.is_in_memory or source.kind is GATHER else None


def _is_row_value(node: Node) -> bool:
    """Returns whether ``node`` is the result of a reduction, broadcast to the row that was reduced."""
    return node.kind is VIEW and node.inputs[0].kind is REDUCE


def _is_leaf(node: Node) -> bool:
    return node.kind in PRODUCTS or node.kind in (INPUT, IOTA, VIEW, CONVOLVE)


def _scales_of_groups(node: Node) -> Node | None:
    """Returns the scales of the weight's rows, of products of groups of codes by codes; None of others."""
    base = node.inputs[1].under_views
    return base.inputs[1] if base.kind is DEQUANTIZE and base.attrs.layout == ROWS else None


def _of_tiles(movement: Movement, tensor: Node, tile: int) -> Movement:
    """Turns a slice of a quantised weight's rows, or their division among groups, into that of one of its tensors,
    where an index counts ``tile`` rows."""
    attrs, (*groups, rows, _) = movement
    tiles: Any = symbols.floordiv(symbols.add(rows, tile - 1), tile)
    shape = (*groups, tiles, *tensor.shape[1:])
    if attrs[0] == "reshape":
        return attrs, shape
    kind, dim, start, step = attrs
    if tile > 1 and (step != 1 or (isinstance(start, int) and start % tile)):
        raise AssertionError(f"rows of a quantised weight from {start} on: a pass should have cut the product instead")
    return (kind, dim, symbols.floordiv(start, tile), step), shape


def _in_one_spelling(shape: Shape, movements: Sequence[Movement]) -> tuple[Movement, ...]:
    """Merges neighbouring ``movements`` that reshape, or that only add or drop sizes of 1, into one reshape, and drops
    it if the shape stays. Elements that are read through different chains of such views then are one operand."""
    spelled: list[Movement] = []
    before: list[Shape] = []  # the shape before each of these
    for attrs, moved in movements:
        kind, start = attrs[0], shape
        if kind == "reshape" or (kind in ("squeeze", "unsqueeze") and _differ_by_ones(shape, moved)):
            attrs = ("reshape",)
            if spelled and spelled[-1][0] == attrs:
                spelled.pop()
                start = before.pop()
        if attrs[0] != "reshape" or moved != start:
            spelled.append((attrs, moved))
            before.append(start)
        shape = moved
    return tuple(spelled)


def _differ_by_ones(shape: Shape, other: Shape) -> bool:
    """Returns whether two shapes have the same sizes but for those of 1."""
    return [size for size in shape if size != 1] == [size for size in other if size != 1]


def _precision(product: Node, x: Node) -> str:
    """Returns the precision of ``product``, whose activation is ``x``: ``"fast"`` is of 8-bit floats alone."""
    fast = product.attrs.precision == "fast"
    return "ieee" if fast and not x.dtype.startswith("float8") else product.attrs.precision
