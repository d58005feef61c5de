"""Generates dispatchers (``dispatch.py``) for the kinds of their arguments: see ``warm.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd import forward_ad

from jitgen.call import observers, warm
from jitgen.call.signature import NUMBERS, STATIC
from jitgen.codegen.python import PythonFunction, block, tuple_text
from jitgen.errors import UnsupportedError
from jitgen.trace.guards import tracing
from jitgen.trace.readable import TENSORS

LAYOUT_FACTS = ("shape", "stride()", "dtype", "device", "requires_grad", "is_neg()")
"""The attributes of a tensor that a dispatcher compares."""


@dataclass(frozen=True)
class DispatchFacts:
    """Holds what the text of a dispatcher depends on.

    Attributes:
        kinds: the types of its arguments, which are leaves.
        static_numbers: which of the numbers among them are compared by value.
    """

    kinds: Sequence[type]
    static_numbers: frozenset[int]

    @cached_property
    def tensors(self) -> list[int]:
        return [index for index, kind in enumerate(self.kinds) if kind in TENSORS]

    @cached_property
    def arguments(self) -> warm.Arguments:
        numbers = [index for index, kind in enumerate(self.kinds) if kind in NUMBERS]
        return warm.Arguments(len(self.kinds), self.tensors, numbers)

    @cached_property
    def values(self) -> list[str]:
        """Lists what is compared besides the layouts of tensors: static values, and remainders of addresses."""
        arguments = self.arguments
        static = [index for index, kind in enumerate(self.kinds) if issubclass(kind, STATIC)]
        static += [index for number, index in enumerate(arguments.numbers) if number in self.static_numbers]
        values = [f"exact(arg{index})" if self.kinds[index] is float else f"arg{index}" for index in static]
        # A GPU's 16-byte accesses depend on the address; the CPU's do not.
        return values + ([f"{address} & 15" for address in arguments.addresses] if torch.cuda.is_available() else [])


def make_dispatch(name: str, facts: DispatchFacts, state: Any) -> Callable[..., Any]:
    """Generates ``(*arguments) -> result``, which launches what ``state.last`` holds if the call is like the last
    one."""
    arguments, values = facts.arguments, facts.values
    known = [f"known{index}" for index in range(len(values))]
    same = [f"{value} == {name}" for value, name in zip(values, known, strict=True)]
    layout = tuple_text([f"{tensor}.{fact}" for tensor in arguments.tensor_names for fact in LAYOUT_FACTS])
    compared = [layout, *map(tuple_text, (values, arguments.all, arguments.launched))]
    inline = f"state.inline({', '.join(arguments.all)})"
    function = warm.function(
        "dispatch",
        arguments.all,
        [] if facts.tensors else [f"if tracing.get() is not None: return {inline}"],
        arguments,
        # A trace in progress refuses to read an address: then this call is part of its kernel. Tensors without
        # memory refuse too.
        unreadable="(UnsupportedError, RuntimeError)",
        inline=inline,
        attempts=warm.launch_if_same(
            "state.last", known, arguments.tensor_names, [*arguments.addresses, *same], arguments
        ),
        otherwise=f"state.cold({', '.join(compared)})",
    )
    names = {"state": state, "exact": float.hex, "UnsupportedError": UnsupportedError}
    names |= {"data_ptr": torch.Tensor.data_ptr, "tracing": tracing, "forward_ad": forward_ad}
    names |= {"modes": observers.modes, "is_recording": observers.is_recording}
    made: Callable[..., Any] = function.define(f"dispatch of {name}", names)
    return made


def make_unpacking(
    name: str,
    count: int,
    keywords: Sequence[str],
    quantized: Sequence[bool],
    table: Mapping[Any, Callable[..., Any]],
    learn: Callable[[tuple[Any, ...], dict[str, Any]], Any],
) -> Callable[..., Any]:
    """Generates a function that unpacks quantised weights and calls the dispatcher of their tensors.

    Args:
        quantized: which of the arguments are.
        table: the dispatchers, by the tokens of the weights.
        learn: takes a call whose dispatcher is not there.
    """
    values = [f"arg{index}" for index in range(len(quantized))]
    packed = [value for value, is_packed in zip(values, quantized, strict=True) if is_packed]
    unpacked = [f"*stored_{value}.tensors" if value in packed else value for value in values]
    named = [f"{keyword!r}: {value}" for keyword, value in zip(keywords, values[count:], strict=True)]
    lines = [
        *(f"stored_{value} = {value}.stored" for value in packed),
        f"dispatcher = table.get({tuple_text([f'stored_{value}.token' for value in packed])})",
        *block(
            "if dispatcher is None or tracing.get() is not None:",
            [f"return learn({tuple_text(values[:count])}, {{{', '.join(named)}}})"],
        ),
        f"return dispatcher({', '.join(unpacked)})",
    ]
    names = {"tracing": tracing, "table": table, "learn": learn}
    made: Callable[..., Any] = PythonFunction("dispatch", values, lines).define(f"dispatch of {name}", names)
    return made
