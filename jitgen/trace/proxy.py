"""Defines ``TensorProxy``, which user code has in place of a tensor while its function is traced.

Neighbour: every operation on a proxy is a call of ``Trace.call`` or ``Trace.attribute`` (``trace/tracer.py``).
"""

from __future__ import annotations

import builtins
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from jitgen.errors import TraceError
from jitgen.ir.graph import Node
from jitgen.trace import own_facts
from jitgen.trace.location import quote, user_location
from jitgen.trace.numbers import wrap
from jitgen.trace.replaced import Replaced

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


TRACED = "<a tensor whose values are not known before its kernel runs"
"""The beginning of the text of a tensor of the trace, which a function may print, and may not return or keep."""


class Memory:
    """Represents the memory of a tensor of the trace, which its views share.

    Attributes:
        base: the node of the whole tensor's current value, which the values of all views are views of.
        proxies: the tensor and its views.
        is_row_major: whether it is known to be contiguous, so that a reshape of it is a view.
        is_unset: whether it was made without values, by ``torch.empty`` and the like.
        updates: how often it was updated in place.
        input: the index of the graph input whose memory it is; None for that of other tensors.
    """

    def __init__(self, base: Node, is_row_major: bool = False, input: int | None = None):
        self.base = base
        self.input = input
        self.proxies: list[weakref.ref[TensorProxy]] = []
        self.is_row_major = is_row_major
        self.is_unset = False
        self.updates = 0


class TensorProxy(fx.Proxy):
    """Represents a tensor of the trace.

    Attributes:
        value: the node of its current value; an update in place replaces it.
        owner: the trace.
        input: the index of the graph input that it is; None for any other tensor.
        memory: which every proxy has whose tensor would share memory with this one.
        is_view: whether torch is sure to have made it without a copy, or to have raised an error.
        untracked: why autograd does not know of it, ``"view"`` for a view that was made where gradients are disabled
            (``own_facts.UNTRACKED``); None for other tensors. In graphs without marks ``"detached"``, too.
        made_after: how often its memory was updated before it was made.
    """

    __array_ufunc__ = None  # numpy leaves its operators to ours

    def __init__(
        self, node: Node, trace: Trace, memory: Memory | None = None, input: int | None = None, is_view: bool = True
    ):
        super().__init__(None, trace.tracer)  # type: ignore[arg-type]
        self.value = node
        self.owner = trace
        self.input = input
        self.memory = memory or Memory(node, input=input)
        self.memory.proxies.append(weakref.ref(self))
        self.is_view = is_view
        self.untracked: str | None = None
        self.made_after = self.memory.updates
        trace.guards.handed_out.append(weakref.ref(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.owner.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in own_facts.OF_PROXIES:
            own_facts.refuse_storing(self.owner, self, name)
        object.__setattr__(self, name, value)

    def __iter__(self) -> Any:
        return iter(self.owner.call("unbind", (self,), {}))

    def __len__(self) -> int:
        if not self.value.shape:
            raise TraceError(f"len() of a 0-d tensor, as in torch{quote(user_location())}\n  ask for .numel()")
        return int(wrap(self.value.shape[0], self.owner.guards))

    def __bool__(self) -> bool:
        return self._leave("used as a condition", "use torch.where, or decide outside the decorated function")

    def _leave(self, what: str, instead: str) -> Any:
        raise TraceError(
            f"{self.owner.name}: a tensor's value is {what}, but it is known only when the kernel runs"
            f"{quote(user_location())}\n  {instead}"
        )

    def __int__(self) -> int:
        return self._leave("converted to a Python number", "keep it a tensor, or pass the number as an argument")

    __float__ = __index__ = __int__

    def __contains__(self, item: Any) -> bool:
        return self._leave("searched", "compare with == and keep the result a tensor")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.owner.call("__setitem__", (self, key, value), {})

    def __copy__(self) -> Any:
        with torch.no_grad():  # it requires grad where this does, and has no history
            return self.owner.call("alias", (self,), {})

    def __deepcopy__(self, memo: Any) -> Any:
        return self.owner.call("clone", (self,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._leave("pickled", "pickle it outside the decorated function")

    def __repr__(self) -> str:
        shape = tuple(map(self.owner.guards.hint, self.value.shape))
        return f"{TRACED}, shape {shape}, dtype {self.value.dtype}>"

    def __format__(self, spec: str) -> str:
        return repr(self)  # what a number of it would be formatted by

    def __hash__(self) -> int:
        self.owner.guards.asks_identity = True
        return object.__hash__(self)


def _install_inplace_operators() -> None:
    # fx.Proxy has no in-place operators: x += y would rebind the name x and not update the caller's tensor.
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):

        def operate(self: TensorProxy, other: Any, operation: str = f"__i{name}__") -> Any:
            return self.owner.call(operation, (self, other), {})

        setattr(TensorProxy, f"__i{name}__", operate)


_install_inplace_operators()


def untraceable(error: Exception) -> str | None:
    """Explains an error that a function of torch's in C raised because it got a proxy (most name its type, the
    jiterator says that it is no Tensor, pybind11 prints it); None for any other error."""
    said = str(error)
    is_about_proxies = TensorProxy.__name__ in said or "tuple is not a Tensor" in said
    is_about_proxies |= "incompatible function arguments" in said and TRACED in said
    return said.replace(TensorProxy.__name__, "Tensor") if is_about_proxies else None


_SAMPLE = torch.empty(0)
_isinstance = builtins.isinstance


def _isinstance_of_proxies(value: Any, kinds: Any) -> bool:
    return _isinstance(value, kinds) or (type(value) is TensorProxy and _isinstance(_SAMPLE, kinds))


proxies_are_tensors = Replaced(builtins, {"isinstance": _isinstance_of_proxies}).active
"""A context within which a proxy is a ``torch.Tensor`` for ``isinstance``, so that user code takes a tensor's branch.

A ``__class__`` property would do for Python, but torch's C++ code reads it as well, and would take a proxy's memory for
a tensor's.
"""
