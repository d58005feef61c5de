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
# Marlin, IST Austria). Codes come as words [.., words along K] of the layout "interleaved", numbers go [.., K]; a 16-bit
# DTYPE is computed in pairs of neighbours, which share a register.


@triton.jit
def exponents(DTYPE: tl.constexpr):
    """2^7 as bfloat16 or 2^10 as float16, in both halves of a word: from there on a mantissa counts in ones."""
    if DTYPE == tl.bfloat16:
        return 0x43004300
    else:
        return 0x64006400


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """The two 16-bit numbers of each word, along a new last dimension."""
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


# Any order along K is right where both operands have it. A warpgroup's instruction takes x from shared memory, where it
# lies as in memory, so there weights are put in the order of their columns, (s, h, t, n). A warp's takes both operands
# from registers, and as Triton spreads what is computed from 16-bit numbers, a thread has four neighbours along K: there,
# in blocks of three dimensions, both have the order (s, t, h, n). Either way nothing moves between threads.


@triton.jit
def in_order(numbers, words, PER_WORD: tl.constexpr):
    """Numbers in the order of their words' bits, which is (t, s, h, n), as an operand [.., rows, K]."""
    CHUNKS: tl.constexpr = words.shape[-1] * PER_WORD // 32
    if len(words.shape) == 2:
        ROWS: tl.constexpr = words.shape[0]
        chunks = numbers.reshape(ROWS, CHUNKS, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5)
        return chunks.reshape(ROWS, CHUNKS * 32)
    else:
        SLICES: tl.constexpr = words.shape[0]
        ROWS: tl.constexpr = words.shape[1]
        chunks = numbers.reshape(SLICES, ROWS, CHUNKS, 4, 2, 2, 2).permute(0, 1, 2, 4, 3, 5, 6)
        return chunks.reshape(SLICES, ROWS, CHUNKS * 32)


@triton.jit
def beside_words(x):
    """x [slices, K, rows] in the order (s, t, h, n) along K."""
    SLICES: tl.constexpr = x.shape[0]
    STEPS: tl.constexpr = x.shape[1] // 16
    ROWS: tl.constexpr = x.shape[2]
    return x.reshape(SLICES, STEPS, 2, 4, 2, ROWS).permute(0, 1, 3, 2, 4, 5).reshape(SLICES, STEPS * 16, ROWS)


@triton.jit
def nibbles(words, zeros, DTYPE: tl.constexpr):
    """Eight 4-bit codes a word, less ``zeros``: integers, [.., 1] along K or everywhere the same."""
    MASK: tl.constexpr = 0x000F000F
    pairs = tl.join(
        tl.join(words & MASK, (words >> 8) & MASK), tl.join((words >> 4) & MASK, (words >> 12) & MASK)
    )
    if DTYPE.primitive_bitwidth == 16:
        numbers = in_order(halves(pairs | exponents(DTYPE), DTYPE), words, 8)
        return numbers - (zeros.to(tl.float32) + (128.0 if DTYPE == tl.bfloat16 else 1024.0)).to(DTYPE)
    else:
        return in_order(tl.join(pairs & 15, pairs >> 16), words, 8).to(DTYPE) - zeros.to(DTYPE)


