"""A Triton kernel of your own within a decorated function: what stands around it is computed in it.

Run:   python examples/18_own_triton_kernel.py
Shows: the plan for an H200 (sm_90a) on any machine, one kernel where there would be three; your lines with the calls
       that replace a load and a store; and a rule that is a kernel of its own, with the reason. With a GPU, or with
       TRITON_INTERPRET=1 on the CPU, the kernel also runs and is compared with torch. Needs Triton.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

import jitgen

try:
    import triton
    import triton.language as tl
except ImportError:
    raise SystemExit("this example needs Triton: pip install triton") from None


@triton.jit
def row_softmax(x_ptr, out_ptr, row_stride, columns, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * row_stride + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < columns
    x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf"))
    powers = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + offsets, powers / tl.sum(powers, axis=0), mask=mask)


@triton.jit
def running_total(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    for _ in range(2):  # reads what it has stored
        total = tl.load(out_ptr + row + offsets, mask=offsets < columns)
        total += tl.load(x_ptr + row + offsets, mask=offsets < columns)
        tl.store(out_ptr + row + offsets, total, mask=offsets < columns)


@jitgen.jit
def attention_weights(scores: torch.Tensor, bias: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    x = scores * 0.125 + bias
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    row_softmax[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=block)
    return (out * torch.sigmoid(gate)).half()


@jitgen.jit
def totals(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    running_total[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return F.gelu(out)


def main() -> None:
    matrix, row = jitgen.TensorSpec(("M", 1000)), jitgen.TensorSpec((1000,))
    lowered = attention_weights.lower(matrix, row, matrix, target="sm_90a")
    print(lowered.explain(), "\n")
    print(lowered.source)
    print(totals.lower(matrix, target="sm_90a").explain())
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        print("\nset TRITON_INTERPRET=1 to run the kernel on this processor")
        return
    device = "cpu" if interpreted else "cuda"
    scores, gate, bias = (torch.randn(size, device=device) for size in ((64, 1000), (64, 1000), (1000,)))
    found = attention_weights(scores, bias, gate)
    right = (scores.double() * 0.125 + bias).softmax(1) * torch.sigmoid(gate.double())
    print(f"\nlargest difference from float64: {(found.double() - right).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
