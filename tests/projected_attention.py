"""Attention whose result is read by a product through views, as in every decoder layer, with gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import jitgen

Tensor = torch.Tensor
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def projected(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(o.transpose(1, 2).flatten(2), weight)


def arguments(
    batch: int, heads: int, shared: int, rows: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    shapes = [(batch, heads, rows, width), *[(batch, heads // shared, rows, width)] * 2, (24, heads * width)]
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def error(backend: str, given: list[Tensor]) -> float:
    """The greatest error of the result and of gradients, in norm, relative to float64."""
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    result, wanted = jitgen.jit(projected, backend=backend)(*given), projected(*exact)
    of_result = torch.randn_like(result)
    found = [result.detach(), *torch.autograd.grad(result, given, of_result)]
    right = [wanted.detach(), *torch.autograd.grad(wanted, exact, of_result.double())]
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))
