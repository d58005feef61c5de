"""Divides a kernel that does the same to many tensors by the texts of its regions, for the strides of a call.

``families/kernels.py`` puts regions that compute the same into one kernel, however many, because one text computes them
all. Strides may need more: a text is of one layout. Regions of a kernel are independent, so those of one layout are put
next to one another, and a kernel has as many texts as it may have regions of texts of their own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from jitgen.device import Device
from jitgen.families.elementwise.layout import layout
from jitgen.families.family import KernelRewrite
from jitgen.ir.program import Kernel
from jitgen.ir.regions import MAX_REGIONS
from jitgen.kernel.operands import Call


def by_text(kernel: Kernel, call: Call, device: Device) -> KernelRewrite | None:
    """Returns ``kernel`` as kernels of at most ``MAX_REGIONS`` texts, each with its regions one after the other; None
    where it is so already."""
    count = len(kernel.bodies)
    if count <= MAX_REGIONS:
        return None
    of_text: dict[Any, list[int]] = {}
    for number, (body, own) in enumerate(zip(kernel.bodies, layout(kernel, call)[0], strict=True)):
        of_text.setdefault((body.computed, own), []).append(number)
    texts = [*of_text.values()]
    firsts = range(0, len(texts), MAX_REGIONS)
    shares = [tuple(chain.from_iterable(texts[first : first + MAX_REGIONS])) for first in firsts]
    if shares == [tuple(range(count))]:
        return None

    def kernels(whole: Kernel, first: int) -> tuple[Kernel, ...]:
        names = [whole.name, *(f"{whole.name}_layouts{number}" for number in range(1, len(shares)))]
        return tuple(
            replace(whole, name=name, bodies=tuple(whole.bodies[number] for number in share))
            for name, share in zip(names, shares, strict=True)
        )

    return KernelRewrite((), kernels)
