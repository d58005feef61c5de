"""Sizes and counts of one chip stand in its record (``jitgen/chips.py``) and nowhere else.

These are integers. Constants of a model that was fitted to timings, which are floats, stand beside that model, as
``jitgen/chips.py`` says; this test does not look at them.

Docstrings and comments may name a chip, to say where something was measured. Code may not have its numbers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from jitgen import chips
from jitgen._data import data_directory

ROOT = data_directory("templates").parent / "jitgen"
RECORDS = ("chips.py",)
"""The module that has the records."""
SPEC = {("spec.py", "_SHARED_KIB")}
"""Shared memory of a block for each compute capability: a number of a target, of which the records' tests say that the
chips agree with it."""
MEASURED_CHIPS = {"bench/chart.py", "device.py"}
"""Files that may name a chip in code: a chart's labels, and the chip whose model stands for chips without a record."""
CODE_NAMES = ("H200", "H100", "A100", "L4", "4090", "RTX_4090", "B200", "MI300X")


def numbers_of_chips() -> set[int]:
    """Numbers that could only be those of a chip: multiprocessors that are no multiple of 32, and sizes of shared
    memory and of the second-level cache, in bytes and the former in KiB."""
    found = {chip.multiprocessors for chip in chips.CHIPS if chip.multiprocessors % 32}
    found |= {chip.shared_bytes // 1024 for chip in chips.CHIPS} - {64}
    for chip in chips.CHIPS:
        found |= {chip.shared_bytes, chip.multiprocessor_shared_bytes, chip.l2_bytes}
    return {number for number in found if number & (number - 1)}


def modules(mentioning: str) -> Iterator[tuple[str, ast.Module]]:
    """The modules whose text matches a regular expression, but for those of the records."""
    for path in sorted(Path(ROOT).rglob("*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if name not in RECORDS and re.search(mentioning, text):
            yield name, ast.parse(text)


def values(node: ast.AST) -> Iterator[tuple[int, int]]:
    """(line, value) of the integers of ``node`` and of products of two of them."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and type(each.value) is int:
            yield each.lineno, each.value
        elif isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult):
            sides = (each.left, each.right)
            if all(isinstance(side, ast.Constant) and type(side.value) is int for side in sides):
                yield each.lineno, each.left.value * each.right.value  # type: ignore[attr-defined]


def test_code_has_no_number_of_a_chip() -> None:
    wanted = numbers_of_chips()
    assert {132, 108, 58, 148, 227, 163, 99, 227 * 1024, 228 * 1024} <= wanted
    found = [
        f"jitgen/{name}:{line}: {value}"
        for name, tree in modules(rf"\b({'|'.join(str(number) for number in wanted)})\b|1024|2\*\*|MIB")
        for statement in tree.body
        if (name, *names(statement)) not in SPEC
        for line, value in values(statement)
        if value in wanted
    ]
    assert not found, f"a number of a chip belongs in jitgen/chips.py: {found}"


def names(statement: ast.stmt) -> tuple[str, ...]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def test_code_names_no_chip() -> None:
    found = []
    for name, tree in modules("|".join(CODE_NAMES)):
        documentation = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        for each in ast.walk(tree):
            if isinstance(each, ast.Attribute) and each.attr in CODE_NAMES:
                found.append(name)
            text = each.value if isinstance(each, ast.Constant) and id(each) not in documentation else None
            if isinstance(text, str) and set(CODE_NAMES) & set(text.split()):
                found.append(name)
    assert set(found) <= MEASURED_CHIPS, found
