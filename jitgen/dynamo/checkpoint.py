"""Handles activation checkpointing within a compiled model: graphs whose forward the backward computes again.

Dynamo has ``torch.utils.checkpoint`` as one call whose first argument is the graph of the checkpointed function.
Torch's own operator for it expects AOTAutograd after it: it keeps no state of generators, so that the backward would
draw other random numbers than the forward. Here that graph is compiled by itself, and ``torch.utils.checkpoint`` runs
it.

Neighbours: ``backend.py`` compiles such a graph as it compiles the one around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import checkpoint

POLICY = "selective checkpointing: its policy chooses among torch's operators"
"""The reason why a checkpointed graph stays with torch."""
_OPERATORS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")


def is_checkpoint(node: Any) -> bool:
    """Returns whether ``node`` calls a graph that is checkpointed."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_function"
        and getattr(node.target, "__name__", "") in _OPERATORS
        and isinstance(node.args[0], fx.Node)
    )


def graph_of(node: fx.Node) -> fx.GraphModule:
    """Returns the graph that ``node``, a checkpoint, calls."""
    attribute: Any = node.args[0]
    graph: fx.GraphModule = attribute.graph.owning_module.get_submodule(attribute.target)
    return graph


def policy_of(graph: fx.GraphModule) -> Callable[[], Any] | None:
    """Returns the ``context_fn`` of selective checkpointing; None without one."""
    return graph.meta.get("_checkpoint_context_fn")


def buffers_of(node: fx.Node) -> frozenset[int]:
    """Returns the positions of those arguments of ``node``, a checkpoint, that are buffers of modules.

    Dynamo passes them, where the function that is checkpointed reads them of its module, and may update them, as
    BatchNorm does. Of an argument torch takes an update for a mistake.
    """
    return frozenset(number for number, argument in enumerate(node.args[1:]) if _is_buffer(argument))


def _is_buffer(node: Any) -> bool:
    source = getattr(node.meta.get("grapharg"), "source", None) if isinstance(node, fx.Node) else None
    name = getattr(source, "name", "")
    return "._buffers[" in str(name() if callable(name) else name)


def run(
    graph: Callable[..., Any], policy: Any, args: Sequence[Any], kwargs: dict[str, Any], buffers: frozenset[int]
) -> Any:
    """Runs ``graph``; the backward runs it again for what it reads, with the same random numbers.

    Args:
        policy: as ``policy_of`` returns it.
        args, kwargs: of the checkpoint's call, without the graph.
        buffers: as ``buffers_of`` returns them.
    """
    read = {number: args[number] for number in buffers}

    def function(*others: Any, **named: Any) -> Any:
        rest = iter(others)
        return graph(*(read[n] if n in read else next(rest) for n in range(len(args))), **named)

    options = kwargs | {"use_reentrant": False, "preserve_rng_state": True}
    if policy is not None:
        options["context_fn"] = policy
    return checkpoint(function, *(arg for number, arg in enumerate(args) if number not in read), **options)
