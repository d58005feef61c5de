"""Whether random numbers have the distribution that they should have, and are independent of one another.

Every test rejects numbers that are as they should be with a probability of at most ``FALSE_ALARM``, over all seeds. At
a fixed seed it either does or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

FALSE_ALARM = 1e-6
NORMAL_QUANTILE = 4.9
"""Beyond it, on either side, lies the standard normal distribution with probability 9.6e-7."""


def uniform_cdf(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(0, 1)


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x)


def exponential_cdf(x: torch.Tensor) -> torch.Tensor:
    return -torch.expm1(-x.clamp(min=0))


def kolmogorov_smirnov(sample: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether ``sample`` may be of the continuous distribution ``cdf``: the bound of Dvoretzky, Kiefer, Wolfowitz and
    Massart on the greatest distance of the empirical distribution."""
    ordered = cdf(sample.double().flatten().sort().values)
    count = ordered.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))
    return distance <= math.sqrt(math.log(2 / FALSE_ALARM) / (2 * count))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Whether ``counts`` may be of a multinomial distribution, of which every cell expects many: the Wilson-Hilferty
    approximation of the upper tail of chi-square."""
    expected = probabilities.double() * counts.sum()
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), counts.numel() - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) <= NORMAL_QUANTILE


def uncorrelated(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the correlation of two samples may be 0."""
    both = torch.stack([left.double().flatten(), right.double().flatten()])
    return abs(float(torch.corrcoef(both)[0, 1])) * math.sqrt(both.shape[1]) <= NORMAL_QUANTILE
