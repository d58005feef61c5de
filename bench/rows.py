"""Row reductions, measured like the streaming cases: the bound is one read or one write of every tensor.

On a GPU the shapes are those that models have, with fewer rows if its memory is too small. On the CPU tensors are as
large as those of the streaming cases, whatever the length of a row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.measurement import Bench, Measurement
from bench.streaming import COPIED, Case, Result, measure_all

LENGTHS = (1024, 4096, 8192, 16384, 32768, 151936)
CPU_LENGTHS = tuple(length for length in LENGTHS if length != 32768)
"""Without 32768, which shows nothing that 16384 and 151936 do not."""
ROWS = 8192
GPU_SHAPES = (*((ROWS, length) for length in LENGTHS), (64, 151936))
DTYPES = (torch.bfloat16, torch.float32)


def rows_of(
    count: int | None, length: int, tensors: int, weights: int, elements: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    """``tensors`` tensors of ``count`` rows of ``length`` elements, and ``weights`` vectors expanded to the same shape.

    ``count``: if None, as many rows as have ``elements`` elements in all.
    """
    count = max(1, elements // length) if count is None else count
    return (
        *(torch.randn(count, length, dtype=dtype, device=device) for _ in range(tensors)),
        *(torch.randn(length, dtype=dtype, device=device).expand(count, length) for _ in range(weights)),
    )


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


def softmax_eager(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.softmax(x, -1, out=out)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(x, -1)


def log_softmax_eager(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.log_softmax(x, -1, out=out)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight[0], 1e-5)


def rms_norm_eager(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Allocates its result: torch has no form with ``out=``, and a copy into ``out`` would count against it."""
    return F.rms_norm(x, x.shape[-1:], weight[0], 1e-5)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight[0], bias[0])


def layer_norm_eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Allocates its result: ``native_layer_norm`` has a form with ``out=``, but it also allocates, and then copies."""
    return F.layer_norm(x, x.shape[-1:], weight[0], bias[0])


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return h, F.rms_norm(h, h.shape[-1:], weight[0], 1e-5)


def add_rms_norm_eager(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Writes the sum to ``out``, and allocates the norm as above."""
    h = torch.add(x, residual, out=out[0])
    return F.rms_norm(h, h.shape[-1:], weight[0], 1e-5)


@dataclass(frozen=True)
class Reduction:
    """A function of rows.

    Attributes:
        name: the name in tables.
        function: plain torch. eager: the same as written by hand for eager torch, see ``Case``.
        tensors, weights: how many tensors of rows, and how many vectors of a row's length, it takes.
        outputs: how many tensors of rows it returns.
        cpu_lengths: the lengths of rows that are measured on the CPU.
    """

    name: str
    function: Callable[..., Result]
    eager: Callable[..., Any]
    tensors: int = 1
    weights: int = 0
    outputs: int = 1
    cpu_lengths: tuple[int, ...] = CPU_LENGTHS

    def case(
        self, length: int, count: int | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES, prefix: str = ""
    ) -> Case:
        """The case of ``count`` rows of ``length``; ``prefix`` tells its name from that of another number of rows."""
        inputs = partial(rows_of, count, length, self.tensors, self.weights)
        return Case(f"{self.name}, {prefix}rows of {length}", self.function, self.eager, inputs, dtypes)


REDUCTIONS = (
    Reduction("softmax", softmax, softmax_eager),
    Reduction("log_softmax", log_softmax, log_softmax_eager, cpu_lengths=(4096, 151936)),
    Reduction("rms_norm", rms_norm, rms_norm_eager, weights=1),
    Reduction("layer_norm", layer_norm, layer_norm_eager, weights=2),
    Reduction("add_rms_norm", add_rms_norm, add_rms_norm_eager, 2, 1, 2, (4096, 151936)),
)


def gpu_shapes(reduction: Reduction) -> Iterator[tuple[int, int, torch.dtype]]:
    """The (rows, length, dtype) of every case on a GPU."""
    for count, length in GPU_SHAPES:
        for dtype in DTYPES:
            yield count, length, dtype
    if reduction.name == "softmax":
        yield 4096, 32768, torch.bfloat16


def rows_that_fit(count: int, row_bytes: int, free: int) -> int:
    """``count``, or fewer rows if two sets of buffers, and the two of the copy, would exceed half of ``free`` bytes.

    The other half remains for temporaries of peers. ``row_bytes``: the size of one row in all tensors of a set, in
    bytes.
    """
    half = free // 2
    return max(1, min(count, max(half // 4, half // 2 - COPIED) // row_bytes))


def _free_memory() -> int:
    """The free memory of the GPU, in bytes, after that of earlier cases has been released."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def cases(bench: Bench) -> Iterator[Case]:
    """The cases. Each must be measured before the next is requested: its number of rows depends on the free memory."""
    for reduction in REDUCTIONS:
        if bench.device == "cpu":
            yield from map(reduction.case, reduction.cpu_lengths)
            continue
        for count, length, dtype in gpu_shapes(reduction):
            row_bytes = (reduction.tensors + reduction.outputs) * length * dtype.itemsize
            fitting = rows_that_fit(count, row_bytes, _free_memory())
            yield reduction.case(length, fitting, (dtype,), "" if count == ROWS else f"{count} ")


def run(bench: Bench) -> Iterator[Measurement]:
    return measure_all(cases(bench), bench, "rows")
