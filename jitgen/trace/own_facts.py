"""Tells what a tensor object knows besides its elements: whether it requires grad, its gradient, and what a user stores
on it.

Of an argument these are read at the trace and guarded. A result of the trace requires grad where an argument or a
captured tensor does that it is computed from. What the function would store on a tensor is refused.

Neighbours: ``tracer.py`` and ``proxy.py`` ask here; ``captures.py`` follows what is stored on captured tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import RequiresGrad, TraceError, UnsupportedError
from jitgen.ir.custom_gradients import UNTRACKED_CONTIGUOUS, UNTRACKED_VIEW, differentiated, is_detached
from jitgen.ir.graph import Node
from jitgen.ir.nodes import INPUT
from jitgen.spec import DTYPES
from jitgen.trace.captured import MISSING, Captured, attribute, derived
from jitgen.trace.location import quote, user_location
from jitgen.trace.traced import Output

if TYPE_CHECKING:
    from jitgen.trace.proxy import TensorProxy
    from jitgen.trace.tracer import Trace

NAMES = frozenset({"requires_grad", "is_leaf", "grad", "grad_fn"})
OF_PROXIES = frozenset({"tracer", "node", "value", "owner", "input", "memory", "is_view", "untracked", "made_after"})
"""The attributes of a proxy that are its own."""
UNTRACKED = {
    "view": "a view that was made where gradients are disabled",
    "contiguous": "what contiguous() returns where gradients are disabled, which is the tensor itself or a copy of it",
}
"""Kinds of tensors that torch's autograd does not know of, though it may know of what they are views of."""


def read(trace: Trace, proxy: TensorProxy, name: str) -> Any:
    """Reads ``proxy.name``, which is one of ``NAMES``.

    Raises:
        TraceError: it is a gradient, or a part of torch's graph, of which a trace knows nothing.
    """
    source = None if proxy.input is None else trace.sources[proxy.input]
    if source is None:
        has_history = _has_history(trace, proxy, name)
        is_leaf = not (has_history and trace.differentiable) or proxy.value.attrs == UNTRACKED_VIEW
        if name in ("requires_grad", "is_leaf"):
            return has_history if name == "requires_grad" else is_leaf
        if is_leaf or name == "grad":
            return None
    elif name in ("requires_grad", "is_leaf") and proxy.value.kind is not INPUT and requires_grad(trace, proxy.value):
        return name == "requires_grad"  # since the function updated it
    else:
        return read_source(trace, source, name)
    raise _unknown(trace, name)


def read_source(trace: Trace, source: Captured, name: str) -> Any:
    """Reads ``name``, which is one of ``NAMES``, of an argument or a captured tensor that the function has not updated.

    Raises:
        TraceError: it is a gradient, or a part of torch's graph, of which a trace knows nothing.
    """
    if name in ("requires_grad", "is_leaf"):
        return _guarded(trace, attribute(source, name))
    if _guarded(trace, derived(f"{source.path}.{name} is None", source, _IS_NONE[name])):
        return None
    raise _unknown(trace, name)


def _unknown(trace: Trace, name: str) -> TraceError:
    return TraceError(
        f"{trace.name} reads {name} of a tensor, which a trace does not know{quote(user_location())}\n"
        "  pass it as an argument"
    )


def _has_no_gradient(tensor: torch.Tensor) -> bool:
    return not (tensor.is_leaf or tensor.retains_grad) or tensor.grad is None  # or else torch warns


_IS_NONE = {"grad": _has_no_gradient, "grad_fn": lambda tensor: tensor.grad_fn is None}


def _guarded(trace: Trace, captured: Captured) -> Any:
    trace.captures.guards.append(captured)
    trace.captures.follows_arguments = True
    return captured.value


def views_know_nothing(trace: Trace, memory: Node) -> bool:
    """Returns whether ``memory`` is an input that requires grad, while views made without gradients do not.

    It is itself a view, of a tensor that requires none, and torch makes its views of that tensor.
    """
    return memory.kind is INPUT and _is_of_another(trace, memory.attrs.number)


def _is_of_another(trace: Trace, index: int) -> bool:
    source = trace.sources[index]
    if not source.value.requires_grad:
        return False
    return bool(_guarded(trace, derived(f"whether {source.path} is a view", source, _requires_more_than_its_base)))


