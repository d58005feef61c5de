"""Program rewrites that depend on a call's sizes: families propose them (``Family.rewrite_kernel``) before layout."""

from __future__ import annotations

from dataclasses import replace

from jitgen.device import Device
from jitgen.families import registry
from jitgen.ir.body import Operand
from jitgen.ir.program import Buffer, Kernel, Program
from jitgen.kernel.operands import Call


def rewritten(program: Program, call: Call, device: Device) -> Program:
    """``program`` with several kernels in place of each one that its family rewrites."""
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
            found = rewrite.kernels(renumbered, first + len(temporaries))
            kernels += (replace(each, family=each.family or registry.FAMILIES[-1].name) for each in found)
            temporaries += rewrite.temporaries
    return replace(program, temporaries=(*program.temporaries, *temporaries), kernels=tuple(kernels))


def _with_results_after(kernel: Kernel, first: int, added: int) -> Kernel:
    """``kernel`` with its results, the buffers from ``first`` on, renumbered to make room for ``added`` temporaries."""

    def renumbered(operand: Operand) -> Operand:
        is_result = operand.buffer is not None and operand.buffer >= first
        return replace(operand, buffer=operand.buffer + added) if is_result else operand  # type: ignore[operator]

    bodies = tuple(replace(body, operands=tuple(map(renumbered, body.operands))) for body in kernel.bodies)
    return replace(kernel, bodies=bodies)
