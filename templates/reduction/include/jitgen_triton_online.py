"""Sums of exponentials and of squared deviations, accumulated online; see ``jitgen/families/rows/reduction/online.py``.

A kernel's source begins with those of these functions that it calls, as with those of ``jitgen_triton.py``. Each
position of a tile keeps a state of its own over all tiles, and the states of a row are combined once, behind the loop.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def power_of(value, COARSE: tl.constexpr):
    """exp(value). COARSE: every result of the kernel has 16 bits or fewer."""
    if COARSE:
        return tl.exp(value)
    else:
        return libdevice.exp(value)


@triton.jit
def exp_sum_with(top, total, value, COARSE: tl.constexpr):
    """The largest value met and the sum of exp(value - largest), with one more value; -inf adds 0. ``top`` is finite at
    first, so that no difference is of two infinities."""
    power = power_of(tl.abs(value - top) * -1.0, COARSE)
    higher = value > top
    total = tl.fma(total, tl.where(higher, power, 1.0), tl.where(higher, 1.0, power))
    return tl.where(higher, value, top), total


@triton.jit
def exp_sum_with_several(top, total, values, DIM: tl.constexpr, COARSE: tl.constexpr):
    """The same with all values of dimension ``DIM``, which a thread has: they rescale the sum together."""
    higher = tl.maximum(top, tl.max(values, DIM))
    added = tl.sum(power_of(values - tl.expand_dims(higher, DIM), COARSE), DIM)
    return higher, tl.fma(total, power_of(top - higher, COARSE), added)


@triton.jit
def exp_sum_of_row(top, total):
    """The sum of exp(value - largest) over each row, [rows, 1], of those of its places, [rows, tile]."""
    return tl.sum(total * libdevice.exp(top - tl.max(top, 1, keep_dims=True)), 1, keep_dims=True)


@triton.jit
def deviations_with(mean, total, count, value):
    """The mean met, the sum of squared deviations from it and the count so far, a scalar, with one more value of each
    place; a value equal to ``mean`` is none."""
    count = count + 1.0
    if mean.dtype == tl.float64:
        share = 1.0 / count
    else:
        share = tl.div_rn(1.0, count)
    deviation = value - mean
    mean = tl.fma(deviation, share, mean)
    return mean, tl.fma(deviation, value - mean, total), count


@triton.jit
def deviations_of_row(mean, total, length):
    """The sum of squared deviations from each row's mean, [rows, 1], of what its places met, [rows, tile]."""
    TILE: tl.constexpr = mean.shape[1]
    count = ((length + (TILE - 1) - tl.arange(0, TILE)[None, :]) // TILE).to(mean.dtype)
    center = tl.sum(mean * (count / length), 1, keep_dims=True)
    apart = mean - center
    return tl.sum(tl.fma(apart * count, apart, total), 1, keep_dims=True)
