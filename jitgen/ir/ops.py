"""Lists the pointwise operations, one row each.

A row states the operands and the result of an operation. Each dialect has a row that prints it (``codegen/c_like.py``
for C++ and CUDA C++, ``codegen/triton.py``; a test fails where a row is missing). ``trace/pointwise.py`` maps torch's
functions to these operations; functions that are compositions of them (silu, gelu, softplus, ...) are in
``trace/activations.py`` and have no row here.

Arithmetic is done in the *compute dtype*: float32 for float16, bfloat16 and float32, and the dtype itself for float64,
the integers and bool. Integers wrap. Comparisons and logic give bool. NaN propagates through ``minimum`` and
``maximum``.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOATS = ("float32", "float64")
INTS = ("uint8", "int8", "int16", "int32", "int64")
COMPUTE_DTYPES = (*FLOATS, *INTS, "bool")
OWN_FLOPS = 8
"""What a function that a user spelled counts for: a transcendental one."""


@dataclass(frozen=True)
class Op:
    """Describes one pointwise operation.

    Attributes:
        name: the operation's name, torch's where torch has one.
        arity: the number of operands.
        domain: the compute dtypes that the operands may have: a subset of ``COMPUTE_DTYPES``.
        predicate: whether the result is bool; otherwise it has the operands' dtype.
        flops: floating-point operations that a report counts for it; for a transcendental function an estimate.
        doc: what it computes, where the name does not say it.
    """

    name: str
    arity: int
    domain: tuple[str, ...] = COMPUTE_DTYPES
    predicate: bool = False
    flops: int = 1
    doc: str = ""


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        # arithmetic
        Op("add", 2, (*FLOATS, *INTS)),
        Op("sub", 2, (*FLOATS, *INTS)),
        Op("mul", 2, (*FLOATS, *INTS)),
        Op("div", 2, FLOATS, doc="IEEE division"),
        Op("floor_divide", 2, (*FLOATS, *INTS), doc="rounds toward minus infinity; integer division by zero is 0"),
        Op("trunc_divide", 2, INTS, doc="rounds toward zero; division by zero is 0"),
        Op("fmod", 2, (*FLOATS, *INTS), doc="sign of the dividend; integer modulus zero gives 0"),
        Op("remainder", 2, (*FLOATS, *INTS), doc="sign of the divisor, as Python's %; integer modulus zero gives 0"),
        Op("pow", 2, (*FLOATS, *INTS), flops=8, doc="of integers by squaring; a negative exponent as in torch"),
        Op("atan2", 2, FLOATS, flops=8),
        Op("copysign", 2, FLOATS),
        Op("minimum", 2, doc="NaN if either is NaN"),
        Op("maximum", 2, doc="NaN if either is NaN"),
        Op("fmin", 2, FLOATS, doc="the number if one is NaN"),
        Op("fmax", 2, FLOATS, doc="the number if one is NaN"),
        Op("fma", 3, FLOATS, flops=2, doc="a * b + c, rounded once"),
        # unary arithmetic
        Op("neg", 1, (*FLOATS, *INTS)),
        Op("abs", 1, (*FLOATS, *INTS)),
        Op("sign", 1, doc="-1, 0 or 1; 0 for NaN"),
        Op("floor", 1, FLOATS),
        Op("ceil", 1, FLOATS),
        Op("round", 1, FLOATS, doc="half to even"),
        Op("trunc", 1, FLOATS),
        Op("sqrt", 1, FLOATS),
        Op("rsqrt", 1, FLOATS),
        Op("reciprocal", 1, FLOATS),
        # exponentials and logarithms
        Op("exp", 1, FLOATS, flops=8),
        Op("exp2", 1, FLOATS, flops=8),
        Op("exp2_normal", 1, FLOATS, flops=8, doc="exp2, except that a subnormal result may be 0"),
        Op("expm1", 1, FLOATS, flops=8),
        Op("log", 1, FLOATS, flops=8),
        Op("log2", 1, FLOATS, flops=8),
        Op("log10", 1, FLOATS, flops=8),
        Op("log1p", 1, FLOATS, flops=8),
        # trigonometry
        Op("sin", 1, FLOATS, flops=8),
        Op("cos", 1, FLOATS, flops=8),
        Op("tan", 1, FLOATS, flops=8),
        Op("asin", 1, FLOATS, flops=8),
        Op("acos", 1, FLOATS, flops=8),
        Op("atan", 1, FLOATS, flops=8),
        Op("sinh", 1, FLOATS, flops=8),
        Op("cosh", 1, FLOATS, flops=8),
        Op("tanh", 1, FLOATS, flops=8),
        Op("asinh", 1, FLOATS, flops=8),
        Op("acosh", 1, FLOATS, flops=8),
        Op("atanh", 1, FLOATS, flops=8),
        Op("erf", 1, FLOATS, flops=8),
        Op("erfc", 1, FLOATS, flops=8),
        Op("sigmoid", 1, FLOATS, flops=10, doc="1 / (1 + exp(-x))"),
        # comparison and classification
        Op("eq", 2, predicate=True),
        Op("ne", 2, predicate=True),
        Op("lt", 2, predicate=True),
        Op("le", 2, predicate=True),
        Op("gt", 2, predicate=True),
        Op("ge", 2, predicate=True),
        Op("isnan", 1, FLOATS, predicate=True),
        Op("isinf", 1, FLOATS, predicate=True),
        Op("signbit", 1, FLOATS, predicate=True),
        # bits and logic; on bool these are the logical operations
        Op("bitwise_and", 2, (*INTS, "bool")),
        Op("bitwise_or", 2, (*INTS, "bool")),
        Op("bitwise_xor", 2, (*INTS, "bool")),
        Op("bitwise_not", 1, (*INTS, "bool")),
        Op("left_shift", 2, INTS, doc="0 when the count is negative or no smaller than the width"),
        Op("right_shift", 2, INTS, doc="arithmetic; sign fill when the count is negative or no smaller than the width"),
        # random bits
        Op("philox", 3, ("int64",), flops=60, doc="64 bits of Philox 4x32-10 for (index, seed, offset)"),
        # selection: operands are (bool condition, value, value)
        Op("where", 3),
    )
}


def flops_of(op: str) -> int:
    """Returns the operations that a pointwise operation counts for; 0 for what is none."""
    return OWN_FLOPS if op == "own" else OPS[op].flops if op in OPS else 0
