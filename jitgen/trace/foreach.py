"""Defines the rows of ``torch._foreach_*``: the torch function of every tensor, in the lists' order.

torch's own schemas bind the arguments: they say which of them is a list with a value for each tensor, which is a packed
tensor of such values, and which belongs to all. The function of a tensor checks its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jitgen.trace.proxy import TensorProxy
from jitgen.trace.table import of_lists

_NAMES = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round"
)
_NAMES += " rsqrt sigmoid sign sin sinh sqrt tan tanh trunc add sub mul div pow clamp_max clamp_min lerp"

Each = Callable[..., Any]
Row = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments and keywords of the function of one tensor."""
Known = Callable[[Any], Any]
"""Returns what is known of an argument: a tensor, or what it is itself."""

EACH: dict[str, Each] = {}
"""The function of one tensor by the name of that of lists; each calls one torch function or method."""


def _method(name: str) -> Each:
    return lambda tensor, *others, **keywords: getattr(tensor, name)(*others, **keywords)


def _of_number(of_tensor: Each, of_number: Each) -> Each:
    return lambda tensor, other: (of_number if isinstance(other, (int, float)) else of_tensor)(tensor, other)


def _with_value(function: Each) -> Each:
    return lambda tensor, left, right, value=1: function(tensor, left, right, value=value)


def _norm(tensor: Any, ord: Any = 2, dtype: Any = None) -> Any:
    return torch.linalg.vector_norm(tensor, ord, dtype=dtype)


def _power_sum(tensor: Any, ord: Any = 2, dtype: Any = None) -> Any:
    linalg: Any = vars(torch._C)["_linalg"]  # torch.linalg does not show it
    return linalg.linalg__powsum(tensor, ord, dtype=dtype)


def rows_of(
    name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], known: Known = lambda value: value
) -> list[Row]:
    """Returns the arguments of ``torch.<name>``, which torch's parser has accepted, for each tensor of its lists.

    Raises:
        ValueError: the lists are of several lengths, or there are no tensors, which torch refuses too; or a number is a
            tensor of another kind of dtype.
    """
    bound = next(filter(None, (_bound(schema, arguments, keywords, known) for schema in _schemas(name))), None)
    if bound is None:
        raise ValueError(
            "torch has no overload for these arguments; pass lists of tensors, and numbers or lists of them"
        )
    lengths = {len(value) for argument, value in bound if _is_list(argument)}
    if len(lengths) != 1 or 0 in lengths:
        counts = " and ".join(map(str, sorted(lengths)))
        raise ValueError(f"lists of {counts} elements; torch takes lists of one length, which is at least 1")
    (length,) = lengths
    tensors = [known(tensor) for argument, value in bound if _is_list(argument) for tensor in value]
    for argument, value in bound:
        _check_numbers(argument, known(value), tensors, length)
    rows = []
    for number in range(length):
        own = [(argument, value[number] if _is_for_each(argument) else value) for argument, value in bound]
        positional = tuple(value for argument, value in own if not argument.kwarg_only)
        rows.append((positional, {argument.name: value for argument, value in own if argument.kwarg_only}))
    return rows


@functools.cache
def _schemas(name: str) -> Sequence[Any]:
    """Lists the schemas of ``torch.<name>``. Those with a tensor for all come first: elsewhere it is a number."""
    packet = getattr(torch.ops.aten, name)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads() if not overload.endswith("out")]
    return sorted(schemas, key=lambda schema: not any(str(argument.type) == "Tensor" for argument in schema.arguments))


def _bound(
    schema: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], known: Known
) -> list[tuple[Any, Any]] | None:
    """Returns the parameters of ``schema`` with their values, but for keywords that are not given; None where the
    arguments are those of another overload."""
    values = dict(zip((argument.name for argument in schema.arguments), arguments, strict=False))
    values |= keywords
    if not values.keys() <= {argument.name for argument in schema.arguments}:
        return None
    bound = []
    for argument in schema.arguments:
        if argument.name in values:
            if not _fits(argument, values[argument.name], known):
                return None
            bound.append((argument, values[argument.name]))
        elif not argument.has_default_value():
            return None
        elif not argument.kwarg_only:
            bound.append((argument, argument.default_value))
    return bound


def _fits(argument: Any, value: Any, known: Known) -> bool:
    kind = str(argument.type)
    if kind.startswith("List"):
        tensors = [_is_tensor(known(item)) for item in value] if isinstance(value, (list, tuple)) else [None]
        return all(is_tensor is (kind == "List[Tensor]") for is_tensor in tensors)
    if kind == "Tensor":
        return _is_tensor(known(value))
    return not isinstance(value, (list, tuple)) and (kind == "number" or not _is_tensor(known(value)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, TensorProxy))


def _is_list(argument: Any) -> bool:
    return str(argument.type).startswith("List")


def _is_packed(argument: Any) -> bool:
    """Returns whether an argument is a tensor with a number for each tensor of the lists."""
    return bool(argument.name == "scalars" and str(argument.type) == "Tensor")


def _is_for_each(argument: Any) -> bool:
    return _is_list(argument) or _is_packed(argument)


def _check_numbers(argument: Any, value: Any, tensors: Sequence[Any], length: int) -> None:
    """Refuses a tensor in place of numbers where there are others than tensors, or where a number of its value would
    make another dtype of the results than it does."""
    if not _is_tensor(value) or not (_is_packed(argument) or str(argument.type) == "number"):
        return
    if tuple(value.shape) != ((length,) if _is_packed(argument) else ()):
        raise ValueError(
            f"{argument.name} is a tensor of the shape {tuple(value.shape)}; pass one number for each tensor"
        )
    if value.dtype.is_floating_point and not all(t.dtype.is_floating_point for t in tensors if _is_tensor(t)):
        raise ValueError(f"{argument.name} is a tensor of {value.dtype} beside integers; pass a number")


@functools.cache
def _returns_lists() -> bool:
    """Returns whether this version of torch returns the list that a function updates."""
    zero: Callable[..., Any] = torch._foreach_zero_
    with torch._C.DisableTorchFunction():
        return zero([torch.empty(0)]) is not None


def _register(name: str, single: Each) -> None:
    """Registers ``single`` for ``torch._foreach_<name>``, if this version of torch has it."""
    name = f"_foreach_{name}"
    if not hasattr(torch, name):
        return

    def function(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        results = tuple(single(*row, **named) for row, named in rows_of(name, arguments, keywords))
        if not name.endswith("_"):
            return results
        return (arguments[0] if arguments else keywords["self"]) if _returns_lists() else None

    EACH[name] = single
    of_lists(name)(function)


for _name in _NAMES.split():
    _register(_name, getattr(torch, _name))
    _register(f"{_name}_", _method(f"{_name}_"))
for _name in ("addcmul", "addcdiv"):
    _register(_name, _with_value(getattr(torch, _name)))
    _register(f"{_name}_", _with_value(_method(f"{_name}_")))
_register("maximum", _of_number(torch.maximum, torch.clamp_min))
_register("minimum", _of_number(torch.minimum, torch.clamp_max))
_register("maximum_", _method("clamp_min_"))
_register("minimum_", _method("clamp_max_"))
_register("norm", _norm)
_register("powsum", _power_sum)
_register("max", torch.max)
_register("mm", torch.mm)
_register("clone", torch.clone)
_register("copy_", _method("copy_"))
_register("zero_", _method("zero_"))
