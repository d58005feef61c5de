"""Turns regions into kernels: consecutive regions of one family share a kernel if the family allows it
(``Family.joins``), up to ``MAX_REGIONS`` regions and ``MAX_OPERANDS`` operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jitgen.families import registry
from jitgen.ir.body import Body
from jitgen.ir.graph import Shape
from jitgen.ir.program import Alias, Buffer, Kernel
from jitgen.ir.regions import Region
from jitgen.ir.symbols import Expr

MAX_REGIONS = 16
"""The most regions of one kernel, which limits the length of a source."""
MAX_OPERANDS = 128
"""The most operands of a kernel with several regions, so that its parameters stay within CUDA's limit of 4 KiB."""


def kernels_of(
    regions: Sequence[Region], numbers: Sequence[int], shapes: Sequence[Shape], name: str, before: int
) -> list[Kernel]:
    """Returns the kernels that compute ``regions``.

    Args:
        numbers: for each result that the regions store, the number of its buffer.
        shapes: the shape of every buffer.
        name: the traced function's name, from which the kernels are named.
        before: how many kernels the function has already.
    """
    groups: list[tuple[str, list[Body], list[tuple[Expr, str]]]] = []
    for region in regions:
        if groups:
            family, bodies, scalars = groups[-1]
            known = len(scalars)
            body = registry.named(region.family).body(region, numbers, shapes, scalars)
            operands = sum(len(other.operands) for other in bodies) + len(body.operands)
            fits = len(bodies) < MAX_REGIONS and operands <= MAX_OPERANDS
            if fits and region.family == family and registry.named(family).joins(bodies, body):
                bodies.append(body)
                continue
            del scalars[known:]  # those that the body has added
        own: list[tuple[Expr, str]] = []
        groups.append((region.family, [registry.named(region.family).body(region, numbers, shapes, own)], own))
    return [
        Kernel(name if before + number == 0 else f"{name}_{before + number}", family, tuple(bodies), tuple(scalars))
        for number, (family, bodies, scalars) in enumerate(groups)
    ]


def with_coarse(
    kernels: Sequence[Kernel], buffers: Sequence[Buffer], temporaries: range, outputs: Sequence[int | Alias]
) -> tuple[Kernel, ...]:
    """Marks bodies of ``kernels`` as ``coarse`` if nobody can see the last bits of their results.

    A body is coarse if each of its results is a float of 16 bits or fewer, or a temporary that is not returned and that
    only coarse bodies read. Kernels are in execution order, so that going backwards every reader of a temporary comes
    before its writer.
    """
    exact = {output.input for output in outputs if isinstance(output, Alias)}
    marked: list[Kernel] = []
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
        marked.append(replace(kernel, bodies=tuple(bodies)))
    return tuple(reversed(marked))


def _is_narrow(dtype: str) -> bool:
    """Returns whether ``dtype`` is a float of 16 bits or fewer."""
    return dtype.startswith("float8") or dtype in ("float16", "bfloat16")
