"""How far from float64 a result may be.

A kernel computes in a float format of unit roundoff u (float32 for 16-bit inputs). A numerically stable algorithm gives
the exact result for operands that are off by some roundings. So an element may be wrong by

    roundings * (sensitivity + u * |exact|)  and half a unit of the format it is stored in,

where the sensitivity is how far the exact result moves when every operand moves by u up or down, and the roundings are
counted in the graph that jitgen traced. Where the exact function jumps (``floor`` at an integer) the sensitivity says
nothing and is not counted.

A product or a sum of 16 bits that other functions read is rounded to these, as in eager torch: to the sensitivities is
added that of operands which are off by a rounding of 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen.ir.graph import Graph, topological

DRAWS = 3
"""Random directions in which the operands are moved."""
MANY_DRAWS = 24
"""As many where a result differs by more. Of an element that moves by s on average, each direction shows less than s/4
with a probability of 0.2: of 3 directions all do for one element in 125, of 24 for none."""
ROUNDINGS_OF_A_FUNCTION = 4
"""Unit roundoffs that a transcendental function of a vector library is wrong by, at most."""


def roundings(graph: Graph, sizes: dict[str, Any]) -> float:
    """The roundings that one element of a result may have gone through: a few for each node, and for each sum the
    square root of its terms, by which random roundings grow."""
    total = float(ROUNDINGS_OF_A_FUNCTION)
    for node in topological(graph.results):
        if node.op in ("view", "input", "const", "scalar", "iota", "cat"):
            continue
        total += ROUNDINGS_OF_A_FUNCTION
        if node.op in ("reduce", "scan", "contract"):
            total += math.sqrt(max(1, *(_elements(child.shape, sizes) for child in node.inputs)))
    return total


def narrow_roundings(graph: Graph) -> tuple[int, float]:
    """The roundings of products and sums to 16 bits that functions within ``graph`` read, and their unit roundoff."""
    nodes = topological(graph.results)
    read = {id(child.under_views) for node in nodes if node.op != "view" for child in node.inputs}
    narrow = [node for node in nodes if node.op in ("reduce", "scan", "contract") and id(node) in read]
    units = [
        torch.finfo(getattr(torch, node.dtype)).eps / 2 for node in narrow if node.dtype in ("float16", "bfloat16")
    ]
    return ROUNDINGS_OF_A_FUNCTION * len(units), max(units, default=0.0)


def _elements(shape: Sequence[Any], sizes: dict[str, Any]) -> int:
    from jitgen.ir import symbols

    return math.prod(symbols.evaluate(size, sizes) for size in shape)


def compute_unit(dtype: torch.dtype) -> float:
    """The unit roundoff of the format that a kernel computes ``dtype`` in."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2


def widened(values: Sequence[Any]) -> list[Any]:
    return [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]


def sensitivities(
    function: Callable[..., Any], values: Sequence[Any], exact: Sequence[Any], unit: float, draws: int = DRAWS
) -> list[Any]:
    """For each result, how far it moves when every floating operand moves by ``unit`` up or down; 0 where it jumps."""
    step = max(unit, 2.0**-36)  # of steps below that, float64 would show its own roundings
    near, far = (_movement(function, values, exact, size, draws) for size in (step / 64, step))
    found = []
    for small, large in zip(near, far, strict=True):
        if small is None:
            found.append(None)
            continue
        smooth = small <= large / 4
        found.append(torch.where(smooth, large, torch.zeros_like(large)) * (unit / step))
    return found


def _movement(
    function: Callable[..., Any], values: Sequence[Any], exact: Sequence[Any], step: float, draws: int
) -> list[Any]:
    most: list[Any] = [None] * len(exact)
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        moved = [_moved(value, step, generator) for value in values]
        for number, result in enumerate(pytree.tree_leaves(function(*moved))):
            want = exact[number]
            if not isinstance(want, torch.Tensor) or not want.is_floating_point():
                continue
            distance = (result - want).abs().nan_to_num(nan=0.0, posinf=0.0)
            most[number] = distance if most[number] is None else torch.maximum(most[number], distance)
    return most


def _moved(value: Any, step: float, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value.clone() if isinstance(value, torch.Tensor) else value
    signs = torch.randint(0, 2, value.shape, generator=generator).double() * 2 - 1
    return value * (1 + step * signs.to(value.device))


def mismatch(got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, spread: Any) -> str | None:
    """How ``got`` differs from the exact result by more than ``spread``, or None.

    An element may instead be what eager torch computes: where a result is no number, infinite or a choice, the formats
    differ and not the algorithms.
    """
    if not got.is_floating_point():
        wrong = got != eager
    else:
        storage = torch.finfo(got.dtype)
        # In float64, since torch compares no numbers of 8 bits.
        stored, got, eager = exact.to(got.dtype).double(), got.double(), eager.double()
        allowed = spread + storage.eps / 2 * exact.abs() + storage.smallest_normal * storage.eps
        near = (got - exact).abs() <= allowed
        edge = stored.isinf() & (got.abs() >= storage.max * (1 - 2 * storage.eps)) & (got.sign() == stored.sign())
        wrong = ~(near | edge | _same(got, stored) | _same(got, eager))
    if not wrong.any():
        return None
    where = tuple(wrong.nonzero()[0].tolist())
    told = f"{got[where].item()!r} for {exact[where].item()!r} (eager {eager[where].item()!r})"
    return f"{int(wrong.sum())} of {wrong.numel()} elements wrong, the first at {where}: {told}"


def _same(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left == right) | (left.isnan() & right.isnan())
