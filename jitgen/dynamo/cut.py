"""Cuts a graph of Dynamo's into programs of generated kernels and what stays with torch.

Nodes keep their order, so that what one writes in place another reads as it did. A program is a run of nodes that
jitgen has rows for. It ends before a node that needs one of its values and has no row, and where the layer of the model
changes: then equal layers are one program. No program is longer than ``MAX_NODES``. Arithmetic of sizes is Python's.

Neighbours: ``aliasing.py`` knows what shares memory; ``backend.py`` runs what this makes; ``report.py`` tells what
became of each node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from jitgen.dynamo.aliasing import Aliasing
from jitgen.dynamo.checkpoint import is_checkpoint
from jitgen.dynamo.program import hint, is_call, picks_an_item, value_of
from jitgen.dynamo.region import region
from jitgen.dynamo.updates import updates
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
MAX_NODES = 160
"""Calls of one program. The time to trace, differentiate and partition one grows faster than its length, and twice the
largest layer of the models in ``tests/huggingface.py`` fits; a model without numbered layers has several programs."""
_IGNORED = ("_log_api_usage_once",)
"""Functions that compute nothing."""
_MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "inference_mode")
_MODES += ("_enter_inference_mode", "_exit_inference_mode")
_LAYER = re.compile(r"^(.*?\.(?:\d+))(?:\.|$)")


@dataclass(eq=False)
class Segment:
    """A run of nodes.

    Attributes:
        nodes: in their order.
        reason: why torch runs them; None where generated kernels do.
        layer: the layer of the model that they belong to, or "".
    """

    nodes: list[fx.Node] = field(default_factory=list)
    reason: str | None = None
    layer: str = ""


def is_size(node: fx.Node) -> bool:
    """Whether ``node`` computes numbers of numbers alone."""
    values = [value_of(node), *map(value_of, node.all_input_nodes)]
    return is_call(node) and all(
        isinstance(leaf, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
        for value in values
        for leaf in pytree.tree_leaves(value)
    )


def rejection(node: fx.Node) -> str | None:
    """Why ``node`` is none that a kernel can compute; None where it may be."""
    if not is_call(node):
        return f"a {node.op}"
    name = getattr(node.target, "__name__", str(node.target))
    if name in _MODES:
        return f"{name} changes a mode of torch"
    if node.target is getattr:
        if node.args[1] not in table.properties():
            return f"no row for the property Tensor.{node.args[1]}"
    elif not picks_an_item(node):
        row, name = table.find(node.target)
        if row is None:
            return f"no row for {name}"
    tensors = [
        leaf
        for value in (value_of(node), *map(value_of, node.all_input_nodes))
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]
    for tensor in tensors:
        if weights.is_quantized(tensor):
            if tensor.dim() == 3:
                return f"{name} of all matrices of experts; a kernel takes one of them"
            continue
        if tensor.device.type not in DEVICES:
            return f"{name} of a tensor on {tensor.device.type}"
        if tensor.layout != torch.strided:
            return f"{name} of a tensor of layout {tensor.layout}"
        if tensor.dtype not in DTYPES.values():
            return f"{name} of {tensor.dtype}"
        if any(hint(size) is None for size in (*tensor.shape, *tensor.stride())):
            return f"{name} of a size that depends on data"
    return None


def layer_of(node: fx.Node) -> str:
    """The name of the numbered layer of the model that ``node`` belongs to, such as ``model.layers.3``; else ""."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    for path, _ in stack.values():
        found = _LAYER.match(re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path))
        if found:
            return found.group(1)
    return ""


def segments(nodes: Iterable[fx.Node], rejected: Mapping[fx.Node, str], aliasing: Aliasing) -> list[Segment]:
    """The calls among ``nodes`` in runs.

    Args:
        rejected: nodes that no kernel can compute, as was found by trying, each with the reason.
    """
    done: list[Segment] = []
    current = Segment()
    inside: set[fx.Node] = set()

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
        reason = rejected.get(node) or rejection(node) or aliasing.refusal(node)
        source: Any = node.args[0] if picks_an_item(node) else None
        if source is not None and source not in inside:
            is_graph = is_checkpoint(source) or source.target is region
            reason = ITEMS if is_graph else "an item of what torch computed"
        if reason is None:
            layer = layer_of(node)
            is_full = len(current.nodes) >= MAX_NODES
            if current.nodes and (layer != current.layer or is_full) and source is None:
                close()
            if not current.nodes:
                current.layer = layer
            current.nodes.append(node)
            inside.add(node)
            continue
        if inside.intersection(node.all_input_nodes) or not is_pure(node) or any(map(updates, current.nodes)):
            close()
        done.append(Segment([node], reason))
    close()
    return done


def is_pure(node: fx.Node) -> bool:
    """Whether ``node`` may be computed earlier than it is written."""
    return not updates(node) and not node.is_impure() and getattr(node.target, "__name__", "") not in _MODES


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The values from elsewhere that ``nodes`` read, each once, in the order in which they are read."""
    inside = set(nodes)
    return list(dict.fromkeys(found for node in nodes for found in node.all_input_nodes if found not in inside))


def outputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The values of ``nodes`` that are read elsewhere."""
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]
