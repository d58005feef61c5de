"""How a kernel in CUDA reads keys and values: what is the same for all elements of one, then eight neighbours of it.

A tensor's keys are where a pointer says. A computed one's pointer may depend on a page that is looked up, and beside it
are the values that its elements are computed with, such as a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Source, printed
from jitgen.families.attention.context import Computed, Operand
from jitgen.ir.body import Instruction


@dataclass(frozen=True)
class Elements:
    """The elements of a key or value.

    Attributes:
        name: ``"key"`` or ``"value"``.
        storage: of what is read for each element.
        row_lines: statements of key ``n`` of ``task``, after which ``pointer`` is that of its first element.
        kept: (type, name) of the values of a key that its elements are computed with.
        step: the stride of elements; empty for 1.
        loaded: (type, name) of what is read for an element; its name is empty where that is the element.
        lines: statements of an element.
        value: of the element.
    """

    name: str
    storage: str
    row_lines: tuple[str, ...]
    pointer: str
    kept: tuple[tuple[str, str], ...]
    step: str
    loaded: tuple[str, str]
    lines: tuple[Line, ...]
    value: str


def elements(name: str, operand: Operand, computed: Computed | None, dialect: Dialect) -> Elements:
    """The elements of ``operand``, or of what is computed from it and others."""
    if computed is None:
        along, step = _strides(operand)
        pointer = f"{operand.pointer} + (task.at{operand.index} + n * {along})"
        return Elements(name, operand.storage, (), pointer, (), _step(operand, step), ("", ""), (), "")
    at = {i: f"task.at{i} + n * {_strides(o)[0]}" for i, o in computed.operands.items()}
    sources = {
        i: Source(o.pointer, at[i], o.gathered, o.dtype)
        for i, o in computed.operands.items()
        if o.gathered and o.pointer
    }
    found = printed(computed.instructions, dialect, name[0], sources=sources)
    row_lines: list[str] = []
    lines: list[Line] = []
    used: set[int] = set()
    pointer = storage = step = ""
    loaded = ("", "")
    for position, instruction in enumerate(computed.instructions):
        if instruction.op in ("load", "iota", "gather"):
            source = computed.operands[instruction.attr]
            kind = dialect.types[instruction.dtype]
            if position in computed.shared:
                row_lines.append(
                    f"const {kind} {found.names[position]} = {_loaded(source, at, found.lines.get(position))};"
                )
                continue
            pointer = f"{source.pointer} + ({_offset(instruction, source, at[source.index], found.names, dialect)})"
            storage, loaded = source.storage, (kind, found.names[position])
            step = _step(source, _strides(source)[1])
            continue
        if position in computed.shared and position in found.lines:
            row_lines.append(found.lines[position].text + found.lines[position].mark)
        if position in found.lines and (position not in computed.shared or instruction.op == "const"):
            lines.append(found.lines[position])
            used.update(instruction.args)
    kept = tuple(
        (dialect.types[computed.instructions[p].dtype], found.names[p])
        for p in sorted(used & computed.shared)
        if computed.instructions[p].op not in ("const", "scalar")
    )
    value = found.names[len(computed.instructions) - 1]
    return Elements(name, storage, tuple(row_lines), pointer, kept, step, loaded, tuple(lines), value)


def _strides(operand: Operand) -> tuple[str, str]:
    """The strides along keys, and along the elements of one."""
    return operand.own if operand.role.startswith("key") else (operand.own[1], operand.own[0])


def _step(operand: Operand, stride: str) -> str:
    return "" if operand.kind == "contiguous" else stride


def _loaded(operand: Operand, at: dict[int, str], line: Line | None) -> str:
    """The expression of a value that is the same for all elements of a key."""
    if line is not None:
        return line.expression
    return f"jitgen::load({operand.pointer}[{at[operand.index]}])" if operand.pointer else at[operand.index]


def _offset(instruction: Instruction, operand: Operand, at: str, names: dict[int, str], dialect: Dialect) -> str:
    """The expression of the offset of a key's first element."""
    terms = [at]
    for argument, (size, stride) in zip(instruction.args, operand.gathered, strict=True):
        terms.append(f"{dialect.within.format(names[argument], size)} * {stride}")
    return " + ".join(terms)
