"""Composes torch's losses of other torch functions.

``torch.nn.functional`` has Python functions around them, whose bodies are traced (``trace/table.py``): these know of
``size_average``, of weights that are multiplied at the end, and of many arguments that are refused. The functions here
are the C++ ones behind them, whose ``reduction`` is a number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jitgen.ir.custom_gradients import with_gradient
from jitgen.trace.compositions.checks import reported, require_float, require_one_dtype, require_shape
from jitgen.trace.table import composition

NONE, MEAN, SUM = 0, 1, 2
LEAST_DENOMINATOR = 9.999999960041972e-13
"""The least denominator by which ``binary_cross_entropy`` divides its gradient: 1e-12 in float32, as in ATen."""


def reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss.mean() if reduction == MEAN else loss.sum() if reduction == SUM else loss


def _difference(input: Tensor, target: Tensor) -> Tensor:
    """Subtracts tensors, for a floating result; bool counts as a number here."""
    dtype = torch.result_type(input, target)
    difference = input.to(dtype) - target.to(dtype)
    require_float(difference)
    return difference


# ---------------------------------------------------------------------------------------------------------- differences


@composition("_nn.mse_loss")
def mse_loss(input: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return reduced(_difference(input, target).square(), reduction)


@composition("_nn.l1_loss")
def l1_loss(input: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return reduced((input - target).abs(), reduction)


def _huber(difference: Tensor, delta: Any) -> Tensor:
    """Computes half the square of a difference up to ``delta``, and beyond it a line of slope ``delta``."""
    size = difference.abs()
    near, far = difference * difference * 0.5, (size - 0.5 * delta) * delta
    limited = torch.where(difference >= delta, delta, torch.where(difference <= -delta, -delta, difference))
    return with_gradient(torch.where(size < delta, near, far), difference, limited)


@composition("_nn.huber_loss")
def huber_loss(input: Tensor, target: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    require_float(input)
    if delta <= 0:
        raise ValueError(f"delta must be positive, not {delta}")
    return reduced(_huber(_difference(input, target), delta).to(input.dtype), reduction)


@composition("_nn.smooth_l1_loss")
def smooth_l1_loss(input: Tensor, target: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    """Computes the Huber loss divided by ``beta``; the absolute difference if ``beta`` is 0."""
    if beta < 0:
        raise ValueError(f"beta must not be negative, but is {beta}")
    if beta == 0:
        return l1_loss(input, target, reduction)
    return reduced(_huber(_difference(input, target), beta) / beta, reduction)


# -------------------------------------------------------------------------------------------------------- probabilities


@composition("_nn.binary_cross_entropy")
def binary_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    """Computes the loss, which is NaN where ``input`` is no probability."""
    require_float(input)
    require_one_dtype(input, target)
    hit, missed = input.log(), (1 - input).log()
    loss = (target - 1) * (-input).log1p().clamp(min=-100) - target * hit.clamp(min=-100)
    slope = (input - target) / ((1 - input) * input).clamp(min=LEAST_DENOMINATOR)
    loss = with_gradient(loss, input, slope, target, missed - hit)
    return reduced(loss if weight is None else loss * weight, reduction)


@composition("torch.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """Computes ``(1 - target) * input - logsigmoid(input)``, a form that does not overflow; in the dtype of
    ``target``."""
    missed = 1 - target
    require_float(missed)
    right = F.logsigmoid(input)
    if pos_weight is not None:
        right = ((pos_weight - 1) * target + 1) * right
    loss = missed * input - right
    if weight is not None:
        loss = loss * weight
    return reduced(loss.to(target.dtype), reduction)


@composition("torch.kl_div")
def kl_div(input: Tensor, target: Tensor, reduction: int = MEAN, *, log_target: bool = False) -> Tensor:
    require_float(input, target)
    loss = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    return reduced(loss, reduction)


@composition("torch.poisson_nll_loss")
def poisson_nll_loss(
    input: Tensor, target: Tensor, log_input: bool, full: bool, eps: float, reduction: int = MEAN
) -> Tensor:
    loss = input.exp() - target * input if log_input else input - target * (input + eps).log()
    if full:
        stirling = target * target.log() - target + 0.5 * (2 * math.pi * target).log()
        loss = loss + stirling.masked_fill(target <= 1, 0)
    return reduced(loss, reduction)


@composition("F.gaussian_nll_loss")
def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Computes the loss, which is NaN where a variance is negative."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    elif var.dim() == input.dim() - 1 and tuple(var.shape) == tuple(input.shape[:-1]):
        var = var.unsqueeze(-1)
    elif var.dim() != input.dim() or any(var.shape[i] not in (1, input.shape[i]) for i in range(var.dim())):
        raise ValueError("the variances have an incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    bounded = with_gradient(torch.where(var < 0, math.nan, var.clamp(min=eps)), var, 1.0)
    loss = 0.5 * (bounded.log() + (input - target) ** 2 / bounded)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return reduced(loss, ("none", "mean", "sum").index(reduction))


# -------------------------------------------------------------------------------------------------------------- margins


@composition("torch.hinge_embedding_loss")
def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0, reduction: int = MEAN) -> Tensor:
    require_float(input)
    missed = torch.where(target != 1, (margin - input).clamp(min=0), 0)
    return reduced(missed + torch.where(target != -1, input, 0), reduction)


@composition("torch.margin_ranking_loss")
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = MEAN
) -> Tensor:
    return reduced((-target * (input1 - input2) + margin).clamp(min=0), reduction)


@composition("_nn.soft_margin_loss")
def soft_margin_loss(input: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    require_float(input)
    return reduced((-input * target).exp().log1p().to(input.dtype), reduction)


@composition("torch.cosine_embedding_loss")
def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = MEAN
) -> Tensor:
    rank = target.dim()
    if rank not in (0, 1) or input1.dim() != rank + 1 or input2.dim() != rank + 1:
        raise ValueError("cosine_embedding_loss takes rows and a target for each, or two vectors and a 0-d target")
    product = (input1 * input2).sum(rank)
    sizes = ((input1 * input1).sum(rank) + 1e-12) * ((input2 * input2).sum(rank) + 1e-12)
    cosine = product / sizes.sqrt()
    alike = torch.where(target == 1, 1 - cosine, 0)
    return reduced(alike + torch.where(target == -1, (cosine - margin).clamp(min=0), 0), reduction)


@composition("torch.pairwise_distance")
def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return torch.norm(x1 - x2 + eps, p, max(x1.dim(), x2.dim()) - 1, keepdim)


@composition("torch.triplet_margin_loss")
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = MEAN,
) -> Tensor:
    if not anchor.dim() == positive.dim() == negative.dim():
        raise ValueError("anchor, positive and negative must have the same number of dimensions")
    near, far = pairwise_distance(anchor, positive, p, eps), pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, pairwise_distance(positive, negative, p, eps))
    return reduced((margin + near - far).clamp(min=0), reduction)


# -------------------------------------------------------------------------------------------------------------- classes


def _mask(input: Tensor, target: Tensor) -> Tensor:
    """Tells which elements of each row are those of its class; the classes are dimension 0 of a vector, else dimension
    1.

    Every element of a row compares its index, which a kernel does while it reads the row for a reduction. A comparison
    of 32 bits is half the work of one of 64.
    """
    dim = min(1, input.dim() - 1)
    classes = input.shape[dim]
    dtype = torch.int32 if classes <= torch.iinfo(torch.int32).max else torch.int64
    column = torch.arange(classes, dtype=dtype).reshape(-1, *[1] * (input.dim() - 1 - dim))
    in_range = (target >= 0) & (target < classes)
    return column == torch.where(in_range, target, -1).to(dtype).unsqueeze(dim)


def _labels(input: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Returns a target of class indices: one for each row of ``input``, int64."""
    if input.dim() < 1:
        raise ValueError("expected (classes,), (rows, classes) or (rows, classes, ...)")
    if target.dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"the classes must be int64 or uint8, not {str(target.dtype).removeprefix('torch.')}")
    dim = min(1, input.dim() - 1)
    if input.dim() == 1 and target.dim() == 1:
        require_shape(target, (1,), "the target")
        target = target.reshape(())
    require_shape(target, (*input.shape[:dim], *input.shape[dim + 1 :]), "the target")
    if weight is not None:
        require_shape(weight, (input.shape[dim],), "the weight")
        require_one_dtype(input, weight)
    return target.long()


