"""Functions that read and write tensors at computed indices, with arguments for them; for every dialect's tests.

What only moves elements has to be torch's result exactly. What combines them is compared with float64: of ``n`` terms,
a sum may be off by ``n`` roundings of the sum of their magnitudes, a product by ``n`` roundings of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import jitgen

Function = Callable[..., Any]
INDICES = (torch.int64, torch.int32)


def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape).to(dtype) if high > low else torch.zeros(shape, dtype=dtype)


READS: dict[str, Function] = {
    "embedding": lambda x, rows, many: F.embedding(rows, x[:, :, 0], padding_idx=0),
    "embedding, computed": lambda x, rows, many: F.embedding(rows, x[:, :, 1] * 2) + 1,
    "embedding, divided": lambda x, rows, many: F.embedding(rows, x.flatten(1)).unflatten(-1, x.shape[1:]).mT,
    "index_select": lambda x, rows, many: x.index_select(0, rows.flatten()),
    "gather": lambda x, rows, many: x.gather(0, many.long() % x.shape[0]),
    "gather of few": lambda x, rows, many: x.gather(0, many[:2, :1] % x.shape[0]),
    "gather along the last": lambda x, rows, many: x.gather(-1, many % x.shape[2]),
    "take": lambda x, rows, many: x.take(many.long() - 1),
    "take_along_dim": lambda x, rows, many: x.take_along_dim(many[:, :1].long() * 5 - 7, 1),
    "a vector": lambda x, rows, many: x[rows.flatten()],
    "from the end": lambda x, rows, many: x[rows - x.shape[0]],
    "two": lambda x, rows, many: x[rows, rows[:1] % x.shape[1]],
    "two apart": lambda x, rows, many: x[rows, :, rows % x.shape[2]],
    "behind slices": lambda x, rows, many: x[1:, None, rows % x.shape[1], ::2],
    "a number beside": lambda x, rows, many: x[0, rows % x.shape[1]],
    "all": lambda x, rows, many: x[rows, rows % x.shape[1], rows % x.shape[2]],
    "no dimensions": lambda x, rows, many: x[rows[0, 0], ..., rows[0, 1] % x.shape[2]],
    "merged after": lambda x, rows, many: x[rows].flatten(1).exp(),
    "turned after": lambda x, rows, many: x[rows].transpose(0, -1)[::2] * 3,
    "of a gather": lambda x, rows, many: x[rows][:, rows[0, 0] % rows.shape[1]],
    "at an extremum": lambda x, rows, many: x[:, 0].gather(1, x[:, 0].argmax(-1, keepdim=True)),
    "reflect": lambda x, rows, many: F.pad(x[None], (2, 1, 0, 3), mode="reflect"),
    "replicate": lambda x, rows, many: F.pad(x, (4, 0), mode="replicate"),
    "circular": lambda x, rows, many: F.pad(x, (1, 3), mode="circular") * 2,
    "reflect around": lambda x, rows, many: F.pad((x * 2).relu(), (1, 1), mode="reflect").neg(),
    "replicate around": lambda x, rows, many: F.pad(x[None].maximum(x[:, :1]), (2, 1, 0, 3), mode="replicate") * 2,
    "circular around": lambda x, rows, many: F.pad(x.abs() / 2, (1, 3), mode="circular") * 4,
    "rows of a sum": lambda x, rows, many: x.minimum(x.flip(-1) * 2)[rows],
    "one_hot": lambda x, rows, many: F.one_hot(rows.long(), x.shape[0]),
}
"""Functions of ``x`` (at least 2, 4, 3), ``rows`` (at least 1, 2; numbers of rows of ``x``) and ``many`` (as x)."""


def read_arguments(
    shape: tuple[int, int, int], rows: tuple[int, int], index: torch.dtype, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(shape).to(dtype),
        integers(0, shape[0], rows, index),
        integers(0, shape[0] * shape[1], shape, index),
    )


READ_SIZES = {"small": ((5, 4, 6), (3, 2)), "smallest": ((2, 4, 3), (1, 2)), "ragged": ((17, 33, 65), (7, 5))}


def read_failures(backend: str, size: str = "ragged", device: str = "cpu") -> Iterator[str | None]:
    """What is wrong of ``READS``, of one of ``READ_SIZES``."""
    index = torch.int32 if size == "smallest" else torch.int64
    dtype = torch.bfloat16 if size == "small" else torch.float32
    yield from compared(READS, read_arguments(*READ_SIZES[size], index, dtype), backend, device)


def empty_failures(backend: str, device: str = "cpu") -> Iterator[str | None]:
    """What is wrong of reads where there is nothing to read."""
    empty = (torch.randn(5, 4, 6), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(5, 0, 6, dtype=torch.int64))
    some = ("embedding", "index_select", "gather", "a vector", "two apart", "merged after", "one_hot")
    yield from compared({name: READS[name] for name in some}, empty, backend, device)


def compared(
    functions: dict[str, Function], arguments: tuple[torch.Tensor, ...], backend: str, device: str
) -> Iterator[str | None]:
    """Several functions in one call, each result as eager torch's on the CPU, to the last bit."""
    there = tuple(argument.to(device) for argument in arguments)
    found = jitgen.jit(lambda *given: tuple(f(*given) for f in functions.values()), backend=backend)(*there)
    for (name, function), ours in zip(functions.items(), found, strict=True):
        got, want = ours.cpu(), function(*arguments)
        exact = "exp" not in function.__code__.co_names
        same = torch.equal(got, want) if exact and got.shape == want.shape else got.shape == want.shape
        same = same and (exact or torch.allclose(got, want, rtol=max(1e-6, torch.finfo(got.dtype).eps)))
        yield None if same and got.dtype == want.dtype else f"{name} of {arguments[0].shape}: {got.shape} {want.shape}"


