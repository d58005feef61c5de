"""Describes what kernels are made for, as far as a choice may look at it."""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.schedule import chips
from jitgen.schedule.chips import Chip, CpuLevel, Rates
from jitgen.spec import Target

INVARIANT_ROWS = 64
"""The number of rows for which kernels are chosen that must be the same for every number of rows: between a batch of
tokens, which has a few, and a prompt, which has hundreds."""


@dataclass(frozen=True)
class Device:
    """Describes a target, the dialect its kernels are written in, and the chip that is to run them.

    Attributes:
        target: such as ``sm_90a`` or ``x86-64-v4``.
        dialect: ``"cpp"``, ``"cuda"`` or ``"triton"``.
        exact: the chip that a process has found; None where kernels are made for any chip of the target.
        batch_invariant: whether the bits of a row's result must not depend on how many rows a call has.
        has_tensor_maps: whether a launch can pass tensor maps, by which sm_90 copies tiles; a torch operator cannot.
        bounded_waits: whether a wait of a kernel in CUDA C++ ends with an error after 2^34 cycles (``waits.cuh``).
        uses_cutlass: whether products are kernels of CUTLASS, in the dialect ``"cuda"``.
    """

    target: Target
    dialect: str
    exact: Chip | None = None
    batch_invariant: bool = False
    has_tensor_maps: bool = True
    bounded_waits: bool = False
    uses_cutlass: bool = False

    def rows(self, count: int) -> int:
        """Rounds ``count`` rows up to the bucket whose schedule serves it."""
        return INVARIANT_ROWS if self.batch_invariant else count

    @property
    def is_gpu(self) -> bool:
        """Returns whether a launch is a grid of blocks, and a source depends on how wide accesses are."""
        return self.target.kind != "cpu"

    @property
    def overlaps_launches(self) -> bool:
        """Returns whether a kernel may begin before the one ahead of it in the stream has ended."""
        return self.target.overlaps_launches

    @property
    def has_clusters(self) -> bool:
        """Returns whether blocks can form clusters that share their memories: compute capability 9.0 (Hopper) and
        later."""
        return self.target.kind == "cuda" and self.target.capability >= 90

    @property
    def chip(self) -> Chip | None:
        """Returns the exact chip, else the target's default; None for a CPU and for targets without a record."""
        return self.exact or chips.default(self.target)

    @property
    def model(self) -> Chip:
        """Returns the chip by whose record schedules are chosen on a GPU: ``chip``, or the one it is modelled as. It is
        an H200 for targets without a record, and for Triton's interpreter."""
        chip = self.chip
        if chip is None:
            return chips.H200
        return chips.named(chip.modelled_as) if chip.modelled_as else chip

    @property
    def measured_as(self) -> str:
        """Returns what measured choices name as the chip: ``model`` on a GPU, the level of a CPU."""
        return self.model.name if self.is_gpu else self.level.name

    @property
    def level(self) -> CpuLevel:
        """Returns the level of a CPU target."""
        return chips.CPU_LEVELS[self.target.arch]

    @property
    def rates(self) -> Rates:
        """Returns the rates by which plans are compared."""
        return self.model.rates if self.is_gpu else self.level.rates
