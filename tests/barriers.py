"""What a kernel's barriers are initialised for, against the threads that arrive: counted in its PTX, without a card.

``check`` runs a kernel's threads through its PTX (``ptx_threads.py``). It refuses a kernel whose threads hang, and one
in which a barrier counts otherwise than its threads arrive:

- a thread arrives twice in one phase;
- threads that have waited for the same phases arrive in different ones: the count is too small, and some are late;
- the kernel ends within a phase: some threads have arrived, and others that are counted do not;
- bytes are copied that nothing expects, or expected and never copied;
- threads meet at a named barrier with different numbers of threads, be it in different rounds, or not all of a cluster
  meet at its barrier.

A barrier is called what the kernel's source calls it, at the place that initialises it or waits there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ptx import parse, place
from ptx_threads import WARP, Arrival, Barrier, Hang, Launch, Machine

from jitgen.compilers import nvrtc
from jitgen.spec import KernelSource

USES = re.compile(r"\bmbarrier\.|\bbarrier\.cluster|\bbar(rier)?\.(sync|arrive)\s+[^;]*,")


class Miscounted(AssertionError):
    """Threads that arrive at a barrier are not those that it counts."""


def compiled(source: KernelSource) -> str:
    """The PTX of ``source``, with line information, for any chip of its target's kind."""
    flags = [flag for flag in nvrtc._flags(source) if not flag.startswith(("--gpu-arch", "--ptxas"))]
    arch = str(source.target.arch).replace("sm_", "compute_")
    status, log, ptx, _ = nvrtc._run(
        source, "kernel.cu", [f"--gpu-architecture={arch}", "-lineinfo", *flags, *nvrtc._include_paths(source)]
    )
    assert status is None, log
    return ptx.decode()


def check(
    source: KernelSource, launch: Launch, clusters: Sequence[int] = (0,), ptx: str = "", least_phases: int = 0
) -> dict[str, set[str]]:
    """Who arrives at each barrier of a kernel, in words, by the barrier's name.

    Args:
        clusters: those whose threads run.
        ptx: of ``source``; compiled where it is not given.
        least_phases: that every mbarrier goes through; of few, a count that is too small may not show.

    Raises:
        Miscounted: with the kernel, the barrier, and who arrives there.
    """
    program = parse(ptx or compiled(source), source.name)
    lines = _Lines(source)
    found: dict[str, set[str]] = {}
    for cluster in clusters:
        machine = Machine(program, launch, cluster)
        hangs: tuple[str, ...] = ()
        try:
            machine.run()
        except Hang as hang:
            hangs = (f"hangs: {hang}: {_waiting(machine, lines)}",)
        faults = sorted({*_of_mbarriers(machine, lines, not hangs), *_of_named(machine, lines)})
        faults += hangs or _of_cluster(machine)
        if faults:
            raise Miscounted(f"kernel {source.name}: " + "; ".join(faults))
        for barrier in machine.barriers.values():
            assert len(barrier.phases) >= least_phases, f"{lines.name(barrier.site)}: {len(barrier.phases)} phases"
            found.setdefault(lines.name(barrier.site), set()).update(
                f"{barrier.count} of {_words(phase.threads, launch)}" for phase in barrier.phases
            )
        for (_, number), named in machine.named.items():
            found.setdefault(f"barrier {number}", set()).update(
                f"{named.count or launch.threads} of {_words(each.threads, launch)}" for each in named.rounds
            )
    return found


def _of_mbarriers(machine: Machine, lines: _Lines, ended: bool) -> Iterator[str]:
    for barrier in machine.barriers.values():
        name = f"{lines.name(barrier.site)}, initialised for {barrier.count}"
        yield from _of_phases(name, barrier.phases, machine)
        if ended:
            yield from _of_end(name, barrier, machine.launch)


def _of_end(name: str, barrier: Barrier, launch: Launch) -> Iterator[str]:
    last = barrier.arrival()
    missing = barrier.count - len(last.threads)
    if missing < 0:
        yield f"{name}: {len(last.threads)} threads arrive in one phase: {_words(last.threads, launch)}"
    elif last.threads and missing:
        yield f"{name}: the kernel ends when {missing} arrivals are missing beside {_words(last.threads, launch)}"
    # One that is open for messages that nobody sends any more has all of its arrivals, and no byte.
    if last.copied and last.expected != last.copied:
        yield f"{name}: {last.expected} bytes are expected and {last.copied} copied in the last phase"


def _of_named(machine: Machine, lines: _Lines) -> Iterator[str]:
    for (_, number), named in machine.named.items():
        name = f"barrier {number} among {named.count or 'all'} threads ({place(named.site)})"
        yield from _of_phases(name, named.rounds, machine)