# ------------------------------------------------------------------------------------------------------------- writes


def few(x: torch.Tensor, at: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ``x``, and values, for as many columns as it has at most."""
    return at[:, : x.shape[1]] % x.shape[0], v[:, : x.shape[1]]


COMBINED: dict[str, tuple[str, Function]] = {
    "scatter_add": ("sum", lambda x, at, v, rows, whole: x.scatter_add(1, at, v)),
    "scatter_add along the first": ("sum", lambda x, at, v, rows, whole: x.scatter_add(0, *few(x, at, v))),
    "scatter by a product": ("prod", lambda x, at, v, rows, whole: x.scatter_reduce(1, at, v, "prod")),
    "index_add": ("sum", lambda x, at, v, rows, whole: x.index_add(0, rows, whole, alpha=2)),
    "index_add along the last": ("sum", lambda x, at, v, rows, whole: x.mT.index_add(1, rows, whole.mT)),
    "index_put": ("sum", lambda x, at, v, rows, whole: x.index_put((rows,), whole, accumulate=True)),
    "index_put of two": ("sum", lambda x, at, v, rows, whole: x.index_put((rows, rows % 2), rows.to(x.dtype), True)),
    "put": ("sum", lambda x, at, v, rows, whole: x.put(at, v, accumulate=True)),
    "mean": ("sum", lambda x, at, v, rows, whole: x.scatter_reduce(1, at, v, "mean", include_self=False)),
    "amax": ("exact", lambda x, at, v, rows, whole: x.scatter_reduce(1, at, v, "amax")),
    "amin of them alone": (
        "exact",
        lambda x, at, v, rows, whole: x.scatter_reduce(1, at, v, "amin", include_self=False),
    ),
    "scatter of a number": ("exact", lambda x, at, v, rows, whole: x.scatter(1, at, 2.5)),
    "index_fill": ("exact", lambda x, at, v, rows, whole: x.index_fill(0, rows - x.shape[0], 7)),
    "computed base": ("exact", lambda x, at, v, rows, whole: (x * 2).scatter(1, at, 1) + 1),
    "twice": ("exact", lambda x, at, v, rows, whole: x.scatter(1, at, 1.0).index_fill(0, rows, 3.0)),
}
"""How results are compared, and functions of ``x`` (n, m), ``at`` (n, k; columns of x), ``v`` (n, k), ``rows`` (r; rows
of x, repeated), ``whole`` (r, m)."""


def write_arguments(n: int, m: int, k: int, r: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    values = ((n, m), (n, k), (r, m))
    x, v, whole = ((torch.randn(shape) * 4).to(dtype) for shape in values)
    return x, integers(0, m, (n, k)), v, integers(0, n, (r,)), whole


WRITE_SIZES = (
    ((6, 8, 5, 7), torch.float32),
    ((1, 3, 9, 1), torch.float64),
    ((33, 70, 65, 40), torch.bfloat16),
    ((4, 5, 0, 0), torch.float32),
)
"""Ragged and degenerate arguments of ``write_arguments``."""


def write_failures(
    backend: str, device: str = "cpu", sizes: Iterable[int] = range(len(WRITE_SIZES))
) -> Iterator[str | None]:
    """What is wrong of ``COMBINED``, with repeated indices; ``sizes``: which of ``WRITE_SIZES``."""
    for number in sizes:
        shape, dtype = WRITE_SIZES[number]
        arguments = write_arguments(*shape, dtype)
        for name, (kind, function) in COMBINED.items():
            yield judged(name, kind, function, arguments, backend, device)


def integer_failures(backend: str, device: str = "cpu") -> Iterator[str | None]:
    """What is wrong of ``COMBINED`` of integers, which wrap."""
    counted = write_arguments(6, 8, 50, 7, torch.int32)
    for name, (_, function) in COMBINED.items():
        if name not in ("computed base", "scatter of a number", "twice", "mean"):
            yield judged(name, "exact", function, counted, backend, device)


SEARCHED = (1025, 3000, 70001)
"""Numbers among which others are looked for: more than each is compared with."""
SEARCHED_DTYPES = (torch.float32, torch.int64, torch.float16)


def search_failures(
    backend: str, device: str = "cpu", sizes: Sequence[int] = SEARCHED, dtypes: Sequence[torch.dtype] = SEARCHED_DTYPES
) -> Iterator[str | None]:
    """What is wrong of positions among sorted numbers, and of membership."""
    for size in sizes:
        for dtype in dtypes:
            numbers = (torch.randn(size) * 900).to(dtype)
            ordered, many = numbers.sort()[0], (torch.randn(70) * 1500).to(dtype)
            edges = [math.nan, math.inf, -math.inf] if dtype.is_floating_point else [2**40, -(2**40)]
            x = torch.cat([ordered[:: size // 40], many, torch.tensor(edges, dtype=dtype)])
            for name, function in SEARCHES.items():
                yield judged(f"{name} of {size}", "exact", function, (x, ordered), backend, device)
            for among in (ordered[:: size // 6], ordered) if dtype.is_floating_point else ():
                with_nan = among.masked_fill(torch.arange(len(among)) * 3 > len(among) * 2, math.nan)
                yield judged(f"NaN among {len(among)}", "exact", SEARCHES["bucketize"], (x, with_nan), backend, device)
        rows = torch.randn(2, 3, size).sort()[0]
        yield judged("rows", "exact", SEARCHES["in rows"], (torch.randn(2, 3, 40), rows), backend, device)


def histogram_failures(backend: str, device: str = "cpu") -> Iterator[str | None]:
    """What is wrong of histograms of numbers at the edges of bins."""
    for bins in (10, 1000, 1024, 1025, 4000):
        for low, high in ((0, bins), (-1, bins + 3)):
            function = functools.partial(torch.histc, bins=bins, min=low, max=high)
            whole = torch.randint(-9, bins + 9, (500,)).float()
            yield judged(f"histc of {bins}", "exact", lambda x, f=function: f(x), (whole,), backend, device)
        # Its distance from -1 is rounded to 2.
        below = torch.tensor([1 - 2**-24, 1.0, -1.0, math.nan])
        function = functools.partial(torch.histc, bins=bins, min=-1, max=1)
        yield judged(f"histc below {bins}", "exact", lambda x, f=function: f(x), (below,), backend, device)


SEARCHES: dict[str, Function] = {
    "bucketize": lambda x, edges: torch.bucketize(x, edges, right=True),
    "in rows": lambda x, edges: torch.searchsorted(edges, x, out_int32=True),
    "isin": lambda x, edges: torch.isin(x, edges.flip(0)),
}


def judged(
    name: str, kind: str, function: Function, arguments: tuple[torch.Tensor, ...], backend: str, device: str
) -> str | None:
    got = jitgen.jit(function, backend=backend)(*(a.to(device) for a in arguments)).cpu()
    if kind == "exact":
        want = function(*arguments)
        return None if torch.equal(got, want) and got.dtype == want.dtype else f"{name} of {arguments[0].shape}"
    wide = [a.double() if a.is_floating_point() else a for a in arguments]
    want = function(*wide)
    # Each element has as many terms as some row of indices has elements, or as there are rows, and the base.
    terms = 2 + max(arguments[1].numel(), arguments[3].numel())
    computed = torch.float64 if arguments[0].dtype == torch.float64 else torch.float32
    magnitude = want.abs() if kind == "prod" else function(*(a.abs() if a.is_floating_point() else a for a in wide))
    allowed = terms * torch.finfo(computed).eps * magnitude
    if arguments[0].dtype != computed:
        allowed = allowed + torch.finfo(arguments[0].dtype).eps * want.abs()
    near = (got.double() - want).abs() <= allowed
    return None if bool(near.all()) and got.dtype == arguments[0].dtype else f"{name} of {arguments[0].shape}"


ASSIGNMENTS: dict[str, Function] = {
    "a row": lambda x, y, i: x.__setitem__(1, y[0, 0]),
    "a block": lambda x, y, i: x.__setitem__((slice(1, 3), slice(None, None, 2), 4), y[1:3, ::2, 0]),
    "a number": lambda x, y, i: x.__setitem__((slice(None), 2), 1.5),
    "everything": lambda x, y, i: x.__setitem__(Ellipsis, y[:1]),
    "rows by a tensor": lambda x, y, i: x.__setitem__(i, 0),
    "a part of a row": lambda x, y, i: x.__setitem__((1, i), y[2, i]),
    "behind a slice": lambda x, y, i: x.__setitem__((slice(1, None), slice(None), i), 7.0),
    "two tensors": lambda x, y, i: x.__setitem__((i, i), y[i, 0]),
    "where a mask is": lambda x, y, i: x.__setitem__(y > 0, -1.0),
    "rows by a mask": lambda x, y, i: x.__setitem__(y[:, 0, 0] > 0, y[0]),
    "behind everything, by a mask": lambda x, y, i: x.__setitem__((slice(None), y[0, :, 0] > 0), 2.0),
    "a mask before a number": lambda x, y, i: x.__setitem__((y[:, :, 0] > 0, 3), 2.5),
    "a mask between a slice and a new dimension": lambda x, y, i: x.__setitem__(
        (slice(1, None), y[0, :, 0] > 0, None, slice(None, None, 2)), y[1:, :1, None, ::2]
    ),
    "a mask behind a number": lambda x, y, i: x.__setitem__((2, Ellipsis, y[0, 0] > 0), y[1, :, :1]),
    "a new dimension": lambda x, y, i: x.__setitem__((None, Ellipsis, 0), 2),
    "one element": lambda x, y, i: x.__setitem__((0, 0, 0), 3),
    "a third": lambda x, y, i: (x.__setitem__(0, y[1]), x.__setitem__((2, 1), 5)),
}
"""Functions that assign to parts of ``x`` (4, 5, 6) from ``y``, alike, at ``i`` (distinct numbers of rows)."""


def _assign_all(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of every function of ``ASSIGNMENTS`` what it makes of a copy of ``x``."""
    made = []
    for function in ASSIGNMENTS.values():
        new = x.clone()
        function(new, y, i)
        made.append(new)
    return tuple(made)


def assignment_failures(backend: str, device: str = "cpu") -> Iterator[str | None]:
    """What is wrong of ``ASSIGNMENTS`` to a tensor of the function."""
    arguments = torch.randn(4, 5, 6), torch.randn(4, 5, 6), torch.tensor([0, -1, 2])
    found = jitgen.jit(_assign_all, backend=backend)(*(a.to(device) for a in arguments))
    for name, got, want in zip(ASSIGNMENTS, found, _assign_all(*arguments), strict=True):
        yield None if torch.equal(got.cpu(), want) else f"{name} to a new tensor"


def update_failures(backend: str, device: str = "cpu") -> Iterator[str | None]:
    """What is wrong of ``ASSIGNMENTS`` to an argument, of two orders of its memory."""
    x, y, i = torch.randn(4, 5, 6), torch.randn(4, 5, 6), torch.tensor([0, -1, 2])
    for (name, function), want in zip(ASSIGNMENTS.items(), _assign_all(x, y, i), strict=True):
        for strides in (lambda t: t, lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)):
            argument = strides(x.clone()).to(device)
            jitgen.jit(lambda x, y, i, function=function: (function(x, y, i), None)[1], backend=backend)(
                argument, y.to(device), i.to(device)
            )
            yield None if torch.equal(argument.cpu(), want) else f"{name} to an argument"