def _of_class(mask: Tensor, values: Tensor, dim: int) -> Tensor:
    return torch.where(mask, values, 0.0).sum(dim)


def _averaged(loss: Tensor, counted: Tensor, label: Tensor, class_weight: Tensor | None, reduction: int) -> Tensor:
    """Reduces ``loss`` where a row counts; a mean is weighted by classes."""
    if reduction != MEAN:
        return reduced(torch.where(counted, loss, 0.0), reduction)
    total = counted.to(loss.dtype) if class_weight is None else torch.where(counted, class_weight, 0.0)
    return torch.where(counted, loss, 0.0).sum() / total.sum()


@composition("_nn.nll_loss_nd", "_nn.nll_loss", "_nn.nll_loss2d")
def nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Tensor:
    """Computes the loss; a class out of range is an IndexError from a kernel on a CPU, and NaN from one on a GPU."""
    require_float(input)
    label, dim = _labels(input, target, weight), min(1, input.dim() - 1)
    counted = label != ignore_index
    chosen = torch.where(counted, label, 0)
    known = (chosen >= 0) & (chosen < input.shape[dim])
    loss = torch.where(known, -input.gather(dim, chosen.unsqueeze(dim)).squeeze(dim), math.nan)
    class_weight = None
    if weight is not None:
        class_weight = weight[chosen]
        loss = loss * class_weight
    return _averaged(loss, counted, label, class_weight, reduction)


def _per_class(weight: Tensor, input: Tensor) -> Tensor:
    return weight.reshape(-1, *[1] * (input.dim() - 2)) if input.dim() > 2 else weight


