"""Updates in place: which tensors share memory in a trace, and what each of them is after one was changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import TraceError, UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import CHANNELS_LAST, CONTIGUOUS, Node, under_views
from jitgen.spec import DTYPES
from jitgen.trace.location import quote, user_location
from jitgen.trace.proxy import TensorProxy
from jitgen.trace.scatters import movements_from, scattered
from jitgen.trace.typing import expand

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def updated(trace: Trace, proxy: Any, value: Node, name: str) -> TensorProxy:
    """An update in place by the function ``name``.

    The value of ``proxy``, which is returned, becomes ``value``, and that of every view of the same memory follows.

    Raises:
        UnsupportedError: it is a captured tensor, or shares memory with a view that cannot be followed.
        TraceError: the update would change its shape or its kind of dtype.
    """
    if not isinstance(proxy, TensorProxy):
        raise UnsupportedError(
            f"{trace.name}: {name} updates a captured tensor{quote(user_location())}\n  pass it as an argument"
        )
    if any(proxy is scalar for scalar in trace.host_scalars):
        raise UnsupportedError(
            f"{trace.name}: {name} updates a 0-d CPU tensor in a kernel on {trace.device}{quote(user_location())}\n"
            "  move it there first, with .to(device)"
        )
    sharing = [alias for alias in (alias() for alias in proxy.aliases) if alias is not None]
    base = under_views(proxy.value)
    if base.op == "input" and all(alias.input is None for alias in sharing):
        raise UnsupportedError(
            f"{trace.name}: {name} updates a captured tensor through a view{quote(user_location())}\n"
            "  pass it as an argument"
        )
    chains = [movements_from(base, alias.value) for alias in sharing]
    if len(sharing) > 1 and not all(chain is not None and _is_writable(chain) for chain in chains):
        raise UnsupportedError(
            f"{trace.name}: {name} updates a tensor that shares memory with a view of it{quote(user_location())}\n"
            "  use the operation that returns a new tensor"
        )
    shape = proxy.value.shape
    same = len(value.shape) == len(shape) and all(
        trace.guards.decide(symbols.compare("eq", new, old)) for new, old in zip(value.shape, shape, strict=True)
    )
    if not same:
        raise TraceError(
            f"{trace.name}: {name} would change the shape {shape} to {value.shape}{quote(user_location())}"
        )
    if not torch.can_cast(DTYPES[value.dtype], DTYPES[proxy.value.dtype]):
        raise TraceError(
            f"{trace.name}: {name} would store a {value.dtype} result in a {proxy.value.dtype} tensor"
            f"{quote(user_location())}\n  use the operation that returns a new tensor"
        )
    value = trace.cast(expand(trace, value, shape), proxy.value.dtype)
    if len(sharing) == 1:
        proxy.value = value
    else:  # the tensor that they are views of changes, and with it all of them
        movements = movements_from(base, proxy.value)
        value = scattered(trace, base, value, (), range(len(shape)), movements=movements) if movements else value
        for alias, chain in zip(sharing, chains, strict=True):
            alias.value = value
            for attrs, sizes in chain or ():
                alias.value = trace.make("view", (alias.value,), value.dtype, sizes, attrs)
    for alias in sharing:
        if alias.input is not None:
            trace.mutated[alias.input] = alias.value
    return proxy


def _is_writable(movements: Any) -> bool:
    """Whether each element of the view that ``movements`` lead to is one of the tensor's, at strides that are known."""
    return all(attrs[0] not in ("expand", "reshape") for attrs, _ in movements)


def memory_of(node: Node) -> Node:
    """The node whose memory ``node`` may share: the one that it is a view of, or ``node`` itself."""
    while node.op == "view" or node.attrs in (CONTIGUOUS, CHANNELS_LAST):
        node = node.inputs[0]
    return node
