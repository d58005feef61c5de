"""What a tensor object knows beside its elements: whether it requires grad, its gradient, and what a user stores on it.

Of an argument these are read at the trace and guarded. A result of the trace requires grad where an argument or a
captured tensor does that it is computed from. What the function would store on a tensor is refused.

Neighbours: ``tracer.py`` and ``proxy.py`` ask here; ``captures.py`` follows what is stored on captured tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import TraceError, UnsupportedError
from jitgen.ir.custom_gradients import differentiated
from jitgen.ir.graph import Node
from jitgen.ir.nodes import INPUT, VIEW
from jitgen.spec import DTYPES
from jitgen.trace.captured import MISSING, Captured, attribute, derived
from jitgen.trace.location import quote, user_location

if TYPE_CHECKING:
    from jitgen.trace.proxy import TensorProxy
    from jitgen.trace.tracer import Trace

NAMES = frozenset({"requires_grad", "is_leaf", "grad", "grad_fn"})
OF_PROXIES = frozenset({"tracer", "node", "value", "owner", "input", "memory", "is_view"})
"""The attributes of a proxy that are its own."""


def read(trace: Trace, proxy: TensorProxy, name: str) -> Any:
    """``proxy.name``, of ``NAMES``.

    Raises:
        TraceError: it is a gradient, or a part of torch's graph, of which a trace knows nothing.
    """
    source = None if proxy.input is None else trace.sources[proxy.input]
    if source is None:
        has_history = requires_grad(trace, proxy.value)
        if name in ("requires_grad", "is_leaf"):
            return has_history is (name == "requires_grad")
        if not has_history or name == "grad":
            return None
    elif name in ("requires_grad", "is_leaf"):
        return _guarded(trace, attribute(source, name))
    elif _guarded(trace, derived(f"{source.path}.{name} is None", source, _IS_NONE[name])):
        return None
    raise TraceError(
        f"{trace.name} reads {name} of a tensor, which a trace does not know{quote(user_location())}\n"
        "  pass it as an argument"
    )


def _has_no_gradient(tensor: torch.Tensor) -> bool:
    return not (tensor.is_leaf or tensor.retains_grad) or tensor.grad is None  # or else torch warns


_IS_NONE = {"grad": _has_no_gradient, "grad_fn": lambda tensor: tensor.grad_fn is None}


def _guarded(trace: Trace, found: Captured) -> Any:
    trace.captures.guards.append(found)
    trace.captures.follows_arguments = True
    return found.value


def requires_grad(trace: Trace, node: Node) -> bool:
    """Whether eager torch would give the result that ``node`` computes a history."""
    if not trace.differentiable or not torch.is_grad_enabled():
        return False
    found = [_guarded(trace, attribute(trace.sources[index], "requires_grad")) for index in _inputs_of(node)]
    return any(found)


def is_detached(node: Node) -> bool:
    """Whether ``node`` is a value through which no gradient flows, by ``detach`` or ``no_grad``."""
    return node.kind is VIEW and node.attrs == ("detach",)


def _inputs_of(node: Node) -> Iterator[int]:
    """The inputs to which gradients of ``node`` may flow."""
    stack, seen = [node], {id(node)}
    while stack:
        each = stack.pop()
        if not DTYPES[each.dtype].is_floating_point or is_detached(each):
            continue
        if each.kind is INPUT:
            yield each.attrs.number
            continue
        children = [each.inputs[position] for position in differentiated(each)]
        stack += [child for child in children if id(child) not in seen]
        seen.update(map(id, children))


def refuse_other_history(trace: Trace, node: Node) -> None:
    """UnsupportedError where ``x.requires_grad_(False)`` of the value ``node`` would change an argument, or a result
    that requires grad, of which eager torch raises an error."""
    if any(_guarded(trace, attribute(trace.sources[index], "requires_grad")) for index in _inputs_of(node)):
        raise UnsupportedError("requires_grad_(False) of what requires grad; write x.detach(), or call it outside")


def stored(trace: Trace, proxy: TensorProxy, name: str) -> Any:
    """What a user has stored as ``name`` on an argument; guarded, as is that nothing is.

    Raises:
        AttributeError: nothing is.
    """
    if proxy.input is not None:
        value = trace.captures.of_argument(trace.sources[proxy.input], name)
        if value is not MISSING:
            return value
    raise AttributeError(f"'Tensor' object has no attribute '{name}'")


def refuse_storing(trace: Trace, proxy: TensorProxy, name: str) -> None:
    """TraceError where ``proxy.name = value`` would be done at the trace alone."""
    if proxy.input is not None or hasattr(torch.Tensor, name):
        raise TraceError(
            f"{trace.name} sets the attribute {name} of a tensor: later calls launch kernels without running the "
            f"function, and would not{quote(user_location())}\n  set it outside of the decorated function"
        )


def refuse_stored(trace: Trace, proxy: TensorProxy) -> None:
    """TraceError where the function has stored an attribute on its result, which is another tensor at every call."""
    if name := next(iter(vars(proxy).keys() - OF_PROXIES), None):
        raise TraceError(
            f"{trace.name} sets the attribute {name} of its result, which later calls would not\n"
            "  set it after the call"
        )
