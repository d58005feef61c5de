"""The operands of a row kernel as templates read them: names and expressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.ir.body import Operand, compute_dtype


@dataclass(frozen=True)
class PrintedOperand:
    """An operand has names and expressions, as they are printed.

    Attributes:
        index: among the body's operands.
        role: ``"load"``, ``"iota"`` or ``"store"``.
        dtype, storage, type: its dtype, that in memory in the dialect, and that of its value.
        value: the name of its element's value, or of the row's.
        strides: expressions of the outer strides; ``inner`` of the row's.
        pointer: the parameter; None for an iota, whose first value is ``offset``.
    """

    index: int
    role: str
    dtype: str
    storage: str
    type: str
    value: str
    strides: tuple[str, ...]
    inner: str
    pointer: str | None
    offset: str

    @property
    def address_type(self) -> str:
        """The type in C++ of where its elements are; an iota has an offset."""
        return f"{'' if self.role == 'store' else 'const '}{self.storage}*" if self.pointer else "int64_t"

    def base(self, outer: Sequence[str]) -> str:
        """Where its row begins at the indices ``outer``, in elements; "0" where no index moves it."""
        terms = [self.offset, *(f"{i} * {s}" for i, s in zip(outer, self.strides, strict=True))]
        return " + ".join(term for term in terms if term) or "0"


def host_parameters(
    operands: Sequence[PrintedOperand], integers: Sequence[str], scalars: Sequence[tuple[str, str]]
) -> list[str]:
    """The parameters of a CPU's entry, as the launcher passes them: those that differ between calls of one shape come
    first. ``scalars`` are (name, type)."""
    pointers = [f"{operand.address_type} {operand.pointer}" for operand in operands if operand.pointer]
    numbers = [f"int64_t {name}" for name in integers]
    return [*pointers, *(f"{kind} {name}" for name, kind in scalars), "int32_t threads", *numbers, "int32_t streaming"]


def cuda_parameters(
    operands: Sequence[PrintedOperand], integers: Sequence[str], scalars: Sequence[tuple[str, str]]
) -> list[str]:
    """The parameters of a kernel in CUDA C++. ``scalars`` are (name, type)."""
    pointers = [f"{operand.address_type} {operand.pointer}" for operand in operands if operand.pointer]
    return [*pointers, *(f"Index {name}" for name in integers), *(f"{kind} {name}" for name, kind in scalars)]


def printed_operand(
    index: int, operand: Operand, kind: str, outer: int, value: str, dialect: Dialect
) -> dict[str, Any]:
    """The attributes of a ``PrintedOperand``: those of ``operand``, which is ``kind`` along the row."""
    return {
        "index": index,
        "role": operand.kind,
        "dtype": operand.dtype,
        "storage": dialect.storage_types[operand.dtype],
        "type": dialect.types[compute_dtype(operand.dtype)],
        "value": value,
        "strides": tuple(f"s{index}_{dim}" for dim in range(outer)),
        "inner": {"contiguous": "1", "strided": f"r{index}"}.get(kind, "0"),
        "pointer": f"p{index}" if operand.buffer is not None else None,
        "offset": f"o{index}" if operand.kind == "iota" else "",
    }
