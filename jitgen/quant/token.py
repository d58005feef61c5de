"""What a quantised weight is, without its numbers: one interned object per kind, so that comparing is by identity."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Token:
    """The part of a call's signature that a quantised weight is. Made by ``intern`` alone: equal is identical.

    Attributes:
        format: name of its row in ``FORMATS``.
        group_size: columns that share a scale; None where a row does.
        layout: name of its row in ``LAYOUTS``.
        weight_shape: (N, K), groups along K, however the tensor lies.
        dtype: nominal; what ``dequantize`` gives.
        device: of the parts.
        transposed: whether the tensor is the weight's transpose, of shape (K, N).
    """

    format: str
    group_size: int | None
    layout: str
    weight_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tensor: (N, K), or (K, N) where it is transposed."""
        rows, columns = self.weight_shape
        return (columns, rows) if self.transposed else (rows, columns)

    def facts(self) -> tuple[Any, ...]:
        return (
            self.format,
            self.group_size,
            self.layout,
            self.weight_shape,
            self.dtype,
            self.device,
            self.transposed,
        )

    def replace(self, **changes: Any) -> Token:
        """The token that differs in these."""
        return intern(*({**self.__dict__, **changes}[name] for name in self.__dataclass_fields__))

    def __reduce__(self) -> tuple[Any, ...]:
        return intern, self.facts()


_tokens: weakref.WeakValueDictionary[tuple[Any, ...], Token] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def intern(
    format: str,
    group_size: int | None,
    layout: str,
    weight_shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    transposed: bool = False,
) -> Token:
    """The token of these facts; the same object for the same facts."""
    facts = (format, group_size, layout, weight_shape, dtype, device, transposed)
    with _lock:
        found = _tokens.get(facts)
        if found is None:
            found = _tokens[facts] = Token(*facts)
        return found
