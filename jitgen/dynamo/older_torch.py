"""Lets a quantised weight be an operand of a region where torch is older than 2.13.

Dynamo asks whether operands and results of a higher-order operator share memory, and its older versions end there with
"Expected FakeTensor, got QTensor". Newer ones look at the tensors that such a tensor consists of, as is done here.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch._dynamo.variables.higher_order_ops import BaseHOPVariable, _hop_name_to_variable_class
from torch._higher_order_ops import utils

from jitgen.quant.qtensor import QTensor

_collect_fakes: Any = utils._collect_fake_inputs


def admit_weights(operator: str) -> None:
    """Has Dynamo take quantised weights among the operands of the higher-order operator of this name."""
    if not hasattr(utils, "is_traceable_wrapper_subclass"):
        _hop_name_to_variable_class[operator] = _Variable


class _Variable(BaseHOPVariable):
    """Represents a higher-order operator whose operands may be quantised weights while Dynamo traces. Dynamo traces in
    one thread at a time."""

    def _call_function(self, *args: Any, **kwargs: Any) -> Any:
        with patch.object(utils, "_collect_fake_inputs", _tensors_of):
            return super()._call_function(*args, **kwargs)


def _tensors_of(nodes: Any) -> list[Any]:
    """Returns the fake values of ``nodes``, with the tensors of each quantised weight in its place."""
    values: list[Any] = []
    for node in nodes:
        example = getattr(node, "node", node).meta["example_value"]
        values += example.tensors if isinstance(example, QTensor) else _collect_fakes([node])
    return values
