"""Changes texts that users wrote: replaces ranges of characters, or nodes of a tree of Python."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """Replaces the characters from ``start`` to ``end`` by ``text``."""

    start: int
    end: int
    text: str


def edited(text: str, edits: Iterable[Edit], keeps_lines: bool = False) -> str:
    """Returns ``text`` with ranges replaced, of which none is within another.

    Args:
        keeps_lines: whether a replaced range ends in as many new lines as it had, so that others stay where they are.
    """
    for start, end, replacement in sorted(edits, reverse=True):
        lines = text.count("\n", start, end) if keeps_lines else 0
        text = text[:start] + replacement + "\n" * lines + text[end:]
    return text


class Positions:
    """Finds the nodes of a tree in the text that it was parsed from."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.starts = [0, *itertools.accumulate(len(line) + 1 for line in self.lines)]

    def start(self, node: Any) -> int:
        return self._position(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        return self._position(node.end_lineno, node.end_col_offset)

    def over(self, node: ast.AST, text: str) -> Edit:
        """Returns the edit that replaces ``node``."""
        return Edit(self.start(node), self.end(node), text)

    def _position(self, line: int, column: int) -> int:
        """Returns the character at ``column``, which a tree counts in bytes, of ``line``, which it counts from 1."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())


class Renamed(ast.NodeTransformer):
    """Gives the variables of a tree other names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)
