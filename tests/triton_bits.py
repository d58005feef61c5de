"""Checks of updates by words of narrow floats under Triton's interpreter; ``tests/interpreter.py`` runs them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import jitgen
from jitgen.ir.rounding import NARROW
from jitgen.spec import BITS_OF, DTYPES
from tests.bits import same, words


def wrong_updates(narrow: str, backend: str) -> Iterator[str]:
    """Names what differs from torch where all words of a dtype are copied, scattered and read."""
    x, integer = words(DTYPES[narrow]), DTYPES[BITS_OF[narrow]]

    def function(x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.copy_((x.view(integer) ^ 1).view(x.dtype))
        y[ids] = (x.view(integer) ^ 3).view(x.dtype)
        return x.view(integer) + 1

    ids = torch.randperm(len(x))
    ours, theirs = ((x.clone(), ids, torch.zeros_like(x)) for _ in range(2))
    if not same(jitgen.jit(function, backend=backend)(*ours), function(*theirs)):
        yield "what is read"
    if not same(ours[0], theirs[0]):
        yield "what is copied"
    if not same(ours[2], theirs[2]):
        yield "what is scattered"


CHECKS = {narrow: lambda narrow=narrow: wrong_updates(narrow, "triton") for narrow in NARROW}
