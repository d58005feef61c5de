"""Defines the CUDA C++ dialect, compiled by NVRTC (``compilers/nvrtc.py``) or nvcc (``compilers/load_inline.py``)."""

from __future__ import annotations

import math

from jitgen.codegen import c_like
from jitgen.codegen.dialect import Dialect


def constant(value: bool | int | float, dtype: str) -> str:
    """Writes a constant as in C++, except for NaN and infinity: NVRTC has no builtins for them, so they are written as
    bits."""
    if dtype in ("float32", "float64"):
        text = c_like.constant(value, dtype)
        number = float(value)
        if math.isnan(number):
            return "__int_as_float(0x7fc00000)" if dtype == "float32" else "__longlong_as_double(0x7ff8000000000000LL)"
        if "huge_val" in text:
            bits = "0x7f800000" if dtype == "float32" else "0x7ff0000000000000LL"
            call = "__int_as_float" if dtype == "float32" else "__longlong_as_double"
            return f"{'-' if number < 0 else ''}{call}({bits})"
        return text
    return c_like.constant(value, dtype)


_BITS = {
    "float32": "__float_as_int({0})",
    "float64": "__double_as_longlong({0})",
    "int32": "__int_as_float({0})",
    "int64": "__longlong_as_double({0})",
}


def bits(expression: str, source: str, to: str) -> str:
    return c_like.narrow_bits(expression, source, to) or _BITS[source].format(expression)


CUDA = Dialect(
    name="cuda",
    rows=c_like.ROWS,
    types=c_like.TYPES,
    storage_types=c_like.STORAGE_TYPES,
    constant=constant,
    cast=c_like.cast,
    round=c_like.round_to,
    bits=bits,
    assign=c_like.assign,
    gather=c_like.gather,
    within="Index(jitgen::within({0}, {1}))",
    suffix=".cu",
    scalar="params.scalar{0}",
    headers=("jitgen/entry.cuh", "jitgen/storage.cuh", "jitgen/math.cuh", "jitgen/vector.cuh"),
    coarse=c_like.COARSE,
    coarse_gelu="jitgen::coarse_gelu({0})",
)
