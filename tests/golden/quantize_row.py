# jitgen 0.1.0: template elementwise/elementwise.py.j2
# target sm_90a: 128 threads a block, 1 step a thread of 8 elements
# stages: map
import triton
import triton.language as tl
from triton.language.extra import cuda, libdevice

E4M3FN_SATURATES = tl.constexpr(1)  # as the installed torch does


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
def e4m3_to_float32(byte):
    """A float8_e4m3fn byte to float32, exactly: the exponent field is re-biased by a multiplication."""
    bits = byte.to(tl.int32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    value = tl.where((bits & 0x80) != 0, magnitude * -1.0, magnitude)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def region0_block(block, p0_0, p0_1, p0_2, n0_0, n0_1, s0_0_0, s0_1_0, s0_2_0, WHOLE: tl.constexpr):
    step = block * 128 + tl.arange(0, 128)[:, None]
    live = None if WHOLE else step * 8 < n0_0 * n0_1
    steps = n0_1 // 8
    column = step % steps * 8 + tl.arange(0, 8)[None, :]
    i0 = step // steps
    v0 = (tl.load(p0_0 + i0 * s0_0_0 + column, mask=live)).to(tl.float32)
    v1 = (tl.load(p0_1 + i0 * s0_1_0, mask=live))
    v2 = (v0 * v1)
    v3 = tl.full((), -448.0, tl.float32)
    v4 = tl.maximum(v2, v3, propagate_nan=tl.PropagateNan.ALL)
    v5 = tl.full((), 448.0, tl.float32)
    v6 = tl.minimum(v4, v5, propagate_nan=tl.PropagateNan.ALL)
    v7 = e4m3_to_float32((float32_to_e4m3(v6)))
    tl.store(p0_2 + i0 * s0_2_0 + column, float32_to_e4m3(v6), mask=live)


@triton.jit
def region0(block, p0_0, p0_1, p0_2, n0_0, n0_1, s0_0_0, s0_1_0, s0_2_0):
    # (N0, N1) as 2 dimensions: load bfloat16 contiguous, load float32 broadcast, store float8_e4m3fn contiguous
    # A block that is whole needs no mask, and without one its accesses are as wide as alignment allows.
    if (block + 1) * 1024 <= n0_0 * n0_1:
        region0_block(block, p0_0, p0_1, p0_2, n0_0, n0_1, s0_0_0, s0_1_0, s0_2_0, True)
    else:
        region0_block(block, p0_0, p0_1, p0_2, n0_0, n0_1, s0_0_0, s0_1_0, s0_2_0, False)


@triton.jit
def jitgen_elementwise_a4e3841f(p0_0, p0_1, p0_2, n0_0, n0_1, s0_0_0, s0_1_0, s0_2_0):
    # The launch may overlap the kernel ahead in the stream, whose memory is ready from here on. That this kernel lets
    # the next one in only by ending is 20 % faster on an H200: of its many small blocks each would have to say so.
    cuda.gdc_wait()
    block = tl.program_id(0)
    region0(block, p0_0, p0_1, p0_2, n0_0, n0_1, s0_0_0, s0_1_0, s0_2_0)
