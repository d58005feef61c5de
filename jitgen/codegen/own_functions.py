"""Prints a pointwise function that a user spelled in the dialects (``jitgen.device_function``).

A spelling is an expression over the names of the function's parameters. In C++ and CUDA C++ ``T`` is the type that the
arguments are computed in: ``float`` of 16-bit floats, too.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jitgen.codegen import c_text
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
    tokens = c_text.tokens_of(text)
    return c_text.spelled(
        [
            replace(token, text=names[token.text])
            if token.kind == "name" and token.text in names and not c_text.is_qualified(tokens, number)
            else token
            for number, token in enumerate(tokens)
        ]
    )


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


def _in_python(text: str, names: Mapping[str, str]) -> str:
    return ast.unparse(_Renamed(names).visit(ast.parse(text.strip(), mode="eval")))
