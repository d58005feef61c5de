"""Functions of rules in kernels that users wrote: what is exact enough for results of 16 bits, in fewer instructions."""

import triton
import triton.language as tl


@triton.jit
def coarse_erfc(x):
    # 2^(z p(z)): of the polynomials p of degree 9 on [0, 10.1] the minimax one, without a division. A relative error of
    # 2^-16 up to 5.5, and of 2^-15 up to 9.19, where the exponent is rounded and a float16 is 0; beyond, a float32 is
    # subnormal. The power is 0 at 10.1.
    z = tl.minimum(tl.abs(x), 10.1, propagate_nan=tl.PropagateNan.ALL)
    p = z * 2.07801287e-09 - 1.39672082e-07
    p = z * p + 4.13944599e-06
    p = z * p - 7.16527284e-05
    p = z * p + 0.000810185331
    p = z * p - 0.00636000838
    p = z * p + 0.0361550152
    p = z * p - 0.15481241
    p = z * p - 0.915893137
    p = z * p - 1.62825942
    tail = tl.exp2(z * p)
    return tl.where(x >= 0, tail, 2.0 - tail)