@triton.jit
def nibbles_packed(words, zeros, DTYPE: tl.constexpr):
    """``nibbles`` in a 16-bit DTYPE with inline PTX."""
    KIND: tl.constexpr = "bf16x2" if DTYPE == tl.bfloat16 else "f16x2"
    EXPONENTS: tl.constexpr = "0x43004300" if DTYPE == tl.bfloat16 else "0x64006400"
    ONE: tl.constexpr = "0x3F803F80" if DTYPE == tl.bfloat16 else "0x3C003C00"
    less = ((zeros.to(tl.int32) * 0x10001) | exponents(DTYPE)) ^ -0x7FFF8000
    first, second, third, fourth = tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 rest, one;
        mov.b32 one, {ONE};
        lop3.b32 $0, $4, 0x000F000F, {EXPONENTS}, 0xEA;
        shr.b32 rest, $4, 4;
        lop3.b32 $1, rest, 0x000F000F, {EXPONENTS}, 0xEA;
        shr.b32 rest, $4, 8;
        lop3.b32 $2, rest, 0x000F000F, {EXPONENTS}, 0xEA;
        shr.b32 rest, $4, 12;
        lop3.b32 $3, rest, 0x000F000F, {EXPONENTS}, 0xEA;
        fma.rn.{KIND} $0, $0, one, $5;
        fma.rn.{KIND} $1, $1, one, $5;
        fma.rn.{KIND} $2, $2, one, $5;
        fma.rn.{KIND} $3, $3, one, $5;
        }}""",
        "=&r,=&r,=&r,=&r,r,r",
        [words, less],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    return in_order(halves(tl.join(tl.join(first, third), tl.join(second, fourth)), DTYPE), words, 8)


@triton.jit
def int4_values(words, DTYPE: tl.constexpr):
    return nibbles(words, tl.full((1, 1), 8, tl.int32), DTYPE)


@triton.jit
def int4_values_packed(words, DTYPE: tl.constexpr):
    return nibbles_packed(words, tl.full((1, 1), 8, tl.int32), DTYPE)


@triton.jit
def uint4_values(words, zeros, DTYPE: tl.constexpr):
    return nibbles(words, zeros, DTYPE)


@triton.jit
def uint4_values_packed(words, zeros, DTYPE: tl.constexpr):
    return nibbles_packed(words, zeros, DTYPE)


@triton.jit
def int8_values(words, DTYPE: tl.constexpr):
    """Four codes in two's complement a word: 2^23 + 128 + code, less 2^23 + 128, in float32."""
    biased = words ^ -0x7F7F7F80
    first = (biased & 0xFF) | 0x4B000000
    second = ((biased >> 8) & 0xFF) | 0x4B000000
    third = ((biased >> 16) & 0xFF) | 0x4B000000
    fourth = ((biased >> 24) & 0xFF) | 0x4B000000
    numbers = tl.join(tl.join(first, second), tl.join(third, fourth)).to(tl.float32, bitcast=True) - 8388736.0
    return in_order(numbers, words, 4).to(DTYPE)


@triton.jit
def int8_values_packed(words, DTYPE: tl.constexpr):
    """``int8_values`` with inline PTX: in a 16-bit DTYPE as 2^b + code mod 128, less 2^b or, of a negative code, twice
    that (bfloat16: b = 7) or 2^b + 128 (float16: b = 10)."""
    if DTYPE == tl.float32:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 biased;
            xor.b32 biased, $4, 0x80808080;
            prmt.b32 $0, biased, 0x4B000000, 0x7650;
            prmt.b32 $1, biased, 0x4B000000, 0x7651;
            prmt.b32 $2, biased, 0x4B000000, 0x7652;
            prmt.b32 $3, biased, 0x4B000000, 0x7653;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        numbers = tl.join(tl.join(first, second), tl.join(third, fourth)).to(tl.float32, bitcast=True) - 8388736.0
        return in_order(numbers, words, 4)
    else:
        KIND: tl.constexpr = "bf16x2" if DTYPE == tl.bfloat16 else "f16x2"
        EXPONENTS: tl.constexpr = "0x43004300" if DTYPE == tl.bfloat16 else "0x64006400"
        LESS_ONE: tl.constexpr = "0xBF80BF80" if DTYPE == tl.bfloat16 else "0xBC00BC00"
        even, odd = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 rest, base, less;
            mov.b32 less, {LESS_ONE};
            shr.b32 rest, $2, 8;
            lop3.b32 $0, $2, 0x007F007F, {EXPONENTS}, 0xEA;
            lop3.b32 base, $2, 0x00800080, {EXPONENTS}, 0xEA;
            fma.rn.{KIND} $0, base, less, $0;
            lop3.b32 $1, rest, 0x007F007F, {EXPONENTS}, 0xEA;
            lop3.b32 base, rest, 0x00800080, {EXPONENTS}, 0xEA;
            fma.rn.{KIND} $1, base, less, $1;
            }}""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return in_order(halves(tl.join(even, odd), DTYPE), words, 4)


