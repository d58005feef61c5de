"""Random convolutions, compared with float64: for the tests of each backend."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import jitgen

Case = tuple[str, Callable[..., Any], list[torch.Tensor]]


def cases(seed: int, count: int, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    """Yields convolutions of random sizes, strides, paddings, dilations and groups, every third one transposed."""
    chosen = random.Random(seed)
    for number in range(count):
        dims = chosen.choice((1, 2, 2, 3))
        groups, is_transposed = chosen.choice((1, 1, 2, 5)), number % 3 == 2
        inputs, outputs = (groups * chosen.choice((1, 1, 2, 3, 7)) for _ in range(2))
        kernel = [chosen.randint(1, 4) for _ in range(dims)]
        dilation = [chosen.randint(1, 2) for _ in range(dims)]
        options = {"stride": [chosen.randint(1, 3) for _ in range(dims)], "dilation": dilation, "groups": groups}
        options["padding"] = [
            chosen.randint(0, apart * (size - 1)) for size, apart in zip(kernel, dilation, strict=True)
        ]
        reach = [apart * (size - 1) + 1 for size, apart in zip(kernel, dilation, strict=True)]
        image = [size + chosen.randint(0, 17 if dims < 3 else 5) for size in reach]
        if is_transposed:
            both = zip(options["stride"], dilation, strict=True)
            options["output_padding"] = [chosen.randint(0, max(pair) - 1) for pair in both]
        elif chosen.random() < 0.2:
            options |= {"padding": "same", "stride": 1}
        weight = (inputs, outputs // groups) if is_transposed else (outputs, inputs // groups)
        tensors = [(chosen.randint(1, 3), inputs, *image), (*weight, *kernel), (outputs,)]
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        arguments = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in tensors]
        if dims == 2 and chosen.random() < 0.3:
            arguments[0] = arguments[0].to(memory_format=torch.channels_last)
        function = getattr(F, f"conv{'_transpose' * is_transposed}{dims}d")

        def call(x: Any, w: Any, b: Any, function: Any = function, options: Any = options) -> Any:
            return F.relu(function(x, w, b, **options))

        yield f"{function.__name__} of {[tuple(shape) for shape in tensors]} with {options}", call, arguments


def wrong(name: str, got: torch.Tensor, exact: torch.Tensor, length: int) -> str | None:
    """Says what is wrong with ``got``, sums of ``length`` products and a bias."""
    if got.shape != exact.shape:
        return f"{name}: the shape is {tuple(got.shape)}, not {tuple(exact.shape)}"
    if not exact.numel():
        return None
    bound = (torch.finfo(got.dtype).eps + 4 * length * torch.finfo(torch.float32).eps) * exact.abs().max()
    if got.dtype == torch.float64:
        bound = 4 * length * torch.finfo(torch.float64).eps * exact.abs().max()
    error = (got.double() - exact).abs().max()
    return None if error <= bound else f"{name}: off by {error:.3g}, {error / bound:.1f} times the bound"


def failures(count: int, seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> Iterator[str | None]:
    """Compares random convolutions on CPU tensors, under ``jitgen.jit(**options)``."""
    for name, call, (x, w, b) in cases(seed, count, dtype):
        exact = call(x.double(), w.double(), b.double())
        yield wrong(name, jitgen.jit(call, **options)(x, w, b), exact, w.numel() + 1)
