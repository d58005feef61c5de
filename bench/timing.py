"""Timing. Subjects are timed in alternation, in many rounds, so that disturbances of the machine affect all alike.

A subject is a sequence of calls that do the same work on different buffers. On the CPU the buffers are larger than the
last-level cache, and each call is timed by itself. On a GPU the calls are captured into one CUDA graph, so that the
figure excludes the host; together they touch more memory than the L2 cache has, so that no call finds the data of the
one before. The graph is replayed once before it is timed. The data that a subject leaves in the cache is then written
to memory within its own time, not the next subject's, and the timed replay is queued before the device could start it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from jitgen.runtime.capturing import captured

Call = Callable[[], object]
Subjects = Mapping[str, Sequence[Call]]

MIN_ROUNDS, MAX_ROUNDS = 5, 101
"""Bounds of the number of times that every subject is timed."""
CALLS_PER_GRAPH = 8
"""The fewest calls that one CUDA graph has."""
AHEAD_CYCLES = 300_000
"""Cycles for which a GPU sleeps before a call that is timed by events."""


def medians(subjects: Subjects, device: str, budget: float) -> dict[str, float]:
    """The median time of one call of each subject, in seconds; timing takes about ``budget`` seconds in all."""
    timers = {name: (_graph_timer if device == "cuda" else _clock_timer)(calls) for name, calls in subjects.items()}
    round_seconds = sum(timer() * CALLS_PER_GRAPH if device == "cuda" else timer() for timer in timers.values())
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget / max(round_seconds, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer())
    return {name: statistics.median(found) for name, found in samples.items()}


def _clock_timer(calls: Sequence[Call]) -> Callable[[], float]:
    """A function that times one call, in seconds, and takes the next call each time."""
    calls[0]()
    index = 0

    def timer() -> float:
        nonlocal index
        call = calls[index % len(calls)]
        index += 1
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return timer


def in_turn(calls: Sequence[Call]) -> list[Call]:
    """The calls of one graph: all of ``calls`` equally often, and ``CALLS_PER_GRAPH`` or more of them."""
    return [*calls] * -(-CALLS_PER_GRAPH // len(calls))


def _graph_timer(calls: Sequence[Call]) -> Callable[[], float]:
    """A function that replays the calls in a CUDA graph and returns the mean time of one, in seconds."""
    repeated = in_turn(calls)
    graph = captured(repeated)
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


def graph_seconds(calls: Sequence[Call]) -> float:
    """The median time of one of ``calls`` in a CUDA graph, in seconds, of as few replays as ``medians`` takes."""
    return medians({"": calls}, "cuda", 0.0)[""]


def event_seconds(call: Call, rounds: int = 8) -> float:
    """The median time of one call on the GPU between two events, in seconds, for what a graph does not capture.

    The device sleeps before each round, so that the host is ahead of it.
    """
    for _ in range(3):
        call()
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(rounds)]
    for start, end in events:
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e-3 for start, end in events)


def wait_for(device: str) -> Callable[[], object]:
    """A function that waits for what ``device`` has still to do."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def wall_seconds(call: Call, device: str, rounds: int) -> float:
    """The median time from a call to the end of its work, in seconds, the host's share included."""
    wait = wait_for(device)
    samples = []
    for _ in range(rounds):
        wait()
        started = time.perf_counter()
        call()
        wait()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def trial(calls: Sequence[Call], device: str, count: int = 3) -> float:
    """The seconds of one call of a subject, roughly: ``count`` calls one after another, the host's share included."""
    wait = wait_for(device)
    calls[0]()
    wait()
    started = time.perf_counter()
    for number in range(count):
        calls[number % len(calls)]()
    wait()
    return (time.perf_counter() - started) / count


def host_medians(subjects: Mapping[str, Call], device: str, calls: int = 500, rounds: int = 15) -> dict[str, float]:
    """The median time that the host spends on one call, in seconds.

    The wait for what a GPU has still to do after the last call is not timed.
    """
    wait = wait_for(device)
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
