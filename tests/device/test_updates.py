"""Updates of many tensors by one kernel on a GPU, in both dialects, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import jitgen
from tests.updates import CASES, LIMITS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MANY = ("adamw of fifty", "adamw of forty, sliced", "momentum of all ranks", "foreach", "in a ring of forty")


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", [*MANY, "momentum of bfloat16", "returns views"])
def test_values(name: str, backend: str) -> None:
    case = CASES[name]
    arguments = pytree.tree_map(lambda tensor: case.made(tensor.cuda()), case.arguments())
    exact = pytree.tree_map(lambda tensor: tensor.double(), arguments)
    case.function(*exact)
    jitgen.jit(case.function, backend=backend)(*arguments)
    for left, right in zip(pytree.tree_leaves(arguments), pytree.tree_leaves(exact), strict=True):
        bound = LIMITS[left.dtype] * (1 + right.abs())
        assert ((left.double() - right).abs() <= bound).all()


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_large_and_small_tensors_with_a_rate(backend: str) -> None:
    def step(parameters: Any, gradients: Any, rate: float) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient * rate)

    sizes = [(1025, 513), (3,), (0, 4), (4096,), (65, 2, 7)] * 12
    parameters, gradients = ([torch.rand(size, device="cuda") for size in sizes] for _ in range(2))
    wanted = [p.double() - g.double() * 0.125 for p, g in zip(parameters, gradients, strict=True)]
    jitgen.jit(step, backend=backend)(parameters, gradients, 0.125)
    for parameter, right in zip(parameters, wanted, strict=True):
        assert ((parameter.double() - right).abs() <= 2**-23).all()
