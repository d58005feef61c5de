"""What rounding to a dtype may change."""

from __future__ import annotations

import torch


def of_subnormals(dtype: torch.dtype, count: int) -> float:
    """The most that rounding changes the norm of ``count`` results below the least normal number of ``dtype``: half of
    the least subnormal number each, however small they are."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps / 2 * count**0.5
