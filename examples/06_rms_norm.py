"""RMSNorm, alone and with what a transformer block does beside it, each in one pass over the row.

Run:   python examples/06_rms_norm.py
Shows: the residual sum and its norm are one kernel with two results; so is the norm followed by an int8 quantisation of
       each row, where the row's largest element, its scale and its codes come out of one reading.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensor = torch.Tensor


@jitgen.jit
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


@jitgen.jit
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.rms_norm(total, (total.shape[-1],), weight, 1e-5)


@jitgen.jit
def rms_norm_int8(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed = F.rms_norm(x, (x.shape[-1],), weight, 1e-5).float()
    scale = normed.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return torch.round(normed / scale).to(torch.int8), scale


def main() -> None:
    x, residual = (torch.randn(256, 4096, device=DEVICE).bfloat16() for _ in range(2))
    weight = torch.randn(4096, device=DEVICE).bfloat16()
    for function, arguments in (
        (rms_norm, (x, weight)),
        (add_rms_norm, (x, residual, weight)),
        (rms_norm_int8, (x, weight)),
    ):
        print(function.lower(*arguments).explain())
    total, normed = add_rms_norm(x, residual, weight)
    exact = add_rms_norm.reference(x.double(), residual.double(), weight.double())
    for result, expected in zip((total, normed), exact, strict=True):
        print(f"error against float64: {float((result.double() - expected).norm() / expected.norm()):.1e}")
    codes, scale = rms_norm_int8(x, weight)
    exact_norm = rms_norm.reference(x.double(), weight.double())
    error = float((codes.double() * scale.double() - exact_norm).norm() / exact_norm.norm())
    print(f"int8 codes with a scale for each row: {error:.1e} from the exact norm")
    assert error < 0.02


if __name__ == "__main__":
    main()
