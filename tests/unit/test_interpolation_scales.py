"""``F.interpolate`` by scales, where torch on a CPU copies along sizes that stay as they are, or takes whole steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.trace.compositions import interpolation

SCALES = (1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.1, 2.3, 0.9, 0.7, 1.25)
MODES = [("nearest", 1), ("nearest", 2), ("nearest", 3), ("nearest-exact", 2)]
MODES += [("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2)]


def _taps(mode: str, align_corners: bool) -> Callable[..., Any]:
    if mode == "nearest":
        return interpolation._nearest
    if mode == "nearest-exact":
        return interpolation._nearest_exact
    return interpolation._cubic(align_corners) if mode == "bicubic" else interpolation._LINEAR[align_corners]


@pytest.mark.parametrize(("mode", "count"), MODES)
def test_scales(mode: str, count: int) -> None:
    choose = random.Random(count)
    for _ in range(150):
        large = mode == "nearest" and count == 2 and choose.random() < 0.3
        sizes = [choose.randint(40, 90) if large else choose.randint(1, 7) for _ in range(count)]
        scales = [choose.choice(SCALES) for _ in sizes]
        if min(int(size * scale) for size, scale in zip(sizes, scales, strict=True)) == 0:
            continue
        align_corners = choose.random() < 0.5
        keywords: dict[str, Any] = {} if mode.startswith("nearest") else {"align_corners": align_corners}
        x = torch.randn(1, 2, *sizes)
        want = F.interpolate(x, scale_factor=scales, mode=mode, **keywords)
        got = interpolation._resampled(x, None, scales, count, _taps(mode, align_corners))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [1.3, (1.3, 1.5), (1.0, 1.5)])
def test_a_call(scale: Any) -> None:
    x = torch.arange(12.0).reshape(1, 1, 3, 4)
    function = lambda x: (F.interpolate(x, scale_factor=scale), F.interpolate(x, scale_factor=scale, mode="bilinear"))  # noqa: E731
    torch.testing.assert_close(jitgen.jit(function)(x), function(x))
