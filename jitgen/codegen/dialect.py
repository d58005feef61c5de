"""What every dialect is: tables from operations and dtypes to text.

A dialect prints the instructions of a body (``ir/body.py``) one line each. It consists of

* ``rows``: operation -> format string over ``{0}``, ``{1}``, ``{2}`` (operand names) and ``{type}``; or a dict of such
  strings by compute dtype, or by the classes ``float`` and ``int`` (the most specific wins);
* ``coarse``: float32 rows to use instead where every result is a float of 16 bits or fewer;
* ``types`` and ``storage_types``: dtype -> type name;
* four expressions that truly differ: ``constant``, ``cast``, ``round`` and the line that names a value.

A test fails when a dialect lacks a row for an operation of ``ir/ops.py``. tinygrad's renderers are built this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jitgen.errors import UnsupportedError
from jitgen.ir.body import Instruction
from jitgen.ir.ops import FLOATS, INTS

Row = str | Mapping[str, str]


def row_text(rows: Mapping[str, Row], op: str, dtype: str) -> str | None:
    """The format string of ``op`` for compute dtype ``dtype``, or None."""
    row = rows.get(op)
    if row is None or isinstance(row, str):
        return row
    kind = "float" if dtype in FLOATS else "int" if dtype in INTS else "bool"
    return row.get(dtype, row.get(kind))


@dataclass(frozen=True)
class Dialect:
    """One output language.

    Attributes:
        name: ``"cpp"``, ``"cuda"`` or ``"triton"``; also its folder under ``templates/``.
        rows, types, storage_types: the tables.
        coarse: rows for float32 whose error of up to 2**-16 the rounding of a 16-bit result hides: half a unit in the
            last place of float16 is 2**-12.
        constant: (number, compute dtype) -> literal.
        cast: (expression, from, to) -> expression, between compute dtypes.
        round: (expression, storage dtype) -> expression: to storage and back.
        assign: (type name, value name, expression) -> the line that defines a value.
        suffix: of the template's file name, such as ``".cu"``.
        headers: static headers every source includes, by include name.
    """

    name: str
    rows: Mapping[str, Row]
    types: Mapping[str, str]
    storage_types: Mapping[str, str]
    constant: Callable[[bool | int | float, str], str]
    cast: Callable[[str, str, str], str]
    round: Callable[[str, str], str]
    assign: Callable[[str, str, str], str]
    suffix: str
    headers: tuple[str, ...] = ()
    coarse: Mapping[str, str] = field(default_factory=dict)

    def expression(
        self, instruction: Instruction, names: Mapping[int, str], dtypes: Mapping[int, str], coarse: bool = False
    ) -> str:
        """The text of an instruction that computes (loads and stores belong to the template).

        ``coarse``: every result of the kernel is a float of 16 bits or fewer.
        """
        operands = [names[position] for position in instruction.args]
        if instruction.op == "const":
            return self.constant(instruction.attr, instruction.dtype)
        if instruction.op == "cast":
            return self.cast(operands[0], dtypes[instruction.args[0]], instruction.dtype)
        if instruction.op == "round_to":
            return self.round(operands[0], instruction.attr)
        dtype = dtypes[instruction.args[-1]]
        text = row_text(self.rows, instruction.op, dtype)
        if coarse and dtype == "float32":
            text = self.coarse.get(instruction.op, text)
        if text is None:
            raise UnsupportedError(f"the {self.name} dialect has no row for {instruction.op} on {dtype}")
        return text.format(*operands, type=self.types[dtype])
