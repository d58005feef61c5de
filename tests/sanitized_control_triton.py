"""The kernel in Triton by which a run of compute-sanitizer shows that it sees Triton's kernels of jitgen's names."""

import torch
import triton
import triton.language as tl


@triton.jit
def jitgen_control_triton(data, count: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(data + count + tl.arange(0, count), 1.0)


def run(data: torch.Tensor) -> None:
    """Launch it: it stores beyond ``data``, which memcheck has to find."""
    jitgen_control_triton[(1,)](data, data.numel())
