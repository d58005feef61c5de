"""Composes functions that reduce: sums without NaN, distances, differences, covariances, integrals."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.ir.custom_gradients import with_gradient
from jitgen.trace.compositions.checks import require_float, require_one_dtype, require_rank, require_shape
from jitgen.trace.compositions.pointwise import floating
from jitgen.trace.table import composition

Dims = Any
FEW_ROWS = 25
"""Up to as many rows on both sides, torch computes Euclidean distances of differences, which is more exact."""


@composition("nansum")
def nansum(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if not input.is_floating_point():
        return input.sum(dim, keepdim, dtype=dtype)
    numbers = torch.where(input.isnan(), 0, input)
    numbers = with_gradient(numbers, input, torch.where(input.isnan(), 0.0, 1.0))
    return numbers.sum(dim, keepdim, dtype=dtype)


@composition("nanmean")
def nanmean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    require_float(input)
    count = (~input.isnan()).sum(dim, keepdim)
    return nansum(input, dim, keepdim, dtype=dtype) / count


composition("dist")(lambda input, other, p=2: torch.norm(input - other, p))


@composition("renorm")
def renorm(input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    require_float(input)
    if input.dim() < 2 or p <= 0 or maxnorm < 0:
        raise ValueError("renorm takes at least two dimensions, a positive p and a maxnorm of 0 or more")
    others = [d for d in range(input.dim()) if d != dim % input.dim()]
    norm = torch.linalg.vector_norm(input, p, others, keepdim=True)
    value = input * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)
    beyond = norm.detach() > maxnorm
    scaled = with_gradient(input, torch.where(beyond, input, 0.0), 1.0)  # a norm that is kept has no gradient
    scaled = scaled * (maxnorm / (torch.linalg.vector_norm(scaled, p, others, keepdim=True) + 1e-7))
    return with_gradient(value, torch.where(beyond, scaled, input), 1.0)


@composition("linalg__powsum")
def power_sum(
    input: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Computes the sum of powers that a vector norm is the root of."""
    require_float(input)
    powers = input.to(torch.promote_types(dtype or input.dtype, torch.float32)).abs() ** ord
    return powers.sum(dim, keepdim).to(dtype or input.dtype)


