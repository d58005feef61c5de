"""Matrix products with a quantised weight outside ``jitgen.jit``, in plain torch.

``linear`` is the one place through which ``F.linear``, ``x @ w.T``, ``torch.matmul`` and ``addmm`` go.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jitgen.quant.qtensor import QTensor


def linear(x: torch.Tensor, weight: QTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x[..., K] @ W[N, K].T + bias``, of x's dtype; ``weight`` is not transposed."""
    return F.linear(x, weight.dequantize(x.dtype), bias)
