"""Composes ``F.interpolate`` and ``F.grid_sample``: elements read at computed coordinates, weighted and added.

Coordinates are computed as torch does, in float32 at least: where a coordinate is rounded to an element, a coordinate
that is more exact may choose another one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jitgen.trace.compositions.checks import require_float, require_one_dtype, require_rank
from jitgen.trace.table import composition

Taps = list[tuple[Tensor, Tensor | None]]
"""The elements of which a result's element is a sum along one dimension: (indices, weights); weights None are 1."""


def _wide(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _sizes(input: Tensor, output_size: Any, scales: Any, count: int) -> tuple[list[int], list[float | None]]:
    """Returns the sizes of the result, and the scales that the user gave."""
    require_rank(input, (count + 2,))
    if output_size is not None:
        return [int(size) for size in output_size], [None] * count
    factors = [float(scale) for scale in scales]
    return [math.floor(float(n) * s) for n, s in zip(input.shape[2:], factors, strict=True)], list(factors)


def _resampled(input: Tensor, output_size: Any, scales: Any, count: int, taps: Callable[..., Taps]) -> Tensor:
    sizes, factors = _sizes(input, output_size, scales, count)
    if min(sizes) <= 0 or not all(input.shape[1:]):
        raise ValueError(f"sizes {sizes} of the result of an input {tuple(map(int, input.shape))}")
    if input.device.type == "cpu":
        factors = _scales_on_a_cpu(input, sizes, factors, taps)
    of_dims = [
        taps(int(old), new, scale, _wide(input))
        for old, new, scale in zip(input.shape[2:], sizes, factors, strict=True)
    ]
    total = None
    for chosen in itertools.product(*of_dims):
        key: list[Any] = [slice(None), slice(None)]
        weight: Any = None
        for dim, (index, factor) in enumerate(chosen):
            across = [1] * (count - 1 - dim)
            key.append(index.reshape(-1, *across))
            if factor is not None:
                factor = factor.reshape(-1, *across)
                weight = factor if weight is None else weight * factor
        piece = input[tuple(key)]
        piece = piece if weight is None else piece * weight
        total = piece if total is None else total + piece
    assert total is not None
    return total.to(input.dtype)


MOST_IN_WHOLE_STEPS = 128
"""The largest sum of an image's two sizes for which torch's kernel for a CPU takes the nearest elements in whole
steps."""


def _scales_on_a_cpu(
    input: Tensor, sizes: Sequence[int], factors: Sequence[float | None], taps: Callable[..., Taps]
) -> list[float | None]:
    """Drops the scales that torch ignores on a CPU: with linear weights those of unchanged sizes, and for the nearest
    elements in small images also those of doubled sizes."""
    multiples: tuple[int, ...] = (1,) if taps in _LINEAR.values() else ()
    if taps is _nearest and len(sizes) == 2 and sum(sizes) <= MOST_IN_WHOLE_STEPS:
        multiples = (1, 2)
    ignored = [
        new in [int(old) * times for times in multiples] for old, new in zip(input.shape[2:], sizes, strict=True)
    ]
    return [None if ignore else scale for ignore, scale in zip(ignored, factors, strict=True)]


def _step(old: int, new: int, scale: float | None) -> float:
    """Returns how many elements of the input one of the result steps."""
    return 1.0 / scale if scale else old / new


def _nearest(old: int, new: int, scale: float | None, dtype: torch.dtype, shift: float = 0.0) -> Taps:
    coordinate = torch.arange(new).to(dtype)
    coordinate = (coordinate + shift) * _step(old, new, scale) if shift else coordinate * _step(old, new, scale)
    return [(coordinate.floor().to(torch.int64).clamp(max=old - 1), None)]


def _nearest_exact(old: int, new: int, scale: float | None, dtype: torch.dtype) -> Taps:
    return _nearest(old, new, scale, dtype, 0.5)


def _source(old: int, new: int, scale: float | None, dtype: torch.dtype, align_corners: bool) -> Tensor:
    """Returns the coordinate of each element of the result, in elements of the input."""
    coordinate = torch.arange(new).to(dtype)
    if align_corners:
        return coordinate * ((old - 1) / (new - 1) if new > 1 else 0.0)
    return (coordinate + 0.5) * _step(old, new, scale) - 0.5


def _linear(align_corners: bool) -> Callable[..., Taps]:
    def taps(old: int, new: int, scale: float | None, dtype: torch.dtype) -> Taps:
        source = _source(old, new, scale, dtype, align_corners).clamp(min=0)
        first = source.floor().to(torch.int64).clamp(max=old - 1)
        fraction = (source - first.to(dtype)).clamp(0, 1)
        return [(first, 1 - fraction), ((first + 1).clamp(max=old - 1), fraction)]

    return taps


_LINEAR = {align_corners: _linear(align_corners) for align_corners in (False, True)}

CUBIC = -0.75
"""The slope of torch's cubic convolution at 1."""


def cubic_weights(fraction: Tensor) -> list[Tensor]:
    """Returns the weights of the four neighbours of a coordinate that is ``fraction`` past the second."""

    def near(x: Tensor) -> Tensor:
        return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC

    return [far(fraction + 1), near(fraction), near(1 - fraction), far(2 - fraction)]


def _cubic(align_corners: bool) -> Callable[..., Taps]:
    def taps(old: int, new: int, scale: float | None, dtype: torch.dtype) -> Taps:
        source = _source(old, new, scale, dtype, align_corners)
        first = source.floor()
        weights = cubic_weights(source - first)
        index = first.to(torch.int64)
        return [
            ((index + offset).clamp(0, old - 1), weight) for offset, weight in zip(range(-1, 3), weights, strict=True)
        ]

    return taps


def _register() -> None:
    for count in (1, 2, 3):
        for name, rule in (("upsample_nearest", _nearest), ("_upsample_nearest_exact", _nearest_exact)):

            def nearest(
                input: Tensor,
                output_size: Any,
                scale_factors: Any = None,
                *,
                rule: Callable[..., Taps] = rule,
                count: int = count,
            ) -> Tensor:
                return _resampled(input, output_size, scale_factors, count, rule)

            composition(f"_nn.{name}{count}d")(nearest)

        def linear(
            input: Tensor, output_size: Any, align_corners: bool, scale_factors: Any = None, *, count: int = count
        ) -> Tensor:
            require_float(input)
            return _resampled(input, output_size, scale_factors, count, _LINEAR[bool(align_corners)])

        composition(f"_nn.upsample_{('linear1d', 'bilinear2d', 'trilinear3d')[count - 1]}")(linear)


_register()


@composition("_nn.upsample_bicubic2d")
def upsample_bicubic2d(input: Tensor, output_size: Any, align_corners: bool, scale_factors: Any = None) -> Tensor:
    require_float(input)
    return _resampled(input, output_size, scale_factors, 2, _cubic(align_corners))


# --------------------------------------------------------------------------------------------------------------- grids

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2


def _bounded(coordinate: Tensor, size: int, padding: int, align_corners: bool) -> Tensor:
    """Moves a coordinate into the tensor as the padding mode does; with zeros it stays where it is."""
    if padding == BORDER:
        return coordinate.clamp(0, size - 1)
    if padding == REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span <= 0:
            return torch.zeros_like(coordinate)
        distance = (coordinate - low).abs()
        flips = (distance / span).floor()
        rest = distance - flips * span
        coordinate = torch.where(flips % 2 == 0, rest + low, span - rest + low)
        return coordinate.clamp(0, size - 1)
    return coordinate


def _read(input: Tensor, coordinates: Sequence[Tensor], padding: int, align_corners: bool, bound: bool) -> Tensor:
    """Reads the elements (N, ..., channels) at whole coordinates, the first of the first dimension; 0 outside. (N, ...,
    channels)."""
    rows = torch.arange(input.shape[0]).reshape(-1, *[1] * (coordinates[0].dim() - 1))
    key: list[Any] = [rows, slice(None)]
    inside = None
    for coordinate, size in zip(coordinates, input.shape[2:], strict=True):
        coordinate = _bounded(coordinate, int(size), padding, align_corners) if bound else coordinate
        valid = (coordinate >= 0) & (coordinate <= size - 1)
        inside = valid if inside is None else inside & valid
        key.append(torch.where(valid, coordinate, 0).to(torch.int64))
    assert inside is not None
    return torch.where(inside.unsqueeze(-1), input[tuple(key)], 0)


@composition("torch.grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """Samples ``input`` (N, channels, ...) at the coordinates ``grid`` (N, ..., dimensions), the last dimension first,
    with the edges at -1 and 1."""
    require_float(input)
    require_one_dtype(input, grid)
    count = input.dim() - 2
    require_rank(input, (4, 5))
    require_rank(grid, (input.dim(),))
    if grid.shape[-1] != count or grid.shape[0] != input.shape[0] or not all(input.shape[1:]):
        raise ValueError(f"a grid {tuple(map(int, grid.shape))} of an input {tuple(map(int, input.shape))}")
    if interpolation_mode == BICUBIC and count != 2:
        raise ValueError("bicubic sampling is of images")
    grid = grid.to(_wide(input))
    coordinates = []
    for dim in range(count):
        size, x = int(input.shape[2 + dim]), grid[..., count - 1 - dim]
        coordinate = (x + 1) * 0.5 * (size - 1) if align_corners else ((x + 1) * size - 1) * 0.5
        coordinates.append(
            coordinate if interpolation_mode == BICUBIC else _bounded(coordinate, size, padding_mode, align_corners)
        )
    if interpolation_mode == NEAREST:
        result = _read(input, [coordinate.round() for coordinate in coordinates], padding_mode, align_corners, False)
    else:
        result = _weighted(input, coordinates, interpolation_mode == BICUBIC, padding_mode, align_corners)
    return result.movedim(-1, 1).to(input.dtype)


def _weighted(input: Tensor, coordinates: Sequence[Tensor], cubic: bool, padding: int, align_corners: bool) -> Tensor:
    firsts = [coordinate.floor() for coordinate in coordinates]
    fractions = [coordinate - first for coordinate, first in zip(coordinates, firsts, strict=True)]
    weights = [cubic_weights(fraction) if cubic else [1 - fraction, fraction] for fraction in fractions]
    offsets = range(-1, 3) if cubic else range(2)
    total = None
    for chosen in itertools.product(range(len(offsets)), repeat=len(coordinates)):
        at = [first + offsets[number] for first, number in zip(firsts, chosen, strict=True)]
        factor: Any = None
        for weights_, number in zip(weights, chosen, strict=True):
            factor = weights_[number] if factor is None else factor * weights_[number]
        piece = _read(input, at, padding, align_corners, cubic) * factor.unsqueeze(-1)
        total = piece if total is None else total + piece
    assert total is not None
    return total
