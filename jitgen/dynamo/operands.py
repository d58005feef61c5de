"""Lets a region have operands that Dynamo takes for no higher-order operator of its own.

Dynamo asks whether the operands and results of such an operator share memory, and asserts that each is one fake tensor
("Expected FakeTensor, got ..."). A quantised weight consists of several, which torch from 2.13 on looks at, and within
``torch.func.grad``, ``vjp`` and ``jacrev`` a fake tensor is wrapped.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._dynamo.variables.higher_order_ops import BaseHOPVariable, _hop_name_to_variable_class
from torch._higher_order_ops import utils

from jitgen.quant.qtensor import QTensor

_collect_fakes: Any = utils._collect_fake_inputs


def admit(operator: str) -> None:
    """Has Dynamo take such operands of the higher-order operator of this name."""
    _hop_name_to_variable_class[operator] = _Variable


class _Variable(BaseHOPVariable):
    """Represents a higher-order operator while Dynamo traces, which it does in one thread at a time."""

    def _call_function(self, *args: Any, **kwargs: Any) -> Any:
        with patch.object(utils, "_collect_fake_inputs", _fakes_of):
            return super()._call_function(*args, **kwargs)


def _fakes_of(nodes: Any) -> list[Any]:
    """Returns the fake values of ``nodes``: of a tensor within a transform what it wraps, and of a quantised weight its
    tensors."""
    values: list[Any] = []
    for node in nodes:
        example = getattr(node, "node", node).meta["example_value"]
        while isinstance(example, torch.Tensor) and is_functorch_wrapped_tensor(example):
            example = get_unwrapped(example)
        if isinstance(example, QTensor):
            values += example.tensors
        elif isinstance(example, torch.Tensor):
            values.append(example)
        else:
            values += _collect_fakes([node])
    return values
