"""Rows that are joined of lengths of themselves, behind a reduction of the row: a rotary embedding of normalised heads
is one kernel, in every dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from tests.cuda_on_host import run
from tests.joined_rows import ONE_KERNEL, OTHERS, Function, Tensor, arguments, halves, pairs
from tests.numeric import mismatch, reference

FUNCTIONS = {**ONE_KERNEL, **OTHERS}


def wrong(function: Function, got: Tensor, *tensors: Tensor) -> str | None:
    return mismatch(got, reference(function, *tensors), function(*tensors), magnitude=4.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    function = FUNCTIONS[name]
    compiled = jitgen.jit(function)
    empty = () if name in ("of_extremes", "of_other_rows") else ((2, 3, 0),)  # nothing has no maximum
    for shape in ((5, 3, 24), (1, 1, 8), (0, 3, 24), *empty):
        tensors = arguments(shape, torch.float32)
        assert wrong(function, compiled(*tensors), *tensors) is None, shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_values_of_other_dtypes(dtype: torch.dtype) -> None:
    for function in (halves, pairs):
        tensors = arguments((3, 2, 40), dtype)
        assert wrong(function, jitgen.jit(function)(*tensors), *tensors) is None


def test_values_of_odd_lengths_and_strided_rows() -> None:
    """Halves of an odd row do not rotate into one another: ``chunk`` makes them unequal."""
    function = jitgen.jit(ONE_KERNEL["of_softmax"])
    x, weight, cos, sin = arguments((4, 6, 24), torch.float32)
    for tensors in (
        (x.transpose(0, 1)[:4], weight, cos, sin),
        (x[:, ::2], weight, cos, sin),
        (x.flip(2), weight, cos, sin),
    ):
        assert wrong(ONE_KERNEL["of_softmax"], function(*tensors), *tensors) is None

    def joined_again(x: Tensor) -> Tensor:
        left, right = (x / x.abs().sum(-1, keepdim=True)).chunk(2, -1)
        return torch.cat([right, left], -1)

    for length in (2, 5, 6):
        x = torch.randn(3, length)
        assert mismatch(jitgen.jit(joined_again)(x), reference(joined_again, x), magnitude=1.0) is None


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel_reads_each_row_once(name: str) -> None:
    specs = [
        jitgen.TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in arguments((512, 8, 128), torch.bfloat16)
    ]
    for backend, target in (("cuda", "sm_90a"), ("triton", "sm_90a"), ("cpp", "cpu")):
        low = jitgen.jit(ONE_KERNEL[name]).lower(*specs, backend=backend, target=target)
        assert low.balance.kernels == 1
        assert name == "pairs" or low.balance.bytes_ratio < 1.01


@pytest.mark.parametrize("name", ["halves", "pairs"])
def test_values_of_cuda(name: str) -> None:
    tensors = arguments((2, 2, 24), torch.float32)
    (got,) = run(ONE_KERNEL[name], *tensors)
    assert wrong(ONE_KERNEL[name], got, *tensors) is None


def test_values_through_a_callers_output() -> None:
    tensors = arguments((3, 2, 24), torch.float32)
    room = torch.full((5, 4, 26), 7.0)
    jitgen.jit(halves).bind(*tensors)(*tensors, out=room[1:-1, 1:-1, 1:-1])
    assert wrong(halves, room[1:-1, 1:-1, 1:-1], *tensors) is None
    room[1:-1, 1:-1, 1:-1] = 7.0
    assert bool((room == 7.0).all())


def test_gradients() -> None:
    tensors = [tensor.double().requires_grad_() for tensor in arguments((2, 2, 8), torch.float32)]
    for function in (halves, pairs):
        assert torch.autograd.gradcheck(jitgen.jit(function), tensors)


def pairs_transposed(x: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    return torch.stack([x * 2, y], -1).flatten(-2).transpose(0, 1).contiguous()


def pairs_in_two_orders(x: Tensor, y: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    pairs = torch.stack([x, y], -1).flatten(-2)
    return pairs.permute(2, 0, 1) + 1, pairs


def rows_in_another_order(x: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
    return x[chosen].flatten(1, 2).permute(2, 1, 0) + 1


@pytest.mark.parametrize("function", [pairs_transposed, pairs_in_two_orders, rows_in_another_order])
def test_what_is_joined_or_chosen_is_stored_in_another_order_at_once(function: Callable[..., Any]) -> None:
    for shape in ((3, 4, 6), (1, 5, 2), (0, 4, 2)):
        tensors = (*torch.randn(2, *shape), torch.zeros(2, 3, dtype=torch.int64)[:, : 3 * shape[0]])
        got, want = jitgen.jit(function)(*tensors), function(*tensors)
        for mine, eager in zip(
            *(value if isinstance(value, tuple) else (value,) for value in (got, want)), strict=True
        ):
            assert torch.equal(mine, eager)
        low = jitgen.jit(function).lower(*tensors, backend="cuda", target="sm_90a")
        assert low.balance.kernels == int(0 not in shape)
