"""What the sort templates read: the operands, what is computed once for a row and of each element, and the stores."""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, printed
from jitgen.families.sort.chunks import order_of
from jitgen.families.sort.launch import integer_names, is_merge
from jitgen.families.sort.layout import Layout
from jitgen.ir.body import compute_dtype
from jitgen.ir.program import Kernel
from jitgen.ir.sorts import Order
from jitgen.kernel.row_operands import PrintedOperand, printed_operand


@dataclass(frozen=True)
class Operand(PrintedOperand):
    """An operand is read once for a row or for each element, or takes what is asked for.

    Attributes:
        what: of a store: ``"values"`` or ``"indices"``; empty for the others.
        once: whether it has one element for a row.
    """

    what: str
    once: bool

    def along(self, index: str) -> str:
        """Offset of the element at ``index`` from where its row begins."""
        return {"0": "0", "1": index}.get(self.inner, f"{index} * {self.inner}")


@dataclass(frozen=True)
class Rows:
    """The whole kernel.

    Attributes:
        title: in words.
        sizes: names of the outer sizes.
        operands: all of them, in order.
        row_loads: operands with one element for a row, and ``row_lines`` what follows from them.
        loads, lines: of each element.
        key: the name of the value that is sorted by; empty where chunks are merged.
        storage: the dialect's name of the dtype in which elements are compared; ``type`` that of its compute dtype.
        order: which ranks are stored; see ``ir/sorts.py``.
        merges: whether sorted chunks are merged; then ``loads`` are their values and indices.
    """

    title: str
    sizes: tuple[str, ...]
    operands: tuple[Operand, ...]
    row_loads: tuple[Operand, ...]
    row_lines: tuple[Line, ...]
    loads: tuple[Operand, ...]
    lines: tuple[Line, ...]
    key: str
    storage: str
    type: str
    order: Order
    merges: bool
    stores: tuple[Operand, ...]
    integers: tuple[str, ...]
    scalars: tuple[tuple[str, str], ...]

    @property
    def outer(self) -> int:
        return len(self.sizes)


def context(kernel: Kernel, layout: Layout, dialect: Dialect) -> Rows:
    """The context of ``kernel`` in ``dialect``."""
    (body,) = kernel.bodies
    instructions, order = body.instructions, order_of(body)
    found = printed(instructions, dialect, coarse=body.coarse)
    stored = {i.attr: instructions[i.args[0]].attr[0] for i in instructions if i.op == "store"}
    operands = tuple(
        Operand(
            **printed_operand(index, operand, layout.along[index], layout.outer, found.values[index], dialect),
            what=stored.get(index, ""),
            once=operand.row or (layout.along[index] == "broadcast" and operand.kind != "store"),
        )
        for index, operand in enumerate(body.operands)
    )
    merges = is_merge(body)
    rows = {position for position, instruction in enumerate(instructions) if instruction.row}
    key = "" if merges else next(found.names[i.args[0]] for i in instructions if i.op == "sort")
    kinds = ", ".join(f"{o.kind} {o.dtype} {along}" for o, along in zip(body.operands, layout.along, strict=True))
    sources = tuple(operand for operand in operands if operand.role != "store")
    return Rows(
        title=f"({', '.join(map(str, body.shape))}), rows of the last dimension: {kinds}",
        sizes=tuple(f"n{dim}" for dim in range(layout.outer)),
        operands=operands,
        row_loads=() if merges else tuple(operand for operand in sources if operand.once),
        row_lines=tuple(line for position, line in found.lines.items() if position in rows),
        loads=sources if merges else tuple(operand for operand in sources if not operand.once),
        lines=tuple(line for position, line in found.lines.items() if position not in rows),
        key=key,
        storage=dialect.storage_types[order.dtype],
        type=dialect.types[compute_dtype(order.dtype)],
        order=order,
        merges=merges,
        stores=tuple(operand for operand in operands if operand.role == "store"),
        integers=tuple(name for name, *_ in integer_names(kernel, layout)),
        scalars=tuple((f"a{i}", dialect.types[dtype]) for i, (_, dtype) in enumerate(kernel.scalars)),
    )
