"""Gradients of attention, written as plain functions, against those of float64 torch, for every dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import jitgen
from jitgen import pipeline
from jitgen.ir.program import Program
from jitgen.lowering import Lowered
from tests.attention import INF, sample

Function = Callable[..., torch.Tensor]


@contextmanager
def partitioned() -> Iterator[list[tuple[Program, list[tuple[int, ...]]]]]:
    """The programs that calls take within the context, each with the sizes of its temporaries and results: not those of
    a route that was given up for its alternative."""
    found: list[tuple[Program, list[tuple[int, ...]]]] = []
    original = pipeline.lower

    def lower(graph: Any, *args: Any) -> Lowered:
        lowered = original(graph, *args)
        found.append((lowered.program, [each.view.sizes for each in lowered.memories[len(graph.inputs) :]]))
        return lowered

    with mock.patch.object(pipeline, "lower", lower):
        yield found


def compared(function: Function, *args: torch.Tensor, backend: str, fused: bool = True) -> Iterator[str | None]:
    """What is wrong with the gradients of ``function(q, k, v, ...)`` of all floating arguments, or with the temporaries
    and results of its forward and backward: where it is ``fused``, none of them is of M x N. M and N differ from other
    sizes."""
    compiled = jitgen.jit(function, backend=backend)
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    with partitioned() as programs:
        found = compiled(*leaves)
        found.sum().backward()
    for leaf in leaves:
        leaf.grad = None
    found = compiled(*leaves)
    g = sample(found.shape, found.dtype, 9).to(found.device)
    wanted_leaves = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args]
    wanted = function(*wanted_leaves)
    mass = _mass(function, args)
    found.backward(g)
    wanted.backward(g.double())
    for program, shapes in programs if fused else ():
        yield program_failure(program, shapes, args[0].shape[-2], args[1].shape[-2])
    q, k, v = (leaf.detach().double() for leaf in wanted_leaves[:3])
    bounds = _bounds(q, k, v, g.double(), args[0].dtype, mass)
    names = ("q", "k", "v", *(f"argument {number}" for number in range(3, len(args))))
    for name, leaf, reference in zip(names, leaves, wanted_leaves, strict=True):
        if not leaf.requires_grad:
            continue
        yield failure(name, leaf.grad, reference.grad, bounds.get(name, max(bounds.values(), default=0.0)))


def program_failure(program: Program, shapes: list[tuple[int, ...]], rows: int, keys: int) -> str | None:
    """What of M x N is in memory."""
    large = [
        shape
        for shape in shapes
        if rows in shape and keys in shape[: shape.index(rows)] + shape[shape.index(rows) + 1 :]
    ]
    families = [kernel.family for kernel in program.kernels]
    return f"{program.name}: {large} in memory, of {families}" if large else None


def failure(name: str, found: torch.Tensor | None, wanted: torch.Tensor | None, bound: float) -> str | None:
    """What is wrong with the gradient ``found`` of ``name``, in words; None where nothing is."""
    if found is None or wanted is None:
        return f"{name} has no gradient"
    if found.shape != wanted.shape or not torch.equal(found.isnan(), wanted.isnan()):
        return f"{name}: NaN at {found.isnan().sum()} of {tuple(found.shape)}; wanted {wanted.isnan().sum()}"
    allowed = bound + torch.finfo(found.dtype).eps * wanted.abs()
    error = (found.double() - wanted).abs()
    excess = ((error > allowed) & ~wanted.isnan()).sum()
    return f"{name}: {excess} off by up to {error.nan_to_num().max():.3g}, allowed {bound:.3g}" if excess else None


def _mass(function: Function, args: tuple[torch.Tensor, ...]) -> float:
    """The greatest sum of the weights that a key has: the gradient of its value where that of the result is 1."""
    leaves = [a.detach().double() if a.is_floating_point() else a for a in args]
    leaves[2].requires_grad_()
    result = function(*leaves)
    (found,) = torch.autograd.grad(result, leaves[2], torch.ones_like(result))
    rows = args[0].shape[-2]  # at most 1 of each, where a row without keys makes all of them NaN
    return float(found.nan_to_num(nan=rows).abs().max()) if found.numel() else 0.0


def _bounds(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, dtype: torch.dtype, mass: float
) -> dict[str, float]:
    """How far gradients may be off, by the roundings of sums.

    A weight has the relative error ``relative`` of ``tests/attention.failure``. dP is a sum of E products of at most A
    in all, and so is delta; dS is P (dP - delta), of at most 2 A P, with these errors and one rounding to the dtype of
    the operands, as have P and, in delta, O. dQ adds N of them times keys, whose weights are 1 in all; dK and dV add
    those of a key, whose weights are ``mass`` in all. Rules of scores here have derivatives of at most 1.
    """
    if not all(t.numel() for t in (q, k, v, g)):
        return {"q": 0.0, "k": 0.0, "v": 0.0}
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    narrow = torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0
    size = q.shape[-1] * q.abs().amax() * k.abs().amax() + q.shape[-2] + k.shape[-2]
    relative = eps * (2 * (q.shape[-1] + 12) * size + k.shape[-2] + q.shape[-2] + 16)
    most = (g.abs().sum(-1).amax() * v.abs().amax()).item()
    score = 2 * most * (relative + eps * (v.shape[-1] + 8) + narrow)
    weight = relative + narrow
    return {
        "q": float(score * k.abs().amax()),
        "k": float(score * q.abs().amax() * mass),
        "v": float(weight * g.abs().amax() * mass),
    }


def grouped(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def repeated(q: Any, k: Any, v: Any) -> Any:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


def sdpa(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25 + bias, -1).to(v.dtype) @ v


def sloped(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    """ALiBi (Press et al., 2022)."""
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    j = torch.arange(k.shape[-2], device=q.device)
    s = q @ k.transpose(-1, -2) * 0.25 + slopes[:, None, None] * (j - i)
    return torch.softmax(s.masked_fill(j > i, -INF), -1).to(v.dtype) @ v


def sunk(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    """A learned score for each head beside the others."""
    s = q @ k.transpose(-1, -2) * 0.25
    top = torch.maximum(s.amax(-1, keepdim=True), sinks[:, None, None])
    e = torch.exp(s - top)
    return (e / (e.sum(-1, keepdim=True) + torch.exp(sinks[:, None, None] - top))).to(v.dtype) @ v


def documents(q: Any, k: Any, v: Any, ids: Any) -> Any:
    s = (q @ k.transpose(-1, -2) * 0.25).masked_fill(ids[:, None, :, None] != ids[:, None, None, :], -INF)
    return torch.softmax(s, -1) @ v


def shown(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
