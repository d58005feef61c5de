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


def limited(
    logits: Tensor, bias: Tensor, groups: int = 8, kept: int = 4, k: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's: sigmoids, groups of experts that are kept by the sum of their two greatest with a bias."""
    experts = logits.shape[1]
    scores = logits.to(dtype).sigmoid()
    choice = scores + bias.to(dtype)
    of_groups = choice.view(-1, groups, experts // groups).topk(2, dim=-1)[0].sum(dim=-1)
    opened = _opened(of_groups, kept, experts)
    indices = first(choice.masked_fill(~opened.bool(), float("-inf")), k)[1]
    weights = scores.gather(1, indices)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, indices


def limited_greedy(
    logits: Tensor, groups: int = 8, kept: int = 3, k: int = 6, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2's: a softmax, groups that are kept by their greatest."""
    experts = logits.shape[1]
    scores = logits.softmax(dim=-1, dtype=dtype)
    of_groups = scores.view(-1, groups, experts // groups).max(dim=-1).values
    opened = _opened(of_groups, kept, experts)
    values, indices = first(scores.masked_fill(~opened.bool(), 0.0), k)
    return values * 16.0, indices


def _opened(of_groups: Tensor, kept: int, experts: int) -> Tensor:
    mask = torch.zeros_like(of_groups).scatter_(1, first(of_groups, kept)[1], 1)
    groups = mask.shape[1]
    return mask.unsqueeze(-1).expand(-1, groups, experts // groups).reshape(-1, experts)


def biased(logits: Tensor, bias: Tensor, k: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Ranks of one row, and weights of another at their places."""
    scores = logits.to(dtype).softmax(-1)
    indices = first(logits.to(dtype) + bias.to(dtype), k)[1]
    weights = scores.gather(1, indices)
    return weights / weights.sum(-1, keepdim=True), indices


FUNCTIONS = (of_softmax, softmax_behind, as_they_are, of_deviations, later_ranks)


def distinct(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Logits of which no two of a row are equal."""
    return (torch.rand(shape).argsort(-1).float() / shape[-1] * 6 - 3).to(dtype)


def among_all(x: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The first ranks of rows as they are, in one kernel with a reduction, whatever their elements are."""
    greatest = x.float().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    return torch.topk(torch.where(greatest > 1e30, greatest.to(x.dtype), x), k, -1, largest)
