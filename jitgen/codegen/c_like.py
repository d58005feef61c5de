"""Defines what the C++ and the CUDA C++ dialect share: types, literals, casts, and the rows of operations.

An operation without a C++ operator is a function of the same name in ``namespace jitgen``, which the dialect's static
headers define (``templates/common/include/jitgen/``), overloaded over the compute dtypes.
"""

from __future__ import annotations

import math

from jitgen.codegen.dialect import Row
from jitgen.ir.ops import OPS
from jitgen.ir.rounding import NARROW

TYPES = {
    "float32": "float",
    "float64": "double",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "uint8": "uint8_t",
    "bool": "bool",
}

STORAGE_TYPES = TYPES | {
    "float16": "jitgen::float16",
    "bfloat16": "jitgen::bfloat16",
    "float8_e4m3fn": "jitgen::float8_e4m3fn",
    "float8_e5m2": "jitgen::float8_e5m2",
}

_OPERATORS: dict[str, Row] = {
    "add": {"float": "{0} + {1}"},
    "sub": {"float": "{0} - {1}"},
    "mul": {"float": "{0} * {1}"},
    "div": "{0} / {1}",
    "neg": {"float": "-{0}"},
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "where": "{0} ? {1} : {2}",
}


def _rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for op in OPS.values():
        call = f"jitgen::{op.name}({', '.join(f'{{{position}}}' for position in range(op.arity))})"
        operator = _OPERATORS.get(op.name)
        if isinstance(operator, str):
            rows[op.name] = operator
        elif operator is not None:
            rows[op.name] = {"float": operator["float"], "int": call, "bool": call}
        else:
            rows[op.name] = call
    return rows


ROWS = _rows()
"""Floats use C++ operators. All else calls functions of the headers, where integer arithmetic wraps; the overflow of a
signed C++ operator would be undefined."""

COARSE = {op: f"jitgen::coarse_{op}({{0}})" for op in ("erfc", "exp", "sigmoid")}
"""Faster, less exact functions of the headers, for results that are rounded to 16 bits; see ``Dialect.coarse``."""


def constant(value: bool | int | float, dtype: str) -> str:
    if dtype == "bool":
        return "true" if value else "false"
    if dtype in ("float32", "float64"):
        suffix = "f" if dtype == "float32" else ""
        number = float(value)
        if math.isnan(number):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(number):
            return f"{'-' if number < 0 else ''}__builtin_huge_val{suffix}()"
        if dtype == "float32":
            number = _to_float32(number)
            if math.isinf(number):
                return f"{'-' if number < 0 else ''}__builtin_huge_val{suffix}()"
        text = repr(number)
        return (text if any(mark in text for mark in ".e") else text + ".0") + suffix
    bits = {"int8": 8, "uint8": 8, "int16": 16, "int32": 32, "int64": 64}[dtype]
    wrapped = int(value) % 2**bits
    if dtype != "uint8" and wrapped >= 2 ** (bits - 1):
        wrapped -= 2**bits
    if dtype == "int64":
        return "(-9223372036854775807LL - 1)" if wrapped == -(2**63) else f"{wrapped}LL"
    return f"{TYPES[dtype]}({wrapped if wrapped != -(2**31) else '-2147483647 - 1'})"


def _to_float32(value: float) -> float:
    import ctypes

    return ctypes.c_float(value).value


def cast(expression: str, source: str, to: str) -> str:
    return f"jitgen::cast<{TYPES[to]}>({expression})"


def round_to(expression: str, storage: str) -> str:
    return f"jitgen::load(jitgen::store<{STORAGE_TYPES[storage]}>({expression}))"


def narrow_bits(expression: str, source: str, to: str) -> str | None:
    """Takes the bits of a narrow float for an integer, or the other way round; None where neither is narrow."""
    if source in NARROW:
        return f"static_cast<{TYPES[to]}>(jitgen::store<{STORAGE_TYPES[source]}>({expression}).bits)"
    if to in NARROW:
        word = "uint8_t" if to.startswith("float8") else "uint16_t"
        return f"jitgen::load({STORAGE_TYPES[to]}{{static_cast<{word}>({expression})}})"
    return None


def gather(pointer: str, offset: str, storage: str, mask: str) -> str:
    return f"jitgen::load({pointer}[{offset}])"


def assign(type_name: str, name: str, expression: str) -> str:
    return f"const {type_name} {name} = {expression};"
