"""Functions of rules in kernels that users wrote: what is exact enough for results of 16 bits, in fewer instructions."""

import triton
import triton.language as tl


@triton.jit
def coarse_erfc(x):
    # Press et al., Numerical Recipes, "Error Function": a relative error of 1.2e-7 at most.
    z = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * z)
    p = t * 0.17087277 - 0.82215223
    p = t * p + 1.48851587
    p = t * p - 1.13520398
    p = t * p + 0.27886807
    p = t * p - 0.18628806
    p = t * p + 0.09678418
    p = t * p + 0.37409196
    p = t * p + 1.00002368
    tail = t * tl.exp(t * p - z * z - 1.26551223)
    return tl.where(x >= 0, tail, 2.0 - tail)
