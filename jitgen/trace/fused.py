"""Defines the rows of torch's fused optimisers, ``torch._fused_adamw_`` and its like: the step of every tensor of
lists, in torch functions of one, which becomes one kernel for all.

The arithmetic is that of torch's fused kernels: in float32 for tensors of 16 bits, rounded once where it is stored.
Where ``found_inf`` is 1 nothing is updated, and a gradient is divided by ``grad_scale`` in place.

Under ``torch.compile`` these functions stay torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from jitgen.trace.table import of_lists

Tensors = Sequence[Any]


def _wide(tensor: Any) -> Any:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class _Step:
    """Reads gradients and stores new values, as ``grad_scale`` and ``found_inf`` say."""

    def __init__(self, maximize: bool, grad_scale: Any, found_inf: Any):
        self.maximize, self.scale, self.found_inf = maximize, grad_scale, found_inf

    def gradient(self, tensor: Any) -> Any:
        gradient = _wide(tensor)
        if self.scale is not None:
            gradient = gradient / self.scale
            self.store(tensor, gradient)
        return -gradient if self.maximize else gradient

    def store(self, tensor: Any, value: Any) -> None:
        tensor.copy_(value if self.found_inf is None else torch.where(self.found_inf == 1, _wide(tensor), value))


def _lists(named: dict[str, Tensors]) -> list[tuple[Any, ...]]:
    """Returns the tensors of each parameter."""
    lengths = {len(tensors) for tensors in named.values()}
    if len(lengths) != 1 or 0 in lengths:
        counts = ", ".join(f"{len(tensors)} of {name}" for name, tensors in named.items())
        raise ValueError(f"lists of {counts}; torch takes lists of one length, which is at least 1")
    return list(zip(*named.values(), strict=True))


def _without_power(beta: float, step: Any) -> Any:
    """Returns 1 - beta^step: of float32, the difference itself has lost digits at the first steps."""
    return -torch.expm1(_wide(step) * math.log(beta)) if beta > 0 else 1.0


def _adam(
    self: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
    decoupled: bool,
) -> None:
    step = _Step(maximize, grad_scale, found_inf)
    named = {"self": self, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    named |= {"state_steps": state_steps, "max_exp_avg_sqs": max_exp_avg_sqs if amsgrad else exp_avg_sqs}
    for parameter, grad, mean, square, count, largest in _lists(named):
        gradient, value = step.gradient(grad), _wide(parameter)
        if weight_decay and decoupled:
            value = value - lr * weight_decay * value
        elif weight_decay:
            gradient = gradient + weight_decay * value
        new_mean = torch.lerp(_wide(mean), gradient, 1 - beta1)
        new_square = _wide(square) * beta2 + (1 - beta2) * gradient * gradient
        greatest = torch.maximum(_wide(largest), new_square) if amsgrad else new_square
        root = greatest.sqrt() / _without_power(beta2, count) ** 0.5 + eps
        step.store(parameter, value - lr / _without_power(beta1, count) * new_mean / root)
        step.store(mean, new_mean)
        step.store(square, new_square)
        if amsgrad:
            step.store(largest, greatest)


def _sgd(
    self: Tensors,
    grads: Tensors,
    momentum_buffer_list: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> None:
    step = _Step(maximize, grad_scale, found_inf)
    named = {"self": self, "grads": grads, "momentum_buffer_list": momentum_buffer_list if momentum else grads}
    for parameter, grad, buffer in _lists(named):
        gradient, value = step.gradient(grad), _wide(parameter)
        if weight_decay:
            gradient = gradient + weight_decay * value
        if momentum:
            mean = gradient if is_first_step else momentum * _wide(buffer) + (1 - dampening) * gradient
            step.store(buffer, mean)
            gradient = gradient + momentum * mean if nesterov else mean
        step.store(parameter, value - lr * gradient)


def _adagrad(
    self: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
) -> None:
    step = _Step(maximize, grad_scale, found_inf)
    named = {"self": self, "grads": grads, "state_sums": state_sums, "state_steps": state_steps}
    for parameter, grad, total, count in _lists(named):
        gradient, value = step.gradient(grad), _wide(parameter)
        if weight_decay:
            gradient = gradient + weight_decay * value
        new_total = _wide(total) + gradient * gradient
        rate = lr / (1 + (_wide(count) - 1) * lr_decay)
        step.store(parameter, value - rate * gradient / (new_total.sqrt() + eps))
        step.store(total, new_total)


def _register(name: str, fused: Callable[..., None]) -> None:
    if hasattr(torch, name):
        of_lists(name)(lambda arguments, keywords: fused(*arguments, **keywords))


_register("_fused_adam_", partial(_adam, decoupled=False))
_register("_fused_adamw_", partial(_adam, decoupled=True))
_register("_fused_sgd_", _sgd)
_register("_fused_adagrad_", _adagrad)
