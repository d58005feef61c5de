"""Interns tokens, which hold everything about a quantised weight but its numbers: equality is identity."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.forks import Lock
from jitgen.spec import DTYPES

COMPUTED = "computed "
"""Begins the text of a weight whose tensors the graph computes that multiplies with it, as those of ``w[ids]``."""


@dataclass(frozen=True, eq=False)
class Token:
    """Identifies a quantised weight in the signature of a call.

    Only ``intern`` makes tokens, so that equal tokens are the same object.

    Attributes:
        format: the name of its row in ``FORMATS``.
        group_size: the number of columns that share a scale; None if all of a row do.
        layout: the name of its row in ``LAYOUTS``.
        weight_shape: (N, K), with groups along K, whether or not the tensor is transposed.
        dtype: the nominal dtype, which ``dequantize`` returns by default.
        device: the device of the weight's tensors.
        transposed: whether the ``QTensor`` is the transpose of the weight, of shape (K, N).
        experts: the number of matrices in a weight of three dimensions, (experts, N / experts, K), which are stored one
            below another; None for a matrix. Where there are none, N is the rows that each would have, and one is
            stored that nothing reads.
        activation: how products quantise what they multiply with it (``quant/activations.py``); None for not at all.
    """

    format: str
    group_size: int | None
    layout: str
    weight_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False
    experts: int | None = None
    activation: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the ``QTensor``: (N, K), or (K, N) if it is transposed; experts come before."""
        rows, columns = self.weight_shape
        if self.experts is not None:
            rows //= max(self.experts, 1)
        matrix = (columns, rows) if self.transposed else (rows, columns)
        return matrix if self.experts is None else (self.experts, *matrix)

    def facts(self) -> tuple[Any, ...]:
        """Returns the arguments with which ``intern`` returns this token."""
        return (
            self.format,
            self.group_size,
            self.layout,
            self.weight_shape,
            self.dtype,
            self.device,
            self.transposed,
            self.experts,
            self.activation,
        )

    @property
    def text(self) -> str:
        """Returns all of it but the device, as text that ``from_text`` reads."""
        group = "" if self.group_size is None else self.group_size
        rows, columns = self.weight_shape
        facts = self.format, group, self.layout, rows, columns, str(self.dtype)[6:], int(self.transposed)
        return " ".join(map(str, (*facts, self.activation) if self.activation else facts))

    def replace(self, **changes: Any) -> Token:
        """Returns the token that differs from this one in ``changes``."""
        return intern(*({**self.__dict__, **changes}[name] for name in self.__dataclass_fields__))

    def __reduce__(self) -> tuple[Any, ...]:
        return intern, self.facts()


_tokens: weakref.WeakValueDictionary[tuple[Any, ...], Token] = weakref.WeakValueDictionary()
_lock = Lock()


def from_text(text: str, device: torch.device) -> Token:
    """Returns the token that ``Token.text`` described, of a weight on ``device``; ``COMPUTED`` may be before it."""
    format, group, layout, rows, columns, dtype, transposed, *activation = text.removeprefix(COMPUTED).split(" ")
    facts = format, int(group) if group else None, layout, (int(rows), int(columns)), DTYPES[dtype], device
    return intern(*facts, transposed == "1", activation=activation[0] if activation else None)


def intern(
    format: str,
    group_size: int | None,
    layout: str,
    weight_shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    transposed: bool = False,
    experts: int | None = None,
    activation: str | None = None,
) -> Token:
    """Returns the token with these attributes; the same attributes always give the same object."""
    facts = (format, group_size, layout, weight_shape, dtype, device, transposed, experts, activation)
    with _lock:
        token = _tokens.get(facts)
        if token is None:
            token = _tokens[facts] = Token(*facts)
        return token
