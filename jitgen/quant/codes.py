"""Lists the dtypes of 8-bit codes that products multiply, and what follows from each.

Formats, kinds of activations, checkpoints, traces and the mainloops of products read them here. Kernels of one dialect
multiply some of them (``families/gemm/code_products.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128
"""Columns, and of a weight its rows too, that share a scale where codes have scales of blocks, as in DeepSeek-V3."""


@dataclass(frozen=True)
class Code:
    """Describes a dtype of codes.

    Attributes:
        dtype: torch's.
        format: of weights without zero-points that have such codes; None where there is none.
    """

    dtype: torch.dtype
    format: str | None = None

    @property
    def largest(self) -> float:
        """Returns the largest number."""
        return (torch.finfo if self.dtype.is_floating_point else torch.iinfo)(self.dtype).max

    @property
    def magnitude(self) -> int:
        """Returns the largest magnitude of an integer."""
        info = torch.iinfo(self.dtype)
        return max(-info.min, info.max)


CODES = {
    "int8": Code(torch.int8, "int8"),
    "uint8": Code(torch.uint8),
    "float8_e4m3fn": Code(torch.float8_e4m3fn, "fp8_e4m3"),
    "float8_e5m2": Code(torch.float8_e5m2, "fp8_e5m2"),
}
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8")
SIGNED = ("int8", *FLOAT8)
"""The codes of activations and caches."""


def is_float8(dtype: torch.dtype) -> bool:
    return any(CODES[name].dtype == dtype for name in FLOAT8)


def longest_exact_sum(x: str, weight: str) -> int:
    """Returns the largest K for which sums of products of integers of these two dtypes fit int32, whatever the codes:
    131,071 for int8 by int8, 33,025 for uint8 by uint8."""
    return (2**31 - 1) // (CODES[x].magnitude * CODES[weight].magnitude)
