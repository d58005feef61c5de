"""Composes products of matrices and vectors of those that have a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.quant.codes import BLOCK, is_float8
from jitgen.trace.compositions.checks import require_one_dtype, require_rank
from jitgen.trace.guards import fast_sums
from jitgen.trace.table import composition


@composition("kron")
def kron(input: Tensor, other: Tensor) -> Tensor:
    rank = max(input.dim(), other.dim())
    left, right = (x.reshape((*[1] * (rank - x.dim()), *x.shape)) for x in (input, other))
    sizes = [m * n for m, n in zip(left.shape, right.shape, strict=True)]
    for dim in range(rank):
        left, right = left.unsqueeze(2 * dim + 1), right.unsqueeze(2 * dim)
    return (left * right).reshape(sizes)


@composition("_VF.tensordot")
def tensordot(a: Tensor, b: Tensor, dims_self: Any, dims_other: Any) -> Tensor:
    require_one_dtype(a, b)
    first, second = ([d % x.dim() for d in dims] for x, dims in ((a, dims_self), (b, dims_other)))
    for d, e in zip(first, second, strict=True):
        if a.shape[d] != b.shape[e] and 1 not in (a.shape[d], b.shape[e]):
            raise ValueError(f"contracted dimensions differ: {int(a.shape[d])} and {int(b.shape[e])}")
        if a.shape[d] == 1:
            b = b.sum(e, keepdim=True)
        elif b.shape[e] == 1:
            a = a.sum(d, keepdim=True)
    rows = [d for d in range(a.dim()) if d not in first]
    columns = [d for d in range(b.dim()) if d not in second]
    length = 1
    for d in first:
        length = length * a.shape[d]
    left = a.permute(*rows, *first).reshape(-1, length) if a.dim() else a.reshape(1, 1)
    right = b.permute(*second, *columns).reshape(length, -1) if b.dim() else b.reshape(1, 1)
    return (left @ right).reshape((*(a.shape[d] for d in rows), *(b.shape[d] for d in columns)))


@composition("_scaled_mm")
def _scaled_mm(
    input: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Multiplies float8 matrices with scales of the tensors, of rows and columns, or of blocks. Products of what codes
    are cast to become products of the codes where kernels have such (``families/gemm/code_products.py``). With
    ``use_fast_accum`` their sums have the bits that tensor cores keep, as torch's do; sums of blocks never."""
    if not (is_float8(input.dtype) and is_float8(mat2.dtype)) or input.dim() != 2 or mat2.dim() != 2:
        raise TypeError("_scaled_mm takes two matrices of float8_e4m3fn or float8_e5m2")
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise TypeError(f"the out_dtype of _scaled_mm is a floating-point one, not {out_dtype}")
    if _are_of_blocks(input, mat2, scale_a, scale_b):
        rows = (input.float().unflatten(-1, (-1, BLOCK)) * scale_a.unsqueeze(-1)).flatten(-2)
        weight = mat2.t().float().unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
        weight = (weight * scale_b.t()[:, None, :, None]).flatten(2).flatten(0, 1)
        product = rows @ weight.t()
        return (product if bias is None else product + bias.float()).to(out_dtype or input.dtype)
    scales = (scale_a, (input.shape[0], 1)), (scale_b, (1, mat2.shape[1]))
    for scale, shape in scales:
        if scale.dtype != torch.float32 or (scale.dim() and scale.shape not in (shape, (1, 1), (1,))):
            raise UnsupportedError(
                "_scaled_mm takes float32 scales: one for a tensor; one for each row, (M, 1), and column, (1, N); or "
                f"one for {BLOCK} of K, (M, K / {BLOCK}), and each block of the other, (K / {BLOCK}, N / {BLOCK}); "
                "write other blocks as a formula"
            )
    with fast_sums(use_fast_accum):
        product = input.float() @ mat2.float()
    product = product * scale_a * scale_b
    if bias is not None:
        product = product + bias.float()
    if scale_result is not None and input.device.type == "cpu":
        # oneDNN divides by the scale of the result, and torch gives it one where out_dtype is a float of 8 bits.
        product = product / scale_result if out_dtype is not None and is_float8(out_dtype) else product
    elif scale_result is not None and is_float8(out_dtype or input.dtype):
        product = product * scale_result  # as cuBLASLt does
    return product.to(out_dtype or input.dtype)


