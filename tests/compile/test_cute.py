"""CuTe under NVRTC: a kernel of layouts and an mma atom, and the two headers that generated kernels include."""

from __future__ import annotations

import re

import pytest

from jitgen.codegen.environment import family_folder, headers, packages
from jitgen.compilers import cute, disassemble, nvrtc
from jitgen.spec import KernelSource, Target

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")


def has_cccl_for_cutlass() -> bool:
    found = nvrtc.find_headers("cuda")
    versions = dict(found.versions) if found else {}
    version = versions.get("nvidia-cuda-cccl") or versions.get("cuda", "99")
    return tuple(map(int, version.split(".")[:2])) < (13, 2)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_a_kernel_of_layouts_and_an_mma_atom_compiles(target: str) -> None:
    if not has_cccl_for_cutlass():
        pytest.skip("CUTLASS 4.2 takes CCCL below 13.2")
    artifact = cute.probe(target)
    assert artifact.meta["spill_bytes"] == 0
    if disassemble.find_tool() is not None:
        assert "HMMA.16816.F32.BF16" in disassemble.sass(artifact.files["kernel.cubin"])


def test_what_is_wrong_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_headers", lambda package: None)
    found = cute.problem()
    assert found is not None
    assert "headers" in found
    assert "\n" not in found


TEXT = """
#include "jitgen/wgmma_atoms.cuh"
extern "C" __global__ void products(float* y) {
  float d[N / 2] = {};
  const uint32_t a[4] = {1, 2, 3, 4};
  cute::warpgroup_arrive();
  jitgen::Wgmma<jitgen::ELEMENT, N>::registers(d, a, 64, 1);
  jitgen::Wgmma<jitgen::ELEMENT, N>::shared<1>(d, 32, 64, 0);
  jitgen::Wgmma<jitgen::ELEMENT, N>::shared<0>(d, 32, 64, 1);
  cute::warpgroup_commit_batch();
  cute::warpgroup_wait<0>();
  for (int i = 0; i < N / 2; ++i) y[i * 128 + threadIdx.x] = d[i];
}
"""


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", [16, 96, 256])
def test_atoms_need_no_toolkit_and_are_the_instructions_they_name(element: str, n: int) -> None:
    text = TEXT.replace("ELEMENT", element).replace("N / 2", str(n // 2)).replace(", N>", f", {n}>")
    included = headers(family_folder("gemm"), text)
    assert packages(text, included) == ("nvidia-cutlass",)
    source = KernelSource("products", "cuda", "nvrtc", Target.parse("sm_90a"), text, included, ("nvidia-cutlass",))
    ptx = nvrtc.compile(source).files["kernel.ptx"].decode()
    name = {"bfloat16": "bf16", "float16": "f16"}[element]
    found = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n{n}k16\.f32\.{name}\.{name}.*?;", ptx, re.DOTALL)
    assert len(found) == 3
    endings = [re.sub(r".*\bp, *", "", each).rstrip(";").replace(" ", "") for each in found]
    assert endings == ["1,1,0", "1,1,0,1", "1,1,0,0"], "not negated; A along K; B along K but for the second"


def test_sources_without_these_headers_need_no_package() -> None:
    included = headers(family_folder("gemm"), '#include "jitgen/gemm_mma.cuh"')
    assert packages('#include "jitgen/gemm_mma.cuh"', included) == ()
