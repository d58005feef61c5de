"""Defines ``jitgen.device_function``: a pointwise function that a user spelled in the dialects.

Within a decorated function a call is one operation of the kernel that it is fused into. Elsewhere, and where torch
traces, it is the reference. In a debugging process a dialect's spelling is compared with the reference at its first
use.

Neighbour: ``trace/own_functions.py`` traces calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen import settings
from jitgen.call.function import JitFunction
from jitgen.errors import JitgenError
from jitgen.frames import followed_as
from jitgen.spec import DTYPES
from jitgen.trace.own_functions import OwnFunction, applied, is_traced

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

_NUMBERS = (0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -3.0, 7.0, 1e-3, -1e-3)
"""Arguments of a check, besides random ones."""
_ELEMENTS = 4096
_ROUNDINGS = 64
"""Units in the last place, of the largest magnitude of a result, that a spelling may differ from its reference by."""


def _reference(function: OwnFunction, *arguments: Any) -> Any:
    reference = function.reference
    return reference(*arguments)


class DeviceFunction(OwnFunction):
    """Represents a pointwise function: call it as its reference. Made by ``jitgen.device_function``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._checked: set[tuple[str, Any]] = set()

    @followed_as(_reference)
    def __call__(self, *arguments: Any) -> Any:
        return applied(self, *arguments) if is_traced(arguments) else self.reference(*arguments)

    def used(self, trace: Trace, dtypes: Sequence[str]) -> None:
        """Compares the spelling with the reference, once for each dtype and kind of device."""
        key = (dtypes[0], trace.device.type)
        if not trace.runs or settings.get("JITGEN_DEBUG") < 1 or key in self._checked:
            return
        self._checked.add(key)
        failures: list[str | BaseException] = []

        def check() -> None:  # in a thread of its own, which traces nothing
            try:
                failures.extend(self._differences(dtypes, trace.device))
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=check, name="jitgen check")
        thread.start()
        thread.join()
        for failure in failures:
            if isinstance(failure, BaseException):
                raise failure
            raise JitgenError(failure)

    def _differences(self, dtypes: Sequence[str], device: torch.device) -> Sequence[str]:
        """Says where the spelling gives another number than the reference."""
        generator = torch.Generator().manual_seed(0)
        known = torch.tensor(_NUMBERS, dtype=torch.float64)
        arguments = []
        for dtype in dtypes:
            numbers = torch.randn(_ELEMENTS, generator=generator, dtype=torch.float64) * 3
            numbers[: len(known)] = known[torch.randperm(len(known), generator=generator)]
            arguments.append(numbers.to(DTYPES[dtype]).to(device))
        spelled = JitFunction(lambda *tensors: applied(self, *tensors), name=self.attrs.name)(*arguments)
        reference = self.reference(*arguments)
        wide = [a.double() if a.dtype.is_floating_point else a for a in arguments]
        exact = self.reference(*wide).double()
        error, own_error = (spelled.double() - exact).abs(), (reference.double() - exact).abs()
        epsilon = torch.finfo(reference.dtype).eps if reference.dtype.is_floating_point else 0.0
        allowed = _ROUNDINGS * epsilon * exact.abs().clamp(min=1.0) + 4 * own_error
        wrong = (error > allowed) | (spelled.isnan() != reference.isnan())
        if not bool(wrong.any()):
            return []
        first = int(wrong.nonzero()[0])
        at = ", ".join(f"{n} = {a[first].item()}" for n, a in zip(self.attrs.parameters, arguments, strict=True))
        return [
            f"{self.attrs.name}, as spelled for {device.type}, gives {spelled[first].item()} at {at}, and its "
            f"reference {reference[first].item()}"
        ]


def device_function(
    reference: Callable[..., Any],
    *,
    cuda: str | None = None,
    triton: str | None = None,
    cpp: str | None = None,
    derivative: Callable[..., Any] | None = None,
) -> DeviceFunction:
    """Makes a pointwise function of tensors that decorated functions call as one operation.

    ::

        softsign = jitgen.device_function(
            lambda x: x / (1 + x.abs()), cuda="x / (1 + fabsf(x))", triton="x / (1 + tl.abs(x))",
            cpp="x / (1 + __builtin_fabsf(x))", derivative=lambda x: 1 / (1 + x.abs()) ** 2)

    Args:
        reference: the same in torch, of tensors alone. It decides the dtype, and is what is called elsewhere.
        cuda, triton, cpp: an expression over the names of its parameters, in CUDA C++, Triton and C++. Arguments have
            one dtype, torch's for all of them, or the reference's where it makes floats of integers; those of 16
            bits are float32. In C++ ``T`` is their type.
        derivative: written in torch, of the same arguments: a slope for each. Without it gradients are refused.

    Raises:
        UnsupportedError: no dialect is given, or a text is no expression.
    """
    return DeviceFunction(reference, {"cuda": cuda, "triton": triton, "cpp": cpp}, derivative)
