"""Batched products in every spelling and memory order, for the tests of all dialects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]
Shape = tuple[int, ...]

CASES: dict[str, tuple[Function, tuple[Shape, ...], int]] = {
    "bmm": (torch.bmm, ((5, 7, 9), (5, 9, 11)), 1),
    "a transposed weight": (lambda a, b: a @ b.mT, ((5, 7, 9), (5, 11, 9)), 1),
    "a transposed activation": (lambda a, b: a.mT @ b, ((5, 9, 7), (5, 9, 11)), 1),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), ((5, 7, 11), (5, 7, 9), (5, 9, 11)), 1),
    "addbmm": (torch.addbmm, ((7, 11), (5, 7, 9), (5, 9, 11)), 2),
    "four dimensions": (lambda a, b: torch.relu(a @ b) + 1, ((2, 3, 7, 9), (2, 3, 9, 11)), 1),
    "five dimensions": (lambda a, b: a @ b, ((2, 1, 4, 7, 9), (3, 1, 9, 11)), 1),
    "batches that broadcast": (lambda a, b: a @ b, ((2, 1, 7, 9), (3, 9, 11)), 1),
    "a matrix on the left": (lambda a, b: a @ b, ((7, 9), (3, 9, 11)), 1),
    "a vector on the left": (lambda a, b: a @ b, ((9,), (3, 9, 11)), 1),
    "a vector on the right": (lambda a, b: a @ b, ((3, 11, 9), (9,)), 1),
    "one row each": (lambda a, b: a @ b, ((64, 1, 33), (64, 33, 5)), 1),
    "heads side by side": (
        lambda q, k: q.view(2, 16, 4, 8).transpose(1, 2) @ k.view(2, 20, 4, 8).permute(0, 2, 3, 1),
        ((2, 16, 32), (2, 20, 32)),
        1,
    ),
    "prologue and epilogue": (
        lambda a, b, c: torch.sigmoid(torch.tanh(a * 2) @ b + c),
        ((5, 7, 9), (5, 9, 11), (5, 1, 11)),
        1,
    ),
    "two products of one activation": (lambda a, b, c: (a @ b, a @ c + 1), ((4, 6, 33), (4, 33, 5), (4, 33, 70)), 1),
    "gated": (lambda a, b, c: F.silu(a @ b) * (a @ c), ((4, 6, 33), (4, 33, 5), (4, 33, 5)), 1),
    "softmax behind": (lambda q, k: torch.softmax(q @ k.mT * 0.3, -1), ((2, 4, 16, 32), (2, 4, 20, 32)), 2),
    "a slice of the result": (lambda a, b: (a @ b)[1:, 2:, ::2], ((4, 7, 33), (4, 33, 11)), 1),
    "einsum of matrices": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((5, 7, 9), (5, 9, 11)), 1),
    "einsum of heads": (lambda a, b: torch.einsum("bihd,bjhd->bhij", a, b), ((2, 7, 3, 9), (2, 5, 3, 9)), 1),
    "einsum of a vector": (lambda a, b: torch.einsum("ij,j->i", a, b), ((7, 9), (9,)), 1),
    "an outer einsum": (lambda a, b: torch.einsum("i,j->ij", a, b), ((7,), (9,)), 1),
    "einsum with an ellipsis": (lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), ((2, 1, 7, 9), (3, 9, 4)), 1),
    "einsum over two dimensions": (lambda a, b: torch.einsum("ijk,jkl->il", a, b), ((7, 4, 5), (4, 5, 6)), 1),
    "einsum of one operand": (lambda a: torch.einsum("bij->jb", a), ((3, 7, 4),), 1),
    "einsum without an arrow": (lambda a, b: torch.einsum("ij,jk", a, b), ((7, 9), (9, 4)), 1),
    "no length": (torch.bmm, ((3, 7, 0), (3, 0, 5)), 1),
    "no matrices": (torch.bmm, ((0, 7, 4), (0, 4, 5)), 1),
    "no rows": (torch.bmm, ((3, 0, 4), (3, 4, 5)), 1),
}
"""Name to function, shapes of its tensors, and how many kernels it is."""

ROUNDED: dict[Function, Function] = {
    CASES["prologue and epilogue"][0]: lambda a, b, c: torch.tanh(a * 2).abs() @ b.abs() / 4,
    CASES["softmax behind"][0]: lambda q, k: _softmax_moves(q @ k.mT * 0.3),
}
"""Functions with a value that is rounded on the way as in eager torch, because it is an operand of the product or lies
in memory between two kernels: how far the result moves when each such value moves by all of itself. 1/4 is the steepest
slope of a sigmoid."""


def _softmax_moves(scores: torch.Tensor) -> torch.Tensor:
    """A softmax changes by the factor ``exp(2 d)`` at most when its arguments change by d, here once or twice."""
    return torch.softmax(scores, -1) * 4 * scores.abs().amax(-1, keepdim=True)


def tensors(shapes: tuple[Shape, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def difference(function: Function, arguments: list[torch.Tensor], results: Any) -> str | None:
    """How ``results`` differ from float64 torch; None where they do not.

    A sum of K terms in float32 is off by at most K roundings of the sum of what it adds, and a result by one rounding
    to its own dtype; the functions here stretch that by less than four. What is rounded on the way is
    in ``ROUNDED``.
    """
    doubles = [argument.double() for argument in arguments]
    exact = function(*doubles)
    moved = ROUNDED[function](*doubles) if function in ROUNDED else 0.0
    sizes = max(argument.abs().amax().item() if argument.numel() else 0.0 for argument in arguments)
    terms = max((argument.shape[-1] for argument in arguments), default=1) * 5
    pairs = zip(*(value if isinstance(value, tuple) else (value,) for value in (results, exact)), strict=True)
    for place, (got, want) in enumerate(pairs):
        if got.shape != want.shape or got.dtype != arguments[0].dtype:
            return f"result {place} is {got.dtype}{tuple(got.shape)}, not {tuple(want.shape)}"
        working = torch.float64 if got.dtype == torch.float64 else torch.float32
        bound = torch.finfo(got.dtype).eps * want.abs()
        bound = bound + 4 * terms * torch.finfo(working).eps * max(1.0, sizes) ** 2
        bound = bound + torch.finfo(got.dtype).eps / 2 * moved
        if not bool(((got.double() - want).abs() <= bound).all()):
            return f"result {place} is off by {(got.double() - want).abs().max():.3g}"
    return None
