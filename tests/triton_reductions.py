"""Row reductions in Triton against float64 torch, under Triton's interpreter on CPU tensors.

``tests/unit/test_reduction_triton.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

import jitgen
from tests import joined_rows
from tests.interpreter import Check, serve
from tests.numeric import mismatch, widened

LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 100, 127, 128, 129, 1000, 1023, 1024, 1025, 4097)
LONG_LENGTHS = (16384, 32768, 32769, 40000)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Function = Callable[..., Any]


def cross_entropy(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, (x[:, 0] * 0).long(), reduction="none")


def attention_weights(x: torch.Tensor) -> torch.Tensor:
    """Work before, between and after, and an index along the row."""
    masked = torch.where(torch.arange(x.shape[-1], device=x.device) % 3 == 1, -math.inf, x * 0.5)
    return torch.softmax(masked, -1) * x


def add_and_normalize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + x.flip(0)
    return total, F.rms_norm(total, total.shape[-1:], None, 1e-6)


def row_values(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reductions of what does not vary along the row, and results of one element a row."""
    one = torch.ones((), dtype=x.dtype).expand(x.shape)
    top = x.amax(-1, keepdim=True)
    return one.sum(-1) + top[:, 0], (top * 2).expand(x.shape).sum(-1), (x - top).sum(-1)


EXACT: dict[str, Function] = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1, keepdim=True),
    "aminmax": lambda x: tuple(torch.aminmax(x, dim=-1)),
    "max": lambda x: tuple(x.max(-1)),
    "min": lambda x: tuple(x.min(-1, keepdim=True)),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "any": lambda x: x.any(-1),
    "all": lambda x: x.all(-1),
    "count_nonzero": lambda x: x.count_nonzero(-1),
    "norm_inf": lambda x: x.norm(math.inf, -1),
}
"""Reductions whose result rounds nothing."""

SUMS: dict[str, Function] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "whole_sum": lambda x: x.sum(),
    "norm_1": lambda x: x.norm(1, -1),
    "norm_2": lambda x: x.norm(2, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": cross_entropy,
    "row_values": row_values,
}
"""Results that may be wrong by some roundings of the sum of what they add."""

NORMALIZED: dict[str, Function] = {
    "prod": lambda x: (1 + 0.01 * x.clamp(-3, 3)).prod(-1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1, correction=0),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], x[0], 1e-5),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], x[0], x[1]),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "add_and_normalize": add_and_normalize,
    "attention_weights": attention_weights,
}
"""Results whose terms are of the order of one."""

FUNCTIONS = EXACT | SUMS | NORMALIZED
OF_INTEGERS = (set(EXACT) - {"norm_inf"}) | {"sum"}
OF_BOOL = {"any", "all", "amax", "amin", "sum", "count_nonzero"}


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.7
    if not dtype.is_floating_point:
        return torch.randint(0 if dtype == torch.uint8 else -9, 10, shape).to(dtype)
    return torch.randn(shape).to(dtype)