@composition("_VF.cdist", "torch.cdist", "_cdist_forward")
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    require_float(x1, x2)
    require_one_dtype(x1, x2)
    if x1.dim() < 2 or x2.dim() < 2 or x1.shape[-1] != x2.shape[-1]:
        raise ValueError("cdist takes (..., rows, columns) tensors of equally many columns")
    if p < 0:
        raise ValueError("p must not be negative")
    if p == 2 and x1.dtype in (torch.float32, torch.float64) and _by_product(x1.shape[-2], x2.shape[-2], compute_mode):
        return _euclidean(x1, x2)
    return distance(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def _by_product(rows: Any, others: Any, compute_mode: Any) -> bool:
    """Returns whether torch computes Euclidean distances of as many rows by a matrix product: by a name of
    ``torch.cdist``'s ``compute_mode``, or the number that stands for it."""
    if compute_mode in ("donot_use_mm_for_euclid_dist", 2):
        return False
    return bool(compute_mode in ("use_mm_for_euclid_dist", 1) or rows > FEW_ROWS or others > FEW_ROWS)


def _euclidean(x1: Tensor, x2: Tensor) -> Tensor:
    """Computes distances by a product, |x|^2 + |y|^2 - 2 xy, as torch does; no gradient flows where one is 0."""
    sizes, others = x1.square().sum(-1, keepdim=True), x2.square().sum(-1, keepdim=True)
    squares = sizes + others.mT - 2 * (x1 @ x2.mT)
    norm = squares.clamp(min=0).sqrt()
    return with_gradient(norm, squares, torch.where(norm == 0, 0.0, 0.5 / norm))


def distance(difference: Tensor, p: float) -> Tensor:
    """Computes the norm of the last dimension. For p = inf every element that has the largest size gets all of the
    gradient.

    For p = 0 a NaN is counted by a vector norm, while torch's distances are NaN then; so is the slope for p = 1.
    """
    norm = torch.linalg.vector_norm(difference, p, -1, True)
    if p == 0:
        return torch.where(difference.isnan().any(-1), math.nan, norm.squeeze(-1))
    if p == 1:
        norm = with_gradient(norm, difference, torch.where(difference.isnan(), math.nan, difference.sign()))
    if p == math.inf:
        norm = with_gradient(norm, difference, torch.where(difference.abs() == norm, difference.sign(), 0.0))
    return norm.squeeze(-1)


# -------------------------------------------------------------------------------------------- differences and integrals


@composition("diff")
def diff(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    if input.dim() == 0:
        raise ValueError("diff needs at least one dimension")
    if n < 0:
        raise ValueError("the order of a difference must not be negative")
    if n == 0:
        return input.clone()  # torch joins nothing then
    around = [piece for piece in (prepend, input, append) if piece is not None]
    joined = torch.cat(around, dim) if len(around) > 1 else input
    for _ in range(int(n)):
        length = joined.shape[dim]
        if length <= 1:
            return joined.narrow(dim, 0, 0)
        later, earlier = joined.narrow(dim, 1, length - 1), joined.narrow(dim, 0, length - 1)
        joined = later ^ earlier if joined.dtype == torch.bool else later - earlier
    return joined


@composition("trapezoid", "trapz")
def trapezoid(y: Tensor, x: Any = None, *, dx: Any = None, dim: int = -1) -> Tensor:
    """Integrates by the trapezoidal rule; with even spacing the ends count half."""
    if y.dtype == torch.bool:
        raise TypeError("not defined for bool tensors")
    length = y.shape[dim]
    if length == 0:
        return y.sum(dim) * 0.0
    if not isinstance(x, Tensor):
        ends = y.select(dim, 0) + y.select(dim, -1)
        return (y.sum(dim) - ends * 0.5) * (1.0 if dx is None else dx)
    first, last = y.narrow(dim, 0, length - 1), y.narrow(dim, 1, length - 1)
    if x.dim() == 1:
        require_shape(x, (length,), "the points")
        apart = (x[1:] - x[:-1]).reshape(-1, *[1] * (y.dim() - 1 - dim % y.dim()))
    else:
        at = dim if dim < 0 else dim - y.dim()
        points = x.shape[at]
        apart = x.narrow(at, 1, points - 1) - x.narrow(at, 0, points - 1)
    return ((first + last) * apart).sum(dim) / 2.0


# ----------------------------------------------------------------------------------------------------------- statistics


@composition("cov")
def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    require_rank(input, (0, 1, 2))
    if input.dtype == torch.bool:
        raise TypeError("not defined for bool tensors")
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    observations = rows.shape[1]
    rows = floating(rows)
    weights = None
    for factors in (fweights, aweights):
        if factors is not None:
            require_shape(factors, (observations,), "the weights")
            weights = factors if weights is None else weights * factors
    if weights is None:
        centred = rows - rows.mean(1, keepdim=True)
        norm: Any = max(observations - correction, 0)
        product = centred @ centred.T
        result = product / norm if norm else product / torch.zeros((), dtype=product.dtype)
    else:
        total = weights.sum()
        centred = rows - (rows * weights).sum(1, keepdim=True) / total
        if aweights is None or not correction:
            norm = total - correction
        else:
            norm = total - correction * (weights * aweights).sum() / total
        result = centred @ (centred * weights).T / norm.clamp(min=0)
    return result.squeeze()


@composition("corrcoef")
def corrcoef(input: Tensor) -> Tensor:
    covariance = cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    deviations = covariance.diagonal().sqrt()
    return (covariance / deviations.unsqueeze(1) / deviations.unsqueeze(0)).clamp(-1, 1)


# ---------------------------------------------------------------------------------------------------------------- norms


@composition("linalg_matrix_norm", "matrix_norm")
def matrix_norm(
    A: Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    require_float(A)
    if A.dim() < 2 or len(dim) != 2:
        raise ValueError("a matrix norm is of two dimensions")
    rows, columns = (d % A.dim() for d in dim)
    if rows == columns:
        raise ValueError("the dimensions of a matrix norm must differ")
    A = A if dtype is None else A.to(dtype)
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, (rows, columns), keepdim)
    if ord in ("nuc", 2, -2):
        raise UnsupportedError(
            f"the matrix norm {ord!r} needs singular values, which no kernel computes; "
            "compute it outside of the decorated function, or take ord='fro'"
        )
    if ord not in (1, -1, math.inf, -math.inf):
        raise ValueError(f"{ord!r} is not a matrix norm")
    summed, kept = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = A.abs().sum(summed, keepdim=True)
    result = sums.amax(kept, keepdim=True) if ord > 0 else sums.amin(kept, keepdim=True)
    return result if keepdim else result.squeeze((rows, columns))


@composition("linalg_norm")
def linalg_norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Computes the norm of a matrix if a kind is asked for and there are two dimensions; else that of all elements."""
    require_float(A)
    if ord is not None and dim is None and A.dim() not in (1, 2):
        raise ValueError("a norm of a kind is of one dimension or of two")
    of_matrices = A.dim() == 2 if dim is None else isinstance(dim, (tuple, list)) and len(dim) == 2
    if ord is not None and of_matrices:
        return matrix_norm(A, ord, (0, 1) if dim is None else dim, keepdim, dtype=dtype)
    return torch.linalg.vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
