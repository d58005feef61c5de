"""Follows updates in place: which tensors share memory in a trace, and what each of them is after one was changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import TraceError, UnsupportedError
from jitgen.ir.attributes import CHANNELS_LAST, CONTIGUOUS
from jitgen.ir.custom_gradients import is_detached
from jitgen.ir.graph import Node
from jitgen.ir.nodes import GATHER, INPUT, VIEW
from jitgen.spec import DTYPES
from jitgen.trace import own_facts
from jitgen.trace.argument_strides import is_contiguous, row_major, strides_of
from jitgen.trace.derivatives import with_gradient
from jitgen.trace.location import quote, user_location
from jitgen.trace.proxy import Memory, TensorProxy
from jitgen.trace.scatters import scattered
from jitgen.trace.typing import expand

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


_COPIES_OF_UPDATES = 1 << 20
"""The first number of a copy that is the new value of an argument; those of results count from 0."""


class NewValues:
    """Holds the new values of inputs that the function has updated.

    Attributes:
        by_input: by the inputs' numbers.
    """

    def __init__(self) -> None:
        self.by_input: dict[int, Node] = {}
        self._inputs: dict[Node, set[int]] = {}

    def set(self, number: int, value: Node) -> None:
        """Makes ``value`` the new value of input ``number``."""
        if number in self.by_input:
            self._inputs[self.by_input[number]].remove(number)
        self.by_input[number] = value
        self._inputs.setdefault(value, set()).add(number)

    def inputs_of(self, value: Node) -> Set[int]:
        """Returns the inputs whose new value is ``value``."""
        return self._inputs.get(value, set())


def updated(trace: Trace, proxy: TensorProxy | None, value: Node, name: str) -> None:
    """Updates ``proxy`` in place by the function ``name``.

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
    own_facts.refuse_untracked_update(trace, proxy, value, name)
    _settle_contiguous(trace, proxy.memory)
    memory = proxy.memory
    sharing = [alias for alias in (alias() for alias in memory.proxies) if alias is not None]
    base = memory.base
    is_own = memory.is_row_major  # a copy, or made by the function
    if not is_own and memory_of(base).kind is INPUT and all(alias.input is None for alias in sharing):
        raise UnsupportedError(
            f"{trace.name}: {name} updates a view of which the trace does not know the tensor{quote(user_location())}\n"
            "  update the tensor itself, or clone the view"
        )
    chains = [_steps_from(base, alias.value) for alias in sharing]
    steps = _steps_from(base, proxy.value) or ()
    if len(sharing) > 1:
        _require_views(trace, sharing, chains, steps, name)
    value = _stored(trace, proxy, value, name)
    is_tracked = _is_tracked(trace, steps, value, name)
    if len(sharing) == 1:
        memory.base = proxy.value = value if is_tracked else _with_history(trace, value, proxy.value, name)
    else:  # the tensor that they are views of changes, and with it all of them
        written = _written(trace, base, steps, value)
        memory.base = written if is_tracked else _with_history(trace, written, base, name)
        for alias, chain in zip(sharing, chains, strict=True):
            alias.value = _moved(trace, memory.base, chain or ())
    memory.updates += 1
    for alias in sharing:
        if alias.input is not None:
            trace.new_values.set(alias.input, alias.value)


def _settle_contiguous(trace: Trace, memory: Memory) -> None:
    """Decides which tensors that ``contiguous`` made of an argument are views of it, and which are copies and have
    memory of their own. A guard on the argument's strides holds that."""
    copies: dict[int, Memory] = {}
    for reference in [*memory.proxies] if memory.input is not None else ():
        alias = reference()
        path = _path(memory.base, alias.value) if alias is not None else None
        if alias is None or path is None or all(step.attrs != CONTIGUOUS for step in path):
            continue
        value, argument = memory.base, _argument(trace, memory.input)  # type: ignore[arg-type]
        for step in path:
            if step.attrs != CONTIGUOUS:
                value, argument = (_moved(trace, source, (step,)) for source in (value, argument))
            elif not is_contiguous(trace, argument):
                alias.memory = copies.setdefault(id(step), Memory(step, is_row_major=True))
                alias.memory.proxies.append(reference)
                memory.proxies = [other for other in memory.proxies if other is not reference]
                break
        else:
            alias.value = value


def _path(base: Node, value: Node) -> list[Node] | None:
    """Returns the views and ``contiguous`` calls that lead from ``base`` to ``value``; None if something else does."""
    path: list[Node] = []
    while value is not base:
        if value.kind is not VIEW and value.attrs != CONTIGUOUS:
            return None
        path.append(value)
        value = value.inputs[0]
    return path[::-1]


