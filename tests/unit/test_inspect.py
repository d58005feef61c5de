"""What a user sees of what ran and of what would run: specialisations, plans, and ``explain``."""

from __future__ import annotations

import pytest
import torch

import jitgen
from jitgen.compilers import nvrtc


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


def silu_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.nn.functional.silu(x @ w), -1)


def test_the_backward_of_a_call_with_gradients_is_lowered_as_it_runs() -> None:
    function = jitgen.jit(silu_product)
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(64, 32, requires_grad=True)
    lowered = function.lower(x, w)
    y = function(x, w)
    torch.autograd.grad(y, (x, w), torch.randn_like(y))
    of_name = {found.name: found for found in function.specializations if found.kernels}
    assert lowered.backward is not None
    for name, wanted in (("silu_product", lowered), ("silu_product_backward", lowered.backward)):
        assert [kernel.key for kernel in of_name[name].kernels] == [kernel.key for kernel in wanted.kernels]
        assert [kernel.source for kernel in of_name[name].kernels] == [kernel.source for kernel in wanted.kernels]
        (explained,) = of_name[name].lowered
        assert explained.explain() == wanted.explain()
    assert function.source(x, w) == lowered.source
    with torch.no_grad():
        assert function.lower(x, w).backward is None
    assert jitgen.jit(lambda x: x.detach() + 1).lower(x).backward is None


def test_the_backward_is_lowered_for_other_targets_captured_tensors_and_quantised_weights() -> None:
    function = jitgen.jit(silu_product)
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(64, 32, requires_grad=True)
    for backend in ("cuda", "triton"):
        lowered = function.lower(x, w, target="sm_90a", backend=backend).backward
        assert lowered is not None
        assert {kernel.backend for kernel in lowered.kernels} == {backend}
    layer = torch.nn.Linear(64, 8)
    closed = jitgen.jit(lambda x: layer(x).exp()).lower(x.detach())
    assert closed.backward is not None
    assert closed.backward.kernels
    weight = jitgen.quantize(torch.randn(64, 64), "int4", 32)
    quantised = jitgen.jit(lambda x, w: torch.nn.functional.linear(x, w).relu()).lower(x, weight)
    assert quantised.backward is not None
    assert "matrix product" in quantised.backward.explain()
