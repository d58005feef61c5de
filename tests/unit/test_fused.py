"""torch's fused optimisers in decorated functions: ``torch._fused_adamw_`` and its like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.errors import TraceError

Tensor = torch.Tensor
_ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
_OF_ADAM = {"amsgrad": False, "maximize": False}
_SGD = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.1, "nesterov": False, "maximize": False}
CASES: dict[str, tuple[Callable[..., None], int, dict[str, Any]]] = {
    "AdamW": (torch._fused_adamw_, 4, _ADAM | _OF_ADAM),
    "AdamW of amsgrad": (torch._fused_adamw_, 5, _ADAM | {"amsgrad": True, "maximize": True}),
    "Adam": (torch._fused_adam_, 4, _ADAM | _OF_ADAM | {"lr": torch.tensor(0.01)}),
    "momentum": (torch._fused_sgd_, 3, _SGD | {"is_first_step": False}),
    "Nesterov": (torch._fused_sgd_, 3, _SGD | {"nesterov": True, "dampening": 0.0, "is_first_step": True}),
    "SGD": (torch._fused_sgd_, 2, _SGD | {"momentum": 0.0, "is_first_step": False}),
    "Adagrad": (
        torch._fused_adagrad_,
        3,
        {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "eps": 1e-8, "maximize": False},
    ),
}
SIZES = ((3, 4), (37,), (1,))


def lists(name: str, dtype: torch.dtype) -> list[list[Tensor]]:
    function, count, _ = CASES[name]
    generator = torch.Generator().manual_seed(0)
    made = [[torch.rand(*size, generator=generator).to(dtype) for size in SIZES] for _ in range(count)]
    steps = [[torch.tensor(step) for step in (1.0, 7.0, 400.0)]]
    if function is torch._fused_sgd_:
        return made + [[]] * (3 - count)
    return made + ([[]] * (5 - count) if "Adam" in name else []) + steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(where=lambda name, dtype: dtype == torch.float32 or name == "AdamW")
def test_a_step(name: str, dtype: torch.dtype) -> None:
    """Against torch's step in float64: that of bfloat16 has wrong momentum on a CPU (torch 2.13). Errors are half a
    unit in the last place of what is stored, or some of float32's, in which powers of float64 are computed too."""
    function, _, options = CASES[name]
    given = lists(name, dtype)
    exact = [[tensor.double() for tensor in tensors] for tensors in given]
    jitgen.jit(lambda *tensors: function(*tensors, **options))(*given)
    function(*exact, **options)
    close = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    for found, wanted in zip(given, exact, strict=True):
        for own, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(own.double(), other, rtol=close, atol=close)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_scaled_gradients_and_infinities(found: float) -> None:
    function, _, options = CASES["AdamW"]
    given, eager = lists("AdamW", torch.float32), lists("AdamW", torch.float32)
    numbers = {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(found)}
    jitgen.jit(lambda *tensors, **named: function(*tensors, **options, **named))(*given, **numbers)
    function(*eager, **options, **numbers)
    torch.testing.assert_close(given, eager, rtol=1e-5, atol=1e-6)


def test_the_step_of_lists_is_one_kernel() -> None:
    function, _, options = CASES["AdamW"]
    tensors = [[torch.rand(2048) for _ in range(3)] for _ in range(4)]
    steps = [torch.tensor(3.0) for _ in range(3)]
    low = jitgen.jit(lambda *lists: function(*lists, [], steps, **options)).lower(*tensors)
    assert len(low.kernels) == 1


def test_lists_of_other_lengths() -> None:
    function, _, options = CASES["AdamW"]
    tensors = lists("AdamW", torch.float32)
    with pytest.raises(TraceError, match="one length"):
        jitgen.jit(lambda *lists: function(*lists, **options))(tensors[0][:2], *tensors[1:])
