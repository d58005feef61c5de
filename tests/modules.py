"""Python files as syntax trees, each parsed once for all tests that read jitgen's own code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    """Parses a file; a test must not change what it is given."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Lists all nodes of a file."""
    return tuple(ast.walk(tree(path)))


@cache
def run_time_nodes(path: Path) -> tuple[ast.AST, ...]:
    """Lists the nodes of a file that are not there for type checking alone."""
    blocks = [node for node in nodes(path) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    return tuple(node for node in nodes(path) if id(node) not in skipped)
