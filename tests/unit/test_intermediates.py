"""What passes between the kernels of one call is float32 where eager torch rounds nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.call.lower import lower
from jitgen.ir.program import Program

Tensor = torch.Tensor
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance from 1 to the next number: what rounding a result may change, relatively."""


def program(function: Callable[..., Any], *arguments: Tensor, target: str | None = None) -> Program:
    jitted = jitgen.jit(function)
    return lower(jitted._resolver, jitted._parameters, arguments, {}, target, None)[0].program


def twos(dtype: torch.dtype) -> Tensor:
    return torch.full((256, 256), 2.0, dtype=dtype)


WITHIN_ONE_FUNCTION: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda a: a - a.mean(),
    "var": lambda a: a * 256 / (1 + a.var(correction=0)),
    "norm": lambda a: a * 512 / torch.linalg.vector_norm(a),
    "mse_loss": lambda a: a - F.mse_loss(a, a * 2) / 2,
    "group_norm": lambda a: F.group_norm(a.view(1, 64, 32, 32), 8),
    "layer_norm over columns": lambda a: F.layer_norm(a.T, (256,)).T + a.mean(0),
}


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("name", WITHIN_ONE_FUNCTION)
@pytest.mark.quick(where=lambda name, dtype: dtype == torch.float16 and name in ("mean", "group_norm"))
def test_sums_within_a_function_do_not_overflow(name: str, dtype: torch.dtype) -> None:
    """Sums of 65,536 elements are beyond float16's largest number, 65,504; the results are not."""
    function, a = WITHIN_ONE_FUNCTION[name], twos(dtype)
    expected = function(a.double())
    found = jitgen.jit(function)(a)
    assert found.dtype == dtype
    # Two roundings at most of numbers up to 2 and of the result; the quotients are exact in float32 to 1e-6.
    torch.testing.assert_close(found.double(), expected, rtol=4 * EPS[dtype], atol=4 * EPS[dtype])


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_group_norm_of_a_large_image(dtype: torch.dtype) -> None:
    """Statistics of 131,072 elements, also where the mean is far from 0: bfloat16 would round it by up to 0.25."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    for middle, deviation in ((0.0, 2.0), (50.0, 2.0)):
        x = (torch.randn(1, 64, 128, 128, generator=generator) * deviation + middle).to(dtype)
        expected = F.group_norm(x.double(), 8)
        found = jitgen.jit(lambda x: F.group_norm(x, 8))(x)
        # The result's rounding, and float32's of statistics near ``middle``, divided by the deviation.
        bound = EPS[dtype] * expected.abs() + 1e-4
        assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("target", ["cpu", "sm_90a", "gfx942"])
def test_intermediates_are_float32_for_every_target(dtype: torch.dtype, target: str) -> None:
    """What is stored in fewer bits is the result, which another kernel copies into another order."""
    for name, function in WITHIN_ONE_FUNCTION.items():
        made = program(function, twos(dtype), target=target)
        rounded = [temporary for temporary in made.temporaries if temporary.dtype != "float32"]
        for body in (body for kernel in made.kernels for body in kernel.bodies):
            loaded = [made.buffers[operand.buffer] for operand in body.operands if operand.kind == "load"]
            if any(buffer is temporary for buffer in loaded for temporary in rounded):
                assert {instruction.op for instruction in body.instructions} == {"load", "store"}, name


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_results_of_functions_pass_in_their_own_dtype(dtype: torch.dtype) -> None:
    """Eager torch rounds a product before the softmax that reads it, and so does the temporary between them."""
    x, w = torch.randn(64, 32).to(dtype), torch.randn(32, 128).to(dtype)
    found = program(lambda x, w: torch.softmax(x @ w * 0.1, -1), x, w)
    assert [temporary.dtype for temporary in found.temporaries] == [str(dtype).removeprefix("torch.")]


def test_a_copy_stays_a_copy() -> None:
    x = torch.randn(5).half()
    found = jitgen.jit(lambda x: x.clone())(x)
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()
