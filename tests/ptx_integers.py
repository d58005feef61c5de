"""PTX's instructions on integers, for a number of threads at a time: values are arrays of 64-bit words."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[np.int64]
Values = NDArray[np.uint64]

GENERIC = 1 << 56
"""Where shared memory is among the addresses of ordinary loads."""


@functools.cache
def width_of(type: str) -> int:
    """The width of a type of PTX."""
    return 1 if type == "pred" else int(re.sub(r"\D", "", type.split("x")[0]))


def _signed(values: Values, bits: int) -> Lanes:
    shift = np.int64(64 - bits)
    return values.astype(np.int64) << shift >> shift


def _as(values: Values, type: str) -> Any:
    bits = width_of(type)
    return _signed(values, bits) if type.startswith("s") else values & np.uint64((1 << bits) - 1)


_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def result(name: tuple[str, ...], values: Sequence[Values]) -> tuple[Values, int]:
    """What an instruction on integers gives for its operands, and the bits of it that count."""
    verb, type = name[0], name[-1]
    if verb == "setp":
        found = _COMPARE[name[1]](_as(values[0], type), _as(values[1], type)).astype(np.uint64)
        if name[2] in ("and", "or", "xor"):
            found = {"and": found & values[2], "or": found | values[2], "xor": found ^ values[2]}[name[2]]
        return found, 1
    if verb in ("cvt", "cvta"):
        if verb == "cvta":
            if "shared" not in name:
                return values[0], 64
            return (values[0] % np.uint64(GENERIC) if "to" in name else values[0] + np.uint64(GENERIC)), 64
        return _as(values[0], type).astype(np.uint64), width_of(name[-2])
    bits = width_of(type)
    if verb == "bfind":
        tops = [int(value).bit_length() - 1 for value in values[0] & np.uint64((1 << bits) - 1)]
        places = [bits - 1 - top if "shiftamt" in name and top >= 0 else top & (1 << 32) - 1 for top in tops]
        return np.array(places, dtype=np.uint64), 32
    if verb == "selp":
        return np.where(values[2].astype(bool), values[0], values[1]), bits
    if verb == "prmt":
        return _permuted(*values), 32
    if verb == "lop3":
        return _looked_up(*values[:3], int(values[3][0])), 32
    if verb in ("shf",):
        shift = values[2] & np.uint64(31) if "wrap" in name else np.minimum(values[2], np.uint64(32))
        both = values[1] << np.uint64(32) | values[0] & np.uint64(0xFFFFFFFF)
        return (both << shift >> np.uint64(32) if name[1] == "l" else both >> shift), 32
    a, *others = [_as(value, type) for value in values]
    if verb in ("shl", "shr"):
        amount = values[1] & np.uint64(0xFFFFFFFF)
        kept = np.minimum(amount, np.uint64(bits - 1))
        if verb == "shl":
            return np.where(amount >= bits, np.uint64(0), values[0] << kept), bits
        shifted = a >> kept.astype(a.dtype)
        return (shifted if type.startswith("s") else np.where(amount >= bits, 0, shifted)).astype(np.uint64), bits
    if verb == "mul" and name[1] == "hi":
        wide = [int(x) * int(y) >> bits for x, y in zip(a, others[0], strict=True)]
        return np.array([value & (1 << 64) - 1 for value in wide], dtype=np.uint64), bits
    if verb in ("mul", "mad"):
        product = a * others[0]
        if verb == "mad":
            product = product + (_as(values[2], f"{type[0]}64") if name[1] == "wide" else others[1])
        return product.astype(np.uint64), bits * (2 if name[1] == "wide" else 1)
    if verb in ("div", "rem"):
        divisor = np.where(others[0] == 0, 1, others[0]).astype(a.dtype)
        quotient = np.abs(a) // np.abs(divisor) if type.startswith("s") else a // divisor
        if type.startswith("s"):
            quotient = np.where((a < 0) != (divisor < 0), -quotient, quotient)
        return (quotient if verb == "div" else a - quotient * divisor).astype(np.uint64), bits
    if verb in _ARITHMETIC:
        return np.asarray(_ARITHMETIC[verb](a, *others)).astype(np.uint64), bits
    if verb in _OF_BITS:
        found = [_OF_BITS[verb](int(x), *(int(other[i]) for other in values[1:]), bits) for i, x in enumerate(a)]
        return np.array(found, dtype=np.uint64), 32 if verb in ("popc", "clz", "bfind") else bits
    raise NotImplementedError(".".join(name))


_ARITHMETIC: dict[str, Any] = {
    "mov": lambda a: a, "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "min": np.minimum, "max": np.maximum,
    "neg": lambda a: -a, "abs": np.abs, "not": np.invert, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


def _field(value: int, start: int, length: int, bits: int) -> int:
    return (value >> (start & 255)) & (1 << min(length & 255, bits)) - 1


def _inserted(value: int, into: int, start: int, length: int, bits: int) -> int:
    mask = (1 << min(length & 255, bits)) - 1 << (start & 255)
    return (into & ~mask | value << (start & 255) & mask) & (1 << bits) - 1


_OF_BITS: dict[str, Any] = {
    "popc": lambda a, bits: a.bit_count(),
    "clz": lambda a, bits: bits - (a & (1 << bits) - 1).bit_length(),
    "brev": lambda a, bits: int(f"{a & (1 << bits) - 1:0{bits}b}"[::-1], 2),
    "bfe": _field,
    "bfi": _inserted,
}


def _permuted(a: Values, b: Values, selector: Values) -> Values:
    both = a & np.uint64(0xFFFFFFFF) | b << np.uint64(32)
    found = np.zeros_like(a)
    for byte in range(4):
        place = (selector >> np.uint64(4 * byte) & np.uint64(7)) * np.uint64(8)
        found |= (both >> place & np.uint64(255)) << np.uint64(8 * byte)
    return found


def _looked_up(a: Values, b: Values, c: Values, table: int) -> Values:
    found = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            found |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return found
