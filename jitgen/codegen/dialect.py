"""Defines what a dialect is: tables from operations and dtypes to text.

A dialect prints each instruction of a body (``ir/body.py``) as one line. It consists of

* ``rows``: operation -> format string over ``{0}``, ``{1}``, ``{2}`` (operand names) and ``{type}``; or a dict of such
  strings by compute dtype, or by the classes ``float`` and ``int`` (the most specific wins);
* ``coarse``: rows that replace float32 rows where every result is a float of 16 bits or fewer;
* ``types`` and ``storage_types``: dtype -> type name;
* six functions for what tables cannot express: ``constant``, ``cast``, ``round``, ``bits``, ``assign`` and ``gather``.

A test fails where a dialect lacks a row for an operation of ``ir/ops.py``. tinygrad's renderers are built this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jitgen.codegen import own_functions
from jitgen.errors import UnsupportedError
from jitgen.ir.attributes import OwnAttrs
from jitgen.ir.body import Instruction
from jitgen.ir.ops import FLOATS, INTS

Row = str | Mapping[str, str]


def row_text(rows: Mapping[str, Row], op: str, dtype: str) -> str | None:
    """Returns the format string of ``op`` for compute dtype ``dtype``, or None."""
    row = rows.get(op)
    if row is None or isinstance(row, str):
        return row
    kind = "float" if dtype in FLOATS else "int" if dtype in INTS else "bool"
    return row.get(dtype, row.get(kind))


@dataclass(frozen=True)
class Dialect:
    """Describes one output language.

    Attributes:
        name: ``"cpp"``, ``"cuda"`` or ``"triton"``; the backend has the same name.
        rows, types, storage_types: the tables; see the module.
        coarse: operation -> float32 row with a relative error of up to 2**-16. Rounding the result to 16 bits hides it:
            half a unit in the last place of float16 is at least 2**-12 of the number. Where a float16 is 0, as erfc
            is from 4.2 on, it is up to 2**-13, beside 2**-9 of bfloat16.
        coarse_gelu: format string over x, GELU of x with the same error, for what is otherwise x / 2 times ``erfc``; or
            nothing.
        constant: (number, compute dtype) -> literal.
        cast: (expression, from, to) -> expression converted from one compute dtype to another.
        round: (expression, storage dtype) -> expression rounded to the storage dtype, in its compute dtype.
        bits: (expression, storage dtype, another of its size) -> the number that has the bits of ``expression`` in the
            other storage dtype, in its compute dtype.
        assign: (type name, value name, expression) -> the line that defines the value.
        gather: (pointer, offset, storage dtype, mask) -> the element there, in its compute dtype; only Triton
            has masks.
        within: format string over an index and a size: the index, or 0 where it is out of range.
        suffix: the suffix of template files, such as ``".cu"``.
        scalar: format string over the number of a run-time scalar: its value.
        headers: include names of the static headers that every source of the dialect includes.
    """

    name: str
    rows: Mapping[str, Row]
    types: Mapping[str, str]
    storage_types: Mapping[str, str]
    constant: Callable[[bool | int | float, str], str]
    cast: Callable[[str, str, str], str]
    round: Callable[[str, str], str]
    bits: Callable[[str, str, str], str]
    assign: Callable[[str, str, str], str]
    gather: Callable[[str, str, str, str], str]
    within: str
    suffix: str
    scalar: str = "a{0}"
    headers: tuple[str, ...] = ()
    coarse: Mapping[str, str] = field(default_factory=dict)
    coarse_gelu: str = ""

    def expression(
        self, instruction: Instruction, names: Mapping[int, str], dtypes: Mapping[int, str], coarse: bool = False
    ) -> str:
        """Returns the expression of one instruction. Loads and stores have none; templates write them.

        Args:
            names: the name of each value, by the position of its instruction.
            dtypes: the compute dtype of each value, by the position of its instruction.
            coarse: whether every result of the kernel is a float of 16 bits or fewer.
        """
        operands = [names[position] for position in instruction.args]
        if instruction.op == "const":
            return self.constant(instruction.attr, instruction.dtype)
        if instruction.op == "cast":
            return self.cast(operands[0], dtypes[instruction.args[0]], instruction.dtype)
        if instruction.op == "round_to":
            return self.round(operands[0], instruction.attr)
        if instruction.op == "bits":
            return self.bits(operands[0], *instruction.attr)
        if instruction.op == "own":
            types = self.types[dtypes[instruction.args[0]]], self.types[instruction.dtype]
            return own_functions.expression(OwnAttrs(*instruction.attr), self.name, operands, *types)
        dtype = dtypes[instruction.args[-1]]
        text = row_text(self.rows, instruction.op, dtype)
        if coarse and dtype == "float32":
            text = self.coarse.get(instruction.op, text)
        if text is None:
            raise UnsupportedError(f"the {self.name} dialect has no row for {instruction.op} on {dtype}")
        return text.format(*operands, type=self.types[dtype])
