"""What happens, told to whoever asked: one event for every kernel really compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class CompileEvent:
    """A kernel was compiled (never published for a store hit).

    Attributes:
        name: the kernel's entry.
        target: such as ``"sm_90a"``.
        compiler: ``"nvrtc"``, ``"triton"``, ``"host"`` or ``"load_inline"``.
        key: the artifact key.
        seconds: in the compiler.
    """

    name: str
    target: str
    compiler: str
    key: str
    seconds: float


_subscribers: list[Callable[[CompileEvent], None]] = []


def on_compile(callback: Callable[[CompileEvent], None]) -> Callable[[], None]:
    """Call ``callback(event)`` once for every kernel compiled from now on; returns the function that ends it."""
    _subscribers.append(callback)

    def unsubscribe() -> None:
        if callback in _subscribers:
            _subscribers.remove(callback)

    return unsubscribe


def publish(event: CompileEvent) -> None:
    for callback in tuple(_subscribers):
        callback(event)
