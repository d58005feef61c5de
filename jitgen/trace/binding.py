"""Binds the arguments of a call to the parameters of a row.

torch's own argument parser judges a call. A torch function has been parsed when a trace sees it. A method, which a
proxy receives by name, is called here with empty stand-ins for the tensors; these only report that the parser accepted
the call. So what torch refuses is refused in torch's words, and rows list the parameters that they implement:

* other names that torch accepts for a parameter (numpy's ``axis`` for ``dim``) are those of ``SPELLINGS``;
* a list of sizes may be given as one argument, as many, or by name;
* parameters in ``NEUTRAL`` may be given to any row, with values that have no effect on a result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.spec import DTYPES
from jitgen.trace.numbers import SymbolicNumber
from jitgen.trace.proxy import TensorProxy
from jitgen.trace.sequences import rebuilt

SPELLINGS = {
    "dim": ("axis", "axes"),
    "keepdim": ("keepdims",),
    "input": ("self", "x", "a", "x1", "A", "tensor"),
    "other": ("x2", "tensor", "vec2"),
    "dim0": ("axis0",),
    "dim1": ("axis1",),
    "indices_or_sections": ("sections", "indices"),
    "split_size_or_sections": ("split_size", "split_sizes"),
}
"""torch's names for a parameter of a row, by the name it has there."""

SIZES = ("size", "sizes", "shape", "dims", "repeats")
"""torch's names for the parameter that a row declares as ``*sizes``."""

_PLAIN = (None, torch.preserve_format, torch.contiguous_format)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "out": (None,),
    "names": (None,),
    "generator": (None,),
    "layout": (None, torch.strided),
    "memory_format": _PLAIN,
    "pin_memory": (None, False),
    "requires_grad": (None, False),
    "non_blocking": (None, False, True),
    "inplace": (False, True),
    "size_average": (None,),
    "reduce": (None,),
}
"""Parameters that a row need not have, and the values of them that change no result. ``Trace.call`` sees to
``inplace``."""


# ------------------------------------------------------------------------------------------------------ torch's parser


class StandIn(torch.Tensor):
    """Stands for a tensor in torch's argument parser: a function does nothing once its arguments are parsed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        return None


@cache
def _stand_in(dtype: str, scalar: bool) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return torch.zeros(() if scalar else 0, dtype=DTYPES[dtype]).as_subclass(StandIn)


def check_method(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises torch's own TypeError where its parser does not accept these arguments of the tensor method ``name``.

    Operators (``__add__``) are not checked: Python parses them. A mode that intercepts torch functions has to let those
    of a ``StandIn`` pass.
    """
    method = getattr(torch.Tensor, name, None)
    if method is not None and not (name.startswith("__") and name.endswith("__")):
        method(*map(_parsed, args), **{key: _parsed(value) for key, value in kwargs.items()})


def _parsed(value: Any) -> Any:
    """Returns an argument as torch's parser is to see it."""
    if isinstance(value, TensorProxy):
        return _stand_in(value.value.dtype, not value.value.shape)
    if isinstance(value, SymbolicNumber):
        return value.guards.hint(value.expr)
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [_parsed(item) for item in value])
    return value


# ----------------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class _Parameters:
    """Lists the parameters of a row.

    Attributes:
        names: those that may be named.
        positional: those that arguments are for that are not named, in order.
        sizes: whether it takes sizes as any number of arguments, after its other positional parameters.
    """

    names: frozenset[str]
    positional: tuple[str, ...]
    sizes: bool

    def free(self, count: int, named: Iterable[str]) -> frozenset[str]:
        """Returns the names left by ``count`` positional arguments and by those that are ``named``."""
        return self.names.difference(self.positional[:count], named)


@cache
def _parameters(function: Callable[..., Any]) -> _Parameters:
    declared = inspect.signature(function).parameters.values()
    named = frozenset(p.name for p in declared if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    positional = tuple(p.name for p in declared if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return _Parameters(named, positional, any(p.kind is p.VAR_POSITIONAL for p in declared))


def bind(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Binds arguments that torch accepts to the parameters of the row ``function``.

    Raises:
        UnsupportedError: the row has no such parameter.
    """
    if not kwargs:
        return tuple(args), {}
    parameters = _parameters(function)
    named: dict[str, Any] = {}
    sizes: tuple[Any, ...] = ()
    for name, value in kwargs.items():
        known = name if name in parameters.names else _canonical(name, parameters.free(len(args), {*named, *kwargs}))
        if known is not None:
            named[known] = value
        elif parameters.sizes and name in SIZES:
            sizes = (value,)
        elif not any(value is allowed for allowed in NEUTRAL.get(name, ())):
            raise UnsupportedError(
                f"the argument {name}={value!r:.80} is not supported; leave it out, or call the function outside the "
                "decorated one"
            )
    return (*args, *sizes), named


def _canonical(name: str, known: frozenset[str]) -> str | None:
    return next((own for own, others in SPELLINGS.items() if name in others and own in known), None)
