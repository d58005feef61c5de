"""Quantising and packing weights: from a bfloat16 weight to the layout that kernels read.

The peer ``read`` adds up the weight, and so is the time of reading it once. ``summary`` says how long the Linears of a
model of 8e9 parameters take, ``MODEL`` weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

import jitgen
from bench.measurement import Bench, Measurement
from bench.products import GROUP
from bench.timing import wall_seconds
from jitgen.quant.formats import find

NAMES = ("int4", "uint4", "uint4.floatzeros", "fp4_e2m1", "nf4", "mxfp4", "nvfp4", "int8", "fp8_e4m3", "int2", "int3")
SHAPES = {"cuda": (14336, 4096), "cpu": (2048, 4096)}
"""(N, K) of the weight, by device."""
LAYOUTS = {"cuda": "mma", "cpu": "cpu"}
"""The layout that kernels read, by device."""
METHODS = ("mse", "absmax")
MODEL = 7e9
"""Weights in the Linears of a model of 8e9 parameters."""
REPEATS = 5


def run(bench: Bench) -> Iterator[Measurement]:
    """One measurement for each format and method."""
    shape = SHAPES[bench.device]
    weight = torch.randn(shape, dtype=torch.bfloat16, device=bench.device)
    read = _seconds(lambda: weight.sum(dtype=torch.float32), bench)
    for name in NAMES:
        for method in METHODS:

            def pack(name: str = name, method: str = method) -> object:
                group = find(name).group_size or GROUP
                return jitgen.quantize(weight, name, group, layout=LAYOUTS[bench.device], method=method)

            yield Measurement(
                group="packing",
                name=f"{name}, {method}",
                device=bench.device,
                backend="torch",
                dtype="bfloat16",
                shape=shape,
                seconds={"jitgen": _seconds(pack, bench), "read": read},
                moved=weight.nbytes,
            )


def _seconds(call: Callable[[], object], bench: Bench) -> float:
    call()
    return wall_seconds(call, bench.device, REPEATS)


def summary(measurements: Sequence[Measurement]) -> list[str]:
    """For each format and method, the seconds that ``MODEL`` weights take."""
    lines = []
    for found in measurements:
        if found.group == "packing":
            rows, columns = found.shape
            seconds = found.seconds["jitgen"] * MODEL / (rows * columns)
            lines.append(f"packing {MODEL:.0e} weights as {found.name} takes {seconds:.1f} s")
    return lines
