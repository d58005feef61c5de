"""Decides where a value of 16 or 8 bits is the number that eager torch would have stored.

Arithmetic on such values runs on in float32. What can tell the difference sees the rounded number:

* comparisons, tests (``isnan``, ``isinf``) and indices of extrema (a sort rounds its keys itself);
* functions that jump (``floor``, ``round``, ``//``, ``%``, ...), where a last bit decides over a whole unit;
* conversions to any other dtype, bits, and results;
* of float16, what brings a value back that has left its range, and so would hide that it is infinite in eager torch:
  roots and logarithms. (bfloat16 has the range of float32.)

A value of which something sees the rounded number is that number for all that read it in a kernel.

Neighbours: ``ir/body_builder.py`` asks here when it makes the instructions of a node, for all dialects and families.
"""

from __future__ import annotations

import torch

from jitgen.ir.graph import Node
from jitgen.ir.nodes import BITS, CAST, REDUCE, SCAN
from jitgen.ir.ops import OPS
from jitgen.ir.scans import PLACES
from jitgen.spec import DTYPES

EXACT_IN = {
    "float16": {"float16", "float8_e4m3fn", "float8_e5m2", "bool", "uint8", "int8"},
    "bfloat16": {"bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "uint8", "int8"},
    "float8_e4m3fn": {"float8_e4m3fn", "bool"},
    "float8_e5m2": {"float8_e5m2", "bool"},
}
"""For each narrow dtype, those that have every number of it."""
NARROW = tuple(EXACT_IN)
"""Dtypes that are computed in float32."""

KEEPS = frozenset({"neg", "abs", "minimum", "maximum", "fmin", "fmax", "copysign", "sign", "where"})
KEEPS |= {"floor", "ceil", "round", "trunc"}
"""Operations whose result is one of their operands, its sign, or a whole number near it: a dtype that has the operands
has the result."""

JUMPS = frozenset({"floor", "ceil", "round", "trunc", "sign", "floor_divide", "fmod", "remainder"})
PREDICATES = frozenset(op.name for op in OPS.values() if op.predicate)
HIDES_INFINITY = frozenset({"sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "log1p"})


def sees_rounded(node: Node, dtype: str) -> bool:
    """Returns whether ``node`` sees an operand of ``dtype`` as it is stored. Within one function that may be float32,
    which the function's argument went into."""
    if dtype not in (*NARROW, "float32"):
        return False
    if node.op in PREDICATES or node.op in JUMPS or node.kind is BITS:
        return True
    if node.kind is CAST:
        return dtype in NARROW and node.dtype != dtype
    if node.op in HIDES_INFINITY:
        return dtype == "float16"
    kind = node.attrs.kind if node.kind in (REDUCE, SCAN) else None
    return kind in ("argmax", "argmin") or (node.kind is SCAN and kind in PLACES)


def holds(dtype: str, number: float) -> bool:
    """Returns whether ``number`` is one of ``dtype``."""
    exact = torch.tensor(number, dtype=torch.float64)
    return bool(torch.equal(exact.to(DTYPES[dtype]).double().nan_to_num(), exact.nan_to_num()))
