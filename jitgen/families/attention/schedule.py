"""How an attention kernel walks its rows and keys: pure functions from layout, sizes and target to numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.match import matched
from jitgen.families.family import Problem, SizeBuckets
from jitgen.ir import symbols
from jitgen.ir.graph import Graph, topological

FEW_ROWS = 8
"""Rows that share keys up to which a CPU thread has the elements of a key in the lanes of its vectors, and not rows: a
vector of AVX2 has so many floats."""


@dataclass(frozen=True)
class CpuSchedule:
    """On a CPU.

    Attributes:
        path: ``"tiles"``: lanes are rows; ``"few"``: lanes are elements of a key.
    """

    path: str

    def __str__(self) -> str:
        """The schedule in words, for people."""
        return "rows in the lanes of vectors" if self.path == "tiles" else "few rows: keys in the lanes of vectors"


def candidates(problem: Problem, device: Device) -> Sequence[Any]:
    """The schedule that the rule of ``device``'s dialect has for ``problem``."""
    (geometry,) = problem.geometries
    return (CpuSchedule("few" if geometry.packed_rows <= FEW_ROWS else "tiles"),)


def buckets(graph: Graph, environment: Mapping[str, Any], device: Device) -> list[SizeBuckets]:
    """The rows of each attention: few of them have another kernel."""
    found = []
    for node in topological(graph.results):
        of = matched(node)
        if of is not None:
            found.append(SizeBuckets(of.scores.shape[-2], (FEW_ROWS,)))
            found.append(SizeBuckets(of.scores.shape[-1]))
            found.append(SizeBuckets(symbols.product(of.scores.shape[:-2])))
    return found
