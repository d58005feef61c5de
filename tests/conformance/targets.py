"""torch's operator samples compiled for a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

import jitgen
from jitgen.errors import TraceError, UnsupportedError
from tests.conformance.samples import Sample, samples

ROUTES = {f"{route[0]} {route[1]}": route for route in (("cuda", "sm_90a"), ("triton", "sm_90a"), ("triton", "gfx942"))}
REFUSED_ON_GPUS = 0.06
"""Of the samples that a CPU computes, those that a GPU refuses, at most: a scatter that would walk for long, a tensor
that the sample makes on the CPU."""


def is_refused(sample: Sample, backend: str, target: str) -> bool:
    """Whether ``sample`` is refused for ``target``; else its kernels are compiled, and what that raises is raised."""
    with torch.no_grad():
        try:
            lowered = jitgen.jit(sample.callable()).lower(*sample.arguments(), backend=backend, target=target)
        except (TraceError, UnsupportedError):
            return True
        lowered.compile()
    return False


def is_refused_on_the_cpu(sample: Sample) -> bool:
    with torch.no_grad():
        try:
            jitgen.jit(sample.callable()).lower(*sample.arguments())
        except Exception:
            return True
    return False


def faults(names: Iterable[str], route: str, count: int) -> Iterator[str]:
    """What is wrong with the kernels of ``count`` samples of each operator, a sentence each."""
    computed = refused = 0
    for name in names:
        for sample in samples(name, count=count):
            if is_refused_on_the_cpu(sample):
                continue
            computed += 1
            try:
                refused += is_refused(sample, *ROUTES[route])
            except Exception as error:
                yield f"{sample}: {type(error).__name__}: {error}"
    if refused > 1 + REFUSED_ON_GPUS * computed:
        yield f"{refused} of {computed} samples are refused for {route}"
