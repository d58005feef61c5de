"""Scans in Triton against float64 torch, under Triton's interpreter on CPU tensors.

``tests/unit/test_scan_triton.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import jitgen
from tests import scans
from tests.interpreter import Check, serve
from tests.scans import FLOATS, INTEGERS, every_kind, sample

LENGTHS = (1, 2, 7, 16, 17, 1000, 4097)
COLUMN_LENGTHS = (1, 3, 17, 65)
CHECKS: dict[str, Check] = {}
SLOW = ("special_values_of_long_rows", "chunks_of_every_shape")


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def of_every_kind(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    return jitgen.jit(lambda x: every_kind(x, dim), backend="triton")(x)


@check
def lengths() -> Iterator[str | None]:
    shapes = [((2, length), 1) for length in LENGTHS] + [((length, 5), 0) for length in COLUMN_LENGTHS]
    for shape, dim in shapes:
        x = sample(shape, torch.float32, sum(shape))
        yield from scans.failures(of_every_kind(x, dim), x, dim)


@check
def dtypes() -> Iterator[str | None]:
    for dtype in (*FLOATS, *INTEGERS):
        for shape, dim in (((4, 37), 1), ((70, 3), 0)):
            x = sample(shape, dtype)
            for text in scans.failures(of_every_kind(x, dim), x, dim):
                yield f"{dtype}: {text}"


@check
def dimensions_and_strides() -> Iterator[str | None]:
    x = sample((2, 3, 4, 5), torch.float32)
    for dim in range(4):
        yield from scans.failures(of_every_kind(x, dim), x, dim)
    x = sample((12, 40), torch.float32)
    for view in (x.t(), x[1:, ::2], x.flip(1), x[:, :1].expand(12, 9), x[:1].expand(7, 40)):
        yield from scans.failures(of_every_kind(view, 1), view, 1)


def _special_values(length: int) -> Iterator[str | None]:
    x = scans.special_rows(length)
    yield from scans.same_special(of_every_kind(x, 1), x, 1)
    yield from scans.same_special(of_every_kind(x.t().contiguous(), 0), x.t(), 0)


@check
def special_values() -> Iterator[str | None]:
    return _special_values(33)


@check
def special_values_of_long_rows() -> Iterator[str | None]:
    return _special_values(2100)


SMALLER = {"CHUNKS": ((2, 16), (64, 4)), "LEAST_CHUNK": 16, "LEAST_COLUMN_CHUNK": 8}


def _chunks(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Iterator[str | None]:
    """Rows too few to keep a GPU busy, shorter than what is cut into chunks elsewhere."""
    with patch.multiple("jitgen.families.rows.scan.chunks", **SMALLER):
        x = sample(shape, dtype)
        low = jitgen.jit(lambda x: every_kind(x, dim), backend="triton").lower(x)
        yield None if len(low.kernels) == 2 else f"{len(low.kernels)} kernels for {shape}"
        yield from scans.failures(of_every_kind(x, dim), x, dim)


@check
def chunks() -> Iterator[str | None]:
    yield from _chunks((1, 100), 1, torch.float32)
    yield from _chunks((2, 50, 3), 1, torch.float64)


@check
def chunks_of_every_shape() -> Iterator[str | None]:
    yield from _chunks((1, 500), 1, torch.float32)
    yield from _chunks((12, 70), 1, torch.bfloat16)
    yield from _chunks((100, 9), 0, torch.float32)
    yield from _chunks((257,), 0, torch.int32)
    with patch.multiple("jitgen.families.rows.scan.chunks", **SMALLER):
        x = scans.special_rows(70)
        yield from scans.same_special(of_every_kind(x, 1), x, 1)


@check
def before_and_after() -> Iterator[str | None]:
    def function(x: Any, y: Any, scale: float) -> tuple[Any, ...]:
        index = torch.arange(x.shape[-1])
        return torch.cumsum(x * y, -1) * scale + x, x + y, torch.cumsum(x + index, -1) / (1 + index) + y[:, :1]

    for shape in ((5, 33), (2, 3000)):
        x, y = sample(shape, torch.float32, 1), sample(shape, torch.float32, 2)
        jitted = jitgen.jit(function, backend="triton")
        yield None if len(jitted.lower(x, y, 2.0).kernels) == 1 else "not one kernel"
        for got, want in zip(jitted(x, y, 2.0), function(x.double(), y.double(), 2.0), strict=True):
            if not torch.allclose(got.double(), want, rtol=1e-4, atol=1e-3):
                yield f"of {shape}: {got} for {want}"


@check
def slices() -> Iterator[str | None]:
    """Parts of a scan are stored by its kernel, each in a tensor of its own, of rows and of columns."""
    for function in scans.SLICES:
        for shape in ((5, 33), (2, 3000), (3, 4)):
            for turned in (False, True):
                x, y = sample(shape, torch.float32, 1), sample(shape, torch.float32, 2)
                if turned:
                    x, y = x.t().contiguous().t(), y.t().contiguous().t()
                scale = torch.tensor(2.5)
                jitted = jitgen.jit(function, backend="triton")
                kernels = len(jitted.lower(x, y, scale).lowered.program.kernels)
                yield None if kernels <= 2 else f"{function.__name__}: {kernels} kernels"
                for text in scans.wrong_slices(jitted(x, y, scale), function, x, y, scale):
                    yield f"{function.__name__} of {shape}: {text}"


@check
def poisoned_outputs() -> Iterator[str | None]:
    """Every element is written, and nothing beyond: into a slice of a larger tensor."""
    for rows, length in ((5, 3), (3, 100), (2, 5000)):
        x, room = torch.randn(rows, length), torch.full((rows + 2, length + 2), 7.0)
        function = jitgen.jit(lambda x: x.cumsum(1), backend="triton")
        function.bind(x)(x, out=room[1:-1, 1:-1])
        yield None if torch.allclose(room[1:-1, 1:-1], x.cumsum(1), atol=1e-3) else f"({rows}, {length}) is wrong"
        room[1:-1, 1:-1] = 7.0
        yield None if (room == 7.0).all() else f"({rows}, {length}) wrote beyond its result"


@contextmanager
def quick_scans() -> Iterator[None]:
    """Within this context the interpreter combines a block's elements with those 1, 2, 4, ... before them at once; by
    itself it goes element by element."""
    from triton.runtime.interpreter import ScanOps

    before = ScanOps.generic_scan

    def by_doubling(self: Any, operands: Any) -> Any:
        import numpy

        parts = [numpy.moveaxis(tensor.handle.data, self.axis, -1).copy() for tensor in operands]
        length, distance = parts[0].shape[-1], 1
        while distance < length:
            earlier = [numpy.roll(part, distance, -1) for part in parts]
            kinds = [tensor.dtype for tensor in operands]
            found = self.combine_fn.fn(*map(self.to_tensor, [*earlier, *parts], kinds * 2))
            found = found if isinstance(found, tuple) else (found,)
            for part, tensor in zip(parts, found, strict=True):
                part[..., distance:] = tensor.handle.data[..., distance:]
            distance *= 2
        back = [numpy.moveaxis(part, -1, self.axis) for part in parts]
        return [self.to_tensor(part, tensor.dtype) for part, tensor in zip(back, operands, strict=True)]

    ScanOps.generic_scan = by_doubling
    try:
        yield
    finally:
        ScanOps.generic_scan = before


within = quick_scans

if __name__ == "__main__":
    serve(CHECKS, within())