def special_rows(length: int) -> torch.Tensor:
    """Rows of -inf, NaN somewhere, infinities, one huge outlier, denormals, equal values, signed zeros."""
    rows = torch.randn(9, length)
    rows[0] = -math.inf
    rows[1, length // 2] = math.nan
    rows[1, -1] = math.nan
    rows[2, length // 3], rows[2, -1] = math.inf, math.inf
    rows[3, length // 2] = 1e30
    rows[4] = torch.randn(length) * 1e-41
    rows[5] = 3.0
    rows[6] = torch.tensor([0.0, -0.0]).repeat(length)[:length]
    rows[7] += 1e4
    rows[8, 0] = -math.inf
    return rows


# --------------------------------------------------------------------------------------------------------- comparing


def compare(function: Function, *arguments: torch.Tensor, magnitude: Any = 0.0) -> str | None:
    """How the kernel's results differ from the float64 reference; None where they do not."""
    got = jitgen.jit(function, backend="triton")(*arguments)
    want = function(*map(widened, arguments))
    eager = function(*(a.float() if a.is_floating_point() and a.dtype != torch.float64 else a for a in arguments))
    like = function(*arguments)
    for place, (mine, exact, near, plain) in enumerate(zip(*map(_as_tuple, (got, want, eager, like)), strict=True)):
        if (mine.shape, mine.dtype) != (plain.shape, plain.dtype):
            return f"result {place} is {mine.dtype} {tuple(mine.shape)} for {plain.dtype} {tuple(plain.shape)}"
        wrong = mismatch(mine, exact, near.to(mine.dtype), magnitude)
        if wrong:
            return f"result {place}: {wrong}"
    return None


def _as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def magnitude(name: str, x: torch.Tensor) -> float:
    """Of what ``name`` adds up for a row of ``x``."""
    if name in EXACT:
        return 0.0
    if name in NORMALIZED:
        return 4.0 + math.sqrt(x.shape[-1]) * (name == "prod")
    sizes = x.double().abs().nan_to_num(0.0, 0.0, 0.0)
    return float(sizes.sum() if name == "whole_sum" else sizes.sum(-1).max())


CHECKS: dict[str, Check] = {}
SLOW = ("columns_of_every_size", "chunks_of_every_shape", "quantization_of_every_length", "strides_of_every_alignment")
"""And of lengths and special values those of functions that reduce as another one does; see ``is_quick``."""


def is_quick(check: str) -> bool:
    """Each kind of state in every dtype, and in every length or with special values."""
    kind, _, name = check.partition("-")
    states = {"dtypes": ("sum", "argmax", "any", "softmax"), "lengths": ("argmax",), "special": ("aminmax", "sum")}
    return name in states.get(kind, ()) or (not name and check not in SLOW)


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def _lengths(name: str) -> Check:
    def run() -> Iterator[str | None]:
        for length in (*LENGTHS, *LONG_LENGTHS):
            rows = 3 if length < 4096 else 2
            x = sample((rows, length), torch.float32)
            wrong = compare(FUNCTIONS[name], x, magnitude=magnitude(name, x))
            yield wrong and f"length {length}: {wrong}"

    return run


def _dtypes(name: str) -> Check:
    def run() -> Iterator[str | None]:
        whole = (*INTEGERS, torch.bool) if name in OF_BOOL else INTEGERS if name in OF_INTEGERS else ()
        for dtype in (*FLOATS, *whole):
            if dtype == torch.uint8 and name in ("any", "all"):
                continue  # torch's are uint8
            for length in (1, 37, 1024):
                x = sample((4, length), dtype)
                wrong = compare(FUNCTIONS[name], x, magnitude=magnitude(name, x))
                yield wrong and f"{dtype} of length {length}: {wrong}"

    return run


def _special(name: str) -> Check:
    def run() -> Iterator[str | None]:
        for length in (5, 64, 1001, 33000):
            x = special_rows(length)
            sizes = x.double().abs().nan_to_num(0.0, 0.0, 0.0).sum(-1)
            wrong = compare(FUNCTIONS[name], x, magnitude=sizes if name in SUMS else magnitude(name, x))
            yield wrong and f"length {length}: {wrong}"

    return run


for _name in FUNCTIONS:
    CHECKS[f"lengths-{_name}"] = _lengths(_name)
    CHECKS[f"dtypes-{_name}"] = _dtypes(_name)
for _name in (*EXACT, "sum", "logsumexp", "softmax", "log_softmax"):
    CHECKS[f"special-{_name}"] = _special(_name)


# ------------------------------------------------------------------------------------------------- shapes and strides


@check
def dimensions() -> Iterator[str | None]:
    x = torch.randn(3, 5, 7, 9)
    for dim in (0, 1, 2, -1, (1, 2), (2, 3), (0, 1), (0, 3), (0, 1, 2, 3)):
        for keepdim in (False, True):
            yield compare(lambda x, dim=dim, keep=keepdim: x.sum(dim, keepdim=keep), x, magnitude=99.0)
            yield compare(lambda x, dim=dim, keep=keepdim: x.amax(dim, keepdim=keep), x)
    for dim in range(4):
        yield compare(lambda x, dim=dim: x.softmax(dim), x, magnitude=4.0)
        yield compare(lambda x, dim=dim: (x.argmax(dim), x - x.mean(dim, keepdim=True)), x, magnitude=9.0)


def _columns(rows: int, length: int, dtype: torch.dtype) -> Iterator[str | None]:
    x = sample((rows, length), dtype)
    yield compare(lambda x: x.sum(0), x, magnitude=float(rows))
    yield compare(lambda x: (x.softmax(0), x.argmin(0), x.amax(0)), x, magnitude=4.0)


@check
def columns() -> Iterator[str | None]:
    yield from _columns(64, 33, torch.bfloat16)
    yield from _columns(2049, 5, torch.float32)  # in chunks
    yield compare(lambda x: x.sum(1), torch.randn(3, 50, 32), magnitude=50.0)
    yield compare(lambda x, w: (x * w[:, None]).sum(1), torch.randn(3, 50, 32), torch.randn(50), magnitude=50.0)


@check
def columns_of_every_size() -> Iterator[str | None]:
    for rows, length in ((3, 5), (64, 33), (16, 128), (200, 48), (5000, 40), (48, 1000)):
        for dtype in (torch.float32, torch.bfloat16):
            yield from _columns(rows, length, dtype)
    for rows, length in ((1024, 24), (2100, 24)):  # resident, and in chunks
        yield from _columns(rows, length, torch.float32)


@check
def chunks() -> Iterator[str | None]:
    return _chunks(torch.float32, ((3, 2048), 1), ((512, 12), 0))


@check
def chunks_of_every_shape() -> Iterator[str | None]:
    shapes = ((3, 2048), 1), ((2, 2071), 1), ((512, 12), 0), ((2, 517, 12), 1), ((2**11 + 1,), 0)
    yield from _chunks(torch.float32, *shapes)
    yield from _chunks(torch.bfloat16, *shapes)


def _chunks(dtype: torch.dtype, *shapes: tuple[tuple[int, ...], int]) -> Iterator[str | None]:
    """Rows too few to keep a GPU busy, with and without elements left over; shorter than what is taken so elsewhere."""
    smaller = {"CHUNKS": 16, "SINGLE_BLOCK_ROW": 1024, "CHUNKED_ROW": 2048, "COLUMN_CHUNKS": 8, "CHUNKED_COLUMN": 512}
    with patch.multiple("jitgen.families.rows.reduction.row_chunks", **smaller):
        for shape in ((3, 2048), (512, 12)):
            low = jitgen.jit(lambda x: x.sum(0 if len(x) == 512 else 1)).lower(
                jitgen.TensorSpec(shape, torch.float32), target="sm_90", backend="triton"
            )
            yield None if len(low.kernels) == 2 else f"{len(low.kernels)} kernels for {shape}"
        for shape, dim in shapes:
            x = sample(shape, dtype) + 3
            long = float(max(shape))
            yield compare(lambda x, d=dim: (x.sum(d), x.mean(d, True), x.norm(dim=d)), x, magnitude=4 * long)
            yield compare(lambda x, d=dim: (x.var(d), x.std(d, correction=0, keepdim=True)), x, magnitude=16.0)
            yield compare(lambda x, d=dim: (x.logsumexp(d), x.softmax(d), x.log_softmax(d)), x, magnitude=32.0)
            yield compare(lambda x, d=dim: (x.argmax(d), x.argmin(d, True), x.max(d)[0], x.any(d)), x)
        x = torch.randint(-3, 4, (2, 2061), dtype=torch.int32)
        yield compare(lambda x: (x.argmax(-1), x.argmin(-1), x.argmax(), x.sum(-1)), x)
        x = torch.randn(9, 2053)
        x[0], x[1, 500], x[2, 700], x[5, :400] = -math.inf, math.nan, math.inf, -math.inf
        x[3, -1], x[4, -2:], x[6, 9], x[6, -1], x[7] = 1e30, 1e30, math.nan, math.nan, 3.0
        x[8] = torch.finfo(torch.float32).min
        for function in (lambda x: x.logsumexp(-1), lambda x: x.softmax(-1)):
            yield compare(function, x, magnitude=32.0)
        yield compare(lambda x: x.var(-1), torch.cat([x[:3], x[6:8]]), magnitude=16.0)
        yield compare(lambda x: (x.argmax(-1), x.argmin(-1), x.amax(-1)), x)


@check
def strides() -> Iterator[str | None]:
    x = torch.randn(12, 40)
    for view in (x.t(), x[:, ::2], x[::3, 1:], x.flip(1), x[:, :1].expand(12, 9), x[:1].expand(7, 40), x[1:, 3:]):
        yield compare(lambda x: (x.sum(-1), x.softmax(-1)), view, magnitude=40.0)
        yield compare(lambda x: (x.amax(0), x.argmax(-1)), view)
    yield from _aligned(52, 48, torch.bfloat16)
    yield compare(lambda x, w: F.layer_norm(x, (8, 5), w), torch.randn(6, 8, 5), torch.randn(8, 5), magnitude=4.0)
    yield compare(lambda x: x.permute(2, 0, 1).mean((0, 2)), torch.randn(4, 6, 8), magnitude=4.0)


def _aligned(wide: int, taken: int, dtype: torch.dtype) -> Iterator[str | None]:
    """Rows and strides that are multiples of 16 bytes, but not of the same number of elements."""
    for stride in (2 * wide, wide):
        view = sample((20, stride), dtype)[:, :taken]
        yield compare(lambda x: (x.sum(-1), x.softmax(-1)), view, magnitude=float(taken))
        yield compare(lambda x: (x.sum(0), x.softmax(0)), view, magnitude=20.0)


@check
def strides_of_every_alignment() -> Iterator[str | None]:
    for wide, taken in ((1004, 1000), (4108, 4096), (52, 48)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            yield from _aligned(wide, taken, dtype)


@check
def nothing() -> Iterator[str | None]:
    for shape in ((0, 5), (0, 0)):
        yield compare(lambda x: (x.sum(-1), x.softmax(-1)), torch.randn(shape))
    yield compare(lambda x: (x.sum(-1), x.prod(-1), x.any(-1), x.all(-1)), torch.randn(4, 0))
    yield compare(lambda x: x.mean(-1), torch.randn(4, 0))
    yield compare(lambda x: x.sum(), torch.randn(()))


# ------------------------------------------------------------------------------------------------------ several results


def int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().to(torch.int8), scale.squeeze(-1)


def fp8_rows(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    normal = F.rms_norm(x.float(), x.shape[-1:], weight.float(), 1e-6)
    scale = normal.abs().amax(-1, keepdim=True) / 448
    return (normal / scale).to(torch.float8_e4m3fn), scale


@check
def quantization() -> Iterator[str | None]:
    return _quantization(100)


@check
def quantization_of_every_length() -> Iterator[str | None]:
    return _quantization(1, 1024, 40000)


def _quantization(*lengths: int) -> Iterator[str | None]:
    """Codes may differ from the reference's by one where the quotient is on the edge."""
    for length in lengths:
        x, weight = torch.randn(5, length).bfloat16(), torch.randn(length).bfloat16()
        codes, scale = jitgen.jit(int8_rows, backend="triton")(x)
        want, want_scale = int8_rows(x)
        if (codes.int() - want.int()).abs().max() > 1 or (codes != want).float().mean() > 0.01:
            yield f"int8 codes of length {length}"
        yield mismatch(scale, want_scale.double())
        codes, scale = jitgen.jit(fp8_rows, backend="triton")(x, weight)
        want, want_scale = fp8_rows(x, weight)
        if (codes.float() != want.float()).float().mean() > 0.01:
            yield f"fp8 codes of length {length}"
        yield mismatch(scale, want_scale.double(), magnitude=0.1)
        many = jitgen.TensorSpec((100, length), torch.bfloat16)  # a few so long would be divided into chunks
        for function, arguments in ((int8_rows, (many,)), (fp8_rows, (many, weight))):
            kernels = jitgen.jit(function).lower(*arguments, target="sm_90", backend="triton").kernels
            if len(kernels) != 1:
                yield f"{len(kernels)} kernels of {function.__name__}"


@check
def joined() -> Iterator[str | None]:
    """Rows that are joined of lengths of themselves: one kernel, with a store of its result for each."""
    for name, function in joined_rows.ONE_KERNEL.items():
        wrong = compare(function, *joined_rows.arguments((5, 3, 24), torch.float32), magnitude=4.0)
        yield f"{name}: {wrong}" if wrong else None


@check
def poisoned_outputs() -> Iterator[str | None]:
    """Every element is written, and nothing beyond: into a slice of a larger tensor."""
    for rows, length in ((5, 3), (3, 100), (2, 5000)):
        x, room = torch.randn(rows, length), torch.full((rows + 2, length + 2), 7.0)
        function = jitgen.jit(lambda x: x.softmax(-1), backend="triton")
        function.bind(x)(x, out=room[1:-1, 1:-1])
        yield mismatch(room[1:-1, 1:-1], x.double().softmax(-1), magnitude=4.0)
        room[1:-1, 1:-1] = 7.0
        yield None if (room == 7.0).all() else f"({rows}, {length}) wrote beyond its result"


# --------------------------------------------------------------------------------------------------------- interpreter


@contextmanager
def quick_reductions() -> Iterator[None]:
    """Within this context the interpreter combines halves of a block at once; by itself it goes element by element."""
    from triton.runtime.interpreter import ReduceOps

    before = ReduceOps.generic_reduce

    def by_halves(self: Any, operands: Any) -> Any:
        import numpy

        parts = [numpy.moveaxis(tensor.handle.data, self.axis, -1) for tensor in operands]
        while (length := parts[0].shape[-1]) > 1:
            ways = slice(0, length // 2), slice(length // 2, None)
            halves = [part[..., way] for way in ways for part in parts]
            kinds = [tensor.dtype for tensor in operands] * 2
            found = self.combine_fn.fn(*map(self.to_tensor, halves, kinds))
            parts = [tensor.handle.data for tensor in _as_tuple_of(found)]
        kept = [numpy.moveaxis(part, -1, self.axis) if self.keep_dims else part[..., 0] for part in parts]
        return [self.to_tensor(part, tensor.dtype) for part, tensor in zip(kept, operands, strict=True)]

    ReduceOps.generic_reduce = by_halves
    try:
        yield
    finally:
        ReduceOps.generic_reduce = before


def _as_tuple_of(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


within = quick_reductions

if __name__ == "__main__":
    serve(CHECKS, within())
