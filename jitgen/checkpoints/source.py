"""Defines ``Source``: the tensors of a checkpoint by name, read when they are asked for, and what its labels say.

A reader finds its weights by names, shapes and dtypes (``Source.shape``, ``Source.dtype``), which the head of a file
has; the numbers of one weight are read when that weight is converted, so that a large file is never in memory whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from jitgen.errors import FormatError
from jitgen.quant.qtensor import QTensor


class Storage(Protocol):
    """Reads tensors from one file, or from a dict of them."""

    def names(self) -> Sequence[str]: ...

    def facts(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns shape and dtype, without reading the tensor."""

    def read(self, name: str) -> Any:
        """Returns the tensor, on the CPU; what is no tensor in a state dict is returned as it is."""


@dataclass(frozen=True)
class Source:
    """Holds the content of a checkpoint.

    Attributes:
        origin: what messages call it: a path, or "the state dict".
        storages: by tensor name, where the tensor is.
        config: what a config file beside it says of its quantisation (``quantization_config``), if anything.
        dtype: what the config says of the model's dtype.
        metadata: of the file, as safetensors and GGUF have it.
    """

    origin: str
    storages: Mapping[str, Storage]
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.storages

    def __iter__(self) -> Iterator[str]:
        return iter(self.storages)

    def ending(self, suffix: str) -> Iterator[str]:
        """Yields the prefixes of all names that end in ``suffix``."""
        return (name.removesuffix(suffix) for name in self.storages if name.endswith(suffix))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._storage(name).facts(name)[0]

    def kind(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return self._storage(name).facts(name)[1]

    def is_of(self, name: str, *dtypes: torch.dtype) -> bool:
        """Returns whether there is such a tensor, and it is of one of ``dtypes``."""
        return name in self.storages and self.kind(name) in dtypes

    def described(self, name: str) -> str:
        """Describes a tensor for messages: ``x.qweight, int32[512, 4096]``."""
        return f"{name}, {str(self.kind(name)).removeprefix('torch.')}{list(self.shape(name))}"

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor.

        Raises:
            FormatError: there is none of that name, or its numbers cannot be read.
        """
        tensor: torch.Tensor = self._storage(name).read(name)
        return tensor

    def value(self, name: str) -> Any:
        """Returns what a state dict has under that name, which need not be a tensor."""
        return self._storage(name).read(name)

    def _storage(self, name: str) -> Storage:
        if name not in self.storages:
            raise FormatError(f"{self.origin}: there is no tensor {name}")
        return self.storages[name]


@dataclass(frozen=True)
class Claim:
    """Describes a weight that a reader recognised.

    Attributes:
        name: the name of the weight in the model's state dict.
        uses: the names of the tensors that it is stored in; no others are given to the caller.
        read: makes the ``QTensor``, or a plain tensor; FormatError where its tensors do not fit one another.
    """

    name: str
    uses: tuple[str, ...]
    read: Callable[[], QTensor | torch.Tensor]


@dataclass(frozen=True)
class Reader:
    """Describes how one kind of checkpoint is read.

    Attributes:
        name: of the kind.
        labels: values of ``quant_method`` in a config that mean it.
        find: the weights of this kind in a source, by content.
        marks: ends of names that only this kind has: such a tensor that no reader has claimed is an error.
    """

    name: str
    labels: frozenset[str]
    find: Callable[[Source], Iterator[Claim]]
    marks: tuple[str, ...]


class Tensors(Storage):
    """Reads a state dict as a ``Storage``."""

    def __init__(self, tensors: Mapping[str, Any]):
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def facts(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        value = self._tensors[name]
        if not isinstance(value, torch.Tensor):
            return (), torch.uint8
        return tuple(value.shape), value.dtype

    def read(self, name: str) -> Any:
        value = self._tensors[name]
        return value.detach() if isinstance(value, torch.Tensor) else value
