"""Looking at what runs, for the machine here and for one that is not.

Run:   python examples/09_inspect.py
Shows: lowering from specs for an H200 (sm_90a) on any machine, by both GPU backends; the source, the assembly, and the
       report of registers, bytes and operations. Then the same for this processor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import jitgen


@jitgen.jit
def gelu_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh") * gate


def show(target: str, backend: str) -> None:
    print(f"\n==== {backend} for {target}\n")
    specs = [jitgen.TensorSpec(("M", 4096), torch.bfloat16) for _ in range(2)]
    lowered = gelu_gate.lower(*specs, target=target, backend=backend)
    print(lowered.explain())
    print(f"template {lowered.kernels[0].template}, {len(lowered.source.splitlines())} lines of source:\n")
    print("\n".join(lowered.source.splitlines()[:14]), "\n...\n")
    try:
        executable = lowered.compile()
    except jitgen.CompileError as error:
        print(f"not compiled here: {error}")
        return
    for kernel in executable.report:
        print(", ".join(f"{name} {value}" for name, value in kernel.items() if name not in ("key", "origin")))
    sizes = ", ".join(f"{kind} {len(code)}" for kind, code in executable.asm.items())
    print(f"asm: {sizes} (characters or bytes)")


def main() -> None:
    show("sm_90a", "cuda")
    show("sm_90a", "triton")
    show("cpu", "cpp")


if __name__ == "__main__":
    main()
