"""Regions become kernels: those that may share one do, at most ``MAX_REGIONS`` and ``MAX_OPERANDS`` in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jitgen.ir.body import Body, BodyBuilder, Contraction
from jitgen.ir.graph import Shape
from jitgen.ir.program import Alias, Buffer, Kernel
from jitgen.ir.regions import Region
from jitgen.ir.symbols import Expr

MAX_REGIONS = 16
MAX_OPERANDS = 128
"""Keeps a source within reason, and its parameters within CUDA's limit; more regions become more kernels."""


def lower(
    regions: Sequence[Region], numbers: Sequence[int], shapes: Sequence[Shape], name: str, before: int
) -> list[Kernel]:
    """The kernels of ``regions``, of a function called ``name``.

    Args:
        numbers: the buffer of each result that the regions store.
        shapes: of every buffer.
        before: how many kernels of the function there are already.
    """
    groups: list[tuple[list[Body], list[tuple[Expr, str]]]] = [([], [])]
    for region in regions:
        bodies, scalars = groups[-1]
        body = BodyBuilder(shapes, scalars).lower(region, numbers)
        operands = sum(len(other.operands) for other in bodies) + len(body.operands)
        alone = not _share_kernel(bodies, body)
        if bodies and (alone or len(bodies) == MAX_REGIONS or operands > MAX_OPERANDS):
            bodies, scalars = [], []
            groups.append((bodies, scalars))
            body = BodyBuilder(shapes, scalars).lower(region, numbers)
        bodies.append(body)
    kernels: list[Kernel] = []
    for bodies, scalars in groups:
        if bodies:
            number = before + len(kernels)
            own = name if number == 0 else f"{name}_{number}"
            kernels.append(Kernel(own, tuple(bodies), tuple(scalars)))
    return kernels


def _share_kernel(bodies: Sequence[Body], body: Body) -> bool:
    """Whether ``body`` may join ``bodies``: pointwise regions do, and products of one activation by alike weights."""
    everyone = [*bodies, body]
    if not any(other.contractions for other in everyone):
        return not any(other.row_rank for other in everyone)
    return len({tuple(_activation_of(other, part) for part in other.contractions) for other in everyone}) == 1


def _activation_of(body: Body, contraction: Contraction) -> tuple[Any, ...]:
    """What two contractions must have in common to be computed side by side in one kernel."""
    x = tuple((i.op, i.args, i.dtype, body.operands[i.attr] if i.op == "load" else i.attr) for i in contraction.x)
    kinds = tuple((body.operands[index].kind, body.operands[index].dtype) for index in contraction.weight)
    return x, kinds, replace(contraction, x=(), weight=())


def with_coarse(
    kernels: Sequence[Kernel], buffers: Sequence[Buffer], temporaries: range, outputs: Sequence[int | Alias]
) -> tuple[Kernel, ...]:
    """``kernels`` with what is known of each body's results; a kernel follows those whose temporaries it reads."""
    exact = {output.input for output in outputs if isinstance(output, Alias)}
    found: list[Kernel] = []
    for kernel in reversed(kernels):
        bodies = []
        for body in kernel.bodies:
            written = [body.operands[index].buffer for index in body.stores]
            coarse = all(
                _is_narrow(buffers[b].dtype) or (b in temporaries and b not in exact) for b in written if b is not None
            )
            bodies.append(replace(body, coarse=coarse))
        for body in bodies:
            read = {operand.buffer for operand in body.operands if operand.kind != "store"}
            exact |= set() if body.coarse else {buffer for buffer in read if buffer is not None}
        found.append(replace(kernel, bodies=tuple(bodies)))
    return tuple(reversed(found))


def _is_narrow(dtype: str) -> bool:
    """Whether it is a float of 16 bits or fewer."""
    return dtype.startswith("float8") or dtype in ("float16", "bfloat16")
