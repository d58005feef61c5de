"""Reads a kernel's PTX as far as its threads' ways through it: branches, barriers, and what they depend on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FIRST_SHARED = 1024
"""The place of the first shared variable: none is at 0."""

_EFFECTS = frozenset(
    [
        "bra",
        "brx",
        "ret",
        "exit",
        "trap",
        "bar",
        "barrier",
        "mbarrier",
        "cp",
        "st",
        "red",
        "call",
        "wgmma",
        "setmaxnreg",
        "prefetch",
    ]
)
_WAITS = frozenset(["bra", "brx", "ret", "exit", "trap", "bar", "barrier", "mbarrier", "call"])
_FLOAT = re.compile(r"b?f(16|32|64|8)(x2)?|tf32|e[45]m\w+")
_REGISTER = re.compile(r"%[A-Za-z_][\w$.]*")


def place(site: tuple[str, int]) -> str:
    """The file, without its folders, and the line."""
    return f"{site[0].rsplit('/', 1)[-1]}:{site[1]}"


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``site`` is the (file, line) of the call that it was inlined at, else its own."""

    name: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str
    negated: bool
    site: tuple[str, int]

    @property
    def place(self) -> str:
        """The site in words."""
        return place(self.site)

    @property
    def is_float(self) -> bool:
        return any(_FLOAT.fullmatch(part) for part in self.name[1:])

    @property
    def written(self) -> tuple[str, ...]:
        """Registers that it writes."""
        if self.name[0] in _EFFECTS and self.name[1:2] not in (("try_wait",), ("test_wait",)):
            return ()
        return tuple(_REGISTER.findall(self.operands[0])) if self.operands else ()

    @property
    def read(self) -> tuple[str, ...]:
        """Registers that its effect depends on; the results of arithmetic on floating point are not computed."""
        operands = self.operands[1:] if self.written else self.operands
        if self.is_float:
            operands = self.operands[:1] if self.name[0] == "st" else ()
        return tuple(_REGISTER.findall(" ".join((*operands, self.guard))))

    @property
    def matters(self) -> bool:
        """Whether threads wait here, arrive, turn off, or write what others may turn off by."""
        to_shared = any("shared" in part for part in self.name[1:])
        if self.name[0] in ("st", "red", "atom"):
            return to_shared and not self.is_float
        if self.name[0] == "cp":
            return any("mbarrier" in part for part in self.name)
        return self.name[0] in _WAITS


@dataclass(frozen=True)
class Program:
    """A kernel: its instructions, and the places of labels, parameters (name and bytes) and shared variables."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    parameters: tuple[tuple[str, int], ...]
    shared: Mapping[str, int]


def parse(ptx: str, entry: str) -> Program:
    """The kernel ``entry`` of ``ptx``, compiled with line information, without what decides nothing."""
    files = dict(re.findall(r'\.file\s+(\d+) "(.*?)"', ptx))
    head, _, rest = ptx.partition(f".entry {entry}(")
    declared, _, rest = rest.partition(")")
    body = rest[rest.index("{") + 1 :]
    parameters = tuple(
        (name, int(bits) // 8 * int(count or 1))
        for bits, name, count in re.findall(r"\.param (?:\.align \d+ )?\.[busf](\d+) (\w+)(?:\[(\d+)\])?", declared)
    )
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    site = ("", 0)
    for statement in _scoped(list(_statements(body))):
        if re.match(r"\.loc\b", statement):
            at = re.search(r"inlined_at (\d+) (\d+)", statement) or re.match(r"\.loc\s+(\d+) (\d+)", statement)
            assert at is not None
            site = (files.get(at[1], at[1]), int(at[2]))
        elif statement.endswith(":"):
            labels[statement[:-1]] = len(instructions)
        elif not statement.startswith("."):
            match = re.fullmatch(r"(?:@(!?)(%[\w.]+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
            assert match is not None, statement
            negated, guard, name, operands = match.groups()
            instructions.append(Instruction(tuple(name.split(".")), _split(operands), guard or "", bool(negated), site))
    return _sliced(Program(tuple(instructions), labels, parameters, _places(head + body)))


def _places(text: str) -> dict[str, int]:
    """Offsets of shared variables; those whose size the launch says come last."""
    variables = re.findall(r"(\.extern )?\.shared \.align (\d+) \.[busf](\d+) ([\w$]+)(?:\[(\d*)\])?", text)
    places, place = {}, FIRST_SHARED
    for _, align, bits, name, count in sorted(variables, key=lambda variable: bool(variable[0])):
        place = -(-place // int(align)) * int(align)
        places[name] = place
        place += int(bits) // 8 * int(count or 1)
    return places


def _statements(body: str) -> Iterator[str]:
    """The statements, labels and braces of a kernel's ``body``, up to the brace that ends it."""
    depth = 0
    for line in re.sub(r",\s*\n\s*", ", ", body).splitlines():
        text = line.split("//")[0].strip()
        if re.match(r"\.(loc|pragma)\b", text):
            yield text
            continue
        while text:
            label = re.match(r"[\w$]+:(?!:)", text)
            end = label.end() if label else 1 if text[0] in "{}" else text.find(";")
            end = len(text) if end < 0 else end
            depth += (text[:end] == "{") - (text[:end] == "}")
            if depth < 0:
                return
            yield text[:end].strip()
            text = text[end:].lstrip("; \t")


