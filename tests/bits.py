"""Makes tensors of random bits and of every word, and compares tensors by bits."""

from __future__ import annotations

import torch


def tensor(dtype: torch.dtype, columns: int = 32) -> torch.Tensor:
    """Returns three rows of random bits, ``columns`` bytes each."""
    x = torch.randint(0, 256, (3, columns), dtype=torch.uint8)
    return (x % 2).bool() if dtype == torch.bool else x.view(dtype)


def words(dtype: torch.dtype) -> torch.Tensor:
    """Returns every number of ``dtype``, which has 16 or 8 bits, and every NaN, as rows of whole words of 64 bits."""
    numbers = torch.arange(256**dtype.itemsize)
    return numbers.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype).view(8, -1)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bits, those of NaN too."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (got, want)))