def _require_views(
    trace: Trace,
    sharing: Sequence[TensorProxy],
    chains: Sequence[tuple[Node, ...] | None],
    steps: Sequence[Node],
    name: str,
) -> None:
    """Raises UnsupportedError if an update of the tensor that ``steps`` lead to cannot be followed in all that share
    its memory.

    Args:
        chains: the steps from that memory to each of ``sharing``.
    """
    for alias, chain in zip(sharing, chains, strict=True):
        if has_other_bits(alias):
            raise UnsupportedError(
                f"{trace.name}: {name} updates a tensor that shares memory with a view(dtype) of it"
                f"{quote(user_location())}\n  compute the new bits and store them: x.copy_(bits.view(x.dtype)); clone "
                f"a view(dtype) that is to keep what it has; it is made{quote(alias.value.location)}"
            )
        if chain is None or not (alias.is_view or _is_surely_a_view(trace, chain, alias.memory)):
            raise UnsupportedError(
                f"{trace.name}: {name} updates a tensor that shares memory with what may be a view of it or a copy, as "
                f"results of reshape, flatten, contiguous and as_strided are{quote(user_location())}\n"
                "  make it by view, which never copies, or clone it, or use the operation that returns a new tensor; "
                f"it is made{quote(_made_at(alias.memory.base, alias.value))}"
            )
    if any(step.attrs[0] == "expand" for step in steps):
        raise UnsupportedError(
            f"{trace.name}: {name} updates an expanded tensor, of which several elements are one number in memory"
            f"{quote(user_location())}\n  clone it first, as eager torch asks too"
        )