def _scoped(statements: list[str]) -> Iterator[str]:
    """``statements`` without scopes: what one declares, in assembly of its own, has a name of its own."""
    scopes: list[dict[str, str]] = []
    number = 0

    def renamed(match: re.Match[str]) -> str:
        return next((names[match[0]] for names in reversed(scopes) if match[0] in names), match[0])

    for at, statement in enumerate(statements):
        if statement == "{":
            number += 1
            scopes.append(_declared(statements[at + 1 :], number))
        elif statement == "}":
            scopes.pop()
        elif statement and not statement.startswith(".reg"):
            yield re.sub(r"(?<![\w%$.])[A-Za-z_]\w*", renamed, statement) if scopes else statement


def _declared(statements: list[str], scope: int) -> dict[str, str]:
    """The registers and labels of the scope that ``statements`` begin in, and their names outside."""
    names, depth = {}, 0
    for statement in statements:
        depth += (statement == "{") - (statement == "}")
        if depth < 0:
            break
        if depth == 0 and statement.startswith(".reg"):
            names |= {name.strip(): f"%{name.strip()}.{scope}" for name in statement.split(None, 2)[2].split(",")}
        elif depth == 0 and statement.endswith(":"):
            names[statement[:-1]] = f"{statement[:-1]}.{scope}"
    return names


def _split(text: str) -> tuple[str, ...]:
    """Operands: commas in brackets separate none."""
    found, depth = [""], 0
    for sign in text:
        depth += (sign in "{[(") - (sign in "}])")
        if sign == "," and depth == 0:
            found.append("")
        else:
            found[-1] += sign
    return tuple(operand.strip() for operand in found if operand.strip())


def _sliced(program: Program) -> Program:
    """``program`` with those instructions alone that matter, and those that compute what they depend on."""
    needed: set[str] = set()
    kept = [False] * len(program.instructions)
    grew = True
    while grew:
        grew = False
        for at in reversed(range(len(kept))):
            instruction = program.instructions[at]
            if not kept[at] and (instruction.matters or not needed.isdisjoint(instruction.written)):
                kept[at] = grew = True
                needed.update(instruction.read)
    places = [0]
    for keep in kept:
        places.append(places[-1] + keep)
    instructions = tuple(i for i, keep in zip(program.instructions, kept, strict=True) if keep)
    labels = {label: places[at] for label, at in program.labels.items()}
    return Program(instructions, labels, program.parameters, program.shared)
