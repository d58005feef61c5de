"""A call's arguments as leaves and structure: ``out=`` removed, keywords in order, quantised weights unpacked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from jitgen.quant import weights

Arguments = tuple[tuple[Any, ...], pytree.TreeSpec | None, Any]
"""(leaves, structure or None for plain positional arguments, caller-owned outputs or None).

A plain tuple: calls with ``out=`` make one each time.
"""


class Parameters:
    """The parameters of a function, by which its arguments are put in order."""

    def __init__(self, function: Callable[..., Any]):
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):  # some functions written in C have none
            self._signature = None
        self.names = frozenset(self._signature.parameters) if self._signature else frozenset()

    def flatten(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layout_of: Callable[[Any], str],
        in_place: bool = True,
    ) -> Arguments:
        """The arguments of a call as leaves.

        Args:
            kwargs: the call's own dict, which loses ``out``.
            layout_of: the layout in which the tensors of a quantised weight become leaves.
            in_place: whether a portable weight itself is converted to that layout. A look at what a call would run
                leaves it as it is: a copy is converted, and specs of quantised weights are unpacked too.
        """
        out = None
        if "out" in kwargs and "out" not in self.names:
            out = kwargs.pop("out")
        if kwargs and self._signature is not None and self.names.issuperset(kwargs):
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if (weights.exist() or not in_place) and weights.among((args, kwargs)):
            args, kwargs = weights.unpack((args, kwargs), layout_of, in_place)
        elif not kwargs and not _has_nested(args):
            return args, None, out
        leaves, tree = pytree.tree_flatten((args, kwargs))
        return tuple(leaves), tree, out


def _has_nested(args: tuple[Any, ...]) -> bool:
    # A generator takes twice as long, and every call with ``out=`` comes here.
    for arg in args:  # noqa: SIM110
        if isinstance(arg, (list, tuple, dict)):
            return True
    return False
