"""relu(x @ W) and its like: whatever stands behind a matrix product is computed from its accumulators.

Run:   python examples/04_relu_matmul.py
Shows: bias, activation, residual and casts join the product's kernel; a transposed weight is read as it lies; products
       that share an activation are one kernel; what cannot be one kernel becomes a few, and `explain` says why.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensor = torch.Tensor


@jitgen.jit
def relu_matmul(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)


@jitgen.jit
def bias_gelu_residual(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias)) + residual


@jitgen.jit
def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


@jitgen.jit
def scores(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, dim=-1)


def main() -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).bfloat16()

    x = random(3, 33, 512)
    calls = (
        (relu_matmul, (x, random(512, 1000))),
        (bias_gelu_residual, (x, random(768, 512), random(768), random(3, 33, 768))),
        (projections, (x, random(512, 512), random(128, 512), random(128, 512))),
        (scores, (x, random(512, 200) / 512**0.5)),
    )
    for function, arguments in calls:
        results = function(*arguments)
        exact = function.reference(*(argument.double() for argument in arguments))
        pairs = zip(results, exact, strict=True) if isinstance(results, tuple) else [(results, exact)]
        errors = [float((result.double() - e).norm() / e.norm()) for result, e in pairs]
        print(function.lower(*arguments).explain())
        print(f"error against float64: {', '.join(f'{error:.1e}' for error in errors)}\n")
        assert max(errors) < 2**-7  # one rounding to bfloat16 at the end, and its weights' share


if __name__ == "__main__":
    main()
