"""Composes random choices and dropout of other random functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitgen.errors import UnsupportedError
from jitgen.trace.compositions.checks import require_float, require_rank
from jitgen.trace.table import composition


@composition("multinomial")
def multinomial(input: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Tensor:
    """Draws categories with probabilities in proportion to ``input``: the first of as many exponential clocks to ring.

    What cannot be drawn, since too few categories are possible, is an index out of range.
    """
    if generator is not None:
        raise UnsupportedError("a generator of one's own is not supported; torch.manual_seed seeds torch's")
    require_float(input)
    require_rank(input, (1, 2))
    categories = input.shape[-1]
    if num_samples <= 0 or (not replacement and num_samples > categories):
        raise ValueError(f"cannot draw {int(num_samples)} samples of {int(categories)} categories")
    rates = input.float() if input.dtype.itemsize == 2 else input
    if replacement:
        clocks = rates.unsqueeze(-2).expand(*input.shape[:-1], num_samples, categories)
        chosen = (clocks / torch.empty_like(clocks).exponential_()).argmax(-1)
    elif num_samples == 1:
        chosen = (rates / torch.empty_like(rates).exponential_()).argmax(-1, keepdim=True)
    else:
        chosen = (rates / torch.empty_like(rates).exponential_()).topk(num_samples, -1).indices
    possible = rates.gather(-1, chosen) > 0
    return torch.arange(categories)[torch.where(possible, chosen, categories)]


_SATURATED = -1.7580993408473766
"""The value of selu at minus infinity, which alpha dropout puts in place of what it drops."""


def _alpha_dropped(input: Tensor, p: float, noise: Tensor) -> Tensor:
    """Returns ``input`` where ``noise`` is 1, else the saturated value, scaled so that mean and variance remain
    (Klambauer et al., "Self-Normalizing Neural Networks", 2017)."""
    scale = ((1 - p) * (1 + p * _SATURATED**2)) ** -0.5 if p < 1 else 0.0
    return (torch.where(noise > 0, input, _SATURATED) - p * _SATURATED) * scale


def _dropped_out(input: Tensor, p: float, train: bool, shape: Any) -> Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"a probability must be between 0 and 1, but is {float(p)}")
    if not train or p == 0 or not input.numel():
        return input
    require_float(input)
    if p == 1:
        return input * 0
    return _alpha_dropped(input, p, torch.empty(shape).bernoulli_(1 - p))


@composition("torch.alpha_dropout", itself=True)
def alpha_dropout(input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    return _dropped_out(input, p, train, input.shape)


@composition("torch.feature_alpha_dropout", itself=True)
def feature_alpha_dropout(input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    """Drops whole channels, dimension 1."""
    if train and p != 0 and input.dim() < 2:
        raise ValueError("feature dropout needs at least 2 dimensions")
    return _dropped_out(input, p, train, (*input.shape[:2], *[1] * (input.dim() - 2)))
