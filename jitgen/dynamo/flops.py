"""Counts the floating-point operations of a node of Dynamo's graph as torch's FlopCounterMode does: products, attention
and convolutions, two for each multiply-add, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from jitgen.dynamo.program import value_of

Shape = tuple[int, ...]


def flops(node: fx.Node) -> int:
    """Counts those of ``node``, at the sizes for which Dynamo traced."""
    name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))
    count = _COUNTS.get(name.strip("_").partition(".")[0])
    if count is None:
        return 0
    args = [*node.args, *node.kwargs.values()]
    shapes = [shape_of(value_of(arg)) for arg in args if isinstance(value_of(arg), torch.Tensor)]
    result = value_of(node)
    return count(shapes, shape_of(result), node) if isinstance(result, torch.Tensor) and len(shapes) > 1 else 0


def shape_of(tensor: torch.Tensor) -> Shape:
    """Returns the hints of its sizes."""
    return tuple(int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in tensor.shape)


def _product(shapes: Sequence[Shape], result: Shape, node: fx.Node) -> int:
    return 2 * math.prod(result) * shapes[0][-1]


def _added_product(shapes: Sequence[Shape], result: Shape, node: fx.Node) -> int:
    return 2 * math.prod(result) * shapes[1][-1]


def _attention(shapes: Sequence[Shape], result: Shape, node: fx.Node) -> int:
    query, key = shapes[0], shapes[1]
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + result[-1])


def _convolution(shapes: Sequence[Shape], result: Shape, node: fx.Node) -> int:
    return 2 * math.prod(result) * math.prod(shapes[1][1:])


def _einsum(shapes: Sequence[Shape], result: Shape, node: fx.Node) -> int:
    equation: Any = node.args[0]
    operands = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
    sizes: dict[str, int] = {}
    for letters, operand in zip(equation.replace(" ", "").partition("->")[0].split(","), operands, strict=True):
        if "." in letters:
            return 0
        sizes.update(zip(letters, shape_of(value_of(operand)), strict=True))
    return 2 * math.prod(sizes.values())


_COUNTS: dict[str, Callable[[Sequence[Shape], Shape, fx.Node], int]] = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv", "dot", "grouped_mm", "grouped_mm_fallback"), _product),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), _added_product),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
}
