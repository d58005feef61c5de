"""Row reductions, measured as the streaming cases are: one read and one write of the tensor is the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from jitgen.bench.measurement import Bench, Measurement
from jitgen.bench.streaming import Case, measure

LENGTHS = (1024, 4096, 8192, 16384, 32768, 151936)


def rows_of(length: int, weights: int, elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Rows of ``length``, as many as ``elements`` make, and ``weights`` vectors of it spread over them."""
    count = max(1, elements // length)
    x = torch.randn(count, length, dtype=dtype, device=device)
    return x, *(torch.randn(length, dtype=dtype, device=device).expand(count, length) for _ in range(weights))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


def softmax_eager(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.softmax(x, -1, out=out)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight[0], 1e-5)


def rms_norm_eager(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Into memory of its own: torch's has no form with ``out=``, and a copy into ``out`` would count against it."""
    return F.rms_norm(x, x.shape[-1:], weight[0], 1e-5)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight[0], bias[0])


def layer_norm_eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    dtype = x.dtype if x.device.type == "cpu" else torch.float32  # what torch keeps these two in
    mean, inverse = torch.empty(2, *x.shape[:-1], 1, dtype=dtype, device=x.device)
    torch.ops.aten.native_layer_norm.out(x, x.shape[-1:], weight[0], bias[0], 1e-5, out0=out, out1=mean, out2=inverse)


def _cases() -> Iterator[Case]:
    functions: tuple[tuple[str, Callable[..., torch.Tensor], Callable[..., Any], int], ...] = (
        ("softmax", softmax, softmax_eager, 0),
        ("rms_norm", rms_norm, rms_norm_eager, 1),
        ("layer_norm", layer_norm, layer_norm_eager, 2),
    )
    for name, function, eager, weights in functions:
        for length in LENGTHS:
            yield Case(f"{name}, rows of {length}", function, eager, partial(rows_of, length, weights))


def run(bench: Bench) -> Iterator[Measurement]:
    for case in _cases():
        if bench.device == "cpu" and "32768" in case.name:
            continue  # what 16384 and 151936 show, at a third of the time
        for dtype in case.dtypes:
            yield from measure(case, dtype, bench, "rows")
