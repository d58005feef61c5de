"""Which calls of Dynamo's graphs write to tensors that are there already, and so keep their place among reads."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_OPERATORS = frozenset(
    {operator.setitem, operator.delitem, operator.iand, operator.ior}
    | {getattr(operator, name) for name in operator.__all__ if name.startswith("i") and hasattr(operator, name[1:])}
)
"""``x += y`` and its like, ``x[i] = y``."""
_STATISTICS = ("running_mean", "running_var")
_NORMS = ("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Functions that may update running statistics."""
_BUILT_IN = {
    "batch_norm": ("input", "weight", "bias", *_STATISTICS, "training"),
    "instance_norm": ("input", "weight", "bias", *_STATISTICS, "use_input_stats"),
}
"""The first parameters of functions of torch that have no signature in Python."""


def updates(node: fx.Node) -> bool:
    """Whether ``node`` writes to a tensor that is there already."""
    target, keywords = node.target, node.kwargs
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if target in _OPERATORS or (name.endswith("_") and not name.endswith("__")) or keywords.get("out") is not None:
        return True
    given: dict[str, Any] = {**(_named(target, node.args) if callable(target) else {}), **keywords}
    if given.get("inplace") or given.get("max_norm") is not None:
        return True
    if name in _NORMS:
        if name in _BUILT_IN and all(given.get(each) is None for each in _STATISTICS):
            return False
        return bool(given.get("training", given.get("use_input_stats", name != "batch_norm")))
    return "moving_avg" in name  # observers of quantisation-aware training


def _named(target: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The positional arguments by the names of their parameters, as far as these are known."""
    return dict(zip(_parameters(target), arguments, strict=False))


@functools.lru_cache(1024)
def _parameters(target: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return _BUILT_IN.get(getattr(target, "__name__", ""), ())
