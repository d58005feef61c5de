# What a scan combines: what is earlier in the row with what is later. A state has one component or two (ir/scans.py of
# jitgen). Of equal elements the later one counts, and the latest NaN.
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def added(a, b):
    return a + b


@triton.jit
def multiplied(a, b):
    return a * b


@triton.jit
def later_larger(a, b):
    return tl.where((b >= a) | (b != b), b, a)


@triton.jit
def later_smaller(a, b):
    return tl.where((b <= a) | (b != b), b, a)


@triton.jit
def later_larger_at(a, at_a, b, at_b):
    wins = (b >= a) | (b != b)
    return tl.where(wins, b, a), tl.where(wins, at_b, at_a)


@triton.jit
def later_smaller_at(a, at_a, b, at_b):
    wins = (b <= a) | (b != b)
    return tl.where(wins, b, a), tl.where(wins, at_b, at_a)


# exp(x - top); where both are equal, infinities too, their difference counts as 0.
@triton.jit
def power_below(x, top):
    return libdevice.exp(tl.where(x == top, tl.zeros_like(x), x - top))


@triton.jit
def exponentials_added(top_a, sum_a, top_b, sum_b):
    top = tl.where((top_b >= top_a) | (top_b != top_b), top_b, top_a)
    return top, sum_a * power_below(top_a, top) + sum_b * power_below(top_b, top)


# The last element of each row of a block, of which a row has LENGTH elements. Floats are added as the integers that
# their bits are, because -0 + 0 is 0.
@triton.jit
def last_of_row(block, LENGTH: tl.constexpr):
    index = tl.arange(0, LENGTH)[None, :]
    if block.dtype.is_floating():
        bits = block.to(tl.int64 if block.dtype.primitive_bitwidth == 64 else tl.int32, bitcast=True)
        last = tl.sum(tl.where(index == LENGTH - 1, bits, tl.zeros_like(bits)), 1, keep_dims=True)
        return last.to(bits.dtype).to(block.dtype, bitcast=True)
    else:
        last = tl.sum(tl.where(index == LENGTH - 1, block, tl.zeros_like(block)), 1, keep_dims=True)
        return last.to(block.dtype)
