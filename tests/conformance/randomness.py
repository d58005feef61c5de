"""Whether two functions draw their results from the same distribution.

An operator is random where a call of it advances torch's default generator: equal results of two calls say nothing,
as those of a dropout with a small p mostly are. Each element of a random result is compared by its distribution over
many calls: it covers which values there are, how often, and by how much a dropout scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

DRAWS = 256
"""Calls of each function."""
FALSE_ALARM = 1e-6
"""With this probability at most, over all seeds, a tensor of the same distribution is said to have another one."""


def draws_numbers(call: Callable[[], Any]) -> bool:
    """Whether ``call`` advances torch's default generator of the CPU or of a GPU."""
    before = _states()
    call()
    return not all(map(torch.equal, before, _states()))


def _states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def mismatch(got: Callable[[], Any], eager: Callable[[], Any], roundings: float) -> str | None:
    """How the distribution of the tensors that ``got`` returns differs from that of ``eager``, or None.

    Args:
        roundings: how many roundings one element of a result may have gone through.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        eagers = [pytree.tree_leaves(eager()) for _ in range(DRAWS)]
        torch.manual_seed(1)
        gots = [pytree.tree_leaves(got()) for _ in range(DRAWS)]
    for ours, theirs in zip(zip(*gots, strict=True), zip(*eagers, strict=True), strict=True):
        if not isinstance(theirs[0], torch.Tensor) or not theirs[0].numel():
            continue
        dtype = theirs[0].dtype
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        found = _different(_columns(ours), _columns(theirs), roundings * eps)
        if found is not None:
            return found
    return None


def _columns(draws: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The draws of each element in a row, sorted: (elements, DRAWS), float64."""
    rows = torch.stack([draw.detach().double().flatten() for draw in draws], 1)
    return rows.nan_to_num(nan=math.inf).sort(1).values.contiguous()


def _different(got: torch.Tensor, eager: torch.Tensor, relative: float) -> str | None:
    """The test of Kolmogorov and Smirnov for two samples of each element, whose values may differ by rounding.

    The bound is that of Dvoretzky, Kiefer, Wolfowitz and Massart for two samples of equal size, with the constant e
    that Wei and Dudley (2012) prove for every size; the elements share the probability of a false alarm.
    """
    finite = eager.abs().where(eager.isfinite(), 0)
    slack = relative * finite.amax()
    allowed = math.sqrt((1 + math.log(got.shape[0] / FALSE_ALARM)) / DRAWS)
    distance = torch.maximum(_excess(got, eager, slack), _excess(eager, got, slack))
    worst = int(distance.argmax())
    if distance[worst] <= allowed:
        return None
    return (
        f"the distribution of element {worst} of {got.shape[0]} is another: {DRAWS} draws differ by "
        f"{float(distance[worst]):.2f}, allowed {allowed:.2f}; they lie in {_range(got[worst])}, "
        f"those of eager torch in {_range(eager[worst])}"
    )


def _excess(left: torch.Tensor, right: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """For each element the most by which the share of ``left`` up to a value exceeds that of ``right``, whose values
    may be greater by ``slack``. The most is at a value of ``left``."""
    below = torch.searchsorted(right, left + slack, right=True)
    upto = torch.searchsorted(left, left.contiguous(), right=True)
    return (upto - below).amax(1).double() / DRAWS


def _range(values: torch.Tensor) -> str:
    return f"[{float(values[0]):.6g}, {float(values[-1]):.6g}]"
