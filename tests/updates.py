"""Functions that update several arguments in place, and what is wrong with what a backend makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import jitgen
from tests.cuda_on_host import run
from tests.joined_rows import rotated_pairs

Tensor = torch.Tensor
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 2e-6, torch.float64: 1e-12}


@dataclass(frozen=True)
class Case:
    """A function with arguments.

    Attributes:
        shapes: of the arguments, or of lists of them.
        kernels: how many kernels compute it at these shapes.
        dtypes: of the arguments; float32 where there are none.
        made: makes an argument of a random tensor.
    """

    function: Callable[..., Any]
    shapes: Sequence[Any]
    kernels: int
    dtypes: Sequence[torch.dtype] = ()
    made: Callable[[Tensor], Tensor] = torch.clone

    def arguments(self, seed: int = 0) -> list[Any]:
        """New random arguments."""
        generator = torch.Generator().manual_seed(seed)
        dtypes = self.dtypes or [torch.float32] * len(self.shapes)

        def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return self.made(torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype))

        return [
            [random(one, dtype) for one in shape] if isinstance(shape, list) else random(shape, dtype)
            for shape, dtype in zip(self.shapes, dtypes, strict=True)
        ]


def momentum(p: Tensor, g: Tensor, m: Tensor) -> None:
    m.mul_(0.9).add_(g)
    p.sub_(0.1 * m)


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.mul_(1 - 1e-4)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)


def of_each(function: Callable[..., None]) -> Callable[..., None]:
    """The update by ``function`` of every tensor of lists."""

    def lists(*arguments: Sequence[Tensor]) -> None:
        for each in zip(*arguments, strict=True):
            function(*each)

    return lists


def foreach(ps: Sequence[Tensor], gs: Sequence[Tensor], ms: Sequence[Tensor], vs: Sequence[Tensor]) -> None:
    torch._foreach_lerp_(ms, gs, 0.1)
    torch._foreach_mul_(vs, 0.99)
    torch._foreach_addcmul_(vs, gs, gs, 0.01)
    roots = torch._foreach_sqrt(vs)
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(ps, ms, roots, -1e-3)


def mean(e: Tensor, p: Tensor) -> None:
    e.lerp_(p, 0.01)


def stepped(step: Tensor, ps: Sequence[Tensor], ms: Sequence[Tensor]) -> None:
    """The parameters are read through no view; the step is, by all of them."""
    step.add_(1)
    for p, m in zip(ps, ms, strict=True):
        m.mul_(0.9)
        p.sub_(m / (1 - 0.9**step))


def swapped(a: Tensor, b: Tensor) -> None:
    before = a.clone()
    a.copy_(b)
    b.copy_(before)


def transposed_before(a: Tensor, b: Tensor) -> None:
    a.copy_(b.t())
    b.mul_(2)


def transposed_each(a: Tensor, b: Tensor) -> None:
    before = a.clone()
    a.copy_(b.t())
    b.copy_(before.t())


def transposed_itself(a: Tensor, b: Tensor) -> None:
    before = a.clone()
    a.add_(before.t())
    b.add_(before)


def returns_what_was(m: Tensor, g: Tensor) -> Tensor:
    before = m * 2
    m.add_(g)
    return before


def returns_sums_of_what_was(m: Tensor, g: Tensor) -> Tensor:
    sums = m.sum(-1)
    m.add_(g)
    g.mul_(m)
    return sums


def returns_a_row_of_what_was(m: Tensor, g: Tensor) -> Tensor:
    row = m[1] + 1
    m.add_(g)
    g.mul_(m)
    return row


def returns_views(m: Tensor, g: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    m.add_(g)
    p.sub_(m)
    return m[:2], p.t()


def normalized(xs: Sequence[Tensor]) -> None:
    for x in xs:
        x.copy_(x.softmax(-1))


def clipped(p: Tensor, g: Tensor) -> None:
    g.mul_(1 / (g.square().sum().sqrt() + 1))
    p.sub_(g)


def projected(h: Tensor, w: Tensor, c: Tensor) -> None:
    new = torch.tanh(h @ w)
    c.add_(new)
    h.copy_(new * c)


def gathered(table: Tensor, p: Tensor) -> None:
    order = torch.arange(p.shape[0] - 1, -1, -1)
    p.add_(table[order])
    table.mul_(p)


def in_a_ring(ps: Sequence[Tensor]) -> None:
    """More than one region may store; each reads what its neighbour was."""
    news = [p + ps[index - 1] for index, p in enumerate(ps)]
    for p, new in zip(ps, news, strict=True):
        p.copy_(new)


def after_a_slice(x: Tensor, m: Tensor, p: Tensor) -> None:
    x[1:3].add_(1)
    m.add_(x)
    p.sub_(m)


def repeated(p: Tensor, m: Tensor) -> None:
    """One argument is updated twice, and read between."""
    p.add_(m)
    m.mul_(p)
    p.mul_(m)


def pairs_to_a_cache(keys: Tensor, k: Tensor, cos: Tensor, sin: Tensor, start: Tensor) -> None:
    """Neighbours are rotated into one another, and appended."""
    at = (start * 4).long() + torch.arange(k.shape[2])
    keys.index_copy_(2, at, rotated_pairs(k, cos, sin))


def heads_to_caches(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, weight: Tensor, start: Tensor) -> None:
    """Normalised keys, which need a kernel before them, and values are appended by one kernel."""
    at = (start * 4).long() + torch.arange(k.shape[1])
    k, v = (x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2) for x in (k, v))
    keys.index_copy_(2, at, F.rms_norm(k, k.shape[-1:], weight, 1e-5))
    values.index_copy_(2, at, v)


def row(x: Tensor) -> Tensor:
    x[5].add_(1)
    return x


def elements(x: Tensor, y: Tensor, w: Tensor) -> None:
    """Each reads what it was, and what another one has become."""
    x[:, 3].mul_(2)
    x.diagonal().sub_(1)
    x[1::2, 2:5].copy_(F.silu(x[1::2, 2:5]) * w[1::2, 2:5])
    y.view(-1)[3:9].mul_(y.view(-1)[3:9])
    y[2] += x[4]


def rows_swapped(x: Tensor) -> Tensor:
    before = x[5].clone()
    x[5] = x[6]
    x[6] = before
    return before


def row_normalized(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A row is divided by its norm; a sum is of what the tensor was, another one of what it is."""
    before = x.sum()
    x[5].div_(x[5].norm())
    x[:2].add_(x[5])
    y.add_(x)
    return before, x.sum()


