"""Convolutions in Triton, under Triton's interpreter on CPU tensors; ``tests/unit/test_convolutions.py`` runs them.

The interpreter takes a second for some thousand elements of windows, so these are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from tests.convolutions import wrong
from tests.interpreter import Check, serve

SMALL: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "padding": (F.conv2d, (1, 2, 4, 3), (3, 2, 3, 2), {"padding": (1, 0), "dilation": (1, 2)}),
    "groups": (F.conv1d, (2, 4, 7), (4, 2, 3), {"stride": 2, "padding": 1, "groups": 2}),
    "many pixels": (F.conv1d, (2, 2, 70), (2, 1, 2), {"groups": 2}),
    "transposed": (F.conv_transpose1d, (1, 2, 4), (2, 3, 4), {"stride": 2, "padding": 1}),
}


def check(name: str) -> Iterator[str | None]:
    function, shape, weight, options = SMALL[name]
    x, w = torch.randn(shape), torch.randn(weight)

    def call(x: Any, w: Any) -> Any:
        return F.relu(function(x, w, **options))

    yield wrong(name, jitgen.jit(call, backend="triton")(x, w), call(x.double(), w.double()), w.numel())


CHECKS: dict[str, Check] = {name: lambda name=name: check(name) for name in SMALL}

if __name__ == "__main__":
    serve(CHECKS)