_RECIPES: dict[tuple[int, ...], str] = {
    (0, 0): "TensorWise",
    (1, 1): "RowWise",
    (4, 5): "BlockWise1x128 by BlockWise128x128",
}
"""What ``F.scaled_mm`` may say of the scales of both operands here, by the numbers of ``F.ScalingType``."""


@composition("_scaled_mm_v2")
def _scaled_mm_v2(
    input: Tensor,
    mat2: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """Computes ``F.scaled_mm`` as ``_scaled_mm``, which tells the kind of scales by their shapes."""
    recipe = (*recipe_a, *recipe_b)
    dims = tuple(contraction_dim)
    if dims and not (len(dims) == 2 and dims[0] in (1, -1) and dims[1] in (0, -2)):
        raise UnsupportedError(
            f"F.scaled_mm(contraction_dim={dims}): the columns of the first operand (M, K) meet the rows of the second "
            "(K, N), which is (1, 0); transpose an operand that is stored otherwise, mat.t()"
        )
    is_known = recipe in _RECIPES and not any((*swizzle_a, *swizzle_b))
    if not is_known or len(scale_a) != 1 or len(scale_b) != 1:
        raise UnsupportedError(
            f"F.scaled_mm takes scales that are {', '.join(_RECIPES.values())}, not swizzled, and two matrices "
            "(M, K) and (K, N); write others as a formula"
        )
    first, second = scale_a[0], scale_b[0]
    if recipe == (0, 0):
        fits = first.numel() == second.numel() == 1
    elif recipe == (1, 1):
        fits = (tuple(first.shape), tuple(second.shape)) == ((input.shape[0], 1), (1, mat2.shape[1]))
    else:
        fits = _are_of_blocks(input, mat2, first, second)
    if not fits:
        raise UnsupportedError(
            f"F.scaled_mm: scales of shapes {tuple(map(int, first.shape))} and {tuple(map(int, second.shape))} are not "
            f"{_RECIPES[recipe]}: one number each; (M, 1) and (1, N); or (M, K / {BLOCK}) and (K / {BLOCK}, "
            f"N / {BLOCK})"
        )
    return _scaled_mm(input, mat2, first, second, bias, None, out_dtype, use_fast_accum)


def _are_of_blocks(input: Tensor, mat2: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    """Returns whether scales are of blocks: of 1 x 128 elements of ``input``, and of 128 x 128 of ``mat2``."""
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32 or scale_a.dim() != 2 or scale_b.dim() != 2:
        return False
    steps, columns = scale_b.shape
    of_blocks = steps * BLOCK == mat2.shape[0] and columns * BLOCK == mat2.shape[1]
    return bool(of_blocks) and tuple(scale_a.shape) == (input.shape[0], steps)


@composition("inner")
def inner(input: Tensor, other: Tensor) -> Tensor:
    if input.dim() == 0 or other.dim() == 0:
        return input * other
    if input.dim() == other.dim() == 1:
        return torch.dot(input, other)
    return tensordot(input, other, (-1,), (-1,))


@composition("linalg_cross")
def linalg_cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    if input.dim() != other.dim():
        raise ValueError("a cross product is of tensors of equally many dimensions")
    if input.shape[dim] != 3 or other.shape[dim] != 3:
        raise ValueError(f"dimension {dim} must have 3 elements")
    require_one_dtype(input, other)
    if input.dtype == torch.bool:
        raise TypeError("not defined for bool tensors")
    x, y, z = input.unbind(dim)
    u, v, w = other.unbind(dim)
    return torch.stack([y * w - z * v, z * u - x * w, x * v - y * u], dim % input.dim())


@composition("cross")
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        dim = next((d for d, size in enumerate(input.shape) if size == 3), None)
        if dim is None:
            raise ValueError("no dimension of size 3")
    return linalg_cross(input, other, dim=dim)


@composition("linalg_vecdot")
def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    require_one_dtype(x, y)
    return (x * y).sum(dim, dtype=x.dtype)


@composition("chain_matmul", "torch.chain_matmul")
def chain_matmul(*matrices: Any) -> Tensor:
    listed = matrices[0] if len(matrices) == 1 and not isinstance(matrices[0], Tensor) else matrices
    for matrix in listed:
        require_rank(matrix, (2,))
    return multi_dot(listed) if len(listed) > 1 else listed[0].clone()


@composition("linalg_multi_dot")
def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """Multiplies in the order that takes fewest multiplications, for the sizes of the traced call."""
    if len(tensors) < 2:
        raise ValueError("a chain has two matrices at least")
    require_one_dtype(*tensors)
    first, *inner, last = tensors
    chain = [first.unsqueeze(0) if first.dim() == 1 else first, *inner]
    chain.append(last.unsqueeze(1) if last.dim() == 1 else last)
    for matrix in chain:
        require_rank(matrix, (2,))
    product = _cheapest(chain)
    product = product.squeeze(1) if last.dim() == 1 else product
    return product.squeeze(0) if first.dim() == 1 else product


def _cheapest(chain: Sequence[Tensor]) -> Tensor:
    sizes = [int(chain[0].shape[0]), *(int(matrix.shape[1]) for matrix in chain)]
    known: dict[tuple[int, int], tuple[int, int]] = {(i, i): (0, i) for i in range(len(chain))}
    for span in range(1, len(chain)):
        for i in range(len(chain) - span):
            j = i + span
            known[i, j] = min(
                (known[i, k][0] + known[k + 1, j][0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j)
            )

    def product(i: int, j: int) -> Tensor:
        return chain[i] if i == j else product(i, known[i, j][1]) @ product(known[i, j][1] + 1, j)

    return product(0, len(chain) - 1)


@composition("linalg_matrix_power", "matrix_power")
def matrix_power(A: Tensor, n: int) -> Tensor:
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        raise ValueError("a power is of square matrices")
    if n < 0:
        raise UnsupportedError(
            "negative powers of matrices are not supported; invert the matrix outside, with torch.linalg.inv"
        )
    if n == 0:
        return torch.eye(A.shape[-1], dtype=A.dtype).expand(A.shape).clone()
    result, square, left = None, A, int(n)
    while left:
        if left & 1:
            result = square if result is None else result @ square
        left >>= 1
        square = square @ square if left else square
    assert result is not None
    return result.clone()


@composition("linalg_vander")
def vander(x: Tensor, *, N: int | None = None) -> Tensor:
    if x.dim() < 1:
        raise ValueError("a Vandermonde matrix is of vectors")
    columns = int(x.shape[-1]) if N is None else int(N)
    if columns <= 1 and N is not None:
        raise ValueError("N must be greater than 1")
    whole = x.to(torch.int64) if x.dtype == torch.bool else x
    powers = whole.unsqueeze(-1).expand(*x.shape, columns - 1).cumprod(-1)
    return torch.cat(
        [torch.ones_like(powers[..., :1]) if columns > 1 else torch.ones_like(whole.unsqueeze(-1)), powers], -1
    )


@composition("torch.bilinear", "_nn.bilinear")
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes ``x1 (..., i) weight (o, i, j) x2 (..., j)``."""
    if input1.dim() != input2.dim() or weight.dim() != 3:
        raise ValueError("bilinear takes two inputs of equally many dimensions and a weight of three")
    outputs, left, right = weight.shape
    halves = torch.einsum("ni,oij->noj", input1.reshape(-1, left), weight)
    result = (halves * input2.reshape(-1, 1, right)).sum(-1).reshape(*input1.shape[:-1], outputs)
    result = result.to(input1.dtype)  # a sum of integers is of int64
    return result if bias is None else result + bias


@composition("torch.vander")
def vander_of_vector(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:
    require_rank(x, (1,))
    columns = int(x.shape[0]) if N is None else int(N)
    if columns < 2:
        return torch.ones(x.shape[0], columns, dtype=torch.int64 if x.dtype == torch.bool else x.dtype)
    powers = vander(x, N=columns)
    return powers if increasing else powers.flip(-1)