@composition("_nn.cross_entropy_loss")
def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Computes the loss for classes or probabilities. Of a class out of range, IndexError from a kernel on a CPU, and
    NaN from one on a GPU."""
    require_float(input)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, not {label_smoothing}")
    dim = min(1, input.dim() - 1)
    top = input.amax(dim, keepdim=True)
    shifted = input - top
    total = shifted.exp().sum(dim, keepdim=True).log()
    if target.is_floating_point():
        return _of_probabilities(total - shifted, target, weight, reduction, label_smoothing, dim)
    label = _labels(input, target, weight)
    label = reported(label, (label != ignore_index) & ~((label >= 0) & (label < input.shape[dim])))
    mask = _mask(input, label)
    known = (label >= 0) & (label < input.shape[dim])
    picked = torch.where(known, _of_class(mask, input, dim) - top.squeeze(dim), math.nan)
    loss = total.squeeze(dim) - picked
    class_weight = None
    if weight is not None:
        class_weight = _of_class(mask, _per_class(weight, input), dim)
        loss = loss * class_weight
    if label_smoothing:
        if weight is None:  # of the input itself, so that one walk over a row computes everything
            spread = total.squeeze(dim) + top.squeeze(dim) - input.mean(dim)
        else:
            spread = ((total - shifted) * _per_class(weight, input)).mean(dim)
        loss = loss * (1.0 - label_smoothing) + spread * label_smoothing
    return _averaged(loss, label != ignore_index, label, class_weight, reduction)


def _of_probabilities(
    surprise: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float, dim: int
) -> Tensor:
    """Computes the cross entropy of a distribution for each row; ``surprise`` is minus the logarithm of the softmax."""
    require_shape(target, surprise.shape, "the target")
    classes = surprise.shape[dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    loss = surprise * target
    if weight is not None:
        require_shape(weight, (classes,), "the weight")
        loss = loss * _per_class(weight, surprise)
    if reduction == MEAN:
        return loss.sum() / (surprise.numel() / classes)
    return reduced(loss.sum(dim), reduction)


def _positive(missed: Tensor) -> Tensor:
    """Returns ``missed`` where it is above 0, and 0 elsewhere without a gradient: torch skips what is NaN, too."""
    return torch.where(missed > 0, missed, 0.0)


@composition("_nn.multi_margin_loss")
def multi_margin_loss(
    input: Tensor, target: Tensor, p: Any = 1, margin: float = 1.0, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """Computes the loss; a class out of range is an IndexError from a kernel on a CPU, and NaN from one on a GPU."""
    require_float(input)
    if p not in (1, 2):
        raise ValueError("only p == 1 and p == 2 are supported")
    input = input.reshape(1) if input.dim() == 0 else input
    if input.dim() > 2:
        raise ValueError("expected (classes,) or (rows, classes)")
    label, dim = _labels(input, target, weight), min(1, input.dim() - 1)
    label = reported(label, ~((label >= 0) & (label < input.shape[dim])))
    mask = _mask(input, label)
    known = (label >= 0) & (label < input.shape[dim])
    missed = _positive(margin - _of_class(mask, input, dim).unsqueeze(dim) + input)
    missed = torch.where(mask, 0.0, missed if p == 1 else missed * missed)
    loss = torch.where(known, missed.mean(dim), math.nan)
    if weight is not None:
        loss = loss * _of_class(mask, weight, dim)
    return reduced(loss, reduction)


@composition("_nn.multilabel_margin_loss")
def multilabel_margin_loss(input: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """Compares each class of a row, which are those in front of its first -1, with every other class."""
    require_float(input)
    if input.dim() == 0:
        input, target = input.reshape(1), target.reshape(1)
    require_shape(target, input.shape, "the target")
    classes = input.shape[-1]
    target = reported(target, ~((target >= -1) & (target < classes)))
    named = (target < 0).long().cumsum(-1) == 0
    chosen = (target.unsqueeze(-1) == torch.arange(classes)) & named.unsqueeze(-1)
    other = ~chosen.any(-2, keepdim=True)
    picked = torch.where(chosen, input.unsqueeze(-2), 0.0).sum(-1, keepdim=True)
    missed = _positive(1 - picked + input.unsqueeze(-2))
    loss = torch.where(other & named.unsqueeze(-1), missed, 0.0).sum((-2, -1)) / classes
    return reduced(loss, reduction)


@composition("torch_nn._linear_cross_entropy_batch_chunked")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *chunks: Any,
) -> tuple[Tensor]:
    """Computes the loss alone of ``F.linear_cross_entropy``; ``chunks`` says how torch divides the rows and what it
    keeps for gradients."""
    logits = F.linear(input, linear_weight, linear_bias)
    return (F.cross_entropy(logits, target, weight, None, ignore_index, None, reduction, label_smoothing),)


@composition("torch_nn._linear_cross_entropy_batch_chunked_no_reduction")
def linear_cross_entropies(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    *chunks: Any,
) -> Tensor:
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(logits, target, weight, None, ignore_index, None, "none")
