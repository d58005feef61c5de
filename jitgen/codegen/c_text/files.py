"""Says what a kernel's text includes, where it was read, and which flags of a compiler it may be compiled with."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jitgen.codegen.c_text.tokens import CONTINUED, tokens_of

MOST_HEADERS = 512
"""Headers of the user's own that a kernel may include."""
_GAP = r"(?:\\[^\S\n]*\n|/\*.*?\*/|[^\S\n])*"
"""Space, comments and ends of continued lines within a directive."""
_WORD = r"(?:\\[^\S\n]*\n)*".join("include")
_INCLUDE = re.compile(rf'(?:\#|%:){_GAP}{_WORD}{_GAP}(?P<open>[<"])(?P<name>[^>"\n]+)[>"]', re.DOTALL)
_MARKER = re.compile(r"(?:\#|%:)(?:/\*.*?\*/|\s)*(?:line\b|\d)", re.DOTALL)
_FLAGS = re.compile(
    r"""-D[A-Za-z_]\w*(=[^\s]*)? | -U[A-Za-z_]\w* | -W(?![alp]$)[\w=-]* | -O[0-3s] | -lineinfo
      | -mprefer-vector-width=\w+ | -mtune=(?!native)[\w-]+ | -mno-fma
      | --?use_fast_math | --?(ftz|prec-div|prec-sqrt|fmad)=(true|false) | --?maxrregcount=\d+
      | --?std=(c|gnu)\+\+(1[47yz]|2\w) | --?extra-device-vectorization | -f(no-)?fast-math | -f(no-)?unroll-loops
      | -f(no-)?associative-math | -f(no-)?reciprocal-math | -f(no-)?finite-math-only | -ffp-contract=\w+
      | -f(no-)?tree-vectorize | -fopenmp-simd | -f(no-)?strict-aliasing | -f(no-)?inline""",
    re.VERBOSE,
)

_files: dict[str, tuple[str, int]] = {}
"""Where each text is that this process has read: the file, and the line there of its first one."""


def note_file(text: str, file: str, line: int) -> None:
    """Remembers where ``text`` is, for messages: no key, and no source, has a path."""
    _files[text] = file, line


def location_of(text: str, line: int) -> str:
    """Returns file and line of line ``line`` of ``text``; another process may know the line alone."""
    file, first = _files.get(text, ("the kernel's text", 1))
    return f"{file}:{first - 1 + line}"


def without_markers(text: str) -> str:
    """Returns ``text`` with empty lines in place of what tells that other files have them (``#line 1 "grammar.y"``).

    A compiler would quote such a file in its messages, and its path would be in every key.
    """
    kept, position = [], 0
    for token in tokens_of(text):
        if token.kind == "directive" and _MARKER.match(CONTINUED.sub("", token.text)):
            kept += [text[position : token.start], "\n" * token.text.count("\n")]
            position = token.end
    return "".join([*kept, text[position:]])


def includes_of(text: str) -> Iterator[tuple[str, bool, tuple[int, int]]]:
    """Yields what ``text`` includes: the name, whether it is in quotes, and where the name is."""
    for token in tokens_of(text):
        if token.kind == "directive" and (match := _INCLUDE.match(token.text)):
            span = token.start + match.start("name"), token.start + match.end("name")
            yield match["name"], match["open"] == '"', span


def is_harmless_flag(flag: str) -> bool:
    """Returns whether a compiler's ``flag`` decides how a kernel is compiled, and reads, writes or runs nothing.

    None depends on the machine, or asks for instructions that the target does not tell of. None chooses C++ before
    2014, whose tokens are others.
    """
    return _FLAGS.fullmatch(flag) is not None
