"""What the threads of a cluster hold while they go through a kernel's PTX: registers, and shared memory.

Each register is an array with an element for every thread, its bits in 64. Global memory reads as 0, whatever was
written to it; numbers of floating point are 0 too, and a comparison of two is false.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ptx import Instruction, Program
from ptx_integers import GENERIC, Lanes, Values, result, width_of

WARP = 32
SHARED_BYTES = 1 << 18
REMOTE = 24
"""Block r of a cluster has its shared memory at ``r + 1 << REMOTE``, and each block its own at 0 too."""
PARAMETERS = 1 << 60
"""Where parameters are; parameter n at ``n << 32`` from there."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        threads: of a block.
        cluster: its blocks.
        grid: blocks in all.
        values: of integer parameters, by number; of a struct, its bytes as one integer.
        copies: bytes that a copy by each tensor map moves, by the number of its parameter, or its number in a struct.
    """

    threads: int
    cluster: int
    grid: tuple[int, int, int]
    values: Mapping[int, int]
    copies: Mapping[int, int]


class Registers:
    """Registers and shared memory of the threads of cluster ``number`` of a launch."""

    def __init__(self, program: Program, launch: Launch, number: int):
        self.program, self.launch = program, launch
        count = launch.threads * launch.cluster
        self.every = np.arange(count)
        self.block = self.every // launch.threads
        self.registers: dict[str, Values] = {}
        self.memory = np.zeros((launch.cluster, SHARED_BYTES), dtype=np.uint8)
        thread = (self.every % launch.threads).astype(np.uint64)
        x, y, _ = launch.grid
        block = (self.block + number * launch.cluster).astype(np.uint64)
        self.special: dict[str, Values | int] = {
            "%tid.x": thread,
            "%tid.y": 0,
            "%tid.z": 0,
            "%laneid": thread % np.uint64(WARP),
            "%warpid": thread // np.uint64(WARP),
            "%ntid.x": launch.threads,
            "%ntid.y": 1,
            "%ntid.z": 1,
            "%ctaid.x": block % np.uint64(x),
            "%ctaid.y": block // np.uint64(x) % np.uint64(y),
            "%ctaid.z": block // np.uint64(x * y),
            "%nctaid.x": x,
            "%nctaid.y": y,
            "%nctaid.z": launch.grid[2],
            "%cluster_ctarank": self.block.astype(np.uint64),
            "%cluster_nctarank": launch.cluster,
        }
        self.parameters = {name: at for at, (name, _) in enumerate(program.parameters)}

    def value(self, operand: str, lanes: Lanes) -> Values:
        """A register, a number, or the place of a parameter or shared variable, as ``lanes`` see it."""
        if operand in self.special:
            value = self.special[operand]
            return value[lanes] if isinstance(value, np.ndarray) else np.full(lanes.size, value, dtype=np.uint64)
        if operand.startswith("!"):
            return self.value(operand[1:], lanes) ^ np.uint64(1)
        if operand.startswith("%"):
            return self.register(operand)[lanes]
        if operand in self.program.shared:
            number = self.program.shared[operand]
        elif operand in self.parameters:
            number = PARAMETERS + (self.parameters[operand] << 32)
        else:
            number = int(operand.rstrip("U"), 0) if re.fullmatch(r"-?(0[xX][\da-fA-F]+|\d+)U?", operand) else 0
        return np.full(lanes.size, number & (1 << 64) - 1, dtype=np.uint64)

    def write(self, register: str, lanes: Lanes, values: Values, bits: int) -> None:
        if register != "_":
            self.register(register)[lanes] = values & np.uint64((1 << bits) - 1)

    def register(self, name: str) -> Values:
        """What all threads have in a register, which is 0 before it is written."""
        held = self.registers.get(name)
        if held is None:
            held = self.registers[name] = np.zeros(self.every.size, dtype=np.uint64)
        return held

    def compute(self, instruction: Instruction, lanes: Lanes) -> None:
        """Does what writes registers alone."""
        name, operands = instruction.name, instruction.operands
        if instruction.is_float or name[0] == "atom":
            for register in instruction.written:
                self.write(register, lanes, np.zeros(lanes.size, dtype=np.uint64), 64)
            return None
        if name[0] in ("ld", "ldu"):
            return self._load(instruction, lanes)
        if name[0] == "mov" and "{" in "".join(operands):
            return self._pack(operands, width_of(name[-1]), lanes)
        if name[0] == "mapa":
            own = self.value(operands[1], lanes) & np.uint64((1 << REMOTE) - 1)
            rank = self.value(operands[2], lanes) + np.uint64(1)
            return self.write(operands[0], lanes, own | rank << np.uint64(REMOTE), 32)
        values = [self.value(operand, lanes) for operand in operands[1:]]
        found, bits = result(name, values)
        targets = operands[0].split("|")
        self.write(targets[0], lanes, found, bits)
        if len(targets) > 1:
            self.write(targets[1], lanes, found ^ np.uint64(1), 1)
        return None

    def _pack(self, operands: Sequence[str], bits: int, lanes: Lanes) -> None:
        """Puts parts together, or takes a value apart, the lowest first."""
        if operands[0].startswith("{"):
            targets = [part.strip() for part in operands[0].strip("{} ").split(",")]
            value, width = self.value(operands[1], lanes), bits // len(targets)
            for number, target in enumerate(targets):
                self.write(target, lanes, value >> np.uint64(number * width), width)
            return
        parts = [part.strip() for part in operands[1].strip("{} ").split(",")]
        width = bits // len(parts)
        mask = np.uint64((1 << width) - 1)
        found = np.zeros(lanes.size, dtype=np.uint64)
        for number, part in enumerate(parts):
            found |= (self.value(part, lanes) & mask) << np.uint64(number * width)
        self.write(operands[0], lanes, found, bits)

    def of_block(self, lane: int, address: int, remote: bool) -> tuple[int, int]:
        """The block and the offset of an address in shared memory."""
        rank, offset = address >> REMOTE, address & (1 << REMOTE) - 1
        return (rank - 1 if rank and remote else int(self.block[lane])), offset

    def address(self, operand: str, lanes: Lanes) -> Values:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.value(base, lanes) + np.uint64(int(offset or 0) & 0xFFFFFFFFFFFFFFFF)

    def store(self, instruction: Instruction, lanes: Lanes) -> None:
        """Writes to shared memory."""
        name, operands = instruction.name, instruction.operands
        width = width_of(name[-1]) // 8
        values = [self.value(part.strip(), lanes) for part in operands[1].strip("{} ").split(",")]
        for position, (lane, where) in enumerate(zip(lanes, self.address(operands[0], lanes).tolist(), strict=True)):
            block, offset = self.of_block(int(lane), where, "shared::cluster" in name)
            for number, value in enumerate(values):
                data = (int(value[position]) & (1 << 8 * width) - 1).to_bytes(width, "little")
                start = offset + number * width
                self.memory[block, start : start + width] = np.frombuffer(data, dtype=np.uint8)

    def _load(self, instruction: Instruction, lanes: Lanes) -> None:
        name, operands = instruction.name, instruction.operands
        targets = [part.strip() for part in operands[0].strip("{} ").split(",")]
        bits = width_of(name[-1])
        if "param" in name:
            base, _, offset = operands[1].strip("[] ").partition("+")
            number, place = self.parameters.get(base, 0), int(offset or 0)
            if base.startswith("%"):
                number, start = divmod(int(self.value(base, lanes)[0]) - PARAMETERS, 1 << 32)
                place += start
            value = self.launch.values.get(number, 0) >> 8 * place
            for number, target in enumerate(targets):
                own = value >> number * bits & (1 << bits) - 1
                self.write(target, lanes, np.full(lanes.size, own, dtype=np.uint64), bits)
            return
        if "local" in name:
            raise NotImplementedError(f"{'.'.join(name)} at {instruction.place}")
        shared = any("shared" in part for part in name)
        address = self.address(operands[1], lanes)
        for number, target in enumerate(targets):
            found = np.zeros(lanes.size, dtype=np.uint64)
            for position, (lane, where) in enumerate(zip(lanes.tolist(), address.tolist(), strict=True)):
                if shared or (where >= GENERIC and where < PARAMETERS):
                    block, offset = self.of_block(lane, where % GENERIC, "shared::cluster" in name)
                    start = offset + number * bits // 8
                    data = self.memory[block, start : start + bits // 8].tobytes()
                    signed = name[-1].startswith("s")
                    found[position] = int.from_bytes(data, "little", signed=signed) & (1 << 64) - 1
            self.write(target, lanes, found, max(bits, 64 if name[-1].startswith("s") else bits))
