"""Makes tensors of random bits, and compares them by bits."""

from __future__ import annotations

import torch


def tensor(dtype: torch.dtype, columns: int = 32) -> torch.Tensor:
    """Returns three rows of random bits, ``columns`` bytes each; no NaN, whose bits a narrow float does not keep."""
    x = torch.randint(0, 256, (3, columns), dtype=torch.uint8)
    if dtype == torch.bool:
        return (x % 2).bool()
    x = x.view(dtype)
    if dtype.is_floating_point:
        x.view(torch.uint8).view(3, -1, dtype.itemsize)[x.isnan()] = 0
    return x


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bits, but for those of a NaN."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if want.dtype.is_floating_point:
        got, want = got.double(), want.double()
        return torch.equal(got.isnan(), want.isnan()) and same_bits(got.nan_to_num(), want.nan_to_num())
    return torch.equal(got, want)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.int64), want.view(torch.int64))
