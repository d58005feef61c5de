"""Defines the rows of ``torch._foreach_*``: the torch function of every tensor, in the lists' order.

The function of a tensor checks its arguments. The overloads of torch's functions of lists differ in what an argument
is: a number or a tensor, which belongs to every tensor, or a list with one of them for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jitgen.trace.table import of_lists

_NAMES = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round"
)
_NAMES += " rsqrt sigmoid sign sin sinh sqrt tan tanh trunc add sub mul div pow clamp_max clamp_min lerp"

_ARGUMENTS = frozenset(
    (
        *("self", "other", "tensor", "scalar", "scalars", "tensor1", "tensor2", "tensors1", "exponent", "weight"),
        *("weights", "src", "ord", "dtype", "value"),
    )
)
"""Parameters of which there may be one for each tensor; others (``alpha``) are for all."""

Each = Callable[..., Any]
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


def rows_of(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Returns the arguments for each tensor of the lists among ``arguments`` and ``keywords``, and those for all.

    An argument that is no list belongs to every tensor.

    Raises:
        ValueError: the lists are of several lengths, or there are no tensors, which torch refuses too; or several of
            the arguments for each tensor are keywords, whose order is not torch's.
    """
    named = [key for key in keywords if key in _ARGUMENTS]
    if len(named) > 1 or (arguments and "self" in named):
        raise ValueError(f"the keywords {', '.join(named)}: pass lists and tensors by position")
    own = [*arguments, *(keywords[key] for key in named)]
    lengths = {len(argument) for argument in own if isinstance(argument, (list, tuple))}
    if len(lengths) != 1 or 0 in lengths:
        counts = " and ".join(map(str, sorted(lengths))) or "no"
        raise ValueError(f"lists of {counts} elements; torch takes lists of one length, which is at least 1")
    (length,) = lengths
    columns = [argument if isinstance(argument, (list, tuple)) else [argument] * length for argument in own]
    rest = {key: value for key, value in keywords.items() if key not in _ARGUMENTS}
    return list(zip(*columns, strict=True)), rest


def _register(name: str, single: Each) -> None:
    """Registers ``single`` for ``torch._foreach_<name>``, which returns None where it updates the tensors."""

    def function(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...] | None:
        rows, common = rows_of(arguments, keywords)
        results = tuple(single(*row, **common) for row in rows)
        return None if name.endswith("_") else results

    EACH[f"_foreach_{name}"] = single
    of_lists(f"_foreach_{name}")(function)


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
_register("max", torch.max)
_register("clone", torch.clone)
_register("copy_", _method("copy_"))
_register("zero_", _method("zero_"))
