"""Presents a row kernel's parameters to its templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen import triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import fields
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES, item_size
from jitgen.kernel.parameters import KernelParameters
from jitgen.kernel.printed import (
    KernelContext,
    PrintedOperand,
    context_attributes,
    printed_attributes,
    sum_of,
    title_of,
)
from jitgen.kernel.rows import RowLayout


@dataclass(frozen=True)
class RowOperand(PrintedOperand):
    """Describes an operand of a row kernel; its ``kind`` is that along the row, ``across`` that from row to row.

    Both are those of ``RowLayout``. ``unit`` is how many elements one access may move; 1 where it moves none together.
    ``within`` are the first index along the row at which a result is stored and the one behind the last, as text.
    ``block``: how many elements of the row have one element of it, or 0.
    """

    across: str
    unit: int
    within: tuple[str, str] | None = None
    block: int = 0

    @property
    def is_once(self) -> bool:
        """Returns whether it is read once for a row."""
        return self.kind in ("row", "broadcast") and self.role != "store"

    @property
    def alignment(self) -> int:
        """Returns the bytes of which its address is a multiple."""
        return min(self.unit * item_size(self.dtype), ACCESS_BYTES)

    @property
    def address_type(self) -> str:
        """Returns the type in C++ of its elements' location; an iota has an offset."""
        return self.pointer_type if self.pointer else "int64_t"

    def base(self, outer: Sequence[str]) -> str:
        """Returns the offset of its row at the indices ``outer``, in elements; "0" if no index moves it."""
        return sum_of([self.offset], self.outer_strides, outer)

    def address(self, outer: Sequence[str]) -> str:
        """Returns the start of its row: a pointer, or the first value of an iota."""
        return f"{self.pointer} + {self.base(outer)}" if self.pointer else self.base(outer)

    def cuda_base(self, outer: Sequence[str]) -> tuple[str, str]:
        """Returns the declaration of a variable with ``address``, and the variable."""
        name = f"{'to' if self.role == 'store' else 'from'}{self.index}"
        return f"{self.pointer_type} const {name}" if self.pointer else f"const Index {name}", self.address(outer)

    def triton_block(self, columns: bool, column: str = "column") -> str:
        """Returns the offset of its block of rows, in elements; ``columns`` is that of the layout."""
        strides = list(self.outer_strides)
        if columns and self.across == "contiguous":
            strides[-1] = "1"
        return sum_of([self.offset], [*strides, self.inner], [*(f"i{dim}" for dim in range(len(strides))), column])

    def triton_access(self, live: str, columns: bool, policy: str = "") -> dict[str, Any]:
        """Returns the operand with its access: the ``expression`` of a load or an iota; the value ``stored`` and the
        ``mask`` of a store. ``policy`` is the eviction policy of a load."""
        at = self.triton_block(columns)
        if self.within:
            live += " & (column >= {}) & (column < {})".format(*self.within)
        mask = f", mask={live}" if live else ""
        access = fields(self) | {"at": at, "mask": mask}
        if self.role == "store":
            return access | {"stored": triton.store_cast(self.value, self.dtype)}
        if self.role == "iota":
            return access | {"expression": f"({at}).to({triton.TYPES[self.dtype]})"}
        mask += f', eviction_policy="{policy}"' if policy else ""
        return access | {"expression": triton.load_cast(f"tl.load({self.pointer} + {at}{mask})", self.dtype)}


@dataclass(frozen=True)
class RowContext(KernelContext):
    """Holds what all dialects read of a row kernel.

    Attributes:
        sizes: the parameters that are sizes of the outer dimensions.
        columns, unit: of the layout.
    """

    sizes: tuple[str, ...]
    columns: bool
    unit: int

    @property
    def outer(self) -> int:
        return len(self.sizes)

    @property
    def cuda_indices(self) -> list[str]:
        """Returns lines that compute the outer indices from the number of a row. Nothing is negative, and unsigned
        division is cheaper than signed."""
        lines, rest = [], "Unsigned(row)"
        for dim in reversed(range(1, self.outer)):
            lines.append(f"const Index i{dim} = Index({rest} % Unsigned({self.sizes[dim]}));")
            lines.append(f"const Unsigned q{dim} = {rest} / Unsigned({self.sizes[dim]});")
            rest = f"q{dim}"
        return [*lines, f"const Index i0 = Index({rest});"]

    @property
    def triton_indices(self) -> list[str]:
        """Returns the lines in Triton that compute the outer indices."""
        lines, rest = [], "row"
        for dim in reversed(range(1, self.outer)):
            lines.append(f"i{dim} = {rest} % {self.sizes[dim]}")
            lines.append(f"q{dim} = {rest} // {self.sizes[dim]}")
            rest = f"q{dim}"
        return [*lines, f"i0 = {rest}"]

    def triton_row_options(self, wide: bool, warps: int) -> dict[str, Any]:
        """Returns ``triton_options`` with what is known of addresses, sizes and strides."""
        units = {self.sizes[-1] if self.columns else "length": self.unit}
        for operand in self.operands:
            strides = operand.outer_strides
            if self.columns:
                strides = (*strides[:-1], operand.inner)
            # Where a unit takes several accesses, only those are known to be aligned.
            units |= dict.fromkeys(strides, min(operand.unit, ACCESS_BYTES // item_size(operand.dtype)))
        return self.triton_options(wide, warps, [operand.alignment for operand in self.memory], units)


def row_attributes(
    kernel: Kernel, layout: RowLayout, parameters: KernelParameters, values: Mapping[int, str], dialect: Dialect
) -> dict[str, Any]:
    """Returns the attributes of a ``RowContext``; ``values`` are the names of operands' values."""
    (body,) = kernel.bodies
    moving = layout.across if layout.columns else layout.along
    operands = [
        RowOperand(
            **printed_attributes(declared, layout.along[index], values[index], dialect),
            across=layout.across[index],
            unit=layout.unit if moving[index] == "contiguous" else 1,
            block=body.operands[index].block,
        )
        for index, declared in enumerate(parameters.operands)
    ]
    rank = body.row_rank
    words = f", rows of the last {f'{rank} dimensions' if rank > 1 else 'dimension'}"
    return {
        **context_attributes(kernel, parameters, operands, dialect, [title_of(body, layout.along, words)]),
        "sizes": tuple(parameters.name(f"n{dim}") for dim in range(layout.outer)),
        "columns": layout.columns,
        "unit": layout.unit,
    }
