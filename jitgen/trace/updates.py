"""Updates in place: which tensors share memory in a trace, and what each of them is after one was changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import TraceError, UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import CHANNELS_LAST, CONTIGUOUS, Node
from jitgen.spec import DTYPES
from jitgen.trace.location import quote, user_location
from jitgen.trace.proxy import Memory, TensorProxy
from jitgen.trace.scatters import Movements, movements_from, scattered
from jitgen.trace.typing import expand

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


def updated(trace: Trace, proxy: TensorProxy | None, value: Node, name: str) -> None:
    """An update in place by the function ``name``.

    The value of ``proxy`` becomes ``value``, and that of every view of the same memory follows.

    Raises:
        UnsupportedError: it shares memory with a view that cannot be followed.
        TraceError: the update would change its shape or its kind of dtype.
    """
    if proxy is None:
        raise UnsupportedError(
            f"{trace.name}: {name} updates what is no tensor of the trace{quote(user_location())}\n"
            "  pass the tensor as an argument"
        )
    if any(proxy is scalar for scalar in trace.host_scalars):
        raise UnsupportedError(
            f"{trace.name}: {name} updates a 0-d CPU tensor in a kernel on {trace.device}{quote(user_location())}\n"
            "  move it there first, with .to(device)"
        )
    sharing = [alias for alias in (alias() for alias in proxy.memory.proxies) if alias is not None]
    memory = proxy.memory
    base = memory.base
    if memory_of(base).op == "input" and all(alias.input is None for alias in sharing):
        raise UnsupportedError(
            f"{trace.name}: {name} updates a view of which the trace does not know the tensor{quote(user_location())}\n"
            "  update the tensor itself, or clone the view"
        )
    chains = [movements_from(base, alias.value) for alias in sharing]
    pairs = zip(sharing, chains, strict=True)
    if len(sharing) > 1 and not all(c is not None and _is_writable(c, memory, alias.is_view) for alias, c in pairs):
        raise UnsupportedError(
            f"{trace.name}: {name} updates a tensor that shares memory with a view of it whose elements may be copies, "
            f"as those of reshape, expand and contiguous are{quote(user_location())}\n"
            "  clone the view where it is made, or use the operation that returns a new tensor"
        )
    shape = proxy.value.shape
    same = len(value.shape) == len(shape) and all(
        trace.guards.decide(symbols.compare("eq", new, old)) for new, old in zip(value.shape, shape, strict=True)
    )
    if not same:
        raise TraceError(
            f"{trace.name}: {name} would change the shape {shape} to {value.shape}{quote(user_location())}\n"
            "  use the operation that returns a new tensor"
        )
    if not torch.can_cast(DTYPES[value.dtype], DTYPES[proxy.value.dtype]):
        raise TraceError(
            f"{trace.name}: {name} would store a {value.dtype} result in a {proxy.value.dtype} tensor"
            f"{quote(user_location())}\n  use the operation that returns a new tensor"
        )
    value = trace.cast(expand(trace, value, shape), proxy.value.dtype)
    if len(sharing) == 1:
        memory.base = proxy.value = value
    else:  # the tensor that they are views of changes, and with it all of them
        memory.base = _written(trace, base, movements_from(base, proxy.value) or (), value)
        for alias, chain in zip(sharing, chains, strict=True):
            alias.value = _moved(trace, memory.base, chain or ())
    for alias in sharing:
        if alias.input is not None:
            trace.mutated[alias.input] = alias.value


def note_copies(sources: Sequence[TensorProxy], results: Iterable[Any]) -> None:
    """Note which of ``results``, views of ``sources``, may be copies, as those of reshape are at some strides."""
    for result in results:
        for source in sources if isinstance(result, TensorProxy) else ():
            if source.memory is result.memory and source is not result:
                chain = movements_from(source.value, result.value)
                result.is_view &= chain is not None and all(attrs[0] != "reshape" for attrs, _ in chain)


def _is_writable(movements: Movements, memory: Memory, is_view: bool) -> bool:
    """Whether each element of the view that ``movements`` lead to is one of the tensor's.

    Args:
        is_view: whether no reshape among them may be a copy.
    """
    if is_view:
        return all(attrs[0] != "expand" for attrs, _ in movements)
    is_row_major = memory.is_row_major
    for attrs, _ in movements:
        if attrs[0] == "expand" or (attrs[0] == "reshape" and not is_row_major):
            return False
        keeps = attrs[0] in ("reshape", "squeeze", "unsqueeze", "detach") or attrs[:2] == ("slice", 0)
        is_row_major = is_row_major and keeps and (attrs[0] != "slice" or attrs[3] == 1)
    return True


def _moved(trace: Trace, base: Node, movements: Movements) -> Node:
    for attrs, sizes in movements:
        base = trace.make("view", (base,), base.dtype, sizes, attrs)
    return base


def _written(trace: Trace, base: Node, movements: Movements, value: Node) -> Node:
    """``base`` with the view of it that ``movements`` lead to replaced by ``value``."""
    first = next((number for number, (attrs, _) in enumerate(movements) if attrs[0] == "reshape"), None)
    if first is None:
        return scattered(trace, base, value, (), range(len(value.shape)), movements=movements) if movements else value
    before, after = movements[:first], movements[first + 1 :]
    shape = before[-1][1] if before else base.shape
    whole = _written(trace, _moved(trace, base, movements[: first + 1]), after, value)
    return _written(trace, base, before, trace.make("view", (whole,), whole.dtype, shape, ("reshape",)))


def memory_of(node: Node) -> Node:
    """The node whose memory ``node`` may share: the one that it is a view of, or ``node`` itself."""
    while node.op == "view" or node.attrs in (CONTIGUOUS, CHANNELS_LAST):
        node = node.inputs[0]
    return node
