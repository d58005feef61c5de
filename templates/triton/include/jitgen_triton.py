"""What a generated Triton kernel calls beyond ``tl`` and ``libdevice``; placed in front of the kernels that use it.

Every function works on blocks and on scalars, in Triton's compiler (NVIDIA and AMD) and in its interpreter, and keeps
its operands' dtype. Integer division never divides by zero or by -1, so that no target may trap or assume it away.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

E4M3FN_SATURATES = tl.constexpr(1)


@triton.jit
def float_divide(a, b):
    """a / b as IEEE rounds it; the plain operator is an approximation in float32."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def float_floor_divide(a, b):
    """floor(a / b) as torch has it: from the exact ``fmod``, so that rounding never crosses an integer."""
    quotient = float_divide(a, b)
    modulus = libdevice.fmod(a, b)
    whole = float_divide(a - modulus, b)
    whole = tl.where((modulus != 0.0) & ((b < 0.0) != (modulus < 0.0)), whole - 1.0, whole)
    floored = tl.floor(whole)
    floored = tl.where(whole - floored > 0.5, floored + 1.0, floored)
    floored = tl.where(whole == 0.0, libdevice.copysign(floored, quotient), floored)
    return tl.where(b == 0.0, quotient, floored)


@triton.jit
def float_remainder(a, b):
    """a - b * floor(a / b), exactly: the sign of the divisor."""
    modulus = libdevice.fmod(a, b)
    return tl.where((modulus != 0.0) & ((b < 0.0) != (modulus < 0.0)), modulus + b, modulus)


@triton.jit
def int_trunc_divide(a, b):
    """a / b toward zero; 0 for b = 0, and a wrapped for the smallest integer over -1."""
    quotient = a // tl.where((b == 0) | (b == -1), 1, b)
    return tl.where(b == 0, 0, tl.where(b == -1, -a, quotient))


@triton.jit
def int_fmod(a, b):
    """The remainder of ``int_trunc_divide``; 0 for b = 0."""
    return a % tl.where((b == 0) | (b == -1), 1, b)


