"""Kernel families: for each, when it applies, how it is laid out, its template's context, and its launch.

A family is a package with ``resolve`` (layout and geometry of a call), ``schedule`` (numbers chosen from them),
``launch_arguments``, ``source``, and ``explain`` (its kernel in words: a title and lines of detail). ``of`` finds the
one a kernel belongs to. Adding one touches no other.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from jitgen.ir.contractions import Decision, Prologue
from jitgen.ir.program import Kernel
from jitgen.spec import Target


def of(kernel: Kernel) -> ModuleType:
    """The family of ``kernel``."""
    return importlib.import_module(f"jitgen.families.{kernel.family}")


def prologue(computed: Prologue, target: Target, backend: str) -> Decision:
    """Whether the kernel of a product computes its activation itself; see ``gemm/schedule.py``."""
    decision: Decision = importlib.import_module("jitgen.families.gemm.schedule").prologue(computed, target, backend)
    return decision


def row_blocks(target: Target, backend: str) -> int:
    """How many blocks of a kernel can share a row, 0 for all there are; see ``reduction/schedule.py``."""
    blocks: int = importlib.import_module("jitgen.families.reduction.schedule").row_blocks(target, backend)
    return blocks
