"""A Python number that its dtype cannot hold is refused where torch refuses it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import NumberRangeError, TraceError


def _assigned(x: torch.Tensor, n: Any) -> torch.Tensor:
    x = x.clone()
    x[0] = n
    return x


def _outer(x: torch.Tensor) -> torch.Tensor:
    return x[:, None] * x


FUNCTIONS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "add": lambda x, n: x + n,
    "multiply": lambda x, n: n * x,
    "compare": lambda x, n: x < n,
    "divide": lambda x, n: x / n,
    "floor_divide": lambda x, n: x // n,
    "remainder": lambda x, n: x % n,
    "trunc_divide": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "pow": lambda x, n: x**n,
    "clamp": lambda x, n: x.clamp(n, n),
    "clamp_min": lambda x, n: x.clamp_min(n),
    "clip in place": lambda x, n: x.clone().clip_(max=n),
    "where": lambda x, n: torch.where(x > 3, x, n),
    "where, method": lambda x, n: x.where(x > 3, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 3, n),
    "fill": lambda x, n: x.clone().fill_(n),
    "full": lambda x, n: torch.full((2,), n, dtype=x.dtype),
    "full_like": lambda x, n: torch.full_like(x, n),
    "tensor": lambda x, n: torch.tensor(n, dtype=x.dtype) + x,
    "tensor of a list": lambda x, n: torch.tensor([n, 1], dtype=x.dtype),
    "scalar_tensor": lambda x, n: torch.scalar_tensor(n, dtype=x.dtype),
    "as_tensor": lambda x, n: torch.as_tensor(n, dtype=x.dtype),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "alpha of sub": lambda x, n: torch.sub(x, x, alpha=n),
    "value of addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "value of addcdiv": lambda x, n: torch.addcdiv(x, x, x, value=n),
    "alpha of addmm": lambda x, n: torch.addmm(_outer(x), _outer(x), _outer(x), alpha=n),
    "beta of addmv": lambda x, n: torch.addmv(x, _outer(x), x, beta=n),
    "alpha of addr": lambda x, n: torch.addr(_outer(x), x, x, alpha=n),
    "alpha of index_add": lambda x, n: x.index_add(0, torch.tensor([0]), x[:1], alpha=n),
    "lerp": lambda x, n: torch.lerp(x, x, n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "constant_pad_nd": lambda x, n: torch.constant_pad_nd(x, (1, 1), n),
    "linspace": lambda x, n: torch.linspace(0, n, 4, dtype=x.dtype),
    "scatter": lambda x, n: x.scatter(0, torch.tensor([0]), n),
    "index_fill": lambda x, n: x.index_fill(0, torch.tensor([0]), n),
    "assignment": _assigned,
    "threshold": lambda x, n: F.threshold(x, 1, n),
    "hardtanh": lambda x, n: F.hardtanh(x, -1, n),
    "hardshrink": lambda x, n: F.hardshrink(x, n),
    "leaky_relu": lambda x, n: F.leaky_relu(x, n),
    "nan_to_num": lambda x, n: torch.nan_to_num(x, n),
}
NUMBERS = {
    torch.int8: (300, -128, 2**40, 300.5),
    torch.uint8: (-1, -256, 256, -1.0),
    torch.int32: (2**33, -(2**31)),
    torch.float16: (1e6, -65519, 1e300, float("inf")),
    torch.bfloat16: (70000, 1e39),
    torch.float32: (1e38, 1e39),
}


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, TraceError, jitgen.UnsupportedError):
        return True
    return False


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_refused_where_torch_refuses(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 3, 5, 100], dtype=dtype)
    different = []
    for name, function in FUNCTIONS.items():
        if name == "linspace" and not dtype.is_floating_point:  # refused altogether
            continue
        for number in NUMBERS[dtype]:
            decorated = jitgen.jit(lambda x, function=function, number=number: function(x, number))
            if _is_refused(lambda: function(x, number)) != _is_refused(lambda: decorated.lower(x)):  # noqa: B023
                different.append((name, number))
    assert not different


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a bool alpha": lambda x: torch.add(x, x, alpha=True),
    "a bool alpha of sub": lambda x: torch.sub(x, x, alpha=False),
    "a bool beta of addr": lambda x: torch.addr(x[:, None], x, x, beta=True),
    "a float alpha of addr": lambda x: torch.addr(x[:, None], x, x, alpha=1.5),
    "a bool bound": lambda x: x.clamp(min=False),
    "arange": lambda x: torch.arange(3, dtype=x.dtype),
    "linspace": lambda x: torch.linspace(0, 1, 4, dtype=x.dtype),
    "logspace": lambda x: torch.logspace(0, 1, 4, dtype=x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.float8_e4m3fn], ids=str)
def test_numbers_of_the_wrong_kind_are_refused_where_torch_refuses(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 0, 1]).to(dtype)
    for name, function in REFUSED.items():
        if _is_refused(lambda: function(x)):  # noqa: B023
            assert _is_refused(lambda: jitgen.jit(function).lower(x)), name  # noqa: B023


def test_the_error_is_one_of_torch_and_names_the_line() -> None:
    x = torch.ones(3, dtype=torch.int8)
    with pytest.raises(NumberRangeError, match=r"300 is beyond the range of int8") as caught:
        jitgen.jit(lambda x: x.clamp(max=300))(x)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, jitgen.TraceError)


def test_a_number_that_is_an_argument_is_refused_by_its_value() -> None:
    x = torch.ones(3, dtype=torch.float16)
    function = jitgen.jit(lambda x, n: x.clamp(max=n) + 0)
    assert torch.equal(function(x, 0.5), x.clamp(max=0.5))
    with pytest.raises(NumberRangeError):
        function(x, 1e9)
    assert torch.equal(function(x, 0.25), x.clamp(max=0.25))


@pytest.mark.parametrize("divisor", [256, 512, -256])
def test_a_divisor_that_wraps_to_zero_is_a_division_by_zero(divisor: int) -> None:
    x = torch.tensor([1, 3], dtype=torch.uint8)
    for function in (lambda x: x // divisor, lambda x: x % divisor, lambda x: torch.fmod(x, divisor)):
        with pytest.raises(RuntimeError):
            function(x)
        with pytest.raises(TraceError, match="division by zero"):
            jitgen.jit(function)(x)
