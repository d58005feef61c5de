"""What may be printed into a generated source besides numbers: identifiers and comments of one line.

A template prints names of functions and symbols, and descriptions of kernels. Whatever text these are made of, what is
printed can neither end its line nor be read as code. ``templates/`` prints every comment through the filter
``comment`` (a test looks for those that do not); entry symbols come from ``entry_name`` and functions' names from
``function_name``.
"""

from __future__ import annotations

import re

from jitgen.spec import digest

NAME_LENGTH = 100
"""Characters of a function's name, at most."""
SYMBOL_LENGTH = 128
"""Characters of an entry symbol's name, at most: a function's, the kernel's number, and what was cut off of it."""
COMMENT_LENGTH = 4000
"""Characters of a line of comment, at most: a title names each of up to 64 operands."""

_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{NAME_LENGTH - 1}}}|<lambda>")
_DIGEST = 8


def is_function_name(name: object) -> bool:
    """Whether ``name`` is what ``function_name`` gives: a short ASCII identifier, or ``<lambda>``."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def function_name(name: object) -> str:
    """A function's ``__name__`` as graphs and kernels carry it; one that is no short identifier is made one.

    What is made ends in a digest of the name, so that functions of different names have different ones.
    """
    text = str(name)
    if is_function_name(text):
        return text
    return f"f_{_plain(text)[: NAME_LENGTH // 2]}_{digest(text)[:_DIGEST]}"


def entry_name(kernel: str) -> str:
    """The symbol of the kernel of this name: the name, made an ASCII identifier of at most ``SYMBOL_LENGTH``."""
    plain = _plain(kernel)
    if not kernel.isascii() or len(plain) > SYMBOL_LENGTH:
        plain = f"{plain[: NAME_LENGTH // 2]}_{digest(kernel)[:_DIGEST]}"
    return "jitgen_" + plain


def _plain(text: str) -> str:
    return re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")


def comment(value: object) -> str:
    """``value`` as text that ends neither a line nor a block of comment, in C++ and in Python.

    Printable ASCII; no ``*/``, no trigraph, and no backslash at the end, which would continue a ``//`` comment.
    """
    text = "".join(c if " " <= c <= "~" else " " if c.isspace() else "?" for c in str(value)[:COMMENT_LENGTH])
    return text.replace("*/", "* /").replace("??/", "?? /").rstrip(" \\")
