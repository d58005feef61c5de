"""Replaces functions of torch, written in Python, that a trace meets in another form.

``torch.cond`` would compile its branches, and a ``BatchNorm`` whose momentum is None would ask for the value of a
tensor. What stands for them says the same in functions that have rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from jitgen.trace.guards import tracing
from jitgen.trace.replaced import Replaced

_cond: Callable[..., Any] = torch.cond
_forward: Callable[..., Any] = _BatchNorm.forward


def _chosen(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """Runs both branches, which have no effects, and selects between their results by the condition."""
    if tracing.get() is None:
        return _cond(pred, true_fn, false_fn, operands)
    if isinstance(pred, (bool, int)):
        return (true_fn if pred else false_fn)(*operands)
    return pytree.tree_map(lambda left, right: torch.where(pred, left, right), true_fn(*operands), false_fn(*operands))


def _normalized(module: Any, input: torch.Tensor) -> torch.Tensor:
    """Computes ``_BatchNorm.forward`` with running statistics that are averages over all batches."""
    is_average = module.momentum is None and module.training and module.track_running_stats
    if tracing.get() is None or not is_average or module.num_batches_tracked is None:
        result: torch.Tensor = _forward(module, input)
        return result
    module._check_input_dim(input)
    module.num_batches_tracked.add_(1)
    share = 1.0 / module.num_batches_tracked
    mean, variance = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
    normal = torch.nn.functional.batch_norm(input, mean, variance, module.weight, module.bias, True, 1.0, module.eps)
    module.running_mean.lerp_(mean, share)
    module.running_var.lerp_(variance, share)
    return normal


_TORCH = Replaced(torch, {"cond": _chosen})
_BATCH_NORM = Replaced(_BatchNorm, {"forward": _normalized})


@contextmanager
def stand_ins() -> Iterator[None]:
    """Makes user code that is traced meet the functions of this module."""
    with _TORCH.active(), _BATCH_NORM.active():
        yield
