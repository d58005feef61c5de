# jitgen 0.1.0: template elementwise/elementwise.py.j2
# target sm_90a: 128 threads a block, 1 step a thread of 4 elements
# stages: map
import triton
import triton.language as tl
from triton.language.extra import cuda, libdevice


@triton.jit
def region0_block(block, p0_2, p0_3, n0_0, n0_1, o0_0, o0_1, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_3_0, WHOLE: tl.constexpr):
    step = block * 128 + tl.arange(0, 128)[:, None]
    live = None if WHOLE else step * 4 < n0_0 * n0_1
    steps = n0_1 // 4
    column = step % steps * 4 + tl.arange(0, 4)[None, :]
    i0 = step // steps
    v0 = (o0_0 + i0 * s0_0_0 + column * s0_0_1).to(tl.int64)
    v1 = (o0_1 + i0 * s0_1_0 + column * s0_1_1).to(tl.int64)
    v4 = (tl.load(p0_2 + i0 * s0_2_0 + column, mask=live))
    v2 = (v0 < v1)
    v3 = tl.full((), float("-inf"), tl.float32)
    v5 = tl.where(v2, v3, v4)
    tl.store(p0_3 + i0 * s0_3_0 + column, v5, mask=live)


@triton.jit
def region0(block, p0_2, p0_3, n0_0, n0_1, o0_0, o0_1, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_3_0):
    # (N0, N1) as 2 dimensions: iota int64 strided, iota int64 strided, load float32 contiguous, store float32 contiguous
    # A block that is whole needs no mask, and without one its accesses are as wide as alignment allows.
    if (block + 1) * 512 <= n0_0 * n0_1:
        region0_block(block, p0_2, p0_3, n0_0, n0_1, o0_0, o0_1, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_3_0, True)
    else:
        region0_block(block, p0_2, p0_3, n0_0, n0_1, o0_0, o0_1, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_3_0, False)


@triton.jit
def jitgen_elementwise_7f0fbb3f(p0_2, p0_3, n0_0, n0_1, o0_0, s0_0_0, s0_0_1, o0_1, s0_1_0, s0_1_1, s0_2_0, s0_3_0):
    # The launch may overlap the kernel ahead in the stream, whose memory is ready from here on. That this kernel lets
    # the next one in only by ending is 20 % faster on an H200: of its many small blocks each would have to say so.
    cuda.gdc_wait()
    block = tl.program_id(0)
    region0(block, p0_2, p0_3, n0_0, n0_1, o0_0, o0_1, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_3_0)
