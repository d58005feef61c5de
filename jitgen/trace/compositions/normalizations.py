"""Composes normalisations whose statistics are arguments, and the forms of normalisation that return them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitgen.trace.compositions.checks import require_float, require_shape
from jitgen.trace.table import composition


def _of_channels(vector: Tensor, input: Tensor) -> Tensor:
    """Reshapes a vector (channels,) to broadcast to ``input`` (N, channels, ...)."""
    return vector.reshape(1, -1, *[1] * (input.dim() - 2))


def _affine(normal: Tensor, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        normal = normal * _of_channels(weight, input)
    return normal if bias is None else normal + _of_channels(bias, input)


def _check_channels(input: Tensor, *vectors: Tensor | None) -> None:
    require_float(input)
    if input.dim() < 2:
        raise ValueError(f"expected (N, channels, ...), got {input.dim()} dimensions")
    present = [vector for vector in vectors if vector is not None]
    for vector in present:
        require_shape(vector, (input.shape[1],), "a vector of the channels")
        if vector.dtype != input.dtype and not (input.dtype.itemsize == 2 and vector.dtype == torch.float32):
            raise TypeError(f"a vector of the channels is {vector.dtype}, the input {input.dtype}")
    if len({vector.dtype for vector in present}) > 1:
        raise TypeError("the vectors of the channels must have one dtype")


@composition("torch.batch_norm")
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalises with the statistics of the batch in training, and moves the running statistics toward them."""
    return native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


@composition("native_batch_norm")
def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (result, the mean, the reciprocal of the standard deviation); outside of training the latter have no
    elements."""
    if not input.numel():
        return input.clone(), torch.zeros(0), torch.zeros(0)
    _check_channels(input, weight, bias, running_mean, running_var)
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("batch_norm needs running statistics where it is not in training")
        scale = (running_var + eps).rsqrt()
        normal = (input - _of_channels(running_mean, input)) * _of_channels(scale, input)
        unused = torch.zeros(0, dtype=running_mean.dtype)
        return _affine(normal, input, weight, bias).to(input.dtype), unused, unused.clone()
    mean, variance = _statistics(input, (0, *range(2, input.dim())))
    scale = (variance + eps).rsqrt()
    _update(running_mean, mean.flatten(), momentum)
    count = input.numel() / input.shape[1]
    _update(running_var, variance.flatten() * (count / (count - 1)) if count > 1 else variance.flatten(), momentum)
    result = _affine((input - mean) * scale, input, weight, bias).to(input.dtype)
    # On a CPU torch stores the statistics as the vectors of the channels are, and on a GPU in float32.
    vectors = [vector for vector in (weight, bias, running_mean, running_var) if vector is not None]
    mixed = any(vector.dtype != input.dtype for vector in vectors)
    stored = mean.dtype if mixed or input.device.type != "cpu" else input.dtype
    return result, mean.flatten().to(stored), scale.flatten().to(stored)


def _statistics(input: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns the mean and the variance, in float32 at least."""
    wide = input.float() if input.dtype.itemsize == 2 else input
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    return mean, variance


def _update(running: Tensor | None, observed: Tensor, momentum: float) -> None:
    """Moves ``running`` toward ``observed``; no gradient flows through it."""
    if running is not None:
        running.copy_((momentum * observed + (1 - momentum) * running).detach())


@composition("_native_batch_norm_legit")
def native_batch_norm_legit(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts calls without running statistics, which have four arguments fewer."""
    if len(arguments) == 3:
        arguments = (None, None, *arguments)
    return native_batch_norm(input, weight, bias, *arguments)


@composition("aten._batch_norm_with_update")
def batch_norm_with_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return *results, torch.zeros(0, dtype=torch.uint8)


@composition("torch.instance_norm")
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalises each channel of each sample by itself."""
    if not use_input_stats:
        return batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)
    _check_channels(input, weight, bias, running_mean, running_var)
    mean, variance = _statistics(input, tuple(range(2, input.dim())))
    count = input.numel() / (input.shape[0] * input.shape[1])
    _update(running_mean, mean.mean(0).flatten(), momentum)
    _update(running_var, (variance * (count / (count - 1))).mean(0).flatten() if count > 1 else variance, momentum)
    return _affine((input - mean) * (variance + eps).rsqrt(), input, weight, bias).to(input.dtype)


@composition("native_layer_norm")
def native_layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    variance, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    normal = torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    return normal, mean, (variance + eps).rsqrt()


@composition("native_group_norm")
def native_group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = input.reshape(N, group, C // group * HxW)
    variance, mean = torch.var_mean(grouped, 2, correction=0)
    normal = torch.nn.functional.group_norm(input, group, weight, bias, eps)
    return normal, mean, (variance + eps).rsqrt()


@composition("aten._softmax_backward_data")
def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: Any) -> Tensor:
    product = grad_output * output
    return (product - output * product.sum(dim, keepdim=True)).to(input_dtype)


@composition("aten._safe_softmax", "_safe_softmax")
def safe_softmax(input: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Computes softmax, with 0 in a row whose every element is minus infinity."""
    masked = (input == -float("inf")).all(dim, keepdim=True)
    return torch.where(masked, 0, input.softmax(dim, dtype=dtype))


composition("aten.native_dropout_backward")(lambda grad_output, mask, scale: grad_output * mask * scale)


@composition("torch._weight_norm")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Returns ``v`` with norms ``g`` along ``dim``; with one norm, that of all elements, if ``dim`` is -1."""
    others = tuple(d for d in range(v.dim()) if d != dim)
    return v * (g / v.norm(2, others, keepdim=True) if dim != -1 else g / v.norm(2))
