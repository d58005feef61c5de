"""What the gemm templates read: regions with their contractions, and the epilogue as printed lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Printed, printed
from jitgen.families.gemm.launch import integer_names
from jitgen.families.gemm.layout import GemmLayout
from jitgen.ir.body import Body, Contraction, compute_dtype
from jitgen.ir.program import Kernel


@dataclass(frozen=True)
class GemmOperand:
    """One operand of a region.

    ``role`` is its kind in the body (load, store, iota, x, weight, codes, scales, zeros), ``kind`` the layout's;
    ``strides`` are expressions of its two strides ("0" and "1" where the kind says so; empty for parts read whole);
    ``pointer`` is the parameter (None for an iota), ``offset`` an iota's first value; ``value`` names the element's
    value in the epilogue or the prologue, of compute ``type``; ``unit`` is how many elements one access may move.
    """

    index: int
    role: str
    kind: str
    dtype: str
    storage: str
    type: str
    value: str
    strides: tuple[str, ...]
    pointer: str | None
    offset: str
    unit: int

    def position(self, row: str, column: str) -> str:
        """Its offset, in elements, at two indices; "0" where nothing moves it."""
        terms = [self.offset]
        for index, stride in zip((row, column), self.strides, strict=True):
            terms.append("" if stride == "0" else index if stride == "1" else f"{index} * {stride}")
        return " + ".join(term for term in terms if term) or "0"


@dataclass(frozen=True)
class ContractionContext:
    """One product: its accumulator is ``acc<index>`` of compute ``type``.

    ``x`` is the activation's operand, or None where a prologue computes it from ``x_loads`` and ``x_scalars`` by
    ``x_lines``, giving ``x_value`` of ``x_type``; ``weight`` are the operands of the weight (one, or codes, scales and
    zeros).
    """

    index: int
    accumulator: str
    type: str
    described: Contraction
    x: GemmOperand | None
    x_loads: tuple[GemmOperand, ...]
    x_lines: tuple[Line, ...]
    x_scalars: tuple[tuple[str, str], ...]
    x_value: str
    x_type: str
    weight: tuple[GemmOperand, ...]


@dataclass(frozen=True)
class GemmRegion:
    """One region: ``columns`` is its N; ``lines`` are the epilogue's, from ``loads`` and the accumulators."""

    index: int
    title: str
    columns: str
    contractions: tuple[ContractionContext, ...]
    operands: tuple[GemmOperand, ...]
    lines: tuple[Line, ...]
    scalars: tuple[tuple[str, str], ...]

    @property
    def loads(self) -> tuple[GemmOperand, ...]:
        """What the epilogue reads."""
        return tuple(operand for operand in self.operands if operand.role in ("load", "iota") and operand.value)

    @property
    def stores(self) -> tuple[GemmOperand, ...]:
        return tuple(operand for operand in self.operands if operand.role == "store")


@dataclass(frozen=True)
class GemmContext:
    """The whole kernel: ``m`` and ``k`` are its parameters of these names."""

    regions: tuple[GemmRegion, ...]
    integers: tuple[str, ...]
    scalars: tuple[tuple[str, str], ...]

    @property
    def pointers(self) -> tuple[GemmOperand, ...]:
        """Every operand in memory, in the order of the parameters."""
        return tuple(operand for region in self.regions for operand in region.operands if operand.pointer)


def context(kernel: Kernel, layouts: Sequence[GemmLayout], dialect: Dialect) -> GemmContext:
    return GemmContext(
        regions=tuple(
            _Region(number, body, layout, dialect).build()
            for number, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True))
        ),
        integers=tuple(name for name, *_ in integer_names(kernel, layouts)),
        scalars=tuple((f"a{i}", dialect.types[dtype]) for i, (_, dtype) in enumerate(kernel.scalars)),
    )


class _Region:
    def __init__(self, number: int, body: Body, layout: GemmLayout, dialect: Dialect):
        self.number, self.body, self.layout, self.dialect = number, body, layout, dialect

    def build(self) -> GemmRegion:
        epilogue = printed(self.body.instructions, self.dialect)
        contractions = [self._contraction(index, part) for index, part in enumerate(self.body.contractions)]
        described = zip(self.body.operands, self.layout.operands, strict=True)
        parts = ", ".join(f"{operand.kind} {operand.dtype} {kind}" for operand, kind in described)
        return GemmRegion(
            index=self.number,
            title=f"(rows, columns) over K: {parts}",
            columns=f"n{self.number}",
            contractions=tuple(contractions),
            operands=tuple(self._operand(index, epilogue) for index in range(len(self.body.operands))),
            lines=tuple(epilogue.lines.values()),
            scalars=tuple(epilogue.scalars.items()),
        )

    def _contraction(self, index: int, part: Contraction) -> ContractionContext:
        prologue = printed(part.x, self.dialect, f"x{index}_")  # may read the same operands as the epilogue
        last = len(part.x) - 1
        loads = dict.fromkeys(i.attr for i in part.x if i.op in ("load", "iota"))
        accumulator = next(i.dtype for i in self.body.instructions if i.op == "matmul" and i.attr == index)
        return ContractionContext(
            index=index,
            accumulator=f"acc{index}",
            type=self.dialect.types[accumulator],
            described=part,
            x=self._operand(part.activation, prologue) if part.activation is not None else None,
            x_loads=tuple(self._operand(operand, prologue) for operand in loads),
            x_lines=tuple(prologue.lines.values()),
            x_scalars=tuple(prologue.scalars.items()),
            x_value=prologue.names[last],
            x_type=self.dialect.types[part.x[last].dtype],
            weight=tuple(self._operand(operand, prologue) for operand in part.weight),
        )

    def _operand(self, index: int, text: Printed) -> GemmOperand:
        """Operand ``index``, its value as ``text`` names it."""
        operand, kind = self.body.operands[index], self.layout.operands[index]
        free = tuple(f"s{self.number}_{index}_{dim}" for dim in range(2))
        fixed = {
            "full": (free[0], "1"),
            "column": ("0", "1"),
            "row": (free[0], "0"),
            "scalar": ("0", "0"),
            "strided": free,
            "k": (free[0], "1"),
            "outer": ("1", free[1]),
            "whole": (),
        }
        return GemmOperand(
            index=index,
            role=operand.kind,
            kind=kind,
            dtype=operand.dtype,
            storage=self.dialect.storage_types[operand.dtype],
            type=self.dialect.types[compute_dtype(operand.dtype)],
            value=text.values.get(index, ""),
            strides=fixed[kind],
            pointer=f"p{self.number}_{index}" if operand.buffer is not None else None,
            offset=f"o{self.number}_{index}" if operand.kind == "iota" else "",
            unit=self.layout.units[index],
        )
