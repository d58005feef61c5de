"""Turns a call's arguments into leaves and a structure: ``out=`` removed, keywords in order, quantised weights
unpacked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree as pytree

from jitgen.call.signature import NUMBERS, STATIC, is_object
from jitgen.quant import weights
from jitgen.trace.readable import TENSORS

Arguments = tuple[tuple[Any, ...], pytree.TreeSpec | None, Any]
"""(leaves, structure or None for plain positional arguments, caller-owned outputs or None)."""

_LEAF_KINDS = frozenset((*TENSORS, *NUMBERS, *STATIC))


class Parameters:
    """Puts the arguments of a function in the order of its parameters."""

    def __init__(self, function: Callable[..., Any]):
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):  # some functions written in C have none
            self._signature = None
        self.names = frozenset(self._signature.parameters) if self._signature else frozenset()

    def arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments in the order of the parameters, positional where they can be, without ``out=``.

        Raises:
            TypeError: no such call is possible.
        """
        if not kwargs or self._signature is None or not self.names.issuperset(kwargs):
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[Any], str], in_place: bool = True
    ) -> Arguments:
        """Flattens the arguments of a call.

        Args:
            kwargs: the call's own dict, which loses ``out``.
            layout_of: the layout in which the tensors of a quantised weight become leaves.
            in_place: whether a portable weight itself is converted to that layout. A look at what a call would run
                leaves it as it is: a copy is converted, and specs of quantised weights are unpacked too.
        """
        out = None
        if "out" in kwargs and "out" not in self.names:
            out = kwargs.pop("out")
        args, kwargs = self.arranged(args, kwargs)
        if (weights.exist() or not in_place) and weights.among((args, kwargs)):
            args, kwargs = weights.unpack((args, kwargs), layout_of, in_place)
        elif not kwargs and not any(_may_be_nested(type(arg)) for arg in args):
            return args, None, out
        leaves, tree = pytree.tree_flatten((args, kwargs))
        return tuple(leaves), tree, out


def leaf_kinds(kinds: Iterable[type]) -> bool:
    """Returns whether values of these types are leaves."""
    return all(kind in _LEAF_KINDS or (is_object(kind) and not _may_be_nested(kind)) for kind in kinds)


def _may_be_nested(kind: type) -> bool:
    return issubclass(kind, (tuple, list, dict)) or kind in pytree.SUPPORTED_NODES


def walk(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout_of: Callable[[Any], str]
) -> tuple[Any, list[Any]] | None:
    """Returns what ``Parameters.flatten`` returns, in a fraction of its time: a key of the structure and of the types
    of the leaves, and the leaves in the same order.

    Returns None if there is anything else than leaves, lists, tuples, dicts and weights that have the layout they need.
    """
    key: list[Any] = [tuple(kwargs)]
    leaves: list[Any] = []

    def enter(values: Iterable[Any]) -> bool:
        for value in values:
            kind = type(value)
            if kind in _LEAF_KINDS:
                key.append(kind)
                leaves.append(value)
            elif kind is list or kind is tuple:
                key.append((kind, len(value)))
                if not enter(value):
                    return False
            elif kind is dict:
                key.append((kind, *value))
                if not enter(value.values()):
                    return False
            elif weights.is_quantized(value) and (stored := value.stored).token.layout == layout_of(value):
                key.append(stored.token)
                leaves.extend(stored.tensors)
            else:
                return False
        return True

    return (tuple(key), leaves) if enter(args) and enter(kwargs.values()) else None
