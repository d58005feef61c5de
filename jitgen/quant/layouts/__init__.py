"""Holds the memory layouts of a quantised weight; each has a module in this package and a row in ``LAYOUTS``.

Files hold weights in the ``portable`` layout, and every other layout is made from it. A layout's module defines two
functions that are exact inverses of each other::

    pack(format, group_size, shape, tensors) -> tensors        # from the portable layout
    unpack(format, group_size, shape, tensors) -> tensors      # to the portable layout

``shape`` is (N, K). ``tensors`` are (codes, scales) or (codes, scales, zeros), contiguous and on one device. Both
functions consist of plain torch operations, so that they work on any device, ``meta`` included. A module is imported
when its layout is first used. A layout's module is about the formats with kernels of their own (``Format.tiled``); of
all others ``planes`` has the codes in each layout.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from jitgen.errors import UnsupportedError
from jitgen.quant.formats import Format

Tensors = tuple[torch.Tensor, ...]
"""The tensors a quantised weight consists of, in the order of ``Format.tensor_names``."""

LAYOUTS: dict[str, str] = {
    "portable": "jitgen.quant.layouts.portable",
    "cpu": "jitgen.quant.layouts.cpu",
    "mma": "jitgen.quant.layouts.mma",
    "mma8": "jitgen.quant.layouts.mma8",
    "interleaved": "jitgen.quant.layouts.interleaved",
    "rows": "jitgen.quant.layouts.rows",
    "blocks": "jitgen.quant.layouts.rows",
}
"""Layout name -> the module that defines it."""


class Conversion(Protocol):
    def __call__(self, format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors: ...


@dataclass(frozen=True)
class Layout:
    """Converts tensors: ``pack`` from the portable layout to this one, ``unpack`` back."""

    name: str
    pack: Conversion
    unpack: Conversion


@functools.cache
def find(name: str) -> Layout:
    """Returns the layout called ``name``; UnsupportedError, with the list of known names, if there is none."""
    if name not in LAYOUTS:
        raise UnsupportedError(f"unknown layout {name!r} of quantised weights; expected one of {', '.join(LAYOUTS)}")
    module = importlib.import_module(LAYOUTS[name])
    if name == "portable":
        return Layout(name, module.pack, module.unpack)
    planes = importlib.import_module("jitgen.quant.layouts.planes")
    of_planes = "mma" if name == "mma8" else name

    def convert(
        format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors, *, way: str
    ) -> Tensors:
        if format.extra_names:
            count = len(format.stored.tensor_names)
            return (*convert(format.stored, group_size, shape, tensors[:count], way=way), *tensors[count:])
        if not format.tiled and name not in ("rows", "blocks"):
            return getattr(planes, way)(of_planes, format, group_size, shape, tensors)
        shares_scales = format.scale_rows != 1 and name != "blocks"
        if shares_scales and way == "pack":
            tensors = planes.one_for_each_row(format, shape, tensors)
        codes, *rest = getattr(module, way)(format, group_size, shape, tensors)
        return (codes, *(planes.shared_rows(format, t) if shares_scales and way == "unpack" else t for t in rest))

    return Layout(name, *(functools.partial(convert, way=way) for way in ("pack", "unpack")))


def convert(
    tensors: Tensors, source: str, target: str, format: Format, group_size: int | None, shape: tuple[int, int]
) -> Tensors:
    """Converts ``tensors`` from layout ``source`` to layout ``target``."""
    if source == target:
        return tensors
    with torch.no_grad():
        portable = find(source).unpack(format, group_size, shape, tensors)
        packed = find(target).pack(format, group_size, shape, portable)
        return tuple(map(_alone, packed)) if target == "portable" else packed


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` in memory that holds nothing else: a file would also store what lies around it, such as rows
    that a layout adds. Within a transform of ``torch.func`` it has no memory, and is kept nowhere."""
    if is_functorch_wrapped_tensor(tensor):
        return tensor
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
