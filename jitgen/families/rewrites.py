"""Rewrites programs by a call's sizes: families propose it (``Family.rewrite_kernel``) before layout."""

from __future__ import annotations

from dataclasses import replace

from jitgen.device import Device
from jitgen.families import registry
from jitgen.ir.body import Operand
from jitgen.ir.program import Buffer, Kernel, Program
from jitgen.kernel.operands import Call


def rewritten(program: Program, call: Call, device: Device) -> Program:
    """Replaces each kernel of ``program`` that its family rewrites by several."""
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
