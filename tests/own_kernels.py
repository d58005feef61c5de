"""Kernels as users write them in Triton, for the tests of launches: those of tutorials, and what is less usual."""

from __future__ import annotations

import triton
import triton.language as tl

SCALE: tl.constexpr = tl.constexpr(2.0)


@triton.jit
def activation(x, KIND: tl.constexpr):
    if KIND == "leaky_relu":
        return tl.where(x >= 0, x, 0.01 * x)
    return x


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    output = x + y
    tl.store(out_ptr + offsets, output, mask=mask)


@triton.jit
def scale_in_place(x_ptr, n, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(x_ptr + offsets, x * factor * SCALE, mask=offsets < n)


@triton.jit
def sum_and_difference(x_ptr, y_ptr, sum_ptr, difference_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    y = tl.load(y_ptr + offsets, mask=offsets < n)
    tl.store(sum_ptr + offsets, x + y, mask=offsets < n)
    tl.store(difference_ptr + offsets, x - y, mask=offsets < n)


@triton.jit
def histogram(x_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    tl.atomic_add(counts_ptr + x, 1, mask=offsets < n)


@triton.jit
def first_elements(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Writes only some of the elements of ``out``."""
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


@triton.jit
def doubled_twice(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Reads what it has stored."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) * 2, mask=offsets < n)
    tl.store(out_ptr + offsets, tl.load(out_ptr + offsets, mask=offsets < n) * 2, mask=offsets < n)


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + ((pid % num_pid_in_group) % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m

    offs_am = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    offs_bn = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)

    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_SIZE_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_SIZE_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk
    accumulator = activation(accumulator, ACTIVATION)
    c = accumulator.to(c_ptr.dtype.element_ty)

    offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    tl.store(c_ptrs, c, mask=c_mask)


@triton.jit
def persistent_matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_bk,
    stride_cm,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, PROGRAMS):
        offs_m = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            offs_k = k + tl.arange(0, BLOCK_K)
            a = tl.load(
                a_ptr + offs_m[:, None] * stride_am + offs_k[None, :],
                mask=(offs_m[:, None] < M) & (offs_k[None, :] < K),
                other=0.0,
            )
            b = tl.load(
                b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :],
                mask=(offs_k[:, None] < K) & (offs_n[None, :] < N),
                other=0.0,
            )
            acc = tl.dot(a, b, acc, input_precision="ieee")
        tl.store(
            c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :],
            acc,
            mask=(offs_m[:, None] < M) & (offs_n[None, :] < N),
        )


@triton.autotune(configs=[triton.Config({"PIECES": 1}), triton.Config({"PIECES": 2}, num_warps=2)], key=["columns"])
@triton.jit
def scaled_rows(x_ptr, out_ptr, stride, columns, factor, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    row = tl.program_id(0)
    for start in range(tl.program_id(1) * BLOCK, columns, BLOCK * PIECES):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + offsets, mask=offsets < columns)
        tl.store(out_ptr + row * stride + offsets, x * factor * SCALE, mask=offsets < columns)


@triton.jit
def softmax(out_ptr, x_ptr, x_row_stride, out_row_stride, n_cols, BLOCK_SIZE: tl.constexpr):
    row_idx = tl.program_id(0)
    col_offsets = tl.arange(0, BLOCK_SIZE)
    row = tl.load(x_ptr + row_idx * x_row_stride + col_offsets, mask=col_offsets < n_cols, other=-float("inf"))
    numerator = tl.exp(row - tl.max(row, axis=0))
    softmax_output = numerator / tl.sum(numerator, axis=0)
    output_row_start_ptr = out_ptr + row_idx * out_row_stride
    output_ptrs = output_row_start_ptr + col_offsets
    tl.store(output_ptrs, softmax_output, mask=col_offsets < n_cols)


@triton.jit
def layer_norm(X, Y, W, B, Mean, Rstd, stride, N, eps, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    Y += row * stride
    X += row * stride
    _mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        a = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        _mean += a
    mean = tl.sum(_mean, axis=0) / N
    _var = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        _var += x * x
    rstd = 1 / tl.sqrt(tl.sum(_var, axis=0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        mask = cols < N
        w = tl.load(W + cols, mask=mask)
        b = tl.load(B + cols, mask=mask)
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * w + b
        tl.store(Y + cols, y, mask=mask)


@triton.jit
def flash_attention(
    Q,
    K,
    V,
    Out,
    stride_h,
    stride_m,
    seq,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    start_m = tl.program_id(0)
    head = tl.program_id(1)
    base = head * stride_h
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, DIM)
    q = tl.load(Q + base + offs_m[:, None] * stride_m + offs_d[None, :], mask=offs_m[:, None] < seq, other=0.0)
    m_i = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
    end = tl.minimum((start_m + 1) * BLOCK_M, seq) if CAUSAL else seq
    for start_n in range(0, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = tl.load(K + base + offs_n[:, None] * stride_m + offs_d[None, :], mask=offs_n[:, None] < seq, other=0.0)
        v = tl.load(V + base + offs_n[:, None] * stride_m + offs_d[None, :], mask=offs_n[:, None] < seq, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        keep = offs_n[None, :] < seq
        if CAUSAL:
            keep = keep & (offs_m[:, None] >= offs_n[None, :])
        qk = tl.where(keep, qk, -1.0e30)
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.exp(qk - m_new[:, None])
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_new
    acc = acc / l_i[:, None]
    tl.store(
        Out + base + offs_m[:, None] * stride_m + offs_d[None, :],
        acc.to(Out.dtype.element_ty),
        mask=offs_m[:, None] < seq,
    )


CONFIGS = [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128}, num_warps=4)]
tuned_add = triton.autotune(configs=CONFIGS, key=["n"])(add)
block_of = {"BLOCK": lambda args: triton.next_power_of_2(args["n"])}
add_by_heuristics = triton.heuristics(block_of)(add)


@triton.jit
def _advanced(pointer, offset):
    return pointer + offset


@triton.jit
def _stored(pointer, value, mask):
    tl.store(pointer, value, mask=mask)


@triton.jit
def through_helpers(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    source, target = _advanced(x_ptr, offsets), _advanced(out_ptr, offsets)
    value = tl.load(source, mask=offsets < n)
    _stored(target, value, offsets < n)


@triton.jit
def advanced_in_a_loop(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        offsets = tl.arange(0, BLOCK)
        value = tl.load(x_ptr + start + offsets, mask=start + offsets < n)
        tl.store(out_ptr + offsets, value, mask=start + offsets < n)
        out_ptr += BLOCK


@triton.jit
def of_either(x_ptr, out_ptr, other_ptr, n, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    pointer = out_ptr + offsets
    if not FIRST:
        pointer = other_ptr + offsets
    tl.store(pointer, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


@triton.jit
def by_a_block_pointer(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    block = tl.make_block_ptr(out_ptr, (n,), (1,), (0,), (BLOCK,), (0,))
    tl.store(block, tl.load(x_ptr + offsets, mask=offsets < n), boundary_check=(0,))


@triton.jit
def too_far(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Writes one element too many."""
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets <= n)


@triton.jit
def scaled(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    offs = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    keep = offs < n
    out_ptrs = out_ptr + offs
    tl.store(out_ptrs, tl.load(x_ptr + offs, mask=keep, other=1.0).to(out_ptr.dtype.element_ty) * factor, mask=keep)


@triton.jit
def shifted(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + (offsets + 1) % n, mask=mask)
    tl.store(out_ptr + offsets, x, mask=mask)


@triton.jit
def of_other_rows(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    x_ptr += (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK
    out_ptr += tl.program_id(0) * BLOCK
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) + 1)


@triton.jit
def of_wider_mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n + 0)
    tl.store(out_ptr + offsets, x, mask=offsets < n)


@triton.jit
def of_changed_number(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    n = n + 0
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


@triton.jit
def stored_in_a_branch(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    if n > 4:
        tl.store(out_ptr + offsets, x * 2, mask=offsets < n)


@triton.jit
def read_twice(x_ptr, out_ptr, sums_ptr, n, BLOCK: tl.constexpr):
    """Reads its tensor once in a loop, and writes two."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    for _ in range(3):
        total += tl.load(x_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, total, mask=mask)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.autotune(configs=CONFIGS, key=[])
@triton.jit
def sums_by_lengths(x_ptr, lengths_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    total = 0.0
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * columns + offsets, mask=offsets < length, other=0.0), axis=0)
    tl.store(out_ptr + row, total)
