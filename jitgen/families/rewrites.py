"""Rewrites programs by a call's sizes: families propose it (``Family.rewrite_kernel``) before layout. Then kernels
follow one another as they will be launched, and products are marked that may read operands before the one ahead ends.
"""

from __future__ import annotations

from dataclasses import replace

from jitgen.device import Device
from jitgen.families import registry
from jitgen.ir.body import Operand
from jitgen.ir.program import Buffer, Kernel, Program
from jitgen.kernel.operands import Call


def rewritten(program: Program, call: Call, device: Device) -> Program:
    """Replaces each kernel of ``program`` that its family rewrites by several."""
    several = _with_several(program, call, device)
    if device.dialect != "cuda" or not device.overlaps_launches or not any(map(_are_by_ids, several.kernels)):
        return several
    pairs = zip((None, *several.kernels), several.kernels, strict=False)
    return replace(several, kernels=tuple(_settled(kernel, ahead, several) for ahead, kernel in pairs))


def _settled(kernel: Kernel, ahead: Kernel | None, program: Program) -> Kernel:
    """Returns ``kernel`` with its products marked whose ids and weights were complete before the kernel ``ahead``
    began. That is so of ids where products ahead have the same: the first of such kernels waits for all before it, and
    no block of the next one starts before it has. It is so of weights that no kernel of the program writes: of three
    such kernels the third may start before the first has ended."""
    if ahead is None or not all(_are_by_ids(one) for one in (ahead, kernel)):
        return kernel
    stored = _stored(ahead)
    temporaries = range(len(program.inputs), len(program.inputs) + len(program.temporaries))
    read = {body.operands[i].buffer for body in kernel.bodies for c in body.contractions for i in c.weight}
    written = {buffer for one in program.kernels for buffer in _stored(one)}
    if _ids(ahead) != _ids(kernel) or not written.isdisjoint(read) or not all(b in temporaries for b in stored):
        return kernel
    bodies = [
        replace(body, contractions=tuple(replace(c, settled=True) for c in body.contractions)) for body in kernel.bodies
    ]
    return replace(kernel, bodies=tuple(bodies))


def _are_by_ids(kernel: Kernel) -> bool:
    """Returns whether all that ``kernel`` computes are products of rows by ids, of operands without scales of blocks:
    kernels that read ids before anything else."""
    contractions = [c for body in kernel.bodies for c in body.contractions]
    products = all(body.contractions for body in kernel.bodies)
    return products and all(c.grouping == "ids" and not c.blocks and not c.w for c in contractions)


def _stored(kernel: Kernel) -> set[int | None]:
    """Returns the buffers that ``kernel`` writes."""
    return {operand.buffer for body in kernel.bodies for operand in body.operands if operand.kind == "store"}


def _ids(kernel: Kernel) -> set[Operand]:
    return {body.operands[c.groups] for body in kernel.bodies for c in body.contractions if c.groups is not None}


def _with_several(program: Program, call: Call, device: Device) -> Program:
    proposed = [registry.family_of(kernel).rewrite_kernel(kernel, call, device) for kernel in program.kernels]
    added = sum(len(rewrite.temporaries) for rewrite in proposed if rewrite)
    if not any(proposed):
        return program
    first = len(program.inputs) + len(program.temporaries)
    temporaries: list[Buffer] = []
    kernels: list[Kernel] = []
    for kernel, rewrite in zip(program.kernels, proposed, strict=True):
        renumbered = _with_results_after(kernel, first, added)
        if rewrite is None:
            kernels.append(renumbered)
        else:
            replacements = rewrite.kernels(renumbered, first + len(temporaries))
            kernels += (
                replace(kernel_, family=kernel_.family or registry.FAMILIES[-1].name) for kernel_ in replacements
            )
            temporaries += rewrite.temporaries
    return replace(program, temporaries=(*program.temporaries, *temporaries), kernels=tuple(kernels))


def _with_results_after(kernel: Kernel, first: int, added: int) -> Kernel:
    """Returns ``kernel`` with its results, the buffers from ``first`` on, renumbered to make room for ``added``
    temporaries."""

    def renumbered(operand: Operand) -> Operand:
        is_result = operand.buffer is not None and operand.buffer >= first
        return replace(operand, buffer=operand.buffer + added) if is_result else operand  # type: ignore[operator]

    bodies = tuple(replace(body, operands=tuple(map(renumbered, body.operands))) for body in kernel.bodies)
    return replace(kernel, bodies=bodies)
