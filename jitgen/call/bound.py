"""Defines what is remembered of a call that was resolved: a launch, and what must be true at a call that takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitgen.call.specialization import Specialization
from jitgen.errors import UnsupportedError
from jitgen.lowering import Lowered
from jitgen.runtime.guards import TensorFacts, layout_check
from jitgen.trace import autocast
from jitgen.trace.captured import MISSING, OfLayout, call_leaves, together
from jitgen.trace.readable import TENSORS, why_unreadable
from jitgen.trace.traced import Traced
from jitgen.trace.weak_method import WeakGuard


class Captures:
    """Checks what one specialisation reads besides its arguments: whether it still is what it was at the trace.

    Attributes:
        specialization: what was traced.
        captured: tensors that the function closes over.
        guards: values that the function closes over, which must be what they were at the trace.
        captured_extents: the bytes that each captured tensor spans.
        depends_on_arguments_alone: whether equal arguments suffice: nothing is captured or guarded, and autocast is
            off.
    """

    __slots__ = (
        *("_autocast", "_missing", "_objects", "_read_all", "_remainders", "_requires_grad", "_same_layout"),
        *("captured", "captured_extents", "depends_on_arguments_alone", "guards", "specialization"),
    )

    def __init__(
        self, specialization: Specialization, captured: Sequence[torch.Tensor], computes_gradients: bool = False
    ):
        """Records the captured tensors of the call at hand; with ``computes_gradients``, those that require grad must
        stay the same ones."""
        self.specialization = specialization
        self.guards = tuple(guard for guard in specialization.traced.guards if not isinstance(guard, OfLayout))
        self.captured = specialization.traced.captured
        self._autocast = autocast.settings()
        self.depends_on_arguments_alone = not (self.captured or self.guards or self._autocast)
        facts = list(map(TensorFacts.from_tensor, captured))
        self.captured_extents = [fact.extent for fact in facts]
        # The CPU's accesses do not depend on the address.
        self._remainders = [
            None if tensor.is_cpu else fact.remainder for tensor, fact in zip(captured, facts, strict=True)
        ]
        self._requires_grad = [tensor.requires_grad for tensor in captured] if computes_gradients else None
        self._same_layout = layout_check(captured)
        objects = [guard for guard in self.guards if isinstance(guard, WeakGuard)]
        values = [guard for guard in self.guards if not isinstance(guard, WeakGuard)]
        self._missing = [guard.read for guard in values if guard.value is MISSING]
        values = [guard for guard in values if guard.value is not MISSING]
        self._objects = [guard.reference for guard in objects]
        self._read_all = together(values, [*objects, *self.captured])

    def captured_tensors(self, leaves: Sequence[Any]) -> list[torch.Tensor] | None:
        """Returns the captured tensors now; None if a layout or a guarded value has changed, if a tensor newly requires
        grad, or, for a launch, if any does.

        Args:
            leaves: the arguments of the call, whose objects are guarded too.
        """
        if self.depends_on_arguments_alone:
            return []
        token = call_leaves.set(leaves)
        try:
            return self._read()
        finally:
            call_leaves.reset(token)

    def _read(self) -> list[torch.Tensor] | None:
        if self._autocast and autocast.settings() != self._autocast:  # without it the check of the arguments suffices
            return None
        values = self._read_all()
        if values is None:
            return None
        for reference, now in zip(self._objects, values, strict=False):
            if now is None or now is not reference():
                return None
        for read in self._missing:
            if read() is not MISSING:
                return None
        return self._checked(values[len(self._objects) :]) if self.captured else []

    def _checked(self, tensors: list[Any]) -> list[torch.Tensor] | None:
        """Returns ``tensors`` if the launch is for captured tensors of their layouts, else None."""
        if not all(type(tensor) in TENSORS for tensor in tensors) or not self._same_layout(*tensors):
            return None
        for captured, tensor, remainder in zip(self.captured, tensors, self._remainders, strict=True):
            address = tensor.data_ptr()
            if remainder is not None and address & 15 != remainder:
                return None
            if not address and (unreadable := why_unreadable(tensor)) is not None:
                raise UnsupportedError(f"{captured.path}: {unreadable}")
        if self._requires_grad is not None:
            return tensors if [tensor.requires_grad for tensor in tensors] == self._requires_grad else None
        if torch.is_grad_enabled() and asks_gradients(self.specialization.traced, tensors) is not None:
            return None
        return tensors


class BoundLaunch(Captures):
    """Holds a launch, and what must be true at a call that takes it.

    Attributes:
        launch: the launcher; see ``runtime/launcher.py`` for its arguments. It takes captured tensors after the
            arguments.
        lowered: what it was made of.
    """

    __slots__ = ("launch", "lowered")

    def __init__(self, launch: Any, specialization: Specialization, lowered: Lowered, captured: Sequence[torch.Tensor]):
        """Binds ``launch``, which was made for the captured tensors ``captured``."""
        super().__init__(specialization, captured)
        self.launch = launch
        self.lowered = lowered

    def current(self, needs_grad: bool) -> Callable[[], list[torch.Tensor] | None] | None:
        """Returns the function that a call with equal arguments asks before it launches; None if there is nothing to
        ask. It returns the captured tensors as they are now, or None if this launch is not for them.

        ``needs_grad``: whether an argument requires grad; then this launch is for calls without gradients alone.
        """
        if self.specialization.traced.follows_arguments:  # only a cold call has them, and checks them there
            return lambda: None
        if needs_grad:
            return lambda: None if torch.is_grad_enabled() else self._read()
        if self.depends_on_arguments_alone:
            return None
        has_values_alone = not (self.captured or self._autocast or self._objects or self._missing)
        return self._read_all if has_values_alone else self._read


def asks_gradients(traced: Traced, captured: Sequence[torch.Tensor]) -> str | None:
    """Returns the path of a captured tensor that requires grad outside ``no_grad``; None without one."""
    for index, (capture, tensor) in enumerate(zip(traced.captured, captured, strict=True)):
        if tensor.requires_grad and index not in traced.under_no_grad:
            return capture.path
    return None
