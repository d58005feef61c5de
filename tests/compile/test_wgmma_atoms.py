"""wgmma of every width compiles under NVRTC without any package, and is the instruction that its name says."""

from __future__ import annotations

import re

import pytest

from jitgen.codegen.environment import family_folder, headers, packages
from jitgen.compilers import nvrtc
from jitgen.spec import KernelSource, Target

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")


TEXT = """
#include "jitgen/wgmma_atoms.cuh"
extern "C" __global__ void products(float* y) {
  float d[N / 2] = {};
  const uint32_t a[4] = {1, 2, 3, 4};
  jitgen::wgmma_fence();
  jitgen::Wgmma<jitgen::ELEMENT, N>::registers(d, a, 64, 1);
  jitgen::Wgmma<jitgen::ELEMENT, N>::registers<1>(d, a, 64, 1);
  jitgen::Wgmma<jitgen::ELEMENT, N>::shared<1>(d, 32, 64, 0);
  jitgen::Wgmma<jitgen::ELEMENT, N>::shared<0>(d, 32, 64, 1);
  jitgen::wgmma_commit();
  jitgen::wgmma_wait<0>();
  for (int i = 0; i < N / 2; ++i) y[i * 128 + threadIdx.x] = d[i];
}
"""


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", [16, 80, 96, 256])
def test_wgmma_needs_no_package_and_is_the_instruction_of_its_width(element: str, n: int) -> None:
    text = TEXT.replace("ELEMENT", element).replace("N / 2", str(n // 2)).replace(", N>", f", {n}>")
    included = headers(family_folder("gemm"), text)
    assert packages(text, included) == ()
    source = KernelSource("products", "cuda", "nvrtc", Target.parse("sm_90a"), text, included)
    ptx = nvrtc.compile(source).files["kernel.ptx"].decode()
    name = {"bfloat16": "bf16", "float16": "f16"}[element]
    found = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{n}k16\.f32\.{name}\.{name}.*?;", ptx, re.DOTALL)
    assert len(found) == 4
    endings = [re.sub(r".*\bp, *", "", each).rstrip(";").replace(" ", "") for each in found]
    assert endings == ["1,1,0", "1,1,1", "1,1,0,1", "1,1,0,0"], "not negated; A along K; B along K but for two"