@triton.jit
def int_floor_divide(a, b):
    """a / b toward minus infinity; 0 for b = 0."""
    quotient = int_trunc_divide(a, b)
    modulus = int_fmod(a, b)
    return tl.where((modulus != 0) & ((modulus < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def int_remainder(a, b):
    """The remainder of ``int_floor_divide``; 0 for b = 0."""
    modulus = int_fmod(a, b)
    return tl.where((modulus != 0) & ((modulus < 0) != (b < 0)), modulus + b, modulus)


@triton.jit
def unsigned_divide(a, b):
    """a / b; 0 for b = 0."""
    return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b))


@triton.jit
def unsigned_remainder(a, b):
    """a mod b; 0 for b = 0."""
    return tl.where(b == 0, 0, a % tl.where(b == 0, 1, b))


@triton.jit
def unsigned_pow(a, b):
    """a to the power b by squaring, wrapping; b is read as unsigned."""
    power = tl.zeros_like(a) + tl.zeros_like(b) + 1
    base = a + tl.zeros_like(b)
    exponent = b + tl.zeros_like(a)
    for _ in range(a.dtype.primitive_bitwidth):
        power = tl.where((exponent & 1) != 0, power * base, power)
        base = base * base
        exponent = exponent >> 1
    return power


@triton.jit
def int_pow(a, b):
    """``unsigned_pow``, and for b < 0 the truncated reciprocal: 1 for a = 1, +-1 for a = -1, else 0."""
    reciprocal = tl.where((a == 1) | (a == -1), tl.where((b & 1) != 0, a, a * a), 0)
    return tl.where(b < 0, reciprocal, unsigned_pow(a, b))


@triton.jit
def int_left_shift(a, b):
    """a << b; 0 for a count that is negative or no smaller than the width."""
    width: tl.constexpr = a.dtype.primitive_bitwidth
    legal = (b >= 0) & (b < width)
    return tl.where(legal, a << tl.where(legal, b, 0), 0)


@triton.jit
def int_right_shift(a, b):
    """a >> b, arithmetic; the sign for a count that is negative or no smaller than the width."""
    last: tl.constexpr = a.dtype.primitive_bitwidth - 1
    return a >> tl.where((b < 0) | (b > last), last, b)


@triton.jit
def unsigned_right_shift(a, b):
    """a >> b; 0 for a count no smaller than the width."""
    width: tl.constexpr = a.dtype.primitive_bitwidth
    return tl.where(b < width, a >> tl.where(b < width, b, 0), 0)


# What reductions combine by. Of the extrema NaN wins, and of equal values the one met first, as in torch.


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def larger(a, b):
    if a.dtype.is_floating():
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    if a.dtype.is_floating():
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(a, b)


@triton.jit
def chosen_of(a, at_a, b, at_b, better, same):
    """Of two values and their indices, b's where it is ``better``, or the ``same`` and met before a."""
    if a.dtype.is_floating():
        better = (a == a) & (better | (b != b))
        same = same | ((a != a) & (b != b))
    take = better | (same & (at_b < at_a))
    return tl.where(take, b, a), tl.where(take, at_b, at_a)


@triton.jit
def larger_at(a, at_a, b, at_b):
    return chosen_of(a, at_a, b, at_b, b > a, a == b)


@triton.jit
def smaller_at(a, at_a, b, at_b):
    return chosen_of(a, at_a, b, at_b, b < a, a == b)


# float8 values travel as their bytes: Triton's own conversions saturate e5m2 where torch overflows, and exist on some
# targets only. Encoding is F. Giesen's float-to-half scheme (round to nearest even by integer carry; subnormals by
# adding the number whose last bit is the format's smallest subnormal), as in PyTorch's c10/util/Float8_*.h.


@triton.jit
def float8_encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SUBNORMAL: tl.constexpr):
    """|x| rounded to a format of MANTISSA bits and BIAS, unbounded above; SUBNORMAL is 2^(24 - MANTISSA - BIAS)."""
    shift: tl.constexpr = 23 - MANTISSA
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    odd = (magnitude >> shift) & 1
    normal = (magnitude + (((BIAS - 127) << 23) + (1 << (shift - 1)) - 1) + odd) >> shift
    anchored = magnitude.to(tl.float32, bitcast=True) + SUBNORMAL
    subnormal = anchored.to(tl.int32, bitcast=True) & 0xFF
    return tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)


@triton.jit
def float8_sign(x):
    return (x.to(tl.int32, bitcast=True) >> 24) & 0x80


@triton.jit
def float32_to_e4m3(x):
    """float32 to a float8_e4m3fn byte; too large, infinity too, is 448 as in torch from 2.13, or NaN as before."""
    overflow: tl.constexpr = 0x7E if E4M3FN_SATURATES else 0x7F
    encoded = tl.where(x == x, tl.minimum(float8_encode(x, 3, 7, 16384.0), overflow), 0x7F)
    return (encoded | float8_sign(x)).to(tl.uint8)


@triton.jit
def float32_to_e5m2(x):
    """float32 to a float8_e5m2 byte; infinity where |x| rounds above 57344, as in torch."""
    encoded = tl.where(x == x, tl.minimum(float8_encode(x, 2, 15, 128.0), 0x7C), 0x7F)
    return (encoded | float8_sign(x)).to(tl.uint8)


