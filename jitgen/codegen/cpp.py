"""Defines the C++ dialect for CPUs: branch-free scalar code, which the host compiler vectorises
(``compilers/host.py``)."""

from __future__ import annotations

from jitgen.codegen import c_like
from jitgen.codegen.dialect import Dialect


def bits(expression: str, source: str, to: str) -> str:
    narrow = c_like.narrow_bits(expression, source, to)
    return narrow or f"jitgen::bit_cast<{c_like.TYPES[to]}>({expression})"


CPP = Dialect(
    name="cpp",
    rows=c_like.ROWS,
    types=c_like.TYPES,
    storage_types=c_like.STORAGE_TYPES | {"bool": "jitgen::boolean"},
    constant=c_like.constant,
    cast=c_like.cast,
    round=c_like.round_to,
    bits=bits,
    assign=c_like.assign,
    scalar="scalar{0}",
    gather=c_like.gather,
    within="jitgen::within({0}, {1}, outside)",
    suffix=".cpp",
    headers=("jitgen/storage.hpp", "jitgen/math.hpp", "jitgen/parallel.hpp"),
    coarse=c_like.COARSE,
)
