"""Decides which calls of Dynamo's graphs write to tensors that existed before, and to which of their arguments. Such
calls keep their place among reads."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from jitgen.dynamo.launches import LaunchedKernel

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
_LAYOUT = frozenset({"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"})
_LAYOUT |= {"resize_", "resize_as_", "set_", "__set__", "setattr", "__setattr__", "swap_tensors"}
"""Functions that change sizes, strides or the memory of a tensor that is there already."""


def name_of(node: fx.Node) -> str:
    """Returns the bare name of the function or method that ``node`` calls."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def changes_layout(node: fx.Node) -> bool:
    """Returns whether ``node`` changes sizes, strides or the memory of a tensor that is there already."""
    return name_of(node).rpartition(".")[2] in _LAYOUT


def written(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments to which ``node``, which updates something, may write; all of them if its schema does not
    say.

    The graphs of higher-order operators update nothing, or Dynamo would not make them.
    """
    target, name = node.target, name_of(node)
    if isinstance(target, LaunchedKernel):
        return [argument for argument in target.written(node.args[1]) if isinstance(argument, fx.Node)]  # type: ignore[arg-type]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return []
    arguments: list[Any] = []
    if isinstance(target, torch._ops.OpOverload):
        values = [*node.args, *[None] * len(target._schema.arguments)]
        for argument, value in zip(target._schema.arguments, values, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                arguments.append(node.kwargs.get(argument.name, value))
    elif any(name.endswith(norm) for norm in _NORMS):
        named = {**(_named(target, node.args) if callable(target) else {}), **node.kwargs}
        arguments = [named.get(parameter) for parameter in _STATISTICS]
    elif target in _OPERATORS or name.endswith("_"):
        arguments = [node.args[0]] if node.args else []
    nodes = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, fx.Node)]
    return nodes or list(node.all_input_nodes)


def _may_write(schema: torch.FunctionSchema) -> bool:
    """Returns whether a call without ``out=`` writes to an argument."""
    return any(
        argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
        for argument in schema.arguments
    )


def updates(node: fx.Node) -> bool:
    """Returns whether ``node`` writes to a tensor that is there already, or calls a graph that may."""
    target, keywords = node.target, node.kwargs
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(_may_write(getattr(target, overload)._schema) for overload in target.overloads())
    if isinstance(target, (torch._ops.HigherOrderOperator, LaunchedKernel)):
        return True
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if target in _OPERATORS or (name.endswith("_") and not name.endswith("__")) or keywords.get("out") is not None:
        return True
    arguments: dict[str, Any] = {**(_named(target, node.args) if callable(target) else {}), **keywords}
    if arguments.get("inplace") or arguments.get("max_norm") is not None:
        return True
    if name in _NORMS:
        if name in _BUILT_IN and all(arguments.get(name_) is None for name_ in _STATISTICS):
            return False
        return bool(arguments.get("training", arguments.get("use_input_stats", name != "batch_norm")))
    return "moving_avg" in name  # observers of quantisation-aware training


def _named(target: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the positional arguments by the names of their parameters, as far as these are known."""
    return dict(zip(_parameters(target), arguments, strict=False))


@functools.lru_cache(1024)
def _parameters(target: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return _BUILT_IN.get(getattr(target, "__name__", ""), ())