@triton.jit
def int8_bytes(words):
    """Four codes in two's complement a word, as they are."""
    return in_order(tl.join(tl.join(words, words >> 8), tl.join(words >> 16, words >> 24)), words, 4).to(tl.int8)


# Codes of formats in bit planes (jitgen/quant/layouts/planes.py) as numbers of float32, [.., K].


@triton.jit
def plane_bits(words, WIDTH: tl.constexpr):
    """The fields of WIDTH bits of words [.., words along K], in their order: [.., K], int32."""
    PER_WORD: tl.constexpr = 32 // WIDTH
    MASK: tl.constexpr = (1 << WIDTH) - 1
    shifts = tl.arange(0, PER_WORD) * WIDTH
    if len(words.shape) == 2:
        fields = (words[:, :, None] >> shifts[None, None, :]) & MASK
        return fields.reshape(words.shape[0], words.shape[1] * PER_WORD)
    else:
        fields = (words[:, :, :, None] >> shifts[None, None, None, :]) & MASK
        return fields.reshape(words.shape[0], words.shape[1], words.shape[2] * PER_WORD)


@triton.jit
def integer_values(code, STEP: tl.constexpr, FIRST: tl.constexpr):
    """Whole numbers, STEP apart; that of code 0 is FIRST."""
    return (code * STEP + FIRST).to(tl.float32)


@triton.jit
def small_floats(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """A sign, EXPONENT and MANTISSA bits: the exponent is re-biased by a multiplication, subnormals included."""
    SIGN: tl.constexpr = 1 << (EXPONENT + MANTISSA)
    factor = tl.full((1,), (254 - BIAS) << 23, tl.int32).to(tl.float32, bitcast=True)
    magnitude = ((code & (SIGN - 1)) << (23 - MANTISSA)).to(tl.float32, bitcast=True) * factor
    return tl.where((code & SIGN) != 0, magnitude * -1.0, magnitude)


@triton.jit
def table_values(code, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15):
    """One of sixteen numbers, chosen bit by bit."""
    first = (code & 1) != 0
    second = (code & 2) != 0
    a = tl.where(second, tl.where(first, v3, v2), tl.where(first, v1, v0))
    b = tl.where(second, tl.where(first, v7, v6), tl.where(first, v5, v4))
    c = tl.where(second, tl.where(first, v11, v10), tl.where(first, v9, v8))
    d = tl.where(second, tl.where(first, v15, v14), tl.where(first, v13, v12))
    third = (code & 4) != 0
    return tl.where((code & 8) != 0, tl.where(third, d, c), tl.where(third, b, a))


@triton.jit
def e8m0_of_power(scale, PRODUCT: tl.constexpr):
    """The exponent plus 127 of a power of two, or of what is next to one; of infinity and NaN 255, which is NaN.
    Each PRODUCT has its own: Triton 3.6 compiles no kernel for sm_100 of which two read one tensor of scales."""
    return ((scale.to(tl.int32, bitcast=True) + (0x00100000 + PRODUCT)) >> 23).to(tl.uint8)


@triton.jit
def e8m0_to_float32(byte):
    """A power of two, from its exponent plus 127; the smallest one is subnormal."""
    bits = byte.to(tl.int32)
    return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def philox_bits(index, seed, offset):
    """64 bits of Philox 4x32-10, its first two words; the counter is the offset and the index, the key the seed."""
    none = index * 0
    c0 = (none + offset).to(tl.int32)
    c1 = (none + (offset >> 32)).to(tl.int32)
    c2 = index.to(tl.int32)
    c3 = (index >> 32).to(tl.int32)
    low, high, _, _ = tl.philox(seed, c0, c1, c2, c3)
    return low.to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def within(index, size):
    """``index`` where it is in [0, size), else 0: no access leaves the tensor."""
    return tl.where((index >= 0) & (index < size), index, 0)
