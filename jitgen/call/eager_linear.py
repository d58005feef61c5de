"""``F.linear`` with a quantised weight in eager torch, as a generated kernel (``quant/eager.py`` says where)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jitgen.call.function import JitFunction
from jitgen.quant import eager


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def _linear_with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


def register() -> None:
    """Make ``F.linear`` of a model after ``quantize_`` run generated kernels."""
    plain, biased = JitFunction(_linear), JitFunction(_linear_with_bias)

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            return plain(x, weight) if bias is None else biased(x, weight, bias)

    eager.kernel = kernel
