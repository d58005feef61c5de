"""Defines the Triton dialect: how operations, dtypes, constants and conversions are written in Triton.

``ROWS`` has a row for each operation of ``ir/ops.py``, in the form that ``codegen/dialect.py`` describes. A row calls
``tl``, ``libdevice`` or a function of ``templates/common/include/jitgen_triton.py``, so the text compiles for NVIDIA
and AMD and runs in Triton's interpreter (``runtime/interpreter.py``).

A row calls libdevice's function wherever ``tl``'s is an approximation: in float32 ``tl.exp`` is ``ex2.approx`` of a
rounded product, and ``tl.sqrt`` and ``/`` are not IEEE. A pointwise kernel loses nothing by it, since memory bounds it.
Sources must be compiled so that libdevice does not flush subnormals; ``compilers/triton.py`` does so.
"""

from __future__ import annotations

import math

from jitgen.codegen.dialect import Dialect

TYPES: dict[str, str] = {
    "float32": "tl.float32",
    "float64": "tl.float64",
    "uint8": "tl.uint8",
    "int8": "tl.int8",
    "int16": "tl.int16",
    "int32": "tl.int32",
    "int64": "tl.int64",
    "bool": "tl.int1",
}
"""Compute dtype to Triton type."""

STORAGE_TYPES: dict[str, str] = TYPES | {
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "float8_e4m3fn": "tl.uint8",
    "float8_e5m2": "tl.uint8",
}
"""Storage dtype to the type of a loaded or stored element. A float8 is loaded as its byte, because no target has all of
torch's float8 dtypes."""

SIGNATURE_TYPES: dict[str, str] = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "u8",
    "float8_e5m2": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "bool": "i1",
}
"""Storage dtype to its name in a kernel signature: ``"bf16"`` for a scalar, ``"*bf16"`` for a pointer to it."""

MULTIPLE = 16
"""The largest divisor of a pointer's address or of an integer that Triton is told, since its widest access is 16
bytes."""

ROWS: dict[str, str | dict[str, str]] = {
    # arithmetic
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": {"float32": "tl.div_rn({0}, {1})", "float64": "({0} / {1})"},
    "floor_divide": {
        "float": "float_floor_divide({0}, {1})",
        "int": "int_floor_divide({0}, {1})",
        "uint8": "unsigned_divide({0}, {1})",
    },
    "trunc_divide": {"int": "int_trunc_divide({0}, {1})", "uint8": "unsigned_divide({0}, {1})"},
    "fmod": {"float": "libdevice.fmod({0}, {1})", "int": "int_fmod({0}, {1})", "uint8": "unsigned_remainder({0}, {1})"},
    "remainder": {
        "float": "float_remainder({0}, {1})",
        "int": "int_remainder({0}, {1})",
        "uint8": "unsigned_remainder({0}, {1})",
    },
    "pow": {"float": "libdevice.pow({0}, {1})", "int": "int_pow({0}, {1})", "uint8": "unsigned_pow({0}, {1})"},
    "atan2": "libdevice.atan2({0}, {1})",
    "copysign": "libdevice.copysign({0}, {1})",
    "minimum": {
        "float": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        "int": "tl.minimum({0}, {1})",
        "bool": "({0} & {1})",
    },
    "maximum": {
        "float": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        "int": "tl.maximum({0}, {1})",
        "bool": "({0} | {1})",
    },
    "fmin": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.NONE)",
    "fmax": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.NONE)",
    "fma": "tl.fma({0}, {1}, {2})",
    # unary arithmetic; Triton's float unary minus is 0 - x in some versions, which loses the sign of zero
    "neg": {"float": "({0} * -1.0)", "int": "(-{0})"},
    "abs": "tl.abs({0})",
    "sign": {
        "float": "(({0} > 0).to({type}) - ({0} < 0).to({type}))",
        "int": "(({0} > 0).to({type}) - ({0} < 0).to({type}))",
        "bool": "{0}",
    },
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round": "libdevice.nearbyint({0})",
    "trunc": "libdevice.trunc({0})",
    "sqrt": {"float32": "tl.sqrt_rn({0})", "float64": "tl.sqrt({0})"},
    "rsqrt": "libdevice.rsqrt({0})",
    "reciprocal": {"float32": "tl.div_rn(1.0, {0})", "float64": "(1.0 / {0})"},
    # exponentials and logarithms
    "exp": "libdevice.exp({0})",
    "exp2": "libdevice.exp2({0})",
    "exp2_normal": {"float32": "tl.exp2({0})", "float64": "libdevice.exp2({0})"},
    "expm1": "libdevice.expm1({0})",
    "log": "libdevice.log({0})",
    "log2": "libdevice.log2({0})",
    "log10": "libdevice.log10({0})",
    "log1p": "libdevice.log1p({0})",
    # trigonometry
    "sin": "libdevice.sin({0})",
    "cos": "libdevice.cos({0})",
    "tan": "libdevice.tan({0})",
    "asin": "libdevice.asin({0})",
    "acos": "libdevice.acos({0})",
    "atan": "libdevice.atan({0})",
    "sinh": "libdevice.sinh({0})",
    "cosh": "libdevice.cosh({0})",
    "tanh": "libdevice.tanh({0})",
    "asinh": "libdevice.asinh({0})",
    "acosh": "libdevice.acosh({0})",
    "atanh": "libdevice.atanh({0})",
    "erf": "libdevice.erf({0})",
    "erfc": "libdevice.erfc({0})",
    "sigmoid": {
        "float32": "tl.div_rn(1.0, 1.0 + libdevice.exp({0} * -1.0))",
        "float64": "(1.0 / (1.0 + libdevice.exp({0} * -1.0)))",
    },
    # comparison and classification; an int1 compares as a signed integer in some versions, hence logic for bool
    "eq": {"float": "({0} == {1})", "int": "({0} == {1})", "bool": "(~({0} ^ {1}))"},
    "ne": {"float": "({0} != {1})", "int": "({0} != {1})", "bool": "({0} ^ {1})"},
    "lt": {"float": "({0} < {1})", "int": "({0} < {1})", "bool": "(~{0} & {1})"},
    "le": {"float": "({0} <= {1})", "int": "({0} <= {1})", "bool": "(~{0} | {1})"},
    "gt": {"float": "({0} > {1})", "int": "({0} > {1})", "bool": "({0} & ~{1})"},
    "ge": {"float": "({0} >= {1})", "int": "({0} >= {1})", "bool": "({0} | ~{1})"},
    "isnan": "({0} != {0})",
    "isinf": '(tl.abs({0}) == float("inf"))',
    "signbit": {"float32": "({0}.to(tl.int32, bitcast=True) < 0)", "float64": "({0}.to(tl.int64, bitcast=True) < 0)"},
    # bits and logic
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "bitwise_not": "(~{0})",
    "left_shift": "int_left_shift({0}, {1})",
    "right_shift": {"int": "int_right_shift({0}, {1})", "uint8": "unsigned_right_shift({0}, {1})"},
    "where": "tl.where({0}, {1}, {2})",
    "philox": "philox_bits({0}, {1}, {2})",
}

