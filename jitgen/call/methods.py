"""Remembers traces and launches for each instance of a decorated method.

A method has traces and launches of its own for each instance, because they depend on what the instance refers to. They
are found by the identity of the instance: two equal instances may differ in attributes that their ``__eq__`` ignores.
And they do not keep the instance alive (``trace/weak_method.py``), unless it has no weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

MAX_STRONG = 64
"""How many instances without weak references, such as those with ``__slots__``, a method keeps alive with what is
remembered of them: the most recent ones."""

Rows = dict[int, tuple[Callable[[], Any], dict[str, Any]]]
"""For the id of an instance: a reference to the instance, and what the ``JitFunction``s of its method share.

A later object may have the same id, so a look-up compares the instance. These are plain tuples, because every call of a
method looks one up.
"""


def add(rows: Rows, instance: Any, attributes: dict[str, Any], when_dead: Callable[[], None]) -> None:
    """Remembers ``attributes`` until the instance dies, and then calls ``when_dead``."""
    key = id(instance)

    def died(reference: weakref.ref[Any]) -> None:
        if key in rows and rows[key][0] is reference:
            del rows[key]
        when_dead()

    rows[key] = weakref.ref(instance, died), attributes


def keep(rows: Rows, instance: Any, attributes: dict[str, Any]) -> None:
    """Remembers ``attributes`` of an instance that takes no weak references, which stays alive until ``MAX_STRONG``
    others are remembered."""
    strong = [key for key, (reference, _) in rows.items() if type(reference) is not weakref.ref]
    for key in strong[: len(strong) + 1 - MAX_STRONG]:
        del rows[key]
    rows[id(instance)] = (lambda: instance), attributes
