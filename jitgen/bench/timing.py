"""Clocks. Subjects are timed in turn, round after round, so that what disturbs the machine disturbs them alike.

A subject is a sequence of calls that do the same work on different buffers. On the CPU the buffers are larger than
the last-level cache and each call is timed by itself. On a GPU the calls are captured into one CUDA graph, which
leaves the host out of the figure; together they touch more than its L2, so that none finds the last one's data there.
The graph is replayed once before it is timed: what a subject leaves in the cache to be written to memory is its own to
pay for, not the next one's, and the timed replay is queued before it can start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]
Subjects = Mapping[str, Sequence[Call]]

FEWEST_ROUNDS, MOST_ROUNDS = 5, 101
CALLS_PER_GRAPH = 8


def medians(subjects: Subjects, device: str, budget: float) -> dict[str, float]:
    """Median seconds of one call, by subject; ``budget`` is about how many seconds to spend."""
    timers = {name: (_graph_timer if device == "cuda" else _clock_timer)(calls) for name, calls in subjects.items()}
    once = sum(timer() * CALLS_PER_GRAPH if device == "cuda" else timer() for timer in timers.values())
    rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(budget / max(once, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer())
    return {name: statistics.median(found) for name, found in samples.items()}


def _clock_timer(calls: Sequence[Call]) -> Callable[[], float]:
    calls[0]()
    place = 0

    def timer() -> float:
        nonlocal place
        call = calls[place % len(calls)]
        place += 1
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return timer


def in_turn(calls: Sequence[Call]) -> list[Call]:
    """What one graph holds: every call as often as the next, ``CALLS_PER_GRAPH`` at least."""
    return [*calls] * -(-CALLS_PER_GRAPH // len(calls))


def _graph_timer(calls: Sequence[Call]) -> Callable[[], float]:
    repeated = in_turn(calls)
    # Whatever compiles, loads or tunes does so here, on a side stream as capture wants it.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in repeated:
            call()
    graph.replay()
    torch.cuda.synchronize()

    def timer() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / len(repeated)

    return timer


def host_medians(subjects: Mapping[str, Call], device: str, calls: int = 500, rounds: int = 15) -> dict[str, float]:
    """Median seconds the host spends on one call: what a GPU still has to do after the last is waited for untimed."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for call in subjects.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, call in subjects.items():
            wait()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append((time.perf_counter() - started) / calls)
    wait()
    return {name: statistics.median(found) for name, found in samples.items()}
