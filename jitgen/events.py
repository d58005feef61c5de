"""Tells subscribers what happens: a kernel was compiled, a call was lowered, the store lacks its kernels.

Who publishes knows nothing of who subscribes: ``deploy/record.py`` writes calls into manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from jitgen.ir.graph import Graph
    from jitgen.ir.views import Memory
    from jitgen.lowering import Lowered

Event = TypeVar("Event")


@dataclass(frozen=True)
class CompileEvent:
    """Says that a kernel was compiled (never published for a store hit).

    Attributes:
        name: the kernel's name in the function that it was compiled for.
        entry: its symbol in the binary; equal kernels of all functions have one, and are compiled once.
        target: such as ``"sm_90a"``.
        compiler: ``"nvrtc"``, ``"triton"``, ``"host"`` or ``"load_inline"``.
        key: the artifact key.
        seconds: in the compiler.
    """

    name: str
    entry: str
    target: str
    compiler: str
    key: str
    seconds: float


@dataclass(frozen=True)
class CallEvent:
    """Says that a new call was lowered, or that ``lower`` was asked what a call would run.

    Attributes:
        graph: as it was traced, without what lowering for this machine added.
        lowered: for this machine.
        environment: a value for every symbol.
        memory: of every input.
        requested: backend, possibly ``"auto"``, and compiler, if one was asked for.
        leaves, tree: the arguments of a call that is made (``call/arguments.py``).
        tensors: of every input, or the spec that describes it; none where nobody has them.
        with_leaves: lowers the same call with other leaves; None where the function cannot be traced for them.
    """

    graph: Graph
    lowered: Lowered
    environment: Mapping[str, Any]
    memory: Sequence[Memory]
    requested: tuple[str, str | None]
    leaves: Sequence[Any] = ()
    tree: Any = None
    tensors: Sequence[Any] = ()
    with_leaves: Callable[[Sequence[Any]], CallEvent | None] | None = None


@dataclass(frozen=True)
class MissEvent:
    """Says that the store lacks the kernels of a call, in a process that may not compile. A subscriber may answer with
    what would have built them."""

    call: CallEvent


_subscribers: dict[type, list[Callable[[Any], Any]]] = {}


def subscribe(kind: type[Event], callback: Callable[[Event], Any]) -> Callable[[], None]:
    """Calls ``callback(event)`` for every event of ``kind`` from now on; returns the function that ends it."""
    callbacks = _subscribers.setdefault(kind, [])
    callbacks.append(callback)

    def unsubscribe() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return unsubscribe


def on_compile(callback: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Calls ``callback(event)`` once for every kernel compiled from now on; returns the function that ends it."""
    return subscribe(CompileEvent, callback)


def publish(event: Any) -> list[Any]:
    """Tells the subscribers of the event's kind; returns what they answered, without None."""
    answers = [callback(event) for callback in tuple(_subscribers.get(type(event), ()))]
    return [answer for answer in answers if answer is not None]
