"""``TensorProxy``: what user code holds in place of a tensor while its function is traced."""

from __future__ import annotations

import builtins
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from jitgen.errors import TraceError, UnsupportedError
from jitgen.ir.graph import Node
from jitgen.trace.location import quote, user_location
from jitgen.trace.numbers import wrap

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

Family = list["weakref.ref[TensorProxy]"]


class TensorProxy(fx.Proxy):
    """A tensor during the trace. ``value`` is its node now; in-place operations replace it."""

    def __init__(self, node: Node, trace: Trace, family: Family | None = None, input: int | None = None):
        super().__init__(None, trace.tracer)  # type: ignore[arg-type]
        self.value = node
        self.owner = trace
        self.input = input
        self.family: Family = [] if family is None else family
        """Every proxy that would share memory with this one: updating one in place would have to update all."""
        self.family.append(weakref.ref(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.owner.attribute(self, name)

    def __iter__(self) -> Any:
        return iter(self.owner.call("unbind", (self,), {}))

    def __len__(self) -> int:
        if not self.value.shape:
            raise TraceError(f"len() of a 0-d tensor{quote(user_location())}")
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
        raise UnsupportedError(
            f"{self.owner.name}: assignment to a part of a tensor is not supported{quote(user_location())}\n"
            "  build the result with torch.where or torch.cat instead"
        )

    def __repr__(self) -> str:
        return f"TensorProxy({self.value.dtype}, {self.value.shape})"

    __hash__ = object.__hash__


def _install_inplace_operators() -> None:
    # fx.Proxy has none: x += y would rebind the name and leave the caller's tensor as it was.
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):

        def operate(self: TensorProxy, other: Any, operation: str = f"__i{name}__") -> Any:
            return self.owner.call(operation, (self, other), {})

        setattr(TensorProxy, f"__i{name}__", operate)


_install_inplace_operators()


_SAMPLE = torch.empty(0)
_isinstance = builtins.isinstance
_tracing = 0
_tracing_lock = threading.Lock()


def _isinstance_of_proxies(value: Any, kinds: Any) -> bool:
    return _isinstance(value, kinds) or (type(value) is TensorProxy and _isinstance(_SAMPLE, kinds))


@contextmanager
def proxies_are_tensors() -> Iterator[None]:
    """Within this ``isinstance`` says that a proxy is a ``torch.Tensor``: user code must take the branch of a tensor.

    torch.fx too replaces builtins while it traces. A ``__class__`` property would answer as well, but torch's C++ code
    asks it too, and then reads a proxy's memory as a tensor's.
    """
    global _tracing
    with _tracing_lock:
        _tracing += 1
        builtins.isinstance = _isinstance_of_proxies
    try:
        yield
    finally:
        with _tracing_lock:
            _tracing -= 1
            if not _tracing:
                builtins.isinstance = _isinstance
