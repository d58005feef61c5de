"""Divides the text of a function in C++ into tokens: comments, strings and directives are known for what they are, and
brackets match. Nothing is parsed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
      | (?P<string>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)"
                   |(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
      | (?P<name>[A-Za-z_]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*)
      | (?P<line>[\r\n]+)
      | (?P<space>(?:[^\S\r\n]|\\[^\S\n]*\n)+)
      | (?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(
    r"""(?:\#|%:)(?:\\[^\S\n]*\n|//(?:\\\n|[^\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[^\n])*""",
    re.DOTALL,
)
"""A directive, where nothing but space and comments stands before it in its line."""
CONTINUED = re.compile(r"\\[^\S\n]*\n")
"""The end of a line that the next one continues."""
CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Token:
    """Holds one token.

    Attributes:
        kind: ``"name"``, ``"number"``, ``"string"``, ``"mark"`` or ``"directive"``.
        start, end: in the text.
    """

    kind: str
    text: str
    start: int
    end: int


@functools.lru_cache(256)
def tokens_of(text: str) -> tuple[Token, ...]:
    """Returns the tokens of ``text``, without comments and space."""
    tokens, position, begins_line = [], 0, True
    while position < len(text):
        directive = _DIRECTIVE.match(text, position) if begins_line else None
        match = directive or _TOKEN.match(text, position)
        assert match is not None
        kind = "directive" if directive else "string" if match.lastgroup == "delimiter" else str(match.lastgroup)
        if kind not in ("comment", "space", "line"):
            tokens.append(Token(kind, match[0], position, match.end()))
        begins_line = kind == "line" or (begins_line and kind in ("comment", "space"))
        position = match.end()
    return tuple(tokens)


def is_qualified(tokens: Sequence[Token], number: int) -> bool:
    """Returns whether token ``number`` is a member, or a name of a namespace: no variable that has this name."""
    marks = ""
    for position in range(number - 1, -1, -1):
        token, behind = tokens[position], tokens[position + 1]
        if token.kind != "mark" or (marks and token.end != behind.start):
            break
        marks = token.text + marks
    # ``n-->x`` compares, and ``n--->x`` is a member of a pointer that is decremented.
    return marks.endswith((".", "::")) or re.search(r"(?<!-)-(--)*>$", marks) is not None


def spelled(tokens: Sequence[Token]) -> str:
    """Returns the text of ``tokens`` without comments, on one line."""
    text = ""
    for number, token in enumerate(tokens):
        text += " " * (number > 0 and tokens[number - 1].end != token.start) + token.text
    return text


def is_expression(text: str) -> bool:
    """Returns whether ``text`` can be one expression, without commas outside of brackets."""
    tokens, opened = tokens_of(text), list[str]()
    for token in tokens:
        mark = token.text if token.kind == "mark" else ""
        if token.kind == "directive" or mark == ";" or (mark == "," and not opened):
            return False
        if mark in CLOSING:
            opened.append(CLOSING[mark])
        elif mark in CLOSING.values() and (not opened or opened.pop() != mark):
            return False
    return bool(tokens) and not opened


def closing_of(tokens: Sequence[Token], opening: int) -> int:
    """Returns where the bracket at ``opening`` is closed; ``len(tokens)`` where it is not."""
    depth = 0
    for number in range(opening, len(tokens)):
        text = tokens[number].text if tokens[number].kind == "mark" else ""
        depth += (text in CLOSING) - (text in CLOSING.values())
        if depth == 0:
            return number
    return len(tokens)


def split_at_commas(tokens: Sequence[Token], angles: bool = False) -> list[tuple[Token, ...]]:
    """Divides ``tokens`` at the commas outside of brackets.

    Args:
        angles: whether ``<`` is a bracket too.
    """
    pieces: list[list[Token]] = [[]]
    depth = 0
    opened, closed = ("(", "[", "{") + ("<",) * angles, (")", "]", "}") + (">",) * angles
    for token in tokens:
        if token.kind == "mark":
            depth += (token.text in opened) - (token.text in closed)
            if token.text == "," and depth == 0:
                pieces.append([])
                continue
        pieces[-1].append(token)
    return [tuple(piece) for piece in pieces if piece]
