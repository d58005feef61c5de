"""Two decorated functions that call each other are one kernel.

Run:   python examples/08_fuse_two_functions.py
Shows: RoPE of a query and a SwiGLU gate written as small functions; each caller's kernel holds its callees. What would
       be a pass over memory for every operation is one; chunk and cat cost no copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@jitgen.jit
def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@jitgen.jit
def rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return q * cos + rotate_half(q) * sin


@jitgen.jit
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@jitgen.jit
def scaled_swiglu(gate_up: torch.Tensor, scale: torch.Tensor, limit: float) -> torch.Tensor:
    return (swiglu(gate_up) * scale).clamp(-limit, limit)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(out.double() - exact) / torch.linalg.vector_norm(exact))


def main() -> None:
    angles = torch.rand(100, 1, 64, device=DEVICE).repeat(1, 1, 2)
    q = torch.randn(100, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    table = [angles.cos().bfloat16(), angles.sin().bfloat16()]
    gate_up = torch.randn(100, 2 * 11008, dtype=torch.bfloat16, device=DEVICE)
    scale = torch.rand(11008, dtype=torch.bfloat16, device=DEVICE)
    for function, arguments in ((rope, (q, *table)), (scaled_swiglu, (gate_up, scale, 6.0))):
        exact = function.reference(*(a.double() if isinstance(a, torch.Tensor) else a for a in arguments))
        lowered = function.lower(*arguments)
        print(f"{lowered.explain()}\n  error against float64: {relative_error(function(*arguments), exact):.1e}\n")
        assert len(lowered.kernels) == 1


if __name__ == "__main__":
    main()
