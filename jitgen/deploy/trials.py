"""Runs a recorded program by several schedules: times them in turn, over copies of its inputs that no cache holds, and
says where their results differ."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from jitgen.call.resolver import ResolverOfGraph
from jitgen.call.routing import Routing
from jitgen.call.signature import check
from jitgen.deploy import manifest as manifests
from jitgen.deploy import own_integers, trial_inputs
from jitgen.deploy.manifest import Entry
from jitgen.ir.views import Strided
from jitgen.lowering import Route
from jitgen.runtime.capturing import captured
from jitgen.spec import DTYPES
from jitgen.trace.traced import Traced

ROTATED_BYTES = 2**28
"""Bytes of copies of the inputs, which no second- or last-level cache that is known holds."""
MOST_COPIES = 16
"""Copies of the inputs at most."""
ROUNDS, CAREFUL_ROUNDS = 7, 31
"""Times that each program is timed, and of those that are compared in the end."""
LEAST_SECONDS = 1e-3
"""Seconds that one timing takes at least, so that clocks are exact enough."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far results of two schedules may lie apart, as a share of the largest magnitude, by dtype: they differ in the
order of sums, and in how many bits tensor cores keep of sums of 8-bit floats."""
OTHER_TOLERANCE = 2e-2
"""The same for other floats."""
OTHER_INTEGERS = 1e-2
"""The share of integers that may differ: indices and codes of values that lie next to one another."""

Call = Callable[[], object]
Timer = Callable[[], float]


@dataclass(frozen=True)
class Seconds:
    """Holds the seconds of one call: the median of the rounds, and its quartiles."""

    median: float
    lower: float
    upper: float


class TimeIsOverError(Exception):
    """Says that the time for measurements ended amid those of a program.

    Attributes:
        needs: the seconds that they need in all, by an estimate from those that were taken; 0 where there is none.
    """

    needs = 0.0


class Program:
    """Holds copies of the inputs of a recorded specialisation on a device, to run them until ``ends``, a time of
    ``time.monotonic``: ``calls`` and ``rounds`` raise TimeIsOverError then."""

    def __init__(self, entry: Entry, route: Route, device: torch.device, ends: float = math.inf):
        self._ends, self._started = ends, time.monotonic()
        self._samples, self._expected, self._timing = 0, 0, 0.0
        program = manifests.laid_out_for(entry, route)
        self._graph, self._device = program.graph, device
        self._routing = Routing(entry["name"], entry["backend"], entry["compiler"], entry.get("batch_invariant", False))
        numbers = {name: value for name, value in program.environment.items() if name.startswith("a")}
        self._numbers = [numbers[f"a{index}"] for index in range(len(numbers))]
        specs = [(input, memory.view) for input, memory in zip(self._graph.inputs, program.memory, strict=True)]
        size = sum(_bytes(view, input.dtype) for input, view in specs)
        count = max(2, min(MOST_COPIES, ROTATED_BYTES // max(1, size)))
        generator = torch.Generator(device).manual_seed(0)
        self._copies = [
            [trial_inputs.filled(view, input.dtype, device, generator) for input, view in specs] for _ in range(count)
        ]
        fillers = trial_inputs.fillers(self._graph, program.environment) | own_integers.fillers(entry)
        for number, fill in fillers.items():
            for tensors in self._copies:
                fill(tensors[number], generator)
        self._counters = [
            (tensors[index], tensors[index].clone())
            for index, _ in self._graph.mutated
            for tensors in self._copies
            if self._graph.inputs[index].dtype in trial_inputs.COUNTERS
        ]
        """Integers that calls update, with what they are before: a position that each moves on would leave a cache."""

    def expects(self, samples: int) -> None:
        """Says how many samples the measurements take, from which is estimated what they need."""
        self._expected = samples

    def calls(self) -> list[Call]:
        """Returns a call for each copy of the inputs, by the schedules that are chosen now.

        Raises:
            UnsupportedError: there is no tensor of a kind that the program takes.
        """
        self._check_time()
        bound = None
        made: list[Call] = []
        resolver = ResolverOfGraph(Traced.from_graph(self._graph), self._routing)
        for tensors in self._copies:
            if bound is None:
                bound = resolver.resolve(check(self._routing.name, [*tensors, *self._numbers]))[0]
            arguments = (*tensors, *(tensor.data_ptr() for tensor in tensors), *self._numbers)
            made.append(_call(bound.launch, arguments))
        return made

    def results(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        """Returns what the first of ``calls`` returns, and what its arguments that are updated become. These are then
        as they were."""
        updated = [self._copies[0][index] for index, _ in self._graph.mutated]
        before = [tensor.clone() for tensor in updated]
        with torch.no_grad():
            returned = [leaf for leaf in tree_leaves(calls[0]()) if isinstance(leaf, torch.Tensor)]
            results = [tensor.clone() for tensor in (*returned, *updated)]
            for tensor, values in zip(updated, before, strict=True):
                tensor.copy_(values)
        return results

    def rounds(self, timers: Mapping[int, Timer], careful: bool = False) -> dict[int, Seconds]:
        """Takes the time of ``timers`` in turn; returns the seconds of one call of each."""
        samples: dict[int, list[float]] = {number: [] for number in timers}
        for _ in range(CAREFUL_ROUNDS if careful else ROUNDS):
            for number, timer in timers.items():
                self._check_time()
                started = time.monotonic()
                samples[number].append(timer())
                self._timing += time.monotonic() - started
                self._samples += 1
        return {number: _seconds(values) for number, values in samples.items()}

    def _check_time(self) -> None:
        now = time.monotonic()
        if now >= self._ends:
            error = TimeIsOverError()
            if self._samples:
                error.needs = now - self._started + self._timing / self._samples * (self._expected - self._samples)
            raise error

    def timer(self, calls: Sequence[Call]) -> Timer:
        """Returns a function that makes all ``calls``, and returns the seconds of one."""
        with torch.no_grad():
            return (_graph_timer if self._device.type == "cuda" else _clock_timer)(calls, self._restore)

    def _restore(self) -> None:
        for tensor, before in self._counters:
            tensor.copy_(before)


def difference(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """Returns how ``results`` of one schedule differ from those of another; empty where they may do so."""
    for number, (one, other) in enumerate(zip(results, expected, strict=True)):
        if not one.numel():
            continue
        if not one.is_floating_point():
            share = float((one != other).float().mean())
            if share > OTHER_INTEGERS:
                return f"{share:.1%} of the integers of result {number} are others"
            continue
        wide, reference = one.double(), other.double()
        numbers = reference.isfinite()
        if not torch.equal(wide.isfinite(), numbers):
            return f"result {number} is finite at other elements"
        gap = torch.where(numbers, wide - reference, 0.0).abs().max()
        most = torch.where(numbers, reference, 0.0).abs().max()
        if gap > TOLERANCE.get(one.dtype, OTHER_TOLERANCE) * most:
            return f"result {number} differs by {float(gap):.3g} where numbers are up to {float(most):.3g}"
    return ""


def _call(launch: Any, arguments: tuple[Any, ...]) -> Call:
    return lambda: launch(*arguments)


def _seconds(values: Sequence[float]) -> Seconds:
    lower, median, upper = statistics.quantiles(values, n=4)
    return Seconds(median, lower, upper)


def _graph_timer(calls: Sequence[Call], restore: Callable[[], None]) -> Timer:
    """Returns a function that replays ``calls`` in a CUDA graph after ``restore``, and returns the seconds of one."""
    restore()
    graph = captured(calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timer() -> float:
        restore()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / len(calls)

    timer()
    return timer


def _clock_timer(calls: Sequence[Call], restore: Callable[[], None]) -> Timer:
    """Returns a function that makes as many of ``calls``, one after the other, as ``LEAST_SECONDS`` ask, with
    ``restore`` before each was made again, goes on after them the next time, and returns the seconds of one."""
    endless = itertools.cycle(calls)

    def timed(count: int) -> float:
        seconds = 0.0
        for begin in range(0, count, len(calls)):
            chosen = [next(endless) for _ in range(min(len(calls), count - begin))]
            restore()
            started = time.perf_counter()
            for call in chosen:
                call()
            seconds += time.perf_counter() - started
        return seconds / count

    timed(1)
    count = max(1, round(LEAST_SECONDS / timed(1)))
    return lambda: timed(count)


def _bytes(view: Strided, dtype: str) -> int:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True))
    return max(extent, 0) * DTYPES[dtype].itemsize