def _of_cluster(machine: Machine) -> Iterator[str]:
    arrivals = machine.cluster_arrivals
    few = [int(thread) for thread in (arrivals < arrivals.max()).nonzero()[0]]
    if few:
        yield f"the cluster's barrier: of {arrivals.max()} arrivals fewer come from {_words(few, machine.launch)}"


def _of_phases(name: str, phases: Sequence[Arrival], machine: Machine) -> Iterator[str]:
    arrived: dict[int, list[int]] = {}
    for number, phase in enumerate(phases):
        for thread in phase.threads:
            arrived.setdefault(thread, []).append(number)
    twice = [thread for thread, numbers in arrived.items() if len(set(numbers)) < len(numbers)]
    if twice:
        yield f"{name}: in one phase threads arrive twice: {_words(twice, machine.launch)}"
    roles: dict[tuple[int, int], dict[tuple[int, ...], list[int]]] = {}
    for thread, numbers in arrived.items():
        role = roles.setdefault((machine.history[thread], len(numbers)), {})
        role.setdefault(tuple(numbers), []).append(thread)
    for role in roles.values():
        if len(role) > 1:
            parts = ", then ".join(_words(threads, machine.launch) for _, threads in sorted(role.items())[:3])
            yield f"{name}: threads that wait for the same arrive in different phases: {parts}"


class _Lines:
    """The lines of a source and its headers."""

    def __init__(self, source: KernelSource):
        self.texts: Mapping[str, list[str]] = {
            name.rsplit("/", 1)[-1]: text.splitlines() for name, text in (*source.headers, ("kernel.cu", source.text))
        }

    def name(self, site: tuple[str, int]) -> str:
        """What a barrier is called where it is initialised: the first argument there."""
        file, line = site
        text = self.texts.get(file.rsplit("/", 1)[-1], [])[line - 1 : line]
        match = re.search(r"barrier_init\((.*), [^,]*\);", text[0]) if text else None
        return f"{match[1] if match else 'a barrier'} ({place(site)})"


def _waiting(machine: Machine, lines: _Lines) -> str:
    """Which threads wait for what, where they hang."""
    threads: dict[str, list[int]] = {}
    for thread, reason in sorted(machine.waits_for.items()):
        barrier = machine.barriers.get(reason)
        if barrier is not None:
            come = len(barrier.threads)
            text = f"{lines.name(barrier.site)}, initialised for {barrier.count}, where {come} have arrived"
            if barrier.expected != barrier.copied:
                text += f", and {barrier.copied} of {barrier.expected} bytes"
        else:
            text = "the cluster's barrier" if reason[0] == "cluster" else f"{reason[0]} ({place(reason[1])})"
        threads.setdefault(text, []).append(thread)
    return "; ".join(f"{_words(found, machine.launch)} at {text}" for text, found in threads.items())


def _words(threads: Sequence[int], launch: Launch) -> str:
    """Threads in words: those of each warp, and warps that send the same ones together."""
    lanes: dict[tuple[int, int], list[int]] = {}
    for thread in threads:
        block, own = divmod(thread, launch.threads)
        lanes.setdefault((block, own // WARP), []).append(own % WARP)
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for (block, warp), found in sorted(lanes.items()):
        groups.setdefault((block, tuple(sorted(found))), []).append(warp)
    blocks: dict[str, list[int]] = {}
    for (block, found), warps in groups.items():
        text = f"{_runs('warp', warps)} {'' if len(found) == WARP else _runs('lane', found)}".strip()
        blocks.setdefault(text, []).append(block)
    if launch.cluster == 1:
        return ", ".join(blocks)
    return ", ".join(f"{text} of {_runs('block', whose)}" for text, whose in blocks.items())


def _runs(noun: str, numbers: Sequence[int]) -> str:
    first, last = min(numbers), max(numbers)
    if len(numbers) == 1:
        return f"{noun} {first}"
    if list(numbers) == list(range(first, last + 1)):
        return f"{noun}s {first}-{last}"
    return f"{noun}s {', '.join(map(str, numbers))}"


def altered(source: KernelSource, old: str, new: str) -> KernelSource:
    """``source`` with ``old``, which is once in it or its headers, replaced: a planted fault."""
    texts: list[tuple[str, str]] = [*source.headers, ("", source.text)]
    assert sum(text.count(old) for _, text in texts) == 1, f"{old!r} is not once in {source.name}"
    *headers, (_, text) = [(name, text.replace(old, new)) for name, text in texts]
    return replace(source, headers=tuple(headers), text=text)
