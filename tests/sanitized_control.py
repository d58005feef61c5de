"""Kernels with one error each, by which a run of compute-sanitizer shows that its tools see jitgen's kernels.

They are loaded and launched as generated kernels are, from a cubin of NVRTC through the driver, and their names begin
like those.
"""

from __future__ import annotations

import contextlib

import torch

from jitgen.compilers import nvrtc
from jitgen.runtime import cuda
from jitgen.spec import KernelSource, Target

ERRORS = {
    "memcheck": "data[64 + threadIdx.x] = 1.0f;",  # beyond the 64 elements
    "racecheck": "shared[threadIdx.x % 2] = threadIdx.x; data[threadIdx.x] = shared[(threadIdx.x + 1) % 2];",
    "synccheck": "if (threadIdx.x % 32 < 16) __syncthreads(); data[threadIdx.x] = 1.0f;",  # half of a warp
    "initcheck": "data[threadIdx.x] = other[threadIdx.x];",  # nothing has written to `other`
}
"""The tool that has to find an error, and the lines that make it."""
THREADS = 64


def source(tool: str, target: Target) -> KernelSource:
    """The kernel whose error ``tool`` finds."""
    name = f"jitgen_control_{tool}"
    body = f"__shared__ float shared[2];\n  {ERRORS[tool]}"
    text = f'extern "C" __global__ void {name}(float* data, const float* other) {{\n  {body}\n}}\n'
    return KernelSource(name, "cuda", "nvrtc", target, text)


def run(tool: str, backend: str) -> None:
    """Launch the kernel whose error ``tool`` finds; of Triton there is one, beyond its operand as memcheck's is."""
    if backend == "triton":
        from tests import sanitized_control_triton

        sanitized_control_triton.run(torch.zeros(THREADS).cuda())
    else:
        _run_cuda(tool)
    with contextlib.suppress(RuntimeError):  # memcheck ends the context at the first error
        torch.cuda.synchronize()


def _run_cuda(tool: str) -> None:
    kernel = source(tool, cuda.target_of(0))
    data, other = torch.zeros(THREADS).cuda(), torch.empty(THREADS, device="cuda")
    function = cuda.load(nvrtc.compile(kernel).files["kernel.cubin"], kernel.name, 0)
    launch = cuda.Launch(function, "PP", (None, None), (1, 1, 1), (THREADS, 1, 1))
    launch(cuda.current_stream(0), data.data_ptr(), other.data_ptr())
