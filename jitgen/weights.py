"""Quantised weights among a call's arguments: taken apart into plain tensors, in the layout the kernels read.

A ``QTensor`` reaches the rest of jitgen as a node of the argument tree: its parts are leaves like any tensor, its token
(format, group size, layout, shape) is a part of the tree, and so of the signature. A weight still in the portable
layout is laid out anew in place when a function first takes it: it then lies as that backend reads it, and is not held
twice. One that two backends share keeps a copy in either layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from jitgen.errors import FormatError
from jitgen.spec import TensorSpec

if TYPE_CHECKING:
    from jitgen.quant.layouts import Parts
    from jitgen.quant.qtensor import QTensor
    from jitgen.quant.tracing import QuantizedLeaves

LAYOUTS = {"cpp": "cpu", "cuda": "mma", "triton": "portable"}
"""Backend to the layout its kernels read."""


def exist() -> bool:
    """Whether this process may have made a quantised weight."""
    return "jitgen.quant.qtensor" in sys.modules


def is_quantized(value: Any) -> bool:
    """Whether ``value`` is a ``QTensor``; imports nothing, for where none was made there is none."""
    module = sys.modules.get("jitgen.quant.qtensor")
    return module is not None and isinstance(value, module.QTensor)


def is_apart(value: Any) -> bool:
    """Whether ``value`` is a quantised weight taken apart."""
    module = sys.modules.get("jitgen.quant.tracing")
    return module is not None and isinstance(value, module.QuantizedLeaves)


def is_described(value: Any) -> bool:
    """Whether ``value`` is the spec of a quantised weight."""
    return isinstance(value, TensorSpec) and value.format is not None


def among(values: Any) -> bool:
    """Whether a structure of arguments holds a quantised weight, or the spec of one."""
    return any(is_quantized(leaf) or is_described(leaf) for leaf in pytree.tree_leaves(values))


def part_positions(tree: Any) -> frozenset[int]:
    """Which leaves of an argument structure (None: plain arguments) are parts of quantised weights."""
    if tree is None:
        return frozenset()
    numbered = pytree.tree_unflatten(range(tree.num_leaves), tree)
    apart = pytree.tree_leaves(numbered, is_leaf=is_apart)
    return frozenset(part for node in apart if is_apart(node) for part in node.parts)


def take_apart(values: Any, layout_of: Callable[[Any], str], in_place: bool = True) -> Any:
    """``values`` with every quantised weight, or spec of one, in ``layout_of`` it and taken apart.

    ``in_place``: whether a portable weight itself is laid out so; else a copy of it is, for a look at what would run.
    """

    def apart(leaf: Any) -> Any:
        if is_quantized(leaf):
            return lay_out(leaf if in_place else leaf.detach(), layout_of(leaf))
        return _described(leaf, layout_of(leaf)) if is_described(leaf) else leaf

    return pytree.tree_map(apart, values)


def lay_out(weight: QTensor, layout: str) -> QuantizedLeaves:
    """``weight`` taken apart in ``layout``; itself laid out so from now on, where it was portable."""
    from jitgen.quant.tracing import QuantizedLeaves

    if weight.token.layout == "portable" != layout:
        weight.relayout_(layout)
    return QuantizedLeaves.of(weight, layout)


def _described(spec: TensorSpec, layout: str) -> QuantizedLeaves:
    """The parts, as specs, of a weight like ``spec``."""
    from jitgen.quant.token import intern
    from jitgen.quant.tracing import QuantizedLeaves

    if not all(isinstance(size, int) for size in spec.shape):
        raise FormatError(f"{spec}: the sizes of a quantised weight are numbers; only an activation's may be symbolic")
    assert spec.format is not None
    shape = (int(spec.shape[0]), int(spec.shape[1]))
    parts = described_parts(spec.format, spec.group_size, shape, layout)
    token = intern(spec.format, spec.group_size, layout, shape, spec.dtype, torch.device("meta"))
    return QuantizedLeaves((TensorSpec(tuple(part.shape), part.dtype) for part in parts), token)


def described_parts(format: str, group_size: int | None, shape: tuple[int, int], layout: str) -> Parts:
    """The parts of a weight of ``shape`` (N, K) as they lie in ``layout``, without memory."""
    from jitgen.quant import formats, layouts
    from jitgen.quant.layouts import portable

    row = formats.find(format)
    with torch._C.DisableTorchFunction():
        parts = portable.empty(row, group_size, shape, "meta")
        return layouts.convert(parts, "portable", layout, row, group_size, shape)