@triton.jit
def e4m3_to_float32(byte):
    """A float8_e4m3fn byte to float32, exactly: the exponent field is re-biased by a multiplication."""
    bits = byte.to(tl.int32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    value = tl.where((bits & 0x80) != 0, magnitude * -1.0, magnitude)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e5m2_to_float32(byte):
    """A float8_e5m2 byte to float32, exactly: it is the upper byte of a float16."""
    return (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


# Codes of quantised weights as numbers: small integers, exact in every float, without a conversion instruction. A code
# is put into the mantissa of a power of two and that power taken off again (as in NVIDIA's FasterTransformer and in
# Marlin, IST Austria); two 4-bit codes of a byte are placed in the halves of one word, so that pairs stay packed.


@triton.jit
def nibbles(codes, zero, FLIP: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes of two codes each (the low nibble first) as numbers minus ``zero``; FLIP is xored into each nibble."""
    if DTYPE.primitive_bitwidth != 16:
        low = ((codes & 15) ^ FLIP).to(DTYPE) - zero
        high = ((codes >> 4) ^ FLIP).to(DTYPE) - zero
    else:
        exponent: tl.constexpr = 0x4300 if DTYPE == tl.bfloat16 else 0x6400
        pair = ((codes.to(tl.int32) * 0x1001) & 0x000F000F) ^ ((exponent + FLIP) * 0x10001)
        zero = zero + (128.0 if DTYPE == tl.bfloat16 else 1024.0)
        low = pair.to(tl.int16).to(DTYPE, bitcast=True) - zero
        high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True) - zero
    return tl.interleave(low, high)


@triton.jit
def int4_values(codes, DTYPE: tl.constexpr):
    """Bytes of two's complement nibbles [.., K / 2] as numbers [.., K]; the low nibble is the even one."""
    return nibbles(codes, tl.full((), 8.0, DTYPE), 8, DTYPE)


@triton.jit
def int4_values_packed(codes, DTYPE: tl.constexpr):
    """``int4_values`` in a 16-bit DTYPE with inline PTX: four bytes share a shift, two codes a subtraction."""
    WIDE: tl.constexpr = DTYPE == tl.bfloat16
    KIND: tl.constexpr = "bf16x2" if WIDE else "f16x2"
    EXPONENTS: tl.constexpr = "0x43084308" if WIDE else "0x64086408"
    ONE: tl.constexpr = "0x3F803F80" if WIDE else "0x3C003C00"
    LESS: tl.constexpr = "0xC308C308" if WIDE else "0xE408E408"  # -136, -1032
    pair = tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 high, one, less;
        mov.b32 one, {ONE};
        mov.b32 less, {LESS};
        shr.b32 high, $4, 4;
        prmt.b32 $0, $4, high, 0x0400;
        prmt.b32 $1, $4, high, 0x0501;
        prmt.b32 $2, $4, high, 0x0602;
        prmt.b32 $3, $4, high, 0x0703;
        lop3.b32 $0, $0, 0x000F000F, {EXPONENTS}, 0x6A;
        lop3.b32 $1, $1, 0x000F000F, {EXPONENTS}, 0x6A;
        lop3.b32 $2, $2, 0x000F000F, {EXPONENTS}, 0x6A;
        lop3.b32 $3, $3, 0x000F000F, {EXPONENTS}, 0x6A;
        fma.rn.{KIND} $0, $0, one, less;
        fma.rn.{KIND} $1, $1, one, less;
        fma.rn.{KIND} $2, $2, one, less;
        fma.rn.{KIND} $3, $3, one, less;
        }}""",
        "=&r,=&r,=&r,=&r,r",
        [codes],
        dtype=tl.int32,
        is_pure=True,
        pack=4,
    )
    low = pair.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def uint4_values(codes, zeros, DTYPE: tl.constexpr):
    """Bytes of unsigned nibbles [.., K / 2] as numbers [.., K], minus zero-points of one row each [.., 1]."""
    return nibbles(codes, zeros.to(tl.float32).to(DTYPE), 0, DTYPE)


@triton.jit
def int8_values(codes, DTYPE: tl.constexpr):
    """Two's complement bytes as numbers."""
    # 2^23 + code + 128, less 2^23 + 128.
    number = ((codes.to(tl.int32) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
    return number.to(DTYPE)
