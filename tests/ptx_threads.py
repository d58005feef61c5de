"""Runs the threads of a cluster through a kernel's PTX (``ptx.py``): who initialises, arrives at and waits for what.

All threads are taken together, one array element each; those furthest behind go first. Integers are exact. Numbers of
floating point are not computed (a comparison of two is false), and global memory reads as 0: what threads wait for does
not depend on data. Copies and messages to other blocks are complete at once. ``barriers.py`` judges what is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ptx import Instruction, Program
from ptx_integers import Lanes, width_of
from ptx_registers import PARAMETERS, REMOTE, WARP, Launch, Registers

MAP_BYTES = 128
"""Of a tensor map."""
MOST_TURNS = 1_000_000
"""Turns of a thread or of several together, after which a kernel is taken for one that never ends."""


def _map_number(address: int) -> int:
    """The number of a tensor map: of the parameter that it is, or its own in the struct that is the only parameter."""
    parameter, offset = divmod(address - PARAMETERS, 1 << 32)
    return parameter + offset // MAP_BYTES


class Hang(AssertionError):
    """Threads wait for what never comes."""


@dataclass(frozen=True)
class Arrival:
    """What has arrived at a barrier in one phase: threads, and bytes that were expected and copied."""

    threads: tuple[int, ...]
    expected: int = 0
    copied: int = 0


@dataclass
class Barrier:
    """An mbarrier: ``count`` arrivals complete a phase, once as many bytes were copied as were expected."""

    count: int
    site: tuple[str, int]
    threads: list[int] = field(default_factory=list)
    expected: int = 0
    copied: int = 0
    phases: list[Arrival] = field(default_factory=list)

    def arrival(self) -> Arrival:
        return Arrival(tuple(self.threads), self.expected, self.copied)

    def turn(self) -> bool:
        """Begins the next phase if this one is complete."""
        if len(self.threads) < self.count or self.expected != self.copied:
            return False
        self.phases.append(self.arrival())
        self.threads, self.expected, self.copied = [], 0, 0
        return True


@dataclass
class Named:
    """A barrier of a block by its number; ``rounds`` are the threads that met, and of those the ones that waited."""

    count: int
    site: tuple[str, int]
    threads: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    rounds: list[Arrival] = field(default_factory=list)


class Machine(Registers):
    """The threads of cluster ``number`` of a launch."""

    def __init__(self, program: Program, launch: Launch, number: int = 0):
        super().__init__(program, launch, number)
        count = self.every.size
        self.place = np.zeros(count, dtype=np.int64)
        self.alive = np.ones(count, dtype=bool)
        self.waits = np.zeros(count, dtype=bool)
        # By thread: the key of an mbarrier, ("cluster", round), or words and the place in the source.
        self.waits_for: dict[int, tuple[Any, Any]] = {}
        # Of each thread, what stands for the phases that it has waited for, in order. A cluster's blocks are alike.
        self.history = [0] * count
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.named: dict[tuple[int, int], Named] = {}
        self.cluster_arrivals = np.zeros(count, dtype=np.int64)  # of each thread
        self.cluster_waits = np.zeros(count, dtype=np.int64)
        self.meeting: dict[tuple[int, Any], set[int]] = {}

    # ------------------------------------------------------------------------------------------------------- a turn

    def run(self) -> None:
        """Runs all threads to their ends.

        Raises:
            Hang: some wait for what the others, which have ended or wait too, do not do any more.
        """
        for _ in range(MOST_TURNS):
            ready = self.alive & ~self.waits
            if not ready.any():
                if self.alive.any():
                    raise Hang("threads wait for what never comes")
                return
            places = self.place[ready]
            first = int(places.min())
            behind = places[places > first]
            lanes = np.flatnonzero(ready & (self.place == first))
            self._advance(lanes, first, int(behind.min()) if behind.size else len(self.program.instructions))
        raise Hang(f"threads do not end within {MOST_TURNS} turns")

    def _advance(self, lanes: Lanes, at: int, end: int) -> None:
        """Takes threads that are at one place on, up to ``end`` or to where they part or wait."""
        while at < len(self.program.instructions):
            instruction = self.program.instructions[at]
            chosen = lanes
            if instruction.guard:
                holds = self.value(instruction.guard, lanes).astype(bool) ^ instruction.negated
                chosen = lanes[holds]
            control = getattr(self, f"_do_{instruction.name[0]}", None)
            if control is not None:
                self.place[lanes] = at + 1
                if chosen.size:
                    control(instruction, chosen, at)
                return
            if chosen.size:
                self.compute(instruction, chosen)
            at += 1
            self.place[lanes] = at
            if at == end:
                return
        self._end(lanes)

    # ------------------------------------------------------------------------------------------ branches and barriers

    def _do_bra(self, instruction: Instruction, lanes: Lanes, at: int) -> None:
        self.place[lanes] = self.program.labels[instruction.operands[-1]]

    def _do_ret(self, instruction: Instruction, lanes: Lanes, at: int) -> None:
        self._end(lanes)

    _do_exit = _do_ret

    def _do_trap(self, instruction: Instruction, lanes: Lanes, at: int) -> None:
        raise Hang(f"a trap at {instruction.place}")

    def _end(self, lanes: Lanes) -> None:
        self.alive[lanes] = False
        for key in list(self.meeting):
            self._meet(key)
        for key in list(self.named):
            self._turn_named(key)
        self._turn_cluster()

    def _do_mbarrier(self, instruction: Instruction, lanes: Lanes, at: int) -> None:
        verb, remote = instruction.name[1], "shared::cluster" in instruction.name
        operands = instruction.operands
        address = self.address(next(operand for operand in operands if operand.startswith("[")), lanes)
        takes_number = verb in ("init", "expect_tx") or "expect_tx" in instruction.name
        numbers = (
            self.value(operands[2 if "wait" in verb else -1], lanes) if takes_number or "wait" in verb else address
        )
        for lane, where, number in zip(lanes.tolist(), address.tolist(), numbers.tolist(), strict=True):
            key = self.of_block(lane, where, remote)
            if verb == "init":
                if key in self.barriers and self.barriers[key].phases:
                    raise Hang(f"a barrier that is in use is initialised again at {instruction.place}")
                self.barriers[key] = Barrier(number, instruction.site)
                continue
            if verb == "inval":
                continue
            barrier = self._found(key, instruction)
            if verb == "arrive":
                if "expect_tx" in instruction.name:
                    barrier.expected += number
                elif len(operands) > 2:
                    raise NotImplementedError(f"arrivals by the number at {instruction.place}")
                barrier.threads.append(lane)
                self._wake(key)
            elif verb == "expect_tx":
                barrier.expected += number
            elif verb in ("try_wait", "test_wait"):
                done = len(barrier.phases) % 2 != number
                self.register(operands[0])[lane] = done
                if done:
                    self.history[lane] = hash((self.history[lane], key[1], len(barrier.phases)))
                else:
                    self.place[lane] = at
                    self._wait(lane, key)
            else:
                raise NotImplementedError(".".join(instruction.name))

    def _found(self, key: tuple[int, int], instruction: Instruction) -> Barrier:
        if key not in self.barriers:
            raise Hang(f"{'.'.join(instruction.name)} of what no thread has initialised at {instruction.place}")
        return self.barriers[key]

    def _wait(self, lane: int, reason: tuple[Any, Any]) -> None:
        self.waits[lane] = True
        self.waits_for[lane] = reason

    def _wake(self, key: tuple[int, int]) -> None:
        if self.barriers[key].turn():
            for lane, reason in list(self.waits_for.items()):
                if reason == key and self.waits[lane]:
                    self.waits[lane] = False
                    del self.waits_for[lane]

    def _copied(self, instruction: Instruction, lane: int, where: int, count: int) -> None:
        key = self.of_block(lane, where, True)
        self._found(key, instruction).copied += count
        self._wake(key)

    def _do_cp(self, instruction: Instruction, lanes: Lanes, at: int) -> None:
        name, operands = instruction.name, instruction.operands
        if "arrive" in name:  # cp.async.mbarrier.arrive.noinc
            for lane, where in zip(lanes.tolist(), self.address(operands[0], lanes).tolist(), strict=True):
                key = self.of_block(lane, where, False)
                self._found(key, instruction).threads.append(lane)
                self._wake(key)
            return
        tensor = "tensor" in name
        barrier = self.address(operands[2 if tensor else 3], lanes)
        counts = self.value(operands[1].strip("[] ").split(",")[0] if tensor else operands[2], lanes)
        blocks = self.value(operands[3], lanes) if "multicast::cluster" in name else None
        for number, (lane, where, count) in enumerate(
            zip(lanes.tolist(), barrier.tolist(), counts.tolist(), strict=True)
        ):
            copied = self.launch.copies[_map_number(count)] if tensor else count
            if blocks is None:
                self._copied(instruction, lane, where, copied)
                continue
            for rank in range(self.launch.cluster):
                if int(blocks[number]) >> rank & 1:
                    self._copied(instruction, lane, (rank + 1 << REMOTE) + (where & (1 << REMOTE) - 1), copied)

    def _do_bar(self, instruction: Instruction, lanes: Lanes, at: int) -> None:
        if instruction.name[1] == "warp":
            self._gather(("warp",), instruction, lanes)
            return
        if instruction.name[1] == "cluster":
            self._cluster(instruction, lanes)
            return
        numbers = self.value(instruction.operands[0], lanes)
        counts = self.value(instruction.operands[1], lanes) if len(instruction.operands) > 1 else None
        for position, lane in enumerate(lanes.tolist()):
            key = int(self.block[lane]), int(numbers[position])
            count = int(counts[position]) if counts is not None else 0
            found = self.named.setdefault(key, Named(count, instruction.site))
            if not found.threads:
                found.site = instruction.site
            if found.count != count:  # in an earlier round too: some threads may still be there when others come
                raise Hang(
                    f"threads meet at barrier {key[1]} with counts {found.count} and {count}: {instruction.place}"
                )
            found.threads.append(lane)
            if instruction.name[1] != "arrive":
                found.waiting.append(lane)
                self._wait(lane, (f"barrier {key[1]} among {count or 'all'} threads", instruction.site))
            self._turn_named(key)

    _do_barrier = _do_bar

    def _turn_named(self, key: tuple[int, int]) -> None:
        found = self.named[key]
        expected = found.count or int((self.alive & (self.block == key[0])).sum())
        if found.threads and len(found.threads) >= expected:
            found.rounds.append(Arrival(tuple(found.threads)))
            for lane in found.waiting:
                self.waits[lane] = False
                self.waits_for.pop(lane, None)
            found.threads, found.waiting = [], []

    def _cluster(self, instruction: Instruction, lanes: Lanes) -> None:
        arrives = instruction.name[2] == "arrive"
        if (self.cluster_arrivals[lanes] - self.cluster_waits[lanes] != int(not arrives)).any():
            raise Hang(f"a thread {instruction.name[2]}s twice at the cluster's barrier at {instruction.place}")
        (self.cluster_arrivals if arrives else self.cluster_waits)[lanes] += 1
        if not arrives:
            for lane in lanes.tolist():
                self._wait(lane, ("cluster", int(self.cluster_arrivals[lane])))
        self._turn_cluster()

    def _turn_cluster(self) -> None:
        come = int(self.cluster_arrivals[self.alive].min()) if self.alive.any() else 0
        for lane, reason in list(self.waits_for.items()):
            if reason[0] == "cluster" and reason[1] <= come:
                self.waits[lane] = False
                del self.waits_for[lane]

    def _do_st(self, instruction: Instruction, lanes: Lanes, at: int) -> None:
        name, operands = instruction.name, instruction.operands
        if name[1] != "async":
            self.store(instruction, lanes)
            return
        # A message to a block of the cluster, whose barrier counts its bytes.
        count = width_of(name[-1]) // 8 * len(operands[1].split(","))
        for lane, barrier in zip(lanes.tolist(), self.address(operands[2], lanes).tolist(), strict=True):
            self._copied(instruction, lane, barrier, count)

    def _do_red(self, instruction: Instruction, lanes: Lanes, at: int) -> None:
        raise NotImplementedError(".".join(instruction.name))

    # ---------------------------------------------------------------------------------------------------- whole warps

    def _gather(self, what: tuple[Any, ...], instruction: Instruction, lanes: Lanes) -> None:
        """Holds ``lanes`` until all of their warps are here."""
        warps: dict[int, list[int]] = {}
        for lane in lanes.tolist():
            warps.setdefault(lane // WARP, []).append(lane)
        for warp, here in warps.items():
            if len(here) == WARP and what == ("warp",):
                continue
            self.meeting.setdefault((warp, what), set()).update(here)
            for lane in here:
                self._wait(lane, ("the rest of its warp", instruction.site))
            self._meet((warp, what))

    def _meet(self, key: tuple[int, Any]) -> None:
        warp, what = key
        all_lanes = {int(lane) for lane in self.every[warp * WARP : (warp + 1) * WARP] if self.alive[lane]}
        here = self.meeting[key]
        if not all_lanes or not all_lanes <= here:
            return
        del self.meeting[key]
        lanes = np.array(sorted(here))
        if len(what) > 1:
            self._exchange(what[1], lanes)
        for lane in here:
            self.waits[lane] = False
            self.waits_for.pop(lane, None)

    def _do_shfl(self, instruction: Instruction, lanes: Lanes, at: int) -> None:
        self._gather(("exchange", instruction), instruction, lanes)

    _do_vote = _do_shfl
    _do_elect = _do_shfl
    _do_redux = _do_shfl
    _do_match = _do_shfl

    def _exchange(self, instruction: Instruction, lanes: Lanes) -> None:
        name, operands = instruction.name, instruction.operands
        targets = operands[0].split("|")
        if name[0] == "vote":
            holds = self.value(operands[1], lanes).astype(bool)
            ballot = sum(1 << int(lane) % WARP for lane in lanes[holds])
            found = {"ballot": ballot, "any": int(holds.any()), "all": int(holds.all())}[name[2]]
            self.write(targets[0], lanes, np.full(lanes.size, found, dtype=np.uint64), 32)
        elif name[0] == "shfl":
            values = np.zeros(WARP, dtype=np.uint64)
            values[lanes % WARP] = self.value(operands[1], lanes)
            steps, clamp = self.value(operands[2], lanes).astype(np.int64), self.value(operands[3], lanes)
            segment = clamp.astype(np.int64) >> 8 & 31
            lane, first = lanes % WARP, lanes % WARP & segment
            last = first | (clamp.astype(np.int64) & 31 & ~segment)
            source = {
                "idx": first | (steps & 31 & ~segment),
                "up": lane - steps,
                "down": lane + steps,
                "bfly": lane ^ steps,
            }[name[2]]
            fits = source >= last if name[2] == "up" else source <= last
            source = np.where(fits, source, lane)
            self.write(targets[0], lanes, values[source % WARP], 32)
            if len(targets) > 1:
                self.write(targets[1], lanes, fits.astype(np.uint64), 1)
        elif name[0] == "elect":
            self.write(targets[1], lanes, (lanes == lanes.min()).astype(np.uint64), 1)
        else:
            raise NotImplementedError(".".join(name))
