"""SwiGLU over two int4 weights: both products, the activation and the multiplication are one kernel.

Run:   python examples/07_swiglu_int4.py
Shows: quantising a weight, what it takes and what it costs in accuracy; that one function serves every format; a weight
       in a module, read at every call; the same kernels made for an H200 on a machine without a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, INNER = 1024, 2816
Tensor = torch.Tensor


@jitgen.jit
def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.up = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def main() -> None:
    dense = [torch.randn(INNER, HIDDEN, device=DEVICE).bfloat16() / HIDDEN**0.5 for _ in range(2)]
    x = torch.randn(4, HIDDEN, device=DEVICE).bfloat16()
    wanted = swiglu.reference(*(tensor.double() for tensor in (x, *dense)))
    for format, group_size in (("int8", None), ("int4", 128), ("int4", 32), ("uint4", 64)):
        gate, up = (jitgen.quantize(weight, format, group_size=group_size) for weight in dense)
        y = swiglu(x, gate, up)
        exact = swiglu.reference(x.double(), *(w.dequantize(torch.float64) for w in (gate, up)))
        kernel = float((y.double() - exact).norm() / exact.norm())
        format_error = float((exact - wanted).norm() / wanted.norm())
        size = (gate.nbytes + up.nbytes) / sum(weight.nbytes for weight in dense)
        print(
            f"{format:5s} groups of {group_size or 'a row':5}: {size:5.1%} of bfloat16's bytes; the kernel's error "
            f"{kernel:.1e}, the format's {format_error:.1e}"
        )
        assert kernel < 2**-7

    model = MLP().to(DEVICE).bfloat16().requires_grad_(False)
    print(f"\n{jitgen.quantize_(model, 'int4', group_size=128)}\n")
    block = jitgen.jit(model)
    y = block(x)
    print(block.lower(x).explain())
    assert torch.isfinite(y).all()

    spec = jitgen.TensorSpec((INNER, HIDDEN), torch.bfloat16, format="int4", group_size=128)
    for rows in (1, 512):
        low = swiglu.lower(jitgen.TensorSpec((rows, HIDDEN), torch.bfloat16), spec, spec, target="sm_90a")
        print(f"\nfor an H200, {rows} rows:\n{low.explain()}")


if __name__ == "__main__":
    main()
