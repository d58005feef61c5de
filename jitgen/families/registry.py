"""Lists the families in the order in which they are asked what they claim: the most particular first."""

from __future__ import annotations

from typing import Any

from jitgen.device import Device
from jitgen.families.attention.backward import FAMILY as ATTENTION_BACKWARD
from jitgen.families.attention.forward import FAMILY as ATTENTION
from jitgen.families.convolution import FAMILY as CONVOLUTION
from jitgen.families.elementwise import FAMILY as ELEMENTWISE
from jitgen.families.family import Family
from jitgen.families.gemm import FAMILY as GEMM
from jitgen.families.launch import FAMILY as LAUNCH
from jitgen.families.rows.reduction import FAMILY as REDUCTION
from jitgen.families.rows.scan import FAMILY as SCAN
from jitgen.families.rows.sort import FAMILY as SORT
from jitgen.families.scatter import FAMILY as SCATTER
from jitgen.ir.program import Decision, Kernel

FAMILIES: list[Family] = [LAUNCH, CONVOLUTION, ATTENTION_BACKWARD, ATTENTION, GEMM]
FAMILIES += [SORT, SCAN, SCATTER, REDUCTION, ELEMENTWISE]
"""All families. The last one computes whatever is left."""


def register(family: Family) -> None:
    """Asks ``family`` before all others. A family of that name is replaced."""
    FAMILIES[:] = [family, *(other for other in FAMILIES if other.name != family.name)]


def unregister(name: str) -> None:
    """Forgets the family called ``name``."""
    FAMILIES[:] = [family for family in FAMILIES if family.name != name]


def named(name: str) -> Family:
    """Returns the family called ``name``; KeyError if there is none."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise KeyError(name)


def decision(family: str, question: Any, device: Device) -> Decision:
    """Returns the answer of ``family`` to ``question``, whose sizes are numbers; one without a family answers
    itself."""
    answer: Decision = named(family).decide(question, device) if family else question.decide(device)
    return answer


def family_of(kernel: Kernel) -> Family:
    """Returns the family of ``kernel``."""
    return named(kernel.family)
