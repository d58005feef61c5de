"""What a user sees of what ran and of what would run: specialisations, plans, and ``explain``."""

from __future__ import annotations

import pytest
import torch

import jitgen
from jitgen.compile import nvrtc


def test_a_specialization_names_the_kernels_that_its_calls_launched() -> None:
    function = jitgen.jit(lambda x, w: torch.softmax((x @ w) * 1.6328125, -1) * 3.5703125)
    x, w = torch.randn(5, 33), torch.randn(33, 17)
    function(x, w)
    (only,) = function.specializations
    lowered = function.lower(x, w)
    assert len(lowered.kernels) == 2
    assert [kernel.name for kernel in only.kernels] == [kernel.name for kernel in lowered.kernels]
    assert [kernel.key for kernel in only.kernels] == [kernel.key for kernel in lowered.kernels]
    assert function.bind(x, w).kernels == tuple(kernel.key for kernel in only.kernels)
    assert all(kernel.origin in ("compiled", "store") and kernel.name in repr(only) for kernel in only.kernels)
    assert lowered.explain().splitlines()[1] == "2 kernels, 1 temporary"


def test_a_kernel_that_several_calls_share_is_named_once() -> None:
    function = jitgen.jit(lambda x: x * 2.25 + 1)
    for rows in (3, 70):
        function(torch.randn(rows, 9))
    (only,) = function.specializations
    assert len({kernel.key for kernel in only.kernels}) == len(only.kernels) == 1


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
def test_text_of_several_kernels_is_joined_and_their_binaries_are_not() -> None:
    function = jitgen.jit(lambda x, w: torch.softmax((x @ w) * 1.6328125, -1))
    specs = jitgen.TensorSpec((64, 512), torch.bfloat16), jitgen.TensorSpec((512, 256), torch.bfloat16)
    code = function.lower(*specs, target="sm_90a", backend="cuda").compile().asm
    assert code["ptx"].count(".visible .entry") == code["sass"].count("Function :") == 2
    assert set(code) == {"ptx", "sass"}
    assert "cubin" not in code
    with pytest.raises(jitgen.JitgenError, match="2 kernels"):
        code["cubin"]
    with pytest.raises(KeyError):
        code["hsaco"]
