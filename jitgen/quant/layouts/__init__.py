"""The ways a quantised weight lies in memory: one module and one row here each.

``portable`` is what is stored and what every other layout is made from. A layout's module has two functions that are
exact inverses of each other::

    pack(format, group_size, shape, parts) -> parts        # from the portable layout
    unpack(format, group_size, shape, parts) -> parts      # to the portable layout

``shape`` is (N, K); ``parts`` are (codes, scales) or (codes, scales, zeros), contiguous tensors of one device. They are
plain torch operations, so that they work on any device, ``meta`` included. Modules are imported when first needed.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Protocol

import torch

from jitgen.errors import UnsupportedError
from jitgen.quant.formats import Format

Parts = tuple[torch.Tensor, ...]

LAYOUTS: dict[str, str] = {
    "portable": "jitgen.quant.layouts.portable",
    "cpu": "jitgen.quant.layouts.cpu",
    "mma": "jitgen.quant.layouts.mma",
    "interleaved": "jitgen.quant.layouts.interleaved",
}
"""Layouts by name, and where each is."""


class Conversion(Protocol):
    def __call__(self, format: Format, group_size: int | None, shape: tuple[int, int], parts: Parts) -> Parts: ...


@dataclass(frozen=True)
class Layout:
    """A layout: how to get there from the portable one, and back."""

    name: str
    pack: Conversion
    unpack: Conversion


@functools.cache
def find(name: str) -> Layout:
    """The layout ``name``; UnsupportedError listing the names there are."""
    if name not in LAYOUTS:
        raise UnsupportedError(f"unknown layout {name!r} of quantised weights; expected one of {', '.join(LAYOUTS)}")
    module = importlib.import_module(LAYOUTS[name])
    return Layout(name, module.pack, module.unpack)


def convert(
    parts: Parts, source: str, target: str, format: Format, group_size: int | None, shape: tuple[int, int]
) -> Parts:
    """``parts`` of layout ``source`` in layout ``target``."""
    if source == target:
        return parts
    with torch.no_grad():
        portable = find(source).unpack(format, group_size, shape, parts)
        return find(target).pack(format, group_size, shape, portable)
