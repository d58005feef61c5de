"""Rebuilds lists and tuples among the arguments and results of torch functions, and those of subclasses of them.

A subclass may be constructed in any way, so only those whose construction is known are made again: lists, tuples, named
tuples, and the struct sequences that torch returns (``torch.return_types``).
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree


def rebuilt(value: Any, items: list[Any]) -> Any:
    """Rebuilds ``value``, a list or a tuple, with ``items`` in place of its own.

    One of another subclass is itself where these are its own items, and a plain list or tuple where they are not.
    """
    kind: Any = type(value)
    if kind in (list, tuple):
        return kind(items)
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        return items
    if hasattr(kind, "_make"):
        return kind._make(items)
    return kind(items) if hasattr(kind, "n_sequence_fields") else tuple(items)


def flattened(values: Any) -> list[Any]:
    """Lists what ``values`` contain, down to what is no container; unlike ``torch.utils._pytree``'s, also what is in
    lists and tuples of subclasses."""
    leaves, waiting = list[Any](), [values]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if issubclass(kind, (list, tuple)):
            waiting.extend([*value][::-1])
        elif kind is dict:
            waiting.extend([*value.values()][::-1])
        elif kind in pytree.SUPPORTED_NODES:
            waiting.extend(pytree.tree_leaves(value)[::-1])
        else:
            leaves.append(value)
    return leaves
