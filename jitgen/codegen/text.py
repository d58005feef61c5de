"""Makes text safe to print into a generated source: identifiers and comments of one line.

A template prints names of functions and symbols, and descriptions of kernels. Whatever text these are made of, what is
printed can neither end its line nor be read as code. ``templates/`` prints every comment through the filter ``comment``
(a test looks for those that do not); functions' names come from ``function_name``. A source has no name of a function
in it: its entry symbol is ``entry_name`` of what it says.
"""

from __future__ import annotations

import re

from jitgen.spec import digest

NAME_LENGTH = 100
"""Characters of a function's name, at most."""
COMMENT_LENGTH = 4000
"""Characters of a line of comment, at most: a title names each of up to 64 operands."""

_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{NAME_LENGTH - 1}}}|<lambda>")
_DIGEST = 8


def is_function_name(name: object) -> bool:
    """Returns whether ``name`` is what ``function_name`` gives: a short ASCII identifier, or ``<lambda>``."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def function_name(name: object) -> str:
    """Returns a function's ``__name__`` as graphs and kernels carry it; one that is no short identifier is made one.

    What is made ends in a digest of the name, so that functions of different names have different ones.
    """
    text = str(name)
    if is_function_name(text):
        return text
    return f"f_{_plain(text)[: NAME_LENGTH // 2]}_{digest(text)[:_DIGEST]}"


def entry_name(family: str, content: object) -> str:
    """Returns the entry symbol of a kernel: its family, and a digest of ``content``, which is all that its source says.

    So equal kernels, of one function or of several, have one name, one source and one artifact.
    """
    return f"jitgen_{_plain(family)[:NAME_LENGTH]}_{digest(content)[:_DIGEST]}"


def _plain(text: str) -> str:
    return re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")


def comment(value: object) -> str:
    """Returns ``value`` as text that ends neither a line nor a block of comment, in C++ and in Python.

    Printable ASCII; no ``*/``, no trigraph, and no backslash at the end, which would continue a ``//`` comment.
    """
    text = "".join(c if " " <= c <= "~" else " " if c.isspace() else "?" for c in str(value)[:COMMENT_LENGTH])
    return text.replace("*/", "* /").replace("??/", "?? /").rstrip(" \\")
