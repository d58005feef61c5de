"""Handles caches of transformers that a unit gets as an argument: what a trace has in their place.

A unit's code calls ``cache.update(keys, values, layer_idx)`` and reads nothing else of the cache, or it stays as it is.
Two things may become of that call:

- A layer of preallocated tensors (``StaticLayer``) is updated by the kernels: its tensors are inputs of the trace,
  which runs the layer's own ``update`` on them.
- Any other layer does what only Python can (it grows, slides, quantises, offloads). There the unit is divided: one
  program computes what the call takes, the call is made, and another program computes the rest of its results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitgen.errors import UnsupportedError

TENSORS = ("keys", "values", "cumulative_length")
"""The tensors of a layer that a trace updates."""
_READ = ("device", "dtype", "max_cache_len")
"""What else the ``update`` of such a layer reads."""


def is_cache(value: Any) -> bool:
    """Returns whether ``value`` is a cache of transformers, which is not imported for that."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


class Reached(BaseException):
    """Ends a trace at a call of a cache's ``update``. No code of a model may catch it.

    Attributes:
        args, kwargs: of the call.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.args, self.kwargs = args, kwargs


def stand_in(kind: type, update: Callable[..., Any]) -> Any:
    """Makes what a trace has in place of a cache of class ``kind``: ``update`` is all of it."""

    def read(self: Any, name: str) -> Any:
        if name == "update":
            return update
        if name == "__class__":
            return kind
        raise UnsupportedError(f"it reads {name} of its cache")

    made = type(kind.__name__, (kind,), {"__getattribute__": read, "__len__": lambda self: read(self, "__len__")})
    return object.__new__(made)


def continued(cache: Any, results: Sequence[tuple[torch.Tensor, ...]]) -> Any:
    """Makes what a unit that runs in torch after all gets in place of ``cache``, which some of its calls have updated.

    Args:
        results: what these calls returned, in their order.
    """
    returned = iter(results)

    def read(self: Any, name: str) -> Any:
        real = getattr(cache, name)
        if name != "update":
            return real
        return lambda *args, **kwargs: next(returned, None) or real(*args, **kwargs)

    made = type(type(cache).__name__, (type(cache),), {"__getattribute__": read, "__len__": lambda self: len(cache)})
    return object.__new__(made)


def layer_of(cache: Any, index: int) -> Any:
    """Returns the layer of preallocated tensors that ``cache.update`` would update; None if it does more than that."""
    from transformers import cache_utils

    layers = vars(cache).get("layers")
    if (
        type(cache).update is not cache_utils.Cache.update
        or cache.layer_class_to_replicate is not None
        or cache.offloading
        or not isinstance(layers, list)
        or not 0 <= index < len(layers)
        or type(layers[index]) is not cache_utils.StaticLayer
    ):
        return None
    return layers[index]


def inputs_of(layer: Any) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Returns the tensors of a layer, and what else of it a trace depends on."""
    return [getattr(layer, name) for name in TENSORS], (type(layer), *(getattr(layer, name) for name in _READ))


def traced_layer(facts: tuple[Any, ...], tensors: Any) -> Any:
    """Makes a layer of which a trace runs ``update``."""
    kind, *read = facts
    layer = object.__new__(kind)
    vars(layer).update(zip(TENSORS, tensors, strict=True), is_initialized=True)
    vars(layer).update(zip(_READ, read, strict=True))
    return layer


def preallocated(cache: Any) -> list[torch.Tensor]:
    """Returns the tensors of a cache.

    Raises:
        UnsupportedError: Python does more at an update than to update them.
    """
    layers = [layer_of(cache, index) for index in range(len(cache.layers))]
    if not layers or None in layers:
        raise UnsupportedError(f"its {type(cache).__name__} has layers that only Python updates")
    if not all(layer.is_initialized for layer in layers):
        raise UnsupportedError("its cache has no tensors yet")
    return [tensor for layer in layers for tensor in inputs_of(layer)[0]]
