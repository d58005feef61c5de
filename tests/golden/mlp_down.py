# jitgen 0.1.0: template gemm/gemm.py.j2
# target sm_90a: weights_packed mainloop, tiles of 64 x 128, 128 of K a step, 4 warps a block, 3 stages, split-K by 8, raster of 8 tiles
# stages: contract over k
# (rows, columns) over K: x bfloat16 k, codes int32 whole, scales bfloat16 whole, store float32 full
import triton
import triton.language as tl
from triton.language.extra import cuda, libdevice


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
def int4_values_packed(words, DTYPE: tl.constexpr):
    return nibbles_packed(words, tl.full((1, 1), 8, tl.int32), DTYPE)


@triton.jit
def region0(tile, tiles_i, tiles_j, part, p0_0, p0_1, p0_2, p0_3, m, k, n0, s0_0_0, s0_3_0):
    # (rows, columns) over K: x bfloat16 k, codes int32 whole, scales bfloat16 whole, store float32 full
    first_i = tile // (tiles_j * 8) * 8
    high = tl.minimum(tiles_i - first_i, 8)
    tile_i = first_i + (tile - first_i * tiles_j) % high
    tile_j = (tile - first_i * tiles_j) // high
    steps = (k + 127) // 128
    first = steps * part // 8 * 128
    last = tl.minimum(steps * (part + 1) // 8 * 128, k)
    i = tile_i * 64 + tl.arange(0, 64)
    j = tile_j * 128 + tl.arange(0, 128)
    first_k = tl.full((1, 1), 0, tl.int32)
    x_k = first_k + tl.arange(0, 128)[:, None]
    x_i = tl.minimum(i, m - 1)[None, :]  # rows beyond the last are read again, and not stored
    w0_j = tl.minimum(j, n0 - 1)[:, None]
    w0_k = first_k // 8 + tl.arange(0, 16)[None, :]
    w0_row = w0_j * ((k + 127) // 128 * 16)
    w0_groups = w0_j * ((k + 127) // 128)
    acc0 = tl.zeros((128, 64), tl.float32)
    w0_scale = tl.load(p0_2 + w0_groups + (first + first_k) // 128, mask=first + first_k < k, other=0)
    for start in range(first, last, 128):
        w0_scale_next = tl.load(p0_2 + w0_groups + (start + 128 + first_k) // 128, mask=start + 128 + first_k < k, other=0)
        x = tl.load(p0_0 + start + x_i * s0_0_0 + x_k)
        w0_codes = tl.load(p0_1 + start // 8 + w0_row + w0_k)
        w0 = int4_values_packed(w0_codes, tl.bfloat16)
        acc0 = tl.fma(tl.dot(w0, x, input_precision="ieee", out_dtype=tl.float32), w0_scale.to(tl.float32), acc0)
        w0_scale = w0_scale_next
    i = i[None, :]
    j = j[:, None]
    tl.store(p0_3 + (i + part * m) * s0_3_0 + j, acc0, mask=(i < m) & (j < n0))


@triton.jit
def jitgen_gemm_84596d21(p0_0, p0_1, p0_2, p0_3, m, k, n0, s0_0_0, s0_3_0):
    # The launch may overlap the kernel ahead in the stream, whose memory is ready from here on.
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    tile = tl.program_id(0)
    tiles_i = (m + 63) // 64
    tiles0 = (n0 + 127) // 128
    tiles = tiles_i * tiles0
    part = tile // tiles
    tile = tile % tiles
    region0(tile, tiles_i, tiles0, part, p0_0, p0_1, p0_2, p0_3, m, k, n0, s0_0_0, s0_3_0)

# jitgen 0.1.0: template elementwise/elementwise.py.j2
# target sm_90a: 128 threads a block, 1 step a thread of 8 elements
# stages: map
import triton
import triton.language as tl
from triton.language.extra import cuda, libdevice


@triton.jit
def region0_block(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, p0_8, p0_9, n0_0, WHOLE: tl.constexpr):
    step = block * 1024 + tl.arange(0, 1024)
    live = None if WHOLE else step < n0_0
    v0 = (tl.load(p0_0 + step, mask=live))
    v1 = (tl.load(p0_1 + step, mask=live))
    v3 = (tl.load(p0_2 + step, mask=live))
    v5 = (tl.load(p0_3 + step, mask=live))
    v7 = (tl.load(p0_4 + step, mask=live))
    v9 = (tl.load(p0_5 + step, mask=live))
    v11 = (tl.load(p0_6 + step, mask=live))
    v13 = (tl.load(p0_7 + step, mask=live))
    v15 = (tl.load(p0_8 + step, mask=live)).to(tl.float32)
    v2 = (v0 + v1)
    v4 = (v2 + v3)
    v6 = (v4 + v5)
    v8 = (v6 + v7)
    v10 = (v8 + v9)
    v12 = (v10 + v11)
    v14 = (v12 + v13)
    v16 = (v15 + v14)
    tl.store(p0_9 + step, v16.to(tl.bfloat16), mask=live)


@triton.jit
def region0(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, p0_8, p0_9, n0_0):
    # (N0, 4096) as 1 dimension: load float32 contiguous, load float32 contiguous, load float32 contiguous, load float32 contiguous, load float32 contiguous, load float32 contiguous, load float32 contiguous, load float32 contiguous, load bfloat16 contiguous, store bfloat16 contiguous
    # A block that is whole needs no mask, and without one its accesses are as wide as alignment allows.
    if (block + 1) * 1024 <= n0_0:
        region0_block(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, p0_8, p0_9, n0_0, True)
    else:
        region0_block(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, p0_8, p0_9, n0_0, False)


@triton.jit
def jitgen_elementwise_da7811b3(p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, p0_8, p0_9, n0_0):
    # The launch may overlap the kernel ahead in the stream, whose memory is ready from here on. That this kernel lets
    # the next one in only by ending is 20 % faster on an H200: of its many small blocks each would have to say so.
    cuda.gdc_wait()
    block = tl.program_id(0)
    region0(block, p0_0, p0_1, p0_2, p0_3, p0_4, p0_5, p0_6, p0_7, p0_8, p0_9, n0_0)
