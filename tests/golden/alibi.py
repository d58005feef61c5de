# jitgen 0.1.0: template attention/attention.py.j2
# target sm_90a: 128 rows a program, tiles of 64 keys, 4 warps, 3 stages
# stages: contract over d; map; 2 x reduce over n; contract over n; map
# (N0, N1, N2, N3): score int64 key, score int64 row, query bfloat16 contiguous, key bfloat16 contiguous, score bfloat16 task, score int64 key, score int64 row, value bfloat16 contiguous, store
#     bfloat16 contiguous
import triton
import triton.language as tl
from triton.language.extra import cuda, libdevice


@triton.jit
def jitgen_attention_b64fba76(p2, p3, p4, p7, p8, rows, keys, depth, width, b0, b1, o0, s0_0, s0_1, s0_2, s0_3, o1, s1_0, s1_1, s1_2, s1_3, s2_0, s2_1, s2_2, s2_3, s3_0, s3_1, s3_2, s3_3, s4_0, s4_1, s4_2, s4_3, o5, s5_0, s5_1, s5_2, s5_3, o6, s6_0, s6_1, s6_2, s6_3, s7_0, s7_1, s7_2, s7_3, s8_0, s8_1, s8_2, s8_3):
    # The launch may overlap the kernel ahead in the stream, whose memory is ready from here on.
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    packed_rows = rows
    tasks = b0 * b1
    blocks = (packed_rows + 127) // 128
    number = tl.program_id(0)
    task = number // blocks
    z0 = task // (b1)
    z1 = task % b1
    at0 = o0 + z0 * s0_0 + z1 * s0_1
    at1 = o1 + z0 * s1_0 + z1 * s1_1
    at2 = z0 * s2_0 + z1 * s2_1
    at3 = z0 * s3_0 + z1 * s3_1
    at4 = z0 * s4_0 + z1 * s4_1
    at5 = o5 + z0 * s5_0 + z1 * s5_1
    at6 = o6 + z0 * s6_0 + z1 * s6_1
    at7 = z0 * s7_0 + z1 * s7_1
    at8 = z0 * s8_0 + z1 * s8_1
    # The last rows of a sequence see most keys under most masks, so they begin first. Rows beyond repeat the last one.
    place = (blocks - 1 - number % blocks) * 128 + tl.arange(0, 128)
    live = place < packed_rows
    row = tl.minimum(place, packed_rows - 1)
    m = row
    d = tl.arange(0, 64)[None, :]
    e = tl.arange(0, 64)[None, :]
    q0 = (tl.load(p2 + (at2 + m * s2_2)[:, None] + d)).to(tl.float32)
    query = q0.to(tl.bfloat16)
    x4 = (tl.load(p4 + at4)).to(tl.float32)
    x1 = at1 + m * s1_2
    x6 = at6 + m * s6_2
    low_of1 = tl.min(x1, 0)
    high_of1 = tl.max(x1, 0)
    begin = 0
    end = (keys + 63) // 64
    # Tiles that these rows see, and the first run of those that no mask touches.
    first = end
    last = begin
    open_first = end
    open_last = begin
    for tile in range(begin, end):
        ends0 = at0 + tile * 64 * s0_3
        other0 = at0 + (tl.minimum(tile * 64 + 64, keys) - 1) * s0_3
        low_of0 = tl.minimum(ends0, other0)
        high_of0 = tl.maximum(ends0, other0)
        low0 = low_of0
        high0 = high_of0
        low1 = low_of1
        high1 = high_of1
        somewhere2 = high0 > low1
        everywhere2 = low0 > high1
        seen = (everywhere2) == False
        whole = (somewhere2 == False) & seen & ((tile + 1) * 64 <= keys)
        first = tl.where(seen, tl.minimum(first, tile), first)
        last = tl.where(seen, tile + 1, last)
        open_last = tl.where(whole & ((open_first == end) | (open_last == tile)), tile + 1, open_last)
        open_first = tl.where(whole, tl.minimum(open_first, tile), open_first)
    first = tl.minimum(first, last)
    open_first = tl.minimum(open_first, last)
    open_last = tl.maximum(open_last, open_first)
    row_max = tl.full((128,), float("-inf"), tl.float32)
    row_sum = tl.zeros((128,), tl.float32)
    sums = tl.zeros((128, 64), tl.float32)
    for tile in range(first, open_first):
        column = tile * 64 + tl.arange(0, 64)
        acc0 = tl.dot(query, tl.trans(tl.load(p3 + at3 + (column * s3_2)[:, None] + d, mask=(column < keys)[:, None], other=0)), input_precision="ieee", out_dtype=tl.float32)
        s0 = (at0 + column * s0_3)[None, :].to(tl.int32)
        s1 = x1[:, None].to(tl.int32)
        s7 = x4
        s8 = (at5 + column * s5_3)[None, :].to(tl.int32)
        s9 = x6[:, None].to(tl.int32)
        s2 = (s0 > s1)
        s3 = tl.full((), float("-inf"), tl.float32)
        s5 = tl.full((), 0.125, tl.float32)
        s6 = (acc0 * s5)
        s10 = (s8 - s9)
        s11 = s10.to(tl.float32)
        s12 = (s11.to(tl.bfloat16)).to(tl.float32)
        s13 = (s7 * s12)
        s14 = (s6 + s13)
        s15 = tl.where(s2, s3, s14)
        score = tl.where((column < keys)[None, :], s15, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        # Rows without any score yet have sums of zero, and not of NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        probabilities = tl.exp(score - base[:, None])
        scale = tl.exp(row_max - base)
        row_sum = row_sum * scale + tl.sum(probabilities, 1)
        value = tl.load(p7 + at7 + (column * s7_3)[:, None] + e, mask=(column < keys)[:, None], other=0)
        sums = tl.dot(probabilities.to(tl.bfloat16), value, sums * scale[:, None], input_precision="ieee", out_dtype=tl.float32)
        row_max = new_max
    for tile in range(open_first, open_last):
        column = tile * 64 + tl.arange(0, 64)
        acc0 = tl.dot(query, tl.trans(tl.load(p3 + at3 + (column * s3_2)[:, None] + d)), input_precision="ieee", out_dtype=tl.float32)
        s3 = x4
        s4 = (at5 + column * s5_3)[None, :].to(tl.int32)
        s5 = x6[:, None].to(tl.int32)
        s1 = tl.full((), 0.125, tl.float32)
        s2 = (acc0 * s1)
        s6 = (s4 - s5)
        s7 = s6.to(tl.float32)
        s8 = (s7.to(tl.bfloat16)).to(tl.float32)
        s9 = (s3 * s8)
        s10 = (s2 + s9)
        score = s10
        new_max = tl.maximum(row_max, tl.max(score, 1))
        # Rows without any score yet have sums of zero, and not of NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        probabilities = tl.exp(score - base[:, None])
        scale = tl.exp(row_max - base)
        row_sum = row_sum * scale + tl.sum(probabilities, 1)
        value = tl.load(p7 + at7 + (column * s7_3)[:, None] + e)
        sums = tl.dot(probabilities.to(tl.bfloat16), value, sums * scale[:, None], input_precision="ieee", out_dtype=tl.float32)
        row_max = new_max
    for tile in range(open_last, last):
        column = tile * 64 + tl.arange(0, 64)
        acc0 = tl.dot(query, tl.trans(tl.load(p3 + at3 + (column * s3_2)[:, None] + d, mask=(column < keys)[:, None], other=0)), input_precision="ieee", out_dtype=tl.float32)
        s0 = (at0 + column * s0_3)[None, :].to(tl.int32)
        s1 = x1[:, None].to(tl.int32)
        s7 = x4
        s8 = (at5 + column * s5_3)[None, :].to(tl.int32)
        s9 = x6[:, None].to(tl.int32)
        s2 = (s0 > s1)
        s3 = tl.full((), float("-inf"), tl.float32)
        s5 = tl.full((), 0.125, tl.float32)
        s6 = (acc0 * s5)
        s10 = (s8 - s9)
        s11 = s10.to(tl.float32)
        s12 = (s11.to(tl.bfloat16)).to(tl.float32)
        s13 = (s7 * s12)
        s14 = (s6 + s13)
        s15 = tl.where(s2, s3, s14)
        score = tl.where((column < keys)[None, :], s15, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        # Rows without any score yet have sums of zero, and not of NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        probabilities = tl.exp(score - base[:, None])
        scale = tl.exp(row_max - base)
        row_sum = row_sum * scale + tl.sum(probabilities, 1)
        value = tl.load(p7 + at7 + (column * s7_3)[:, None] + e, mask=(column < keys)[:, None], other=0)
        sums = tl.dot(probabilities.to(tl.bfloat16), value, sums * scale[:, None], input_precision="ieee", out_dtype=tl.float32)
        row_max = new_max
    acc1 = sums
    # A product over no keys is zero, whatever its factors.
    v1 = tl.where(keys == 0, 1.0, row_sum)[:, None]
    v2 = tl.div_rn(1.0, v1)
    v3 = (acc1 * v2)
    tl.store(p8 + (at8 + m * s8_2)[:, None] + e, v3.to(tl.bfloat16), mask=live[:, None])
