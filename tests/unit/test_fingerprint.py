"""What is hashed of jitgen's code is what can change a kernel, and no comment."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

import jitgen
from jitgen import fingerprint

PACKAGE = Path(jitgen.__file__).parent
_SPACE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def tokens(text: str, skipped: frozenset[tuple[int, int]] = frozenset()) -> list[str]:
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in found if token.type not in _SPACE and token.start not in skipped]


def documentation(text: str) -> frozenset[tuple[int, int]]:
    """Where strings are that are statements."""
    return frozenset(
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def test_all_code_is_hashed_and_no_documentation() -> None:
    files = fingerprint.generating_files(PACKAGE)
    assert {path.relative_to(PACKAGE).parts[0] for path in files} >= {"codegen", "families", "ir", "lowering.py"}
    for path in files:
        text = path.read_text()
        assert tokens(fingerprint.without_comments(text)) == tokens(text, documentation(text)), path


@pytest.mark.parametrize(
    "text",
    [
        'x = "#" # a comment\n',
        "x = '\\'#' + \"'\"  # '\n",
        'def f():\n    """Says\n    what."""\n\n    # a comment\n    return 1\n',
        'x = """\n# not a comment\n\n"""\n',
        'f(\n    """\n    text""",\n    2,\n)\n',
        "y = '''a\n\"\"\"\nb'''  # two kinds\n",
        'if a:  # why\n    b = a[1:]  # more "quotes\n',
    ],
)
def test_what_is_code(text: str) -> None:
    assert tokens(fingerprint.without_comments(text)) == tokens(text, documentation(text))
    assert fingerprint.without_comments(fingerprint.without_comments(text)) == fingerprint.without_comments(text)


def test_a_comment_changes_nothing_and_code_does() -> None:
    text = 'def f(x):\n    """Doubles."""\n    return x * 2\n'
    same = '# about f\n\n\ndef f(x):  # of numbers\n    """Returns\n    twice x."""\n    return x * 2  # exactly\n'
    assert fingerprint.without_comments(text) == fingerprint.without_comments(same)
    assert fingerprint.without_comments(text) != fingerprint.without_comments(text.replace("2", "3"))
