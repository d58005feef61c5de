"""Few ranks of short rows, with what is reduced over the row before and over the ranks behind, as routers of mixtures
of experts have them: what tests of kernels on the CPU and on a GPU share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def first(x: Tensor, k: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """torch.topk with the least index among equals."""
    values, indices = torch.sort(x, dim=-1, descending=largest, stable=True)
    return values[..., :k], indices[..., :k]


def of_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Mixtral's and Qwen's."""
    values, indices = first(F.softmax(logits.float(), -1), k)
    return values / values.sum(-1, keepdim=True), indices


def softmax_behind(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """gpt-oss's."""
    values, indices = first(logits, k)
    return F.softmax(values, -1), indices


def as_they_are(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return first(F.softmax(logits.float(), -1), k)


def of_deviations(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Two passes before, and two behind."""
    centred = logits - logits.mean(-1, keepdim=True)
    values, indices = first(centred / (1 + centred.abs().amax(-1, keepdim=True)), k, largest=False)
    spread = (values - values.mean(-1, keepdim=True)).abs()
    return spread / (1 + spread.sum(-1, keepdim=True)), (indices + 1).to(torch.int32)


def later_ranks(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(logits * 2, dim=-1, stable=True)
    values = values[..., 2 : 2 + k]
    return values.square() / (1 + values.square().sum(-1, keepdim=True)), indices[..., 2 : 2 + k]


FUNCTIONS = (of_softmax, softmax_behind, as_they_are, of_deviations, later_ranks)


def distinct(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Logits of which no two of a row are equal."""
    return (torch.rand(shape).argsort(-1).float() / shape[-1] * 6 - 3).to(dtype)
