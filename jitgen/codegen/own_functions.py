"""Prints a pointwise function that a user spelled in the dialects (``jitgen.device_function``).

A spelling is an expression over the names of the function's parameters. In C++ and CUDA C++ ``T`` is the type that the
arguments are computed in: ``float`` of 16-bit floats, too.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jitgen.codegen.c_text.tokens import is_qualified, spelled, tokens_of
from jitgen.codegen.edits import Renamed
from jitgen.errors import UnsupportedError
from jitgen.ir.attributes import OwnAttrs

DIALECTS = ("cuda", "triton", "cpp")


def expression(attrs: OwnAttrs, dialect: str, operands: Sequence[str], type_name: str, result: str) -> str:
    """Returns the expression of a call.

    Args:
        operands: the names of the arguments.
        type_name, result: the dialect's types of the arguments and of the result.

    Raises:
        UnsupportedError: the function is not spelled in this dialect.
    """
    texts = dict(attrs.texts)
    if dialect not in texts:
        raise UnsupportedError(
            f"{attrs.name} is spelled in {', '.join(texts)}, and not in {dialect}; pass {dialect}= to "
            "jitgen.device_function"
        )
    named = dict(zip(attrs.parameters, operands, strict=True))
    if dialect == "triton":
        return f"tl.cast({_in_python(texts[dialect], named)}, {result})"
    return f"{result}({_in_c(texts[dialect], {'T': type_name} | named)})"


def _in_c(text: str, names: Mapping[str, str]) -> str:
    """Returns ``text`` with names replaced that are no members; on one line, without comments."""
    tokens = tokens_of(text)
    return spelled(
        [
            replace(token, text=names[token.text])
            if token.kind == "name" and token.text in names and not is_qualified(tokens, number)
            else token
            for number, token in enumerate(tokens)
        ]
    )


def _in_python(text: str, names: Mapping[str, str]) -> str:
    return ast.unparse(Renamed(names).visit(ast.parse(text.strip(), mode="eval")))
