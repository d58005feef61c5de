"""Quantises the activations of products with quantised weights, as ``quantize(..., activation="int8")`` asks for.

A row of the activation (a token) has codes from -127 to 127 and one scale, the largest magnitude over 127: dynamic,
symmetric, in float32. The sum of products of codes over a group of the weight is exact. It is multiplied by the
group's scale, groups are added up, and the total is multiplied by the row's scale, in float32. The formulas here are
plain torch, which the reference runs and a trace turns into kernels.

Gradients pass straight through: they are those of the product with the activation as it was.
"""

from __future__ import annotations

import torch

from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.formats import Format

ACTIVATIONS = ("int8",)
LARGEST_CODE = 127
MOST_COLUMNS = 2**16
"""The largest group of columns: sums of so many products of codes are int32."""


def check_activation(activation: str | None, format: Format, group_size: int | None) -> str | None:
    """Returns ``activation`` if products of weights of ``format`` may quantise theirs so.

    Raises:
        FormatError: there is no such kind of activation, or no kernel for it with these weights.
    """
    if activation is None:
        return None
    if activation not in ACTIVATIONS:
        raise FormatError(
            f"unknown activation {activation!r}; expected None, which leaves activations as they are, or "
            f"{', '.join(map(repr, ACTIVATIONS))}"
        )
    if not format.stored.tiled:
        raise FormatError(
            f"activation={activation!r} has kernels for int8, int4 and uint4 weights, and {format.name} is none of "
            "them; take one of these, or leave the activation as it is"
        )
    if group_size is not None and group_size > MOST_COLUMNS:
        raise FormatError(f"activation={activation!r} takes groups of at most {MOST_COLUMNS} columns, not {group_size}")
    return activation


def scales_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each row of ``x`` (..., K), float32 (..., 1)."""
    return x.float().abs().amax(-1, keepdim=True) / LARGEST_CODE


def codes_of(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the codes of ``x``, int8. Those of a row of zeros are 0."""
    steps = x.float() / torch.where(scales == 0, 1.0, scales)
    return steps.round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` as its codes and scales have it, of its dtype: what a product with such a weight multiplies."""
    if not x.shape[-1]:
        return x
    wide = x.float()
    scales = scales_of(wide)
    return (codes_of(wide, scales) * scales).to(torch.promote_types(x.dtype, torch.float32))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns the product with the dense ``weight`` (N, K) in torch: the reference of the kernels."""
    rounded = quantized(x)
    product = torch.nn.functional.linear(rounded, weight.to(rounded.dtype)).to(x.dtype)
    return product if bias is None else product + bias


def refuse_backend(activation: str, layout: str) -> None:
    """Raises UnsupportedError unless the kernels that read ``layout`` multiply quantised activations."""
    if layout != "cpu":
        raise UnsupportedError(
            f"a product with quantised activations ({activation!r}) has kernels on a CPU alone so far; make the weight "
            "without activation=, or call weight.with_activation(None), for kernels that leave activations as they are"
        )
