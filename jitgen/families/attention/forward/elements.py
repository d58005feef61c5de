"""Writes how a kernel in CUDA reads keys and values: what is the same for all elements of one, then eight neighbours of
it.

A tensor's keys are where a pointer says. A computed one's pointer may depend on a page that is looked up, and beside it
are the values that its elements are computed with, such as a scale.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Line, Source, printed
from jitgen.families.attention.forward.context import Computed
from jitgen.families.attention.rule.context import Operand
from jitgen.ir.body import Instruction

CODES = ("int8_t", "uint8_t", "jitgen::float8_e4m3fn", "jitgen::float8_e5m2")
"""What ``numbers_of`` (``attention_codes.cuh``) reads."""


@dataclass(frozen=True)
class Elements:
    """Describes the elements of a key or value.

    Attributes:
        name: ``"key"`` or ``"value"``.
        storage: of what is read for each element.
        row_lines: statements of key ``n`` of ``task``, after which ``pointer`` is that of its first element.
        kept: (type, name) of the values of a key that its elements are computed with.
        step: the stride of elements; empty for 1.
        loaded: (type, name) of what is read for an element; its name is empty where that is the element.
        is_code: whether elements are of one byte and are read as float numbers, eight at once.
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
    is_code: bool
    lines: tuple[Line, ...]
    value: str


def elements(name: str, operand: Operand, computed: Computed | None, dtype: str, dialect: Dialect) -> Elements:
    """Describes how the elements of ``operand`` are loaded, or computed from it and others; ``dtype`` is that of the
    products."""
    if computed is None:
        along, step = _strides(operand)
        pointer = f"{operand.pointer} + (task.{operand.at} + n * {along})"
        return Elements(name, operand.storage, (), pointer, (), _step(operand, step), ("", ""), False, (), "")
    at = {i: f"task.{o.at} + n * {_strides(o)[0]}" for i, o in computed.operands.items()}
    sources = {
        i: Source(o.pointer, at[i], o.gathered, o.dtype)
        for i, o in computed.operands.items()
        if o.gathered and o.pointer
    }
    texts = printed(computed.instructions, dialect, name[0], sources=sources)
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
                    f"const {kind} {texts.names[position]} = {_loaded(source, at, texts.lines.get(position))};"
                )
                continue
            pointer = f"{source.pointer} + ({_offset(instruction, source, at[source.index], texts.names, dialect)})"
            storage, loaded = source.storage, (kind, texts.names[position])
            step = _step(source, _strides(source)[1])
            continue
        if position in computed.shared and position in texts.lines:
            row_lines.append(texts.lines[position].text + texts.lines[position].mark)
        if position in texts.lines and (position not in computed.shared or instruction.op == "const"):
            lines.append(texts.lines[position])
            used.update(instruction.args)
    kept = tuple(
        (dialect.types[computed.instructions[p].dtype], texts.names[p])
        for p in sorted(used & computed.shared)
        if not computed.instructions[p].is_number
    )
    value = texts.names[len(computed.instructions) - 1]
    last = computed.instructions[-1]
    if last.op == "round_to" and last.attr == dtype:  # a product's operand is rounded to it anyway
        lines, value = lines[:-1], texts.names[last.args[0]]
    if value == loaded[1] and storage == dialect.storage_types[dtype]:  # no number is computed
        return Elements(name, storage, tuple(row_lines), pointer, (), step, ("", ""), False, (), "")
    number = _number_of_code(computed.instructions, computed.shared)
    if number is not None and storage in CODES:
        lines = [line for line in lines if line.position != number]
        loaded = ("float", texts.names[number])
    is_code = storage in CODES and loaded[0] == "float"
    return Elements(name, storage, tuple(row_lines), pointer, kept, step, loaded, is_code, tuple(lines), value)


def _number_of_code(instructions: Sequence[Instruction], shared: Collection[int]) -> int | None:
    """Returns the position of the cast to float that is the only use of what is loaded for each element; None without
    one."""
    read = {p for p, i in enumerate(instructions) if i.op in ("load", "gather") and p not in shared}
    uses = [position for position, instruction in enumerate(instructions) if read & set(instruction.args)]
    is_cast = len(uses) == 1 and instructions[uses[0]].op == "cast" and instructions[uses[0]].dtype == "float32"
    return uses[0] if is_cast else None


def _strides(operand: Operand) -> tuple[str, str]:
    """Returns the strides along keys, and along the elements of one."""
    return operand.own if operand.role.startswith("key") else (operand.own[1], operand.own[0])


def _step(operand: Operand, stride: str) -> str:
    return "" if operand.kind == "contiguous" else stride


def _loaded(operand: Operand, at: dict[int, str], line: Line | None) -> str:
    """Prints a value that is the same for all elements of a key."""
    if line is not None:
        return line.expression
    return operand.element(at[operand.index])


def _offset(instruction: Instruction, operand: Operand, at: str, names: dict[int, str], dialect: Dialect) -> str:
    """Prints the offset of a key's first element."""
    terms = [at]
    for argument, (size, stride) in zip(instruction.args, operand.gathered, strict=True):
        terms.append(f"{dialect.within.format(names[argument], size)} * {stride}")
    return " + ".join(terms)
