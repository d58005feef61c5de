"""Chooses a schedule: candidates, what they cost, and measured rows that come before a model of the cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jitgen import console
from jitgen.errors import CacheWarning
from jitgen.schedule import tuned

if TYPE_CHECKING:
    from jitgen.device import Device


@dataclass(frozen=True)
class Choice:
    """Holds a schedule, and the digest of the measured row that chose it; empty if the model did."""

    schedule: Any
    row: str = ""


def choose(
    family: str,
    candidates: Sequence[Any],
    cost: Callable[[Any], float],
    facts: Callable[[], Mapping[str, Any] | None],
    device: Device,
) -> Choice:
    """Returns the candidate that was measured to be the best; without a measurement the cheapest, of equals the first.

    Args:
        family: the name of the family whose measured rows are read.
        candidates: at least one. ``cost`` and ``facts`` are asked only where there are more.
        facts: what measured rows tell the problem by; None where the family takes no measured rows.
    """
    if len(candidates) == 1:
        return Choice(candidates[0])
    problem = facts() if tuned.has_rows(family, device.target.arch) else None
    row = None
    if problem is not None:
        row = tuned.find(family, device.target.arch, device.measured_as, device.dialect, problem)
    if row is not None:
        chosen = [candidate for candidate in dict.fromkeys(candidates) if row.selects(candidate)]
        if len(chosen) == 1:
            return Choice(chosen[0], row.digest)
        several = f"{len(chosen)} candidates, and needs more of their fields to tell them apart"
        names = several if chosen else "no candidate"
        text = f"{row.source}: a measured choice for {device.target} names {names}: {row}"
        console.warn(f"{text}; the model chooses{' among them' if chosen else ''}", CacheWarning, stacklevel=2)
        if chosen:
            return Choice(min(chosen, key=cost), row.digest)
    return Choice(min(candidates, key=cost))
