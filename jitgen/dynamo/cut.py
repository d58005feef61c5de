"""Cuts a graph of Dynamo's into programs of generated kernels and what stays with torch.

Nodes keep their order, so that what one writes in place another reads as it did. A program is a run of nodes that
jitgen has rows for. It ends before a node that needs one of its values and has no row, and where the layer of the model
changes: then equal layers are one program. Arithmetic of sizes is Python's.

Neighbours: ``aliasing.py`` knows what shares memory; ``backend.py`` runs what this makes; ``report.py`` tells what
became of each node.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from jitgen.dynamo.aliasing import Aliasing
from jitgen.dynamo.checkpoint import is_checkpoint
from jitgen.dynamo.launches import LaunchedKernel
from jitgen.dynamo.program import hint, is_call, picks_an_item, value_of
from jitgen.dynamo.region import region
from jitgen.quant import weights
from jitgen.spec import DTYPES
from jitgen.trace import table

SIZES = "arithmetic of sizes"
"""The reason why Python computes it."""
ITEMS = "an item of what a checkpointed graph or a decorated function returned"
"""The reason why Python picks it."""
VIEWS = "views of what a program returned"
"""The reason why torch makes them, without moving an element."""
DEVICES = ("cpu", "cuda")
_IGNORED = ("_log_api_usage_once",)
"""Functions that compute nothing."""
_MODES = (
    "_set_grad_enabled",
    "_enter_autocast",
    "_exit_autocast",
    "inference_mode",
    "_enter_inference_mode",
    "_exit_inference_mode",
)
_LAYER = re.compile(r"^(.*?\.(?:\d+))(?:\.|$)")


@dataclass(eq=False)
class Segment:
    """Describes a run of nodes.

    Attributes:
        nodes: in their order.
        reason: why torch runs them; None where generated kernels do.
        layer: the layer of the model that they belong to, or "".
    """

    nodes: list[fx.Node] = field(default_factory=list)
    reason: str | None = None
    layer: str = ""


def is_size(node: fx.Node) -> bool:
    """Returns whether ``node`` computes numbers of numbers alone."""
    return is_call(node) and all(map(_is_numbers, (node, *node.all_input_nodes)))


def _is_numbers(node: fx.Node) -> bool:
    value = value_of(node)
    return not isinstance(value, torch.Tensor) and all(
        isinstance(leaf, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
        for leaf in pytree.tree_leaves(value)
    )


def rejection(node: fx.Node, unreadable: Callable[[fx.Node], str | None]) -> str | None:
    """Explains why no kernel can compute ``node``; None if one may.

    Args:
        unreadable: ``why_unreadable``, or what remembers its answers.
    """
    if not is_call(node):
        return f"a {node.op}"
    name = getattr(node.target, "__name__", str(node.target))
    if name in _MODES:
        return f"{name} changes a mode of torch"
    if node.target is getattr:
        if node.args[1] not in table.properties():
            return f"no row for the property Tensor.{node.args[1]}"
    elif isinstance(node.target, LaunchedKernel):
        if not all(map(_is_row_major, node.all_input_nodes)):
            return f"{name} gets a tensor that is not contiguous"
    elif not picks_an_item(node):
        row, name = table.find(node.target)
        if row is None:
            return f"no row for {name}"
        if row.copied and row.proxies:  # as_strided
            return f"{name} reads elements where torch has them"
    reason = next(filter(None, map(unreadable, (node, *node.all_input_nodes))), None)
    return None if reason is None else f"{name} of {reason}"


def _is_row_major(node: fx.Node) -> bool:
    """Returns whether the value of ``node``, if it is a tensor, is row-major, as programs have what they compute."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return True
    step: int | None = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if step is None or (hint(size) != 1 and hint(stride) != step):
            return False
        length = hint(size)
        step = None if length is None else step * max(length, 1)
    return True


def why_unreadable(node: fx.Node) -> str | None:
    """Explains what the value of ``node`` is, if no kernel reads or writes such; else None."""
    value = value_of(node)
    for tensor in [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value):
        if not isinstance(tensor, torch.Tensor):
            continue
        if weights.is_quantized(tensor):
            continue
        if tensor.device.type not in DEVICES:
            return f"a tensor on {tensor.device.type}"
        if tensor.layout != torch.strided:
            return f"a tensor of layout {tensor.layout}"
        if tensor.dtype not in DTYPES.values():
            return str(tensor.dtype)
        if any(hint(size) is None for size in (*tensor.shape, *tensor.stride())):
            return "a size that depends on data"
    return None


def layer_of(node: fx.Node) -> str:
    """Returns the name of the numbered layer of the model that ``node`` belongs to, such as ``model.layers.3``; else
    ""."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return next(filter(None, (_layer(path) for path, _ in stack.values())), "")


@functools.lru_cache(4096)
def _layer(path: str) -> str:
    """Returns the numbered layer that the module ``path``, as Dynamo writes it, is or belongs to; else ""."""
    match = _LAYER.match(re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path))
    return match.group(1) if match else ""


def segments(nodes: Iterable[fx.Node], rejected: Mapping[fx.Node, str], aliasing: Aliasing) -> list[Segment]:
    """Divides the calls among ``nodes`` into runs.

    Args:
        rejected: nodes that no kernel can compute, as was found by trying, each with the reason.
    """
    done: list[Segment] = []
    current = Segment()
    inside: set[fx.Node] = set()
    unreadable = functools.cache(why_unreadable)

    def close() -> None:
        nonlocal current
        if current.nodes:
            done.append(current)
        current = Segment()
        inside.clear()

    for node in nodes:
        if not is_call(node) or getattr(node.target, "__name__", "") in _IGNORED:
            continue
        if is_size(node) and not inside.intersection(node.all_input_nodes):
            done.append(Segment([node], SIZES))
            continue
        reason = rejected.get(node) or rejection(node, unreadable) or aliasing.refusal(node)
        source: Any = node.args[0] if picks_an_item(node) else None
        if source is not None and source not in inside:
            is_graph = is_checkpoint(source) or source.target is region
            reason = ITEMS if is_graph else "an item of what torch computed"
        if reason is None:
            layer = layer_of(node)
            if current.nodes and layer != current.layer and source is None:
                close()
            if not current.nodes:
                current.layer = layer
            current.nodes.append(node)
            inside.add(node)
            continue
        writes = any(map(aliasing.updates, current.nodes))
        if inside.intersection(node.all_input_nodes) or not _is_pure(node, aliasing) or writes:
            close()
        done.append(Segment([node], reason))
    close()
    return done


def _is_pure(node: fx.Node, aliasing: Aliasing) -> bool:
    """Returns whether ``node`` may be computed earlier than it is written."""
    return not aliasing.updates(node) and not node.is_impure() and getattr(node.target, "__name__", "") not in _MODES


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the values from elsewhere that ``nodes`` read, each once, in the order in which they are read."""
    inside = set(nodes)
    return list(
        dict.fromkeys(argument for node in nodes for argument in node.all_input_nodes if argument not in inside)
    )


def outputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the values of ``nodes`` that are read elsewhere."""
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]
