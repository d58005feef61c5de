"""Generates the text of a warm call: "are the arguments those of the last call? Then launch."

A loop over arguments that asks what each of them is would spend a warm call's microseconds on questions whose answers
do not change. So dispatchers (``dispatch.py``) and plans (``plan.py``) are generated functions for the kinds of their
arguments. This module has the lines that both consist of; they differ in what they do when the arguments are other
ones. For two tensors on a GPU and a number, the dispatcher reads::

    def dispatch(arg0, arg1, arg2):
        try:
            address0 = arg0.data_ptr()
            address1 = arg1.data_ptr()
        except (UnsupportedError, RuntimeError):
            return state.inline(arg0, arg1, arg2)
        if arg0.is_nested or arg1.is_nested:
            return state.inline(arg0, arg1, arg2)
        same_layout, launch, current, known0, known1 = state.last
        if same_layout(arg0, arg1) and forward_ad._current_level < 0 and address0 and ... and address1 & 15 == known1:
            captured = () if current is None else current()
            if captured:
                captured_addresses = [*map(data_ptr, captured)]
                return launch(arg0, arg1, *captured, address0, address1, *captured_addresses, arg2)
            elif captured is not None:
                return launch(arg0, arg1, address0, address1, arg2)
        return state.cold(...)

and the plan::

    def __call__(self, arg0=missing, arg1=missing, arg2=missing, *more, out=None):
        try:
            address0 = arg0.data_ptr()
            address1 = arg1.data_ptr()
        except (AttributeError, RuntimeError, UnsupportedError):
            return self._elsewhere((arg0, arg1, arg2, *more,), out)
        if arg0.is_nested or arg1.is_nested:
            return self._elsewhere((arg0, arg1, arg2, *more,), out)
        if out is None:
            last = self._last
            if last is not None and not more and type(arg2) is kind2:
                same_layout, launch, current, remainder0, remainder1 = last
                if same_layout(arg0, arg1) and forward_ad._current_level < 0 and ... and not (address0 | address1) & 15:
                    ...launch as above
        else:
            ...the same with ``self._last_out``, ``out`` and its address
        return self._elsewhere((arg0, arg1, arg2, *more,), out)

The address of a tensor is 0 if it is empty or has lost its memory, which its layout does not tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jitgen.codegen.python import PythonFunction, block


@dataclass(frozen=True)
class Arguments:
    """Holds the names of a generated function's arguments.

    Attributes:
        count: of all arguments.
        tensors: indices of those that are tensors.
        numbers: indices of those that are numbers the launch takes.
    """

    count: int
    tensors: Sequence[int]
    numbers: Sequence[int]

    @cached_property
    def all(self) -> list[str]:
        return [f"arg{index}" for index in range(self.count)]

    @cached_property
    def tensor_names(self) -> list[str]:
        return [f"arg{index}" for index in self.tensors]

    @cached_property
    def addresses(self) -> list[str]:
        """Returns the names of the addresses of the tensors, which ``function`` reads first."""
        return [f"address{index}" for index in self.tensors]

    @cached_property
    def launched(self) -> list[str]:
        """Returns what a launcher takes (``runtime/launcher.py``): tensors, their addresses, numbers."""
        return self._launched([], [])

    @cached_property
    def launched_with_captured(self) -> list[str]:
        """Returns what a launcher with captured tensors takes: also ``captured``, a list of tensors, and
        ``captured_addresses``."""
        return self._launched(["*captured"], ["*captured_addresses"])

    def _launched(self, captured: list[str], addresses: list[str]) -> list[str]:
        return [*self.tensor_names, *captured, *self.addresses, *addresses, *(f"arg{index}" for index in self.numbers)]


def launch_if_same(
    remembered: str,
    names: Iterable[str],
    compared: Sequence[str],
    conditions: Iterable[str],
    arguments: Arguments,
    out: Sequence[str] = (),
    captured_condition: str = "",
) -> list[str]:
    """Returns the lines that compare the arguments with those of the last call, and launch if they are alike.

    Args:
        remembered: the expression of what the last call left: a tuple of its layout check, its launcher, what must be
            asked at each call (``BoundLaunch.current``; None for nothing) and values.
        names: the names of these values, for the conditions.
        compared: the tensors whose layouts the check takes.
        conditions: what else must hold.
        arguments: of the function.
        out: what the launcher takes after them: the output and its address. The function returns the first of these;
            where there are none, what the launch returns.
        captured_condition: what must hold of ``captured`` and ``captured_addresses``.
    """

    def launch(launched: Sequence[str]) -> list[str]:
        text = f"launch({', '.join([*launched, *out])})"
        return [text, f"return {out[0]}"] if out else [f"return {text}"]

    launch_captured = launch(arguments.launched_with_captured)
    if captured_condition:
        launch_captured = block(f"if {captured_condition}:", launch_captured)
    # Within a dual_level() of forward-mode AD tensors may have tangents, which no layout tells.
    first = [f"same_layout({', '.join(compared)})", "forward_ad._current_level < 0"]
    # A mode would not see the launch (observers.py).
    same = " and ".join([*first, *conditions, "not modes()", "not is_recording()"])
    then = [
        "captured = () if current is None else current()",
        *block("if captured:", ["captured_addresses = [*map(data_ptr, captured)]", *launch_captured]),
        *block("elif captured is not None:", launch(arguments.launched)),
    ]
    names = ["same_layout", "launch", "current", *names]
    return [f"{', '.join(names)} = {remembered}", *block(f"if {same}:", then)]


def function(
    name: str,
    parameters: Sequence[str],
    first: Sequence[str],
    arguments: Arguments,
    unreadable: str,
    inline: str,
    attempts: Sequence[str],
    otherwise: str,
) -> PythonFunction:
    """Assembles a whole function.

    Args:
        first: the statements before any other.
        unreadable: the exception that an argument without an address raises.
        inline: what the function returns then, and for nested tensors, which have no strides.
        attempts: lines of ``launch_if_same``.
        otherwise: what the function returns where none of them did.
    """
    read = [
        f"{name} = arg{index}.data_ptr()" for name, index in zip(arguments.addresses, arguments.tensors, strict=True)
    ]
    nested = " or ".join(f"{name}.is_nested" for name in arguments.tensor_names)  # a layout check aborts at these
    body = [
        *first,
        *block("try:", read or ["pass"]),
        *block(f"except {unreadable}:", [f"return {inline}"]),
        *(block(f"if {nested}:", [f"return {inline}"]) if nested else []),
        *attempts,
        f"return {otherwise}",
    ]
    return PythonFunction(name, parameters, body)
