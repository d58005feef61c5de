"""Deals the GPUs of this machine to processes: one that tests or measures computes on the card that it sees first."""

from __future__ import annotations

import os
from functools import cache


@cache
def visible() -> tuple[str, ...]:
    """The cards that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them. None of them is initialised."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")[:count] if named is not None else map(str, range(count)))


def variables(worker: int, cards: tuple[str, ...]) -> dict[str, str]:
    """The environment of process number ``worker``: it sees all of ``cards``, those of the numbers after it last."""
    if len(cards) < 2:
        return {}
    first = worker % len(cards)
    return {"CUDA_VISIBLE_DEVICES": ",".join([*cards[first:], *cards[:first]])}


def workers(of_a_card: int, spare: int = 0) -> int:
    """How many processes to run at once: ``of_a_card`` for each card, and no more than processors but ``spare``."""
    return max(1, min(of_a_card * max(1, len(visible())), len(os.sched_getaffinity(0)) - spare))
