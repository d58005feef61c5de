"""Checks the sizes and scalars of a manifest: expressions over known symbols, by the operators of ``ir/symbols.py``.

What passes is also evaluated, with the values that the manifest gives its symbols, so that shapes can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jitgen.fields import SIZE_LIMIT, Field, shown
from jitgen.ir import symbols

DEPTH_LIMIT = 100
"""Levels of operators in an expression."""
OPERAND_LIMIT = 1000
"""Terms of a sum, or factors of a product."""
BITS_LIMIT = 1024
"""Bits of an integer constant, and of an integer argument."""
RANK_LIMIT = 64
"""Dimensions of a tensor, as in torch."""

OPERATORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "sub", "mul", "truediv"), ("float",)),
    **dict.fromkeys(("floordiv", "mod", "pow", "min", "max"), ("int", "float")),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), ("bool",)),
}
"""Binary operators, with the kinds that their results may have. Integer sums and products have forms of their own."""

_HEXADECIMAL = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}|-?inf|nan")


def number(field: Field) -> Any:
    """Returns a constant: an integer, a bool, or a float as ``{"float": hexadecimal text}``."""
    value = field.value
    if isinstance(value, dict):
        (text,) = field.members("float")
        try:
            parsed = float.fromhex(text.text(_HEXADECIMAL, "a float as float.hex writes it"))
        except OverflowError as error:
            text.refuse(str(error))
        if parsed.hex() != text.value:
            text.refuse(f"{shown(text.value)} is not a float as float.hex writes it")
        return parsed
    if type(value) is bool:
        return value
    if type(value) is not int or value.bit_length() > BITS_LIMIT:
        field.refuse(f"{shown(value)} is neither a bool, nor an integer of at most {BITS_LIMIT} bits, nor a float")
    return value


def is_expression(field: Field) -> bool:
    return isinstance(field.value, dict) and "float" not in field.value


def scalar(field: Field, environment: Mapping[str, Any]) -> Any:
    """Returns a constant or an expression: its value in ``environment``, which has one for every symbol."""
    _check(field, environment, 0)
    try:
        value = symbols.evaluate(symbols.from_json(field.value), environment)
    except (ArithmeticError, TypeError, ValueError) as error:
        field.refuse(f"cannot be evaluated where the symbols are as the environment says: {error}")
    if type(value) not in (int, float, bool):
        field.refuse(f"is a {type(value).__name__}, and no real number")
    return value


def size(field: Field, environment: Mapping[str, Any]) -> int:
    """Returns the value of a size: an integer that is neither negative nor too large for an index."""
    value = scalar(field, environment)
    if type(value) is not int or not 0 <= value < SIZE_LIMIT:
        field.refuse(f"is {shown(value)}; a size is an integer of at least 0 and below {SIZE_LIMIT}")
    return value


def shape(field: Field, environment: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the values of a tensor's sizes."""
    sizes = tuple(size(item, environment) for item in field.items(RANK_LIMIT))
    elements(field, sizes)
    return sizes


def elements(field: Field, sizes: tuple[int, ...]) -> int:
    """Returns the product of ``sizes``; ``field`` is refused if it is too large."""
    count = 0 if 0 in sizes else 1
    for factor in sizes if count else ():
        count *= factor
    if count >= SIZE_LIMIT:
        field.refuse(f"is a tensor of {shown(count)} elements; there may be fewer than {SIZE_LIMIT}")
    return count


def _check(field: Field, environment: Mapping[str, Any], depth: int) -> str:
    """Returns the kind of a constant or an expression: ``"int"``, ``"float"`` or ``"bool"``."""
    if not is_expression(field):
        return type(number(field)).__name__
    if depth == DEPTH_LIMIT:
        field.refuse(f"is nested more than {DEPTH_LIMIT} levels deep")
    if field.value.get("op") == "sum":
        _, arguments = field.members("op", "args")
        constant, *terms = arguments.items(OPERAND_LIMIT, 2)
        _integer(constant)
        for term in terms:
            coefficient, atom = term.items(2, 2)
            _integer(coefficient)
            _integral(atom, environment, depth)
        return "int"
    op, arguments, kind = field.members("op", "args", "kind")
    if op.value == "symbol":
        (name,) = arguments.items(1, 1)
        if not isinstance(name.value, str) or name.value not in environment:
            name.refuse(f"{shown(name.value)} is no symbol of the environment")
        return kind.one_of((symbols.kind_of(environment[name.value]),))
    if op.value == "product":
        for factor in arguments.items(OPERAND_LIMIT, 2):
            _integral(factor, environment, depth)
        return kind.one_of(("int",))
    result = kind.one_of(OPERATORS[op.one_of(OPERATORS)])
    for operand in arguments.items(2, 2):
        if _check(operand, environment, depth + 1) == "float" and result == "int":
            operand.refuse("is a float in an expression of kind int")
    return result


def _integer(field: Field) -> None:
    if type(number(field)) is not int:
        field.refuse(f"{shown(field.value)} is not an integer")


def _integral(field: Field, environment: Mapping[str, Any], depth: int) -> None:
    """Checks a term or factor: an expression that is no float."""
    if not is_expression(field):
        field.refuse(f"{shown(field.value)} is not an expression")
    if _check(field, environment, depth + 1) == "float":
        field.refuse("is a float in a sum or product of integers")
