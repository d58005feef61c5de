# jitgen 0.1.0: template elementwise/elementwise.py.j2
# target gfx942: 128 threads a block, 1 step a thread of 8 elements
# stages: map
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def region0_block(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, n0_0, n0_1, n0_2, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_2_1, s0_3_0, s0_3_1, s0_4_0, s0_4_1, s0_5_0, s0_5_1, s0_6_0, s0_6_1, s0_7_0, s0_7_1, WHOLE: tl.constexpr):
    step = block * 128 + tl.arange(0, 128)[:, None]
    live = None if WHOLE else step * 8 < n0_0 * n0_1 * n0_2
    steps = n0_2 // 8
    column = step % steps * 8 + tl.arange(0, 8)[None, :]
    r1 = step // steps
    i1 = r1 % n0_1
    i0 = r1 // n0_1
    v0 = (tl.load(p0_0 + i0 * s0_0_0 + i1 * s0_0_1 + column, mask=live)).to(tl.float32)
    v1 = (tl.load(p0_1 + i0 * s0_1_0 + i1 * s0_1_1 + column, mask=live)).to(tl.float32)
    v3 = (tl.load(p0_2 + i0 * s0_2_0 + i1 * s0_2_1 + column, mask=live)).to(tl.float32)
    v5 = (tl.load(p0_3 + i0 * s0_3_0 + i1 * s0_3_1 + column, mask=live)).to(tl.float32)
    v8 = (tl.load(p0_4 + i0 * s0_4_0 + i1 * s0_4_1 + column, mask=live)).to(tl.float32)
    v10 = (tl.load(p0_5 + i0 * s0_5_0 + i1 * s0_5_1 + column, mask=live)).to(tl.float32)
    v2 = (v0 * v1)
    v4 = (v3 * -1.0)
    v6 = (v4 * v5)
    v7 = (v2 + v6)
    v9 = (v3 * v8)
    v11 = (v0 * v10)
    v12 = (v9 + v11)
    tl.store(p0_6 + i0 * s0_6_0 + i1 * s0_6_1 + column, v7.to(tl.bfloat16), mask=live)
    tl.store(p0_7 + i0 * s0_7_0 + i1 * s0_7_1 + column, v12.to(tl.bfloat16), mask=live)


@triton.jit
def region0(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, n0_0, n0_1, n0_2, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_2_1, s0_3_0, s0_3_1, s0_4_0, s0_4_1, s0_5_0, s0_5_1, s0_6_0, s0_6_1, s0_7_0, s0_7_1):
    # (N0, N1, N2) as 3 dimensions: load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, load bfloat16 contiguous, store bfloat16 contiguous, store bfloat16 contiguous
    # A block that is whole needs no mask, and without one its accesses are as wide as alignment allows.
    if (block + 1) * 1024 <= n0_0 * n0_1 * n0_2:
        region0_block(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, n0_0, n0_1, n0_2, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_2_1, s0_3_0, s0_3_1, s0_4_0, s0_4_1, s0_5_0, s0_5_1, s0_6_0, s0_6_1, s0_7_0, s0_7_1, True)
    else:
        region0_block(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, n0_0, n0_1, n0_2, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_2_1, s0_3_0, s0_3_1, s0_4_0, s0_4_1, s0_5_0, s0_5_1, s0_6_0, s0_6_1, s0_7_0, s0_7_1, False)


@triton.jit
def jitgen_elementwise_4c54ba90(p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, n0_0, n0_1, n0_2, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_2_1, s0_3_0, s0_3_1, s0_4_0, s0_4_1, s0_5_0, s0_5_1, s0_6_0, s0_6_1, s0_7_0, s0_7_1):
    block = tl.program_id(0)
    region0(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, n0_0, n0_1, n0_2, s0_0_0, s0_0_1, s0_1_0, s0_1_1, s0_2_0, s0_2_1, s0_3_0, s0_3_1, s0_4_0, s0_4_1, s0_5_0, s0_5_1, s0_6_0, s0_6_1, s0_7_0, s0_7_1)
