"""Chooses the C++ types that decode low-bit codes in bit planes: ``gemm_planes.hpp`` on a CPU, ``gemm_codes.cuh`` in
CUDA."""

from __future__ import annotations

import struct

from jitgen.quant.formats import Float, Format, Integer

TABLE_BITS = 4
"""Floats of this many bits are looked up on a CPU, as bytes: registers have tables of sixteen."""


def codes_type(format: Format, cuda: bool = False) -> str:
    """Returns the type, without its namespace, that decodes the codes of ``format``."""
    code = format.code
    if isinstance(code, Integer):
        numbers = (format.bits, code.step, format.first) if cuda else (code.step, format.first)
        return f"IntegerCodes<{', '.join(map(str, numbers))}>"
    if not cuda and format.bits == TABLE_BITS and _whole_halves(format):
        return f"HalfCodes<{', '.join(str(int(2 * value) + 128) for value in format.values.tolist())}>"
    if isinstance(code, Float):
        return f"FloatCodes<{code.exponent}, {code.mantissa}, {code.bias}>"
    words = struct.unpack("<16I", struct.pack("<16f", *format.values.tolist()))
    return f"TableCodes<{', '.join(f'0x{word:08x}u' for word in words)}>"


def _whole_halves(format: Format) -> bool:
    """Returns whether all values are multiples of 1/2 that a byte has twice of."""
    twice = 2 * format.values
    return bool((twice == twice.round()).all() and (twice.abs() < 128).all())
