"""Random chains of functions that move elements, at sizes of 0, 1 and more: source texts that eager torch runs.

What joins and chooses elements (``cat``, ``gather``) meets reshapes in every order, which is where views cannot always
be moved to the inputs and something must be computed first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from jitgen.trace.indexing import MOST_NUMBERS

MOST_ELEMENTS, MOST_DIMENSIONS, MOST_STATEMENTS = 600, 5, 9
_NAMES = {"torch": torch, "F": F}


def draw(seed: int) -> tuple[str, torch.Tensor]:
    """The source of a function ``f(t)`` and a tensor for it."""
    choose = random.Random(seed)
    sizes = [choose.choice((0, 1, 2, 3, 4, 4)) for _ in range(choose.randint(1, 3))]
    argument = torch.randint(-4, 5, sizes, generator=torch.Generator().manual_seed(seed)).float()
    value, lines = argument, []
    for _ in range(choose.randint(2, MOST_STATEMENTS)):
        text = choose.choice(STATEMENTS)(choose, value, choose.randrange(value.ndim) if value.ndim else 0)
        try:
            result = eval(text, _NAMES | {"t": value})
        except (IndexError, RuntimeError):  # not for this shape
            continue
        if result.numel() <= MOST_ELEMENTS and result.ndim <= MOST_DIMENSIONS:
            value = result
            lines.append(text)
    return "".join(["def f(t):\n", *(f"    t = {line}\n" for line in lines), "    return t\n"]), argument


def function(text: str) -> Callable[[torch.Tensor], torch.Tensor]:
    names: dict[str, Any] = dict(_NAMES)
    exec(text, names)
    made: Callable[[torch.Tensor], torch.Tensor] = names["f"]
    return made


def _reshape(choose: random.Random, t: torch.Tensor, dim: int) -> str:
    count = t.numel()
    if not count:
        return f"t.reshape({choose.choice(('0, 3', '0', '2, 0', '3, 0, 1'))})"
    first = choose.choice([n for n in range(1, count + 1) if count % n == 0])
    second = choose.choice([n for n in range(1, count // first + 1) if count // first % n == 0])
    return f"t.reshape({choose.choice((f'{first}, {second}, -1', f'{first}, -1', '-1'))})"


def _joined(choose: random.Random, t: torch.Tensor, dim: int) -> str:
    tensors = [choose.choice(("t", "t", "t * 2", f"t.flip({dim})")) for _ in range(choose.randint(2, 3))]
    return f"torch.{choose.choice(('cat', 'stack'))}([{', '.join(tensors)}], {dim})"


def _gather(choose: random.Random, t: torch.Tensor, dim: int) -> str:
    size = t.shape[dim] if t.ndim else 1
    shape = list(t.shape) or [1]
    shape[dim] = choose.randint(0, 3) if size else 0
    count = math.prod(shape)
    base = f"torch.arange({count}) % {max(size, 1)}"
    numbers = [choose.randrange(max(size, 1)) for _ in range(count)]
    listed = (f"torch.tensor({numbers}, dtype=torch.int64).reshape({shape})",) if count <= MOST_NUMBERS else ()
    index = (
        *listed,
        f"({base}).reshape({shape})",
        f"torch.cat([({base})[:1], ({base})[1:]]).reshape({shape})",
        f"torch.stack([{base}, {base}])[1].reshape({shape})",
        f"({base}).flip(0).roll(1).reshape({shape})",
        f"torch.cat([({base}).reshape({shape}), ({base}).reshape({shape})], {dim}).narrow({dim}, 0, {shape[dim]})",
    )
    return f"{choose.choice(('t.gather({1}, {0})', 'torch.take_along_dim(t, {0}, {1})'))}".format(
        choose.choice(index), dim
    )


def _indexed(choose: random.Random, t: torch.Tensor, dim: int) -> str:
    size = t.shape[dim] if t.ndim else 0
    numbers = [choose.randrange(max(size, 1)) for _ in range(choose.randint(1, 3))]
    index = choose.choice(("torch.tensor({})", "torch.tensor({})[:, None].expand(-1, 2).reshape(-1)")).format(numbers)
    return f"t[{':, ' * dim}{index}]"


def _sliced(choose: random.Random, t: torch.Tensor, dim: int) -> str:
    end = choose.randint(0, max(t.shape[dim], 1) if t.ndim else 1)
    return f"t[{':, ' * dim}{end // 2}:{end}:{choose.choice((1, 1, 2))}]"


def _permuted(choose: random.Random, t: torch.Tensor, dim: int) -> str:
    return f"t.permute({choose.sample(range(t.ndim), t.ndim)})"


def _fixed(text: str) -> Callable[[random.Random, torch.Tensor, int], str]:
    return lambda choose, t, dim: text.format(dim=dim, amount=choose.randint(-3, 3), few=choose.randint(0, 2))


STATEMENTS = (_reshape, _reshape, _joined, _joined, _gather, _gather, _indexed, _sliced, _permuted)
STATEMENTS += tuple(
    _fixed(text)
    for text in (
        *("F.pad(t, ({few}, 1))", "t.flip({dim})", "t.roll({amount}, {dim})", "t[None].expand({few}, *t.shape)"),
        *("t + t.flip(0)", "t.select({dim}, 0)", "torch.cat(t.chunk(2, {dim})[::-1], {dim})", "t.cumsum({dim})"),
        *("t.unflatten({dim}, (-1, 2))", "t.repeat(*[1] * (t.ndim - 1), 2)", "t.sum({dim}, keepdim=True)"),
        *("t.index_add({dim}, torch.arange(t.shape[{dim}]).flip(0), t)", "torch.where(t > 0, t, t.flip(0))"),
        *("t.sort({dim}).values", "F.embedding(torch.arange(4).reshape(2, 2) % t.shape[0], t.flatten(1))"),
    )
)
"""Each makes an expression of ``t``, which may not be defined for its shape."""
