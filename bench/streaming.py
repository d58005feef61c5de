"""Kernels bound by memory, compared with a copy of as many bytes, eager torch and torch.compile.

All subjects write to outputs that the caller owns. These contain NaN before the first call, so that elements which are
not written are noticed. Eager torch is written as one would by hand, with ``out=`` and in place; where a function has
no such form (RoPE, the norms), it allocates. torch.compile compiles the function together with ``out.copy_(...)``,
which it fuses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import Bench, Measurement, attempted, relative_error
from bench.timing import medians
from jitgen.spec import dtype_name

Result = torch.Tensor | tuple[torch.Tensor, ...]

CHECKED = 2**20
"""The number of elements compared with float64 at the head, in the middle and at the tail of an output."""
COPIED = 2**29
"""The most bytes that one call of the peer ``copy_`` reads and writes in all. Longer copies are not faster, and those
of float32 can be slower: on an H200, 1.2 GB moved at 2.7 TB/s and 0.5 GB at 4.2 TB/s."""
MOST_SETS = 64
"""The most sets of buffers that calls cycle through."""
WHOLE = 4096
"""The number of elements of a copy is a multiple of this; for other numbers torch does not move whole vectors."""


@dataclass(frozen=True)
class Case:
    """One function and its inputs.

    Attributes:
        name: the name in tables.
        function: plain torch; the float64 reference runs it as well.
        eager: the same as written by hand for eager torch, ``(*inputs, out)``, where ``out`` is like the result of
            ``function``: a tensor or a tuple of tensors.
        inputs: ``(elements, dtype, device) -> tensors`` of fresh random numbers. The function maps rows of their first
            dimension to rows, so that a slice of the rows can be checked by itself.
        dtypes: the dtypes to measure.
        flops: the number of operations for each element of the output; 0 if the table is to show none.
    """

    name: str
    function: Callable[..., Result]
    eager: Callable[..., Any]
    inputs: Callable[[int, torch.dtype, str], tuple[torch.Tensor, ...]]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    flops: int = 0


# ----------------------------------------------------------------------------------------------------------- cases


def vector(elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    return (torch.randn(elements, dtype=dtype, device=device),)


def ragged_vectors(elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Two vectors whose length is odd."""
    return tuple(torch.randn(elements - 5, dtype=dtype, device=device) for _ in range(2))


