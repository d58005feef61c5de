"""Multiprocessors, memories, clocks and rates of one chip stand in its record (``schedule/chips.py``) and nowhere else.

The test sees a number of a record that stands elsewhere. It does not see constants that a model was fitted with, such
as the microseconds of a launch: they are a model's, and its docstring says on which chip they were measured.

Docstrings and comments may name a chip, to say where something was measured. Code may not have its numbers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from jitgen._data import data_directory
from jitgen.schedule import chips

ROOT = data_directory("templates").parent / "jitgen"
RECORDS = ("schedule/chips.py",)
"""The module that has the records."""
SPEC = {("spec.py", "_SHARED_KIB")}
"""Shared memory of a block for each compute capability: a number of a target, of which the records' tests say that the
chips agree with it."""
MEASURED_CHIPS = {"device.py"}
"""The file that may name a chip in code: the chip whose model stands for chips without a record."""
CODE_NAMES = ("H200", "H100", "A100", "L4", "4090", "RTX_4090", "B200", "MI300X")


def numbers_of_chips() -> set[float]:
    """Numbers that could only be those of a chip: multiprocessors that are no multiple of 32, sizes of shared memory
    and of the second-level cache, in bytes and the former in KiB, clocks, and rates of memory."""
    found = {chip.multiprocessors for chip in chips.CHIPS if chip.multiprocessors % 32}
    found |= {chip.shared_bytes // 1024 for chip in chips.CHIPS} - {64}
    for chip in chips.CHIPS:
        found |= {chip.shared_bytes, chip.multiprocessor_shared_bytes, chip.l2_bytes}
    whole = {number for number in found if number & (number - 1)}
    return whole | {rate for chip in chips.CHIPS for rate in (chip.clock, chip.read_rate) if rate}


def modules(mentioning: str) -> Iterator[tuple[str, ast.Module]]:
    """The modules whose text matches a regular expression, but for those of the records."""
    for path in sorted(Path(ROOT).rglob("*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if name not in RECORDS and re.search(mentioning, text):
            yield name, ast.parse(text)


def values(node: ast.AST) -> Iterator[tuple[int, float]]:
    """(line, value) of the numbers of ``node`` and of products of two of them."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and type(each.value) in (int, float):
            yield each.lineno, each.value
        elif isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult):
            sides = (each.left, each.right)
            if all(isinstance(side, ast.Constant) and type(side.value) in (int, float) for side in sides):
                yield each.lineno, each.left.value * each.right.value  # type: ignore[attr-defined]


def test_code_has_no_number_of_a_chip() -> None:
    wanted = numbers_of_chips()
    assert {132, 108, 58, 148, 227, 163, 99, 227 * 1024, 228 * 1024, 4.4e12, 1750e6} <= wanted
    whole = "|".join(str(number) for number in wanted if isinstance(number, int))
    found = [
        f"jitgen/{name}:{line}: {value}"
        for name, tree in modules(rf"\b({whole})\b|1024|2\*\*|MIB|\de\d")
        for statement in tree.body
        if (name, *names(statement)) not in SPEC
        for line, value in values(statement)
        if value in wanted
    ]
    assert not found, f"a number of a chip belongs in jitgen/schedule/chips.py: {found}"


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


def is_numeric(node: ast.AST) -> bool:
    """Whether ``node`` is made of numbers: one, several in a tuple or table, arithmetic, or fitted constants."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Dict):
        return any(map(is_numeric, node.values))
    if isinstance(node, ast.Call):
        return any(map(is_numeric, [*node.args, *(keyword.value for keyword in node.keywords)]))
    if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.BinOp | ast.UnaryOp | ast.Starred):
        return any(map(is_numeric, ast.iter_child_nodes(node)))
    return False


SAID_BY_THE_MODULE = {"gemm/wgmma_fits.py"}
"""Modules whose docstrings say of all their constants to which timings they were fitted."""


def test_every_number_of_a_schedule_says_what_it_is() -> None:
    """Numbers at module level in ``families``, where schedules are chosen, have a docstring: what they are, in which
    unit, and where they were measured if they were."""
    undocumented, count = [], 0
    for path in sorted((Path(ROOT) / "families").rglob("*.py")):
        name = path.relative_to(Path(ROOT) / "families").as_posix()
        statements = ast.parse(path.read_text()).body
        for statement, following in zip(statements, [*statements[1:], None], strict=True):
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            if value is None or not is_numeric(value):
                continue
            count += 1
            said = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not said and name not in SAID_BY_THE_MODULE:
                undocumented.append(f"jitgen/families/{name}:{statement.lineno}")
    assert not undocumented, f"a number needs a docstring: {undocumented}"
    assert count > 200, "numbers are seen"