_LOADS = {
    "float16": "{0}.to(tl.float32)",
    "bfloat16": "{0}.to(tl.float32)",
    "float8_e4m3fn": "e4m3_to_float32({0})",
    "float8_e5m2": "e5m2_to_float32({0})",
}
_STORES = {
    "float16": "{0}.to(tl.float16)",
    "bfloat16": "{0}.to(tl.bfloat16)",
    "float8_e4m3fn": "float32_to_e4m3({0})",
    "float8_e5m2": "float32_to_e5m2({0})",
}


def constant(value: bool | int | float, dtype: str) -> str:
    """Writes a scalar of compute dtype ``dtype``. It has a type, as a bare number would take part in Triton's
    promotion."""
    if dtype == "bool":
        return f"tl.full((), {bool(value)}, {TYPES[dtype]})"
    if not dtype.startswith("float"):
        return f"tl.full((), {int(value)}, {TYPES[dtype]})"
    number = float(value)
    if math.isnan(number) or math.isinf(number):
        return f'tl.full((), float("{number}"), {TYPES[dtype]})'
    if number == 0.0 and math.copysign(1.0, number) < 0:
        # Some versions of tl.full take every zero for +0.
        return f"(tl.full((), 0.0, {TYPES[dtype]}) * -1.0)"
    return f"tl.full((), {number!r}, {TYPES[dtype]})"


def cast(expression: str, source: str, to: str) -> str:
    """Converts ``expression`` from compute dtype ``source`` to compute dtype ``to``, as torch does it.

    A float is converted to a narrow integer through a wide one, so that it wraps, as on the CPU, and does not saturate.
    """
    if source == to:
        return expression
    if to == "bool":
        return f"({_atom(expression)} != 0)"
    value = _atom(expression)
    if source.startswith("float") and to in ("int8", "int16"):
        value += ".to(tl.int32)"
    elif source.startswith("float") and to == "uint8":
        value += ".to(tl.int64)"
    return f"{value}.to({TYPES[to]})"


def load_cast(expression: str, storage: str) -> str:
    """Converts a loaded element of ``storage`` to its compute dtype."""
    return _LOADS.get(storage, "{0}").format(_atom(expression))


def store_cast(expression: str, storage: str) -> str:
    """Rounds a value of ``storage``'s compute dtype to nearest even for storing."""
    return _STORES.get(storage, "{0}").format(_atom(expression))


def round_to(expression: str, storage: str) -> str:
    """Rounds a float32 to ``storage`` and back."""
    return load_cast(store_cast(expression, storage), storage)


def bits(expression: str, source: str, to: str) -> str:
    stored = _atom(store_cast(expression, source))
    if STORAGE_TYPES[source] != STORAGE_TYPES[to]:
        stored += f".to({STORAGE_TYPES[to]}, bitcast=True)"
    return load_cast(stored, to)


def _atom(expression: str) -> str:
    """Returns ``expression``, in parentheses unless a method call may follow it directly."""
    return expression if expression.isidentifier() else f"({expression})"


def gather(pointer: str, offset: str, storage: str, mask: str) -> str:
    return load_cast(f"tl.load({pointer} + {offset}{f', mask={mask}' if mask else ''})", storage)


def assign(type_name: str, name: str, expression: str) -> str:
    """Returns the line that defines a value; Triton infers its type."""
    return f"{name} = {expression}"


TRITON = Dialect(
    name="triton",
    rows=ROWS,
    types=TYPES,
    storage_types=STORAGE_TYPES,
    constant=constant,
    cast=cast,
    round=round_to,
    bits=bits,
    assign=assign,
    gather=gather,
    within="within({0}, {1})",
    suffix=".py",
    coarse={"exp": "tl.exp({0})", "sigmoid": "(1.0 / (1.0 + tl.exp({0} * -1.0)))"},
)