def rope_inputs(elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Queries of 32 heads of 128, and the tables of cosines and sines for their positions."""
    tokens = max(1, elements // (32 * 128))
    angles = torch.rand(tokens, 1, 64, device=device).repeat(1, 1, 2) * 6.28
    queries = torch.randn(tokens, 32, 128, dtype=dtype, device=device)
    return queries, angles.cos().to(dtype), angles.sin().to(dtype)


def swiglu_inputs(elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Gate and up in one tensor, next to each other, as the fused projection of an 8B model returns them."""
    return (torch.randn(max(1, elements // 28672), 28672, dtype=dtype, device=device),)


def double_square(x: torch.Tensor) -> torch.Tensor:
    return (x * x) * (x * x)


def double_square_eager(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, x, out=out).square_()


def chain(x: torch.Tensor) -> torch.Tensor:
    return (x * 1.1 + 0.3).relu() * x - 0.5


def chain_eager(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 1.1, out=out).add_(0.3).relu_().mul_(x).sub_(0.5)


def transcendental_chain(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(torch.exp(-x.abs()) * x + 0.1)


def transcendental_chain_eager(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.abs(x, out=out).neg_().exp_().mul_(x).add_(0.1).sigmoid_()


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def add_eager(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(x, y, out=out)


def rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat((-second, first), -1) * sin


def rope_eager(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    first, second = q.chunk(2, -1)
    torch.mul(q, cos, out=out).addcmul_(torch.cat((-second, first), -1), sin)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_eager(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    gate, up = gate_up.chunk(2, -1)
    torch.mul(F.silu(gate), up, out=out)


CASES = (
    Case("double square", double_square, double_square_eager, vector),
    Case("chain of five", chain, chain_eager, vector),
    Case("transcendental chain", transcendental_chain, transcendental_chain_eager, vector),
    Case("ragged add", add, add_eager, ragged_vectors),
    Case("RoPE", rope, rope_eager, rope_inputs, (torch.bfloat16,)),
    Case("SwiGLU", swiglu, swiglu_eager, swiglu_inputs, (torch.bfloat16,)),
)


# ------------------------------------------------------------------------------------------------------- measuring


def run(bench: Bench) -> Iterator[Measurement]:
    return measure_all(CASES, bench, "streaming")


def measure_all(cases: Iterable[Case], bench: Bench, group: str) -> Iterator[Measurement]:
    for case in cases:
        for dtype in case.dtypes:
            yield from attempted(measure(case, dtype, bench, group), bench, group, case.name, dtype_name(dtype))


def measure(case: Case, dtype: torch.dtype, bench: Bench, group: str) -> Iterator[Measurement]:
    """One measurement for each backend. All backends and peers are timed in alternation."""
    inputs, results = one_set(case, dtype, bench)
    moved = sum(map(_bytes, (*inputs, *results)))
    others = [one_set(case, dtype, bench) for _ in range(buffer_sets(moved, bench) - 1)]
    sets, outs = zip((inputs, results), *others, strict=True)
    subjects: dict[str, list[Callable[[], Any]]] = {}
    errors = {}
    for backend in bench.backends:
        plan = jitgen.jit(backend=backend)(case.function).bind(*inputs)
        calls: list[Callable[[], Any]] = [partial(plan, *i, out=_one(o)) for i, o in zip(sets, outs, strict=True)]
        calls[0]()
        errors[backend] = _error(case, inputs, results)
        for out in results:
            out.fill_(_unwritten(out.dtype))
        subjects[backend] = calls
    copied = copied_elements(moved, dtype)
    subjects["copy_"] = _copies(copied, dtype, bench)
    eager: list[Callable[[], Any]] = [partial(case.eager, *i, _one(o)) for i, o in zip(sets, outs, strict=True)]
    subjects["eager"] = eager if bench.device == "cpu" else retaining(eager)
    notes = []
    if bench.compile_peer:
        try:
            subjects["torch.compile"] = compiled(case.function, sets, outs)
        except Exception as error:  # a peer that fails here is reported, not measured
            notes.append(f"torch.compile: {type(error).__name__}: {str(error).splitlines()[0]}")
            print(notes[-1], file=sys.stderr)
    times = medians(subjects, bench.device, bench.budget)
    times["copy_"] *= moved / (2 * copied * dtype.itemsize)
    peers = {name: seconds for name, seconds in times.items() if name not in bench.backends}
    for backend in bench.backends:
        yield Measurement(
            group=group,
            name=case.name,
            device=bench.device,
            backend=backend,
            dtype=dtype_name(dtype),
            shape=tuple(inputs[0].shape),
            seconds={"jitgen": times[backend], **peers},
            error=errors[backend],
            moved=moved,
            flops=case.flops * results[0].numel(),
            notes=tuple(notes),
        )


def _elements(bench: Bench, dtype: torch.dtype) -> int:
    """The number of elements of ``dtype`` that take as many bytes as ``bench.elements`` of float32."""
    return bench.elements * 4 // dtype.itemsize


def _tuple(result: Result) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _one(results: tuple[torch.Tensor, ...]) -> Result:
    """The results as a function returns them: a single one is not in a tuple."""
    return results[0] if len(results) == 1 else results


def one_set(case: Case, dtype: torch.dtype, bench: Bench) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The inputs, and outputs filled with NaN or, for integers, the lowest value."""
    inputs = case.inputs(_elements(bench, dtype), dtype, bench.device)
    results = _tuple(case.function(*(tensor.to("meta") for tensor in inputs)))
    return inputs, tuple(torch.full(r.shape, _unwritten(r.dtype), dtype=r.dtype, device=bench.device) for r in results)


def _unwritten(dtype: torch.dtype) -> float:
    """A value that no result has."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def retaining(calls: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """The calls, each of which retains its result until it runs again, so that they cycle through several buffers.

    Otherwise each call of a CUDA graph would allocate the memory of the call before it, which is still in the cache.
    """
    retained: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        retained[index] = calls[index]()

    return [partial(call, index) for index in range(len(calls))]


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes that must be moved for ``tensor``. A vector expanded over rows is read from memory once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def buffer_sets(moved: int, bench: Bench) -> int:
    """The number of sets of buffers, of ``moved`` bytes each, through which calls cycle.

    On a GPU there are at least two, and together they exceed four times its L2 cache. On the CPU there is one, because
    each call is timed by itself and each tensor exceeds four times the cache. Of small cases there are ``MOST_SETS``,
    which all stay in the cache, for every subject.
    """
    return 1 if bench.device == "cpu" else min(MOST_SETS, max(2, 4 * bench.elements // moved + 1))


def copied_elements(moved: int, dtype: torch.dtype) -> int:
    """The number of elements with which a copy reads and writes about ``moved`` bytes in all, ``COPIED`` at most.

    Its time is scaled to ``moved`` bytes.
    """
    count = min(moved, COPIED) // (2 * dtype.itemsize)
    return max(1, -(-count // WHOLE)) * WHOLE


def _copies(count: int, dtype: torch.dtype, bench: Bench) -> list[Callable[[], Any]]:
    """Calls of ``copy_``, of ``count`` elements each."""
    number = buffer_sets(2 * count * dtype.itemsize, bench)
    sources = [torch.randn(count, dtype=dtype, device=bench.device) for _ in range(number)]
    return [partial(torch.full_like(source, torch.nan).copy_, source) for source in sources]


def compiled(
    function: Callable[..., Result], sets: Any, outs: Any, backend: Any = "inductor"
) -> list[Callable[[], Any]]:
    """Calls of ``function`` compiled by torch.compile together with copies of its results to ``outs``."""
    number = len(outs[0])

    def write(*tensors: torch.Tensor) -> None:
        for out, result in zip(tensors[:number], _tuple(function(*tensors[number:])), strict=True):
            out.copy_(result)

    torch._dynamo.reset()  # to Dynamo all cases are one code object, of which it compiles only a few versions
    written = torch.compile(write, backend=backend, dynamic=False, fullgraph=True)
    written(*outs[0], *sets[0])
    return [partial(written, *out, *inputs) for inputs, out in zip(sets, outs, strict=True)]


def _error(case: Case, inputs: tuple[torch.Tensor, ...], outs: tuple[torch.Tensor, ...]) -> float:
    """The largest relative error of ``outs`` against float64, at the head, in the middle and at the tail.

    It is NaN if any element of ``outs`` was not written.
    """
    if any(bool(out.isnan().any()) for out in outs):
        return float("nan")
    length = inputs[0].shape[0]
    count = min(length, max(1, CHECKED * length // inputs[0].numel()))
    worst = 0.0
    for start in {0, (length - count) // 2, length - count}:
        rows = slice(start, start + count)
        exact = (t[rows].double() if t.is_floating_point() else t[rows] for t in inputs)
        references = _tuple(case.function(*exact))
        for out, reference in zip(outs, references, strict=True):
            worst = max(worst, relative_error(out[rows], reference))
    return worst
