"""Edits of texts: ranges, lines that stay where they are, and nodes of a tree behind characters of several bytes."""

from __future__ import annotations

import ast

from jitgen.codegen.edits import Edit, Positions, Renamed, edited


def test_ranges_are_replaced_whatever_their_order() -> None:
    text = "load(x[i], row)"
    edits = [Edit(14, 14, ", last"), Edit(0, 4, "fetch"), Edit(5, 5, "first, "), Edit(7, 8, "j + 1")]
    assert edited(text, edits) == edited(text, edits[::-1]) == "fetch(first, x[j + 1], row, last)"


def test_lines_stay_where_they_are() -> None:
    text = "a(\n  b,\n  c);\nd;\n"
    edits = [Edit(0, text.index(";"), "e()")]
    assert edited(text, edits) == "e();\nd;\n"
    assert edited(text, edits, keeps_lines=True) == "e()\n\n;\nd;\n"


def test_nodes_are_found_behind_characters_of_several_bytes() -> None:
    text = 'größe = "πλ"; x = f(größe,\n    "é", y) + y\n'
    positions, tree = Positions(text), ast.parse(text)
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert text[positions.start(call) : positions.end(call)] == 'f(größe,\n    "é", y)'
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in ("größe", "y")]
    renamed = edited(text, [positions.over(node, f"{node.id}_2") for node in names])
    assert ast.unparse(ast.parse(renamed)) == ast.unparse(Renamed({"größe": "größe_2", "y": "y_2"}).visit(tree))
