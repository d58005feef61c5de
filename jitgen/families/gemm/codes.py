"""The C++ types that decode low-bit codes in bit planes: ``gemm_planes.hpp`` on a CPU, ``gemm_codes.cuh`` in CUDA."""

from __future__ import annotations

import struct

from jitgen.quant.formats import Float, Format, Integer

MOST_TABLE_BITS = 4
"""Floats of up to this many bits are looked up in a table on a CPU: vector registers have its sixteen numbers."""


def codes_type(format: Format, cuda: bool = False) -> str:
    """The type, without its namespace, that decodes the codes of ``format``."""
    code = format.code
    if isinstance(code, Integer):
        numbers = (format.bits, code.step, format.first) if cuda else (code.step, format.first)
        return f"IntegerCodes<{', '.join(map(str, numbers))}>"
    if isinstance(code, Float) and (cuda or format.bits > MOST_TABLE_BITS):
        return f"FloatCodes<{code.exponent}, {code.mantissa}, {code.bias}>"
    words = struct.unpack("<16I", struct.pack("<16f", *format.values.tolist()))
    return f"TableCodes<{', '.join(f'0x{word:08x}u' for word in words)}>"
