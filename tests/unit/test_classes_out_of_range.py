"""A class or an index out of range is an IndexError from a kernel on a CPU; one that is ignored is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen

ROWS, CLASSES = 6, 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25])
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "rows": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "weights": lambda x, t: F.cross_entropy(x, t, WEIGHT),
    "smoothed": lambda x, t: F.cross_entropy(x, t, WEIGHT, label_smoothing=0.1),
    "images": lambda x, t: F.cross_entropy(x.reshape(2, 3, CLASSES).mT, t.reshape(2, 3)),
    "nll_loss": lambda x, t: F.nll_loss(x.log_softmax(-1), t, WEIGHT),
}
OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "multi_margin_loss": F.multi_margin_loss,
    "embedding": lambda x, t: F.embedding(t, x[:CLASSES]),
    "gather": lambda x, t: x.gather(1, t[:, None]),
    "one_hot": lambda x, t: F.one_hot(t, CLASSES),
    "multilabel_margin_loss": lambda x, t: F.multilabel_margin_loss(x[:1], t[None, :CLASSES]),
}


def _arguments(wrong: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 3, 1, 2, 2, 0])
    if wrong is not None:
        target[1] = wrong
    return x, target


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    function, decorated = LOSSES[name], jitgen.jit(LOSSES[name])
    for ignored in (None, -100):
        torch.testing.assert_close(decorated(*_arguments(ignored)), function(*_arguments(ignored)))
    for wrong in (CLASSES, -1, 10**6):
        with pytest.raises(IndexError):
            function(*_arguments(wrong))
        with pytest.raises(IndexError):
            decorated(*_arguments(wrong))
    x, target = _arguments(CLASSES)
    with pytest.raises(IndexError):
        decorated(x.requires_grad_(), target)


@pytest.mark.parametrize("name", OTHERS)
def test_other_indices(name: str) -> None:
    function, decorated = OTHERS[name], jitgen.jit(OTHERS[name])
    torch.testing.assert_close(decorated(*_arguments(None)), function(*_arguments(None)))
    for wrong in (CLASSES, -2):
        with pytest.raises((IndexError, RuntimeError)):
            function(*_arguments(wrong))
        if name != "gather" or wrong > 0:  # torch refuses what jitgen takes from the end
            with pytest.raises(IndexError):
                decorated(*_arguments(wrong))


def test_an_ignored_class_that_is_in_range_and_one_that_is_not() -> None:
    for ignored in (2, -1, 17):
        function = lambda x, t, ignored=ignored: F.cross_entropy(x, t, ignore_index=ignored)  # noqa: E731
        torch.testing.assert_close(jitgen.jit(function)(*_arguments(ignored)), function(*_arguments(ignored)))
