"""Kernels bound by memory, beside a copy of as many bytes, eager torch and torch.compile.

Outputs are given by the caller on every side, and hold NaN before the first call, so that what is not written shows.
Eager torch is written as one would by hand, with ``out=`` and in place; where a function has no such form (RoPE, the
norms), it allocates. torch.compile gets the function with ``out.copy_(...)`` around it, which it fuses.
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
from jitgen.bench.measurement import Bench, Measurement, relative_error
from jitgen.bench.timing import medians
from jitgen.spec import dtype_name

Result = torch.Tensor | tuple[torch.Tensor, ...]

CHECKED = 2**20
"""Elements per place (head, middle, tail) compared with float64."""
COPIED = 2**29
"""The most bytes that one copy, the peer, reads and writes together. Longer ones are not faster, and torch's of float32
can be slower: on an H200 1.2 GB moved at 2.7 TB/s, and 0.5 GB at 4.2."""
WHOLE = 4096
"""Elements of which a copy takes a multiple: of other counts torch's own does not move whole vectors."""


@dataclass(frozen=True)
class Case:
    """One function and its inputs.

    Attributes:
        name: what the table calls it.
        function: plain torch; also what the float64 reference runs.
        eager: the same written by hand for eager torch: ``(*inputs, out)``, where ``out`` is what ``function`` returns,
            a tensor or a tuple of them.
        inputs: ``(elements, dtype, device) -> tensors``, of fresh random numbers; the function maps rows of their first
            dimension to rows, so that a part can be checked by itself.
        dtypes: to measure it in.
        flops: per element of the output, where that is worth telling.
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
    """Two vectors whose length is a multiple of nothing."""
    return tuple(torch.randn(elements - 5, dtype=dtype, device=device) for _ in range(2))


def rope_inputs(elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Queries of 32 heads of 128, and the tables of cosines and sines for their positions."""
    tokens = max(1, elements // (32 * 128))
    angles = torch.rand(tokens, 1, 64, device=device).repeat(1, 1, 2) * 6.28
    queries = torch.randn(tokens, 32, 128, dtype=dtype, device=device)
    return queries, angles.cos().to(dtype), angles.sin().to(dtype)


def swiglu_inputs(elements: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Gate and up side by side, as the fused projection of an 8B model gives them."""
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
            yield from measure(case, dtype, bench, group)


def measure(case: Case, dtype: torch.dtype, bench: Bench, group: str) -> Iterator[Measurement]:
    """One measurement for each backend; all of them, and the peers, timed in turn."""
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
    subjects["eager"] = eager if bench.device == "cpu" else keeping(eager)
    notes = []
    if bench.compile_peer:
        try:
            subjects["torch.compile"] = compiled(case.function, sets, outs)
        except Exception as error:  # a peer that does not work here is told of, and not measured
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
    """As many bytes in every dtype: ``bench.elements`` is of float32."""
    return bench.elements * 4 // dtype.itemsize


def _tuple(result: Result) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _one(results: tuple[torch.Tensor, ...]) -> Result:
    """As a function returns them and ``out=`` takes them: one by itself."""
    return results[0] if len(results) == 1 else results


def one_set(case: Case, dtype: torch.dtype, bench: Bench) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Inputs, and the memory of their results, which holds NaN, or the lowest integer."""
    inputs = case.inputs(_elements(bench, dtype), dtype, bench.device)
    results = _tuple(case.function(*(tensor.to("meta") for tensor in inputs)))
    return inputs, tuple(torch.full(r.shape, _unwritten(r.dtype), dtype=r.dtype, device=bench.device) for r in results)


def _unwritten(dtype: torch.dtype) -> float:
    """What no result is."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def keeping(calls: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """The calls, each holding its result until it runs again: what they allocate goes round as given buffers do.

    In a graph each would else be given the memory of the one before, which a GPU's cache still holds.
    """
    kept: list[Any] = [None] * len(calls)

    def keep(place: int) -> None:
        kept[place] = calls[place]()

    return [partial(keep, place) for place in range(len(calls))]


def _bytes(tensor: torch.Tensor) -> int:
    """What must be moved for it: a vector spread over rows is read once, and then from the cache."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def buffer_sets(moved: int, bench: Bench) -> int:
    """How many sets of buffers, of ``moved`` bytes each, calls go round.

    On a GPU two at least, and as many as lie over four times its L2 together. On the CPU, where each call is timed by
    itself and each tensor lies over four times the cache, one.
    """
    return 1 if bench.device == "cpu" else max(2, 4 * bench.elements // moved + 1)


def copied_elements(moved: int, dtype: torch.dtype) -> int:
    """How many elements a copy takes to read and write about ``moved`` bytes together, ``COPIED`` at most.

    The time of the copy is then scaled to ``moved`` bytes.
    """
    count = min(moved, COPIED) // (2 * dtype.itemsize)
    return max(1, -(-count // WHOLE)) * WHOLE


def _copies(count: int, dtype: torch.dtype, bench: Bench) -> list[Callable[[], Any]]:
    """copy_ calls of ``count`` elements."""
    number = buffer_sets(2 * count * dtype.itemsize, bench)
    sources = [torch.randn(count, dtype=dtype, device=bench.device) for _ in range(number)]
    return [partial(torch.full_like(source, torch.nan).copy_, source) for source in sources]


def compiled(
    function: Callable[..., Result], sets: Any, outs: Any, backend: Any = "inductor"
) -> list[Callable[[], Any]]:
    number = len(outs[0])

    def write(*tensors: torch.Tensor) -> None:
        for out, result in zip(tensors[:number], _tuple(function(*tensors[number:])), strict=True):
            out.copy_(result)

    torch._dynamo.reset()  # every case is the same code object to Dynamo, which recompiles only so often
    written = torch.compile(write, backend=backend, dynamic=False, fullgraph=True)
    written(*outs[0], *sets[0])
    return [partial(written, *out, *inputs) for inputs, out in zip(sets, outs, strict=True)]


def _error(case: Case, inputs: tuple[torch.Tensor, ...], outs: tuple[torch.Tensor, ...]) -> float:
    """Against float64, at the head, in the middle and at the tail; NaN if any element of all was left unwritten.

    The worst of all ``outs``.
    """
    if any(bool(out.isnan().any()) for out in outs):
        return float("nan")
    rows = inputs[0].shape[0]
    count = min(rows, max(1, CHECKED * rows // inputs[0].numel()))
    worst = 0.0
    for start in {0, (rows - count) // 2, rows - count}:
        part = slice(start, start + count)
        exact = (t[part].double() if t.is_floating_point() else t[part] for t in inputs)
        references = _tuple(case.function(*exact))
        for out, reference in zip(outs, references, strict=True):
            worst = max(worst, relative_error(out[part], reference))
    return worst