def shifted(x: Tensor, y: Tensor) -> None:
    """Slices read one another."""
    x[1:].copy_(y[:-1].clone())
    y[1:].copy_(x[:-1].clone())
    x[:1] = 0


def chosen_rows(x: Tensor, start: Tensor) -> None:
    at = (start * 4).long() + torch.arange(3)
    x.index_copy_(0, at, x[at] * 2 + x[1])


def sliced(tensor: Tensor) -> Tensor:
    """Every other column of a wider tensor."""
    return torch.cat([tensor, tensor], -1)[..., ::2] if tensor.dim() else tensor


S = (7, 13)
Q = (9, 9)
RAGGED = [(7, 13), (1,), (5,), (0, 4), (3, 1, 2)]
wide, half = torch.float32, torch.bfloat16
CASES: dict[str, Case] = {
    "momentum": Case(momentum, [S] * 3, 1),
    "momentum of rows of 1": Case(momentum, [(1, 5)] * 3, 1),
    "momentum of one number": Case(momentum, [()] * 3, 1),
    "momentum of nothing": Case(momentum, [(0, 3)] * 3, 1),
    "momentum of doubles": Case(momentum, [S] * 3, 1, [torch.float64] * 3),
    "momentum of bfloat16": Case(momentum, [S] * 3, 1, [half, half, wide]),
    "momentum of columns": Case(momentum, [S] * 3, 1, made=lambda x: x.t().contiguous().t()),
    "momentum of slices": Case(momentum, [S] * 3, 1, made=sliced),
    "adamw": Case(adamw, [S] * 4, 1),
    "adamw of bfloat16": Case(lambda p, g, m, v: adamw(p, g.to(m.dtype), m, v), [S] * 4, 1, [half, half, wide, wide]),
    "adamw of five": Case(of_each(adamw), [RAGGED] * 4, 1),
    "adamw of fifty": Case(of_each(adamw), [[(3, n) for n in range(1, 51)]] * 4, 1),
    "adamw of forty, sliced": Case(of_each(adamw), [[(3, n) for n in range(1, 21)] * 2] * 4, 1, made=sliced),
    "momentum of all ranks": Case(of_each(momentum), [RAGGED * 4] * 3, 1),
    "foreach": Case(foreach, [[(3, n) for n in range(1, 51)]] * 4, 1),
    "mean of five": Case(of_each(mean), [RAGGED] * 2, 1),
    "stepped": Case(stepped, [(), RAGGED, RAGGED], 2),
    "swapped": Case(swapped, [S] * 2, 1),
    "transposed before": Case(transposed_before, [Q] * 2, 2),
    "transposed each": Case(transposed_each, [Q] * 2, 3),
    "transposed itself": Case(transposed_itself, [Q] * 2, 3),
    "returns what was": Case(returns_what_was, [S] * 2, 1),
    "returns sums of what was": Case(returns_sums_of_what_was, [S] * 2, 2),
    "returns a row of what was": Case(returns_a_row_of_what_was, [S] * 2, 2),
    "returns views": Case(returns_views, [S] * 3, 1),
    "normalized": Case(normalized, [[S, (3, 4, 5), (6,)]], 3),
    "clipped": Case(clipped, [S] * 2, 2),
    "projected": Case(projected, [S, (13, 13), S], 2),
    "gathered": Case(gathered, [S] * 2, 2),
    "in a ring": Case(in_a_ring, [[S] * 5], 1),
    "in a ring of forty": Case(in_a_ring, [[S] * 40], 2),
    "after a slice": Case(after_a_slice, [S] * 3, 2),
    "row": Case(row, [S], 1),
    "row of slices": Case(row, [S], 1, made=sliced),
    "elements": Case(elements, [S] * 3, 4),
    "rows swapped": Case(rows_swapped, [S], 3),
    "row normalized": Case(row_normalized, [S] * 2, 6),
    "shifted": Case(shifted, [S] * 2, 4),
    "chosen rows": Case(chosen_rows, [S, (1,)], 2),
    "repeated": Case(repeated, [S] * 2, 1),
    "pairs to a cache": Case(pairs_to_a_cache, [(2, 2, 6, 8), (2, 2, 2, 8), (1, 8), (1, 8), (1,)], 1),
    "heads to caches": Case(heads_to_caches, [(1, 2, 6, 8)] * 2 + [(1, 2, 16)] * 2 + [(8,), (1,)], 2),
}


def failures(case: Case, backend: str) -> Iterator[str | None]:
    """What is wrong with arguments and results on fresh random data, at the case's shapes, in float64's eyes."""
    jitted = jitgen.jit(case.function, backend=backend)
    for seed in range(2):
        arguments = case.arguments(seed)
        exact = pytree.tree_map(lambda tensor: tensor.double(), case.arguments(seed))
        wanted = case.function(*exact)
        found = run(case.function, *arguments) if backend == "cuda" else jitted(*arguments)
        lefts, rights = (
            pytree.tree_leaves([each, *([] if wanted is None else [results])])
            for each, results in ((arguments, found), (exact, wanted))
        )
        for number, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            bound = LIMITS[left.dtype] * (1 + right.abs())
            off = int((~((left.double() - right).abs() <= bound)).sum())
            yield f"{off} of {right.numel()} elements of tensor {number} are off" if off else None