def _stored(trace: Trace, proxy: TensorProxy, value: Node, name: str) -> Node:
    """Returns ``value`` as the memory of ``proxy`` has it: in its shape and dtype."""
    shape = proxy.value.shape
    same = len(value.shape) == len(shape) and all(
        trace.guards.equal(new, old) for new, old in zip(value.shape, shape, strict=True)
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
    if trace.new_values.inputs_of(value) - {proxy.memory.input}:  # results are told by values
        copy = ("copy", _COPIES_OF_UPDATES + len(trace.new_values.by_input))
        value = trace.marked(value, copy)
    return value


def _is_tracked(trace: Trace, steps: Sequence[Node], value: Node, name: str) -> bool:
    """Returns whether autograd would know of an update of the tensor that ``steps`` lead to: it does not under
    ``no_grad``, nor for ``x.detach()`` or ``x.data``."""
    if not trace.differentiable or not DTYPES[value.dtype].is_floating_point:
        return True
    if not torch.is_grad_enabled():
        return False
    if not any(map(is_detached, steps)):
        return True
    if own_facts.requires_grad(trace, value):
        raise UnsupportedError(
            f"{trace.name}: {name} updates a detached tensor with a value that requires grad{quote(user_location())}\n"
            "  clone the detached tensor first, or detach the value"
        )
    return False


def _with_history(trace: Trace, value: Node, before: Node, name: str) -> Node:
    """Returns ``value``, which an untracked update has made of ``before``, with the gradient of ``before``, as in eager
    torch."""
    if before.kind is not INPUT:
        return with_gradient(trace, value, before, 1.0)
    if trace.sources[before.attrs.number].value.requires_grad:
        raise UnsupportedError(
            f"{trace.name}: {name} updates an argument that requires grad without a gradient, under no_grad or through "
            f"detach or .data{quote(user_location())}\n"
            "  call the function under torch.no_grad(), or make the update outside of it"
        )
    return trace.detached(value)  # refused where gradients of this input are wanted


def is_selection(value: object) -> bool:
    """Returns whether ``value`` is what 0-d integer tensors choose, as in ``x[i]``.

    torch selects it as a number does, and so it is a view; here it is read by a gather, as the number is not known.
    """
    return isinstance(value, Node) and value.kind is GATHER and all(map(_is_one_number, value.inputs[1:]))


def _is_one_number(node: Node) -> bool:
    while node.kind is VIEW and node.attrs.kind in ("unsqueeze", "expand"):
        node = node.inputs[0]
    return not node.shape


def _steps_from(base: Node, value: Node) -> tuple[Node, ...] | None:
    """Returns the views and selections that lead from ``base`` to ``value``; None if something else does."""
    steps: list[Node] = []
    while value is not base:
        if value.kind is not VIEW and not is_selection(value):
            return None
        steps.append(value)
        value = value.inputs[0]
    return tuple(reversed(steps))


def has_other_bits(proxy: TensorProxy) -> bool:
    """Returns whether ``proxy`` is made of bits of the memory that it would share (``trace/bits.py``)."""
    node, dtype = proxy.value, proxy.memory.base.dtype
    while node.inputs and node is not proxy.memory.base:
        if node.dtype != dtype:
            return True
        node = node.inputs[0]
    return False


def _made_at(base: Node, value: Node) -> str | None:
    """Returns the line that made ``value`` of ``base``: the one of a reshape or a copy among those steps."""
    node = value
    while node is not base and node.inputs:
        if node.kind is not VIEW or node.attrs.kind == "reshape":
            return node.location
        node = node.inputs[0]
    return value.location


def note_copies(sources: Sequence[TensorProxy], results: Iterable[Any]) -> None:
    """Notes which of ``results``, views of ``sources``, may be copies: those of reshape are for some strides."""
    for result in results:
        for source in sources if isinstance(result, TensorProxy) else ():
            if source.memory is result.memory and source is not result:
                steps = _steps_from(source.value, result.value)
                result.is_view &= steps is not None and all(step.attrs[0] != "reshape" for step in steps)


def _is_surely_a_view(trace: Trace, steps: Sequence[Node], memory: Memory) -> bool:
    """Returns whether ``steps`` lead to a view of the tensor, and to no copy, at any strides that ``memory`` allows; an
    argument's are guarded where they decide."""
    if _is_view_of(steps, memory.is_row_major):
        return True
    if memory.input is None or not _is_view_of(steps, True):
        return False
    argument = _argument(trace, memory.input)
    return strides_of(trace, argument) == row_major(argument.shape)


def _is_view_of(steps: Sequence[Node], is_row_major: bool) -> bool:
    """Returns whether ``steps`` lead to a view of a tensor at any strides, or of one that is row-major."""
    for step in steps:
        attrs: Any = step.attrs if step.kind is VIEW else (GATHER.name,)
        if attrs[0] == "reshape" and not is_row_major:
            return False
        keeps = attrs[0] in ("reshape", "squeeze", "unsqueeze", "detach", "untracked_view") or attrs[:2] == ("slice", 0)
        is_row_major = is_row_major and keeps and (attrs[0] != "slice" or attrs[3] == 1)
    return True


def _moved(trace: Trace, base: Node, steps: Sequence[Node]) -> Node:
    for step in steps:
        base = trace.make(step.op, (base, *step.inputs[1:]), base.dtype, step.shape, step.attrs)
    return base


def _written(trace: Trace, base: Node, steps: Sequence[Node], value: Node) -> Node:
    """Replaces the view of ``base`` that ``steps`` lead to by ``value``."""
    first = next((n for n, step in enumerate(steps) if step.kind is GATHER or step.attrs.kind == "reshape"), None)
    if not steps:
        return value
    if first is None:
        movements = tuple((step.attrs, step.shape) for step in steps)
        return scattered(trace, base, value, (), range(len(value.shape)), movements=movements)
    before, step, after = steps[:first], steps[first], steps[first + 1 :]
    source = _moved(trace, base, before)
    whole = _written(trace, _moved(trace, source, (step,)), after, value)
    if step.kind is GATHER:
        return _written(trace, base, before, scattered(trace, source, whole, step.inputs[1:], step.attrs))
    return _written(trace, base, before, trace.make("view", (whole,), whole.dtype, source.shape, ("reshape",)))


def reshaped(trace: Trace, proxy: TensorProxy | None, view: TensorProxy, name: str) -> TensorProxy:
    """Makes ``proxy`` the ``view`` of it that the function ``name`` returns, and returns it.

    Raises:
        UnsupportedError: a caller would have to see it, or autograd would not know of it.
    """
    if proxy is None or proxy.input is not None:
        raise UnsupportedError(
            f"{trace.name}: {name} changes the sizes or strides of an argument itself{quote(user_location())}\n"
            f"  use {name.removesuffix('_')}, which returns a view, or call it outside of the decorated function"
        )
    if trace.differentiable and not torch.is_grad_enabled():
        raise UnsupportedError(
            f"{trace.name}: {name} where gradients are disabled, in a function that has some{quote(user_location())}\n"
            f"  use {name.removesuffix('_')}, which returns a view"
        )
    proxy.value, proxy.is_view = view.value, view.is_view
    proxy.memory.is_row_major &= name.endswith("squeeze_")  # the next update may make this view the whole tensor
    return proxy


def before_updates(trace: Trace, proxy: TensorProxy) -> Node:
    """Returns what the value of ``proxy`` was before the function updated the argument whose memory it has: a view of
    the argument; the value itself where there is none."""
    memory = proxy.memory
    if memory.input is None or not memory.updates:
        return proxy.value
    return _moved(trace, _argument(trace, memory.input), _steps_from(memory.base, proxy.value) or ())


def _argument(trace: Trace, number: int) -> Node:
    spec = trace.inputs[number]
    return trace.builder.make("input", (), spec.dtype, spec.shape, (number,))


def memory_of(node: Node) -> Node:
    """Returns the node whose memory ``node`` may share: the one that it is a view of, or ``node`` itself."""
    while node.kind is VIEW or node.attrs in (CONTIGUOUS, CHANNELS_LAST):
        node = node.inputs[0]
    return node