def _requires_more_than_its_base(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor._base is not None and not tensor._base.requires_grad


def _has_history(trace: Trace, proxy: TensorProxy, name: str) -> bool:
    """Returns whether a tensor that is no argument requires grad in eager torch.

    Raises:
        TraceError: it does if it is a view, and not if it is a copy, which depends on strides.
    """
    if proxy.untracked == "detached":
        return False
    if trace.differentiable or proxy.untracked is None:
        tracked = requires_grad(trace, proxy.value, (UNTRACKED_VIEW, UNTRACKED_CONTIGUOUS))
    else:
        inputs = [alias.input for alias in (alias() for alias in proxy.memory.proxies) if alias is not None]
        base = proxy.memory.base
        indices = {index for index in inputs if index is not None} | set(base.attrs if base.kind is INPUT else ())
        tracked = any(
            _guarded(trace, attribute(trace.sources[index], "requires_grad")) and not _is_of_another(trace, index)
            for index in sorted(indices)
        )
    if tracked and proxy.untracked and not proxy.is_view:
        raise TraceError(
            f"{trace.name} reads {name} of what was made where gradients are disabled, and is a view or a copy"
            f"{quote(user_location())}\n  ask the tensor that it was made of"
        )
    return tracked


def requires_grad(trace: Trace, node: Node, through: Collection[Any] = (UNTRACKED_VIEW,)) -> bool:
    """Returns whether the tensor of ``node`` requires grad in eager torch.

    Args:
        through: kinds of marks that do not end a history.
    """
    if not trace.differentiable:
        is_required = any(trace.sources[index].value.requires_grad for index in _inputs_of(node))
        if is_required and trace.enables_gradients:
            raise TraceError(
                f"{trace.name} enables gradients in a call under torch.no_grad(), which has no effect there, and asks "
                f"for requires_grad{quote(user_location())}\n  call it where gradients are enabled"
            )
        if is_required and torch.is_grad_enabled():
            raise RequiresGrad(
                f"{trace.name} asks for requires_grad of what is computed of a tensor that requires it, and neither a "
                f"plan nor a call with out= computes gradients{quote(user_location())}\n  call the function itself"
            )
        return False
    requiring = [
        _guarded(trace, attribute(trace.sources[index], "requires_grad")) for index in _inputs_of(node, through)
    ]
    return any(requiring)


def _inputs_of(node: Node, through: Collection[Any] = ()) -> Iterator[int]:
    """Yields the inputs to which gradients of ``node`` may flow."""
    stack, seen = [node], {id(node)}
    while stack:
        node_ = stack.pop()
        if not DTYPES[node_.dtype].is_floating_point or (is_detached(node_) and node_.attrs not in through):
            continue
        if node_.kind is INPUT:
            yield node_.attrs.number
            continue
        children = [node_.inputs[position] for position in differentiated(node_)]
        stack += [child for child in children if id(child) not in seen]
        seen.update(map(id, children))


def untracked(source: TensorProxy, node: Node, kind: str | None) -> str | None:
    """Explains why autograd does not know of ``node``, which may be a view of ``source``; None if it does.

    Args:
        kind: of views that are made now, in a graph without marks.
    """
    if is_detached(node):
        return {UNTRACKED_VIEW: "view", UNTRACKED_CONTIGUOUS: "contiguous"}.get(node.attrs)
    return source.untracked if kind is None or source.untracked == "detached" else kind


def output(trace: Trace, proxy: TensorProxy, index: int) -> Output:
    """Makes output ``index`` of the graph from ``proxy``; marks in the graph say what is not tracked."""
    return Output(index, untracked=None if trace.differentiable else proxy.untracked)


def refuse_untracked(trace: Trace, proxy: TensorProxy, name: str) -> None:
    """Raises TraceError if ``name``, called while gradients are enabled, would read ``proxy`` with a history that eager
    torch does not know: torch raises an error, or what it does depends on strides."""
    through, why = (UNTRACKED_CONTIGUOUS,), ""
    if proxy.untracked == "view":
        if proxy.made_after == proxy.memory.updates:
            return
        through, why = (UNTRACKED_VIEW,), ", and that was updated since, as torch refuses"
    if requires_grad(trace, proxy.value, through):
        raise TraceError(
            f"{trace.name}: {name} reads {UNTRACKED[str(proxy.untracked)]}{why}{quote(user_location())}\n"
            "  make it and use it either both under torch.no_grad(), or both outside of it"
        )


def refuse_untracked_update(trace: Trace, proxy: TensorProxy, value: Node, name: str) -> None:
    """Raises TraceError if an update with ``value`` would be of a tensor whose history autograd does not know."""
    if proxy.untracked is None or not (trace.differentiable and torch.is_grad_enabled()):
        return
    if DTYPES[value.dtype].is_floating_point and (requires_grad(trace, proxy.value) or requires_grad(trace, value)):
        raise TraceError(
            f"{trace.name}: {name} updates {UNTRACKED[proxy.untracked]}, where they are enabled, as torch refuses"
            f"{quote(user_location())}\n  make and update it either both under torch.no_grad(), or both outside of it"
        )


def refuse_other_history(trace: Trace, node: Node) -> None:
    """Raises UnsupportedError if ``x.requires_grad_(False)`` of the value ``node`` would change an argument, or a
    result that requires grad, for which eager torch raises an error."""
    if any(_guarded(trace, attribute(trace.sources[index], "requires_grad")) for index in _inputs_of(node)):
        raise UnsupportedError("requires_grad_(False) of what requires grad; write x.detach(), or call it outside")


def stored(trace: Trace, proxy: TensorProxy, name: str) -> Any:
    """Returns what a user has stored as ``name`` on an argument, with a guard, also if nothing is stored.

    Raises:
        AttributeError: nothing is.
    """
    if proxy.input is not None:
        value = trace.captures.of_argument(trace.sources[proxy.input], name)
        if value is not MISSING:
            return value
    raise AttributeError(f"'Tensor' object has no attribute '{name}'")


def refuse_storing(trace: Trace, proxy: TensorProxy, name: str) -> None:
    """Raises TraceError for ``proxy.name = value``, which would happen at the trace alone."""
    if proxy.input is not None or hasattr(torch.Tensor, name):
        raise TraceError(
            f"{trace.name} sets the attribute {name} of a tensor: later calls launch kernels without running the "
            f"function, and would not{quote(user_location())}\n  set it outside of the decorated function"
        )


def refuse_stored(trace: Trace, proxy: TensorProxy) -> None:
    """Raises TraceError if the function has stored an attribute on its result, which is another tensor at every
    call."""
    if name := next(iter(vars(proxy).keys() - OF_PROXIES), None):
        raise TraceError(
            f"{trace.name} sets the attribute {name} of its result, which later calls would not\n"
            "  set it after the call"
        )
