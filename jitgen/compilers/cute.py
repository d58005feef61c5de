"""Whether CuTe compiles here: NVRTC, CUTLASS's headers, and CCCL's, of which CUTLASS 4.2 takes versions below 13.2.

Generated kernels include two headers of CUTLASS that need no CCCL (``wgmma_atoms.cuh``). A kernel that is written
with CuTe's layouts and tensors needs all of it. The probe is such a kernel: a layout, and an mma atom on fragments.
"""

from __future__ import annotations

from jitgen.compilers import nvrtc
from jitgen.errors import CompileError
from jitgen.spec import Artifact, KernelSource, Target

PACKAGES = ("nvidia-cutlass", "cuda")
REMEDY = "pip install 'jitgen[cuda]' for CCCL below 13.2, with which CUTLASS 4.2 compiles"

_LAYOUTS = """
#include <cute/layout.hpp>

extern "C" __global__ void layouts(int* y) {
  using namespace cute;
  const auto layout = make_layout(make_shape(Int<4>{}, Int<8>{}), make_stride(Int<8>{}, Int<1>{}));
  y[threadIdx.x] = layout(threadIdx.x);
}
"""

_PROBE = """
#include <cute/tensor.hpp>

extern "C" __global__ void cute_probe(const cute::bfloat16_t* a, const cute::bfloat16_t* b, float* c) {
  using namespace cute;
  using Products = TiledMMA<MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>, Layout<Shape<_1, _1, _1>>>;
  const auto rows = make_layout(make_shape(Int<16>{}, Int<16>{}), make_stride(Int<16>{}, Int<1>{}));
  const auto columns = make_layout(make_shape(Int<8>{}, Int<16>{}), make_stride(Int<16>{}, Int<1>{}));
  const auto results = make_layout(make_shape(Int<16>{}, Int<8>{}), make_stride(Int<8>{}, Int<1>{}));
  const auto thread = Products{}.get_slice(threadIdx.x);
  const auto x = thread.partition_A(make_tensor(make_gmem_ptr(a), rows));
  const auto w = thread.partition_B(make_tensor(make_gmem_ptr(b), columns));
  auto y = thread.partition_C(make_tensor(make_gmem_ptr(c), results));
  auto left = thread.make_fragment_A(x);
  auto right = thread.make_fragment_B(w);
  auto sums = thread.make_fragment_C(y);
  copy(x, left);
  copy(w, right);
  clear(sums);
  gemm(Products{}, left, right, sums);
  copy(sums, y);
}
"""


def probe(target: str) -> Artifact:
    """A small CuTe kernel, compiled for ``target``: y[16, 8] = x[16, 16] w[8, 16]^T by one warp. It takes seconds.

    Raises:
        CompileError: headers are missing, or do not fit one another.
    """
    return nvrtc.compile(KernelSource("cute_probe", "cuda", "nvrtc", Target.parse(target), _PROBE, packages=PACKAGES))


def problem() -> str | None:
    """Why CuTe does not compile here, in one line; None where it does. Its layouts alone are tried, in two seconds."""
    try:
        nvrtc.compile(KernelSource("layouts", "cuda", "nvrtc", Target.parse("sm_80"), _LAYOUTS, packages=PACKAGES))
    except CompileError as error:
        return "; ".join(line.strip() for line in str(error).splitlines()[:2])
    return None
