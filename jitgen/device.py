"""What kernels are made for, as far as a choice may look at it."""

from __future__ import annotations

from dataclasses import dataclass

from jitgen.spec import Target


@dataclass(frozen=True)
class Device:
    """A target, and the dialect its kernels are written in.

    Attributes:
        target: such as ``sm_90a`` or ``x86-64-v4``.
        dialect: ``"cpp"``, ``"cuda"`` or ``"triton"``.
    """

    target: Target
    dialect: str

    @property
    def is_gpu(self) -> bool:
        """Whether a launch is a grid of blocks, and a source depends on how wide accesses are."""
        return self.target.kind != "cpu"

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel may begin before the one ahead of it in the stream has ended."""
        return self.target.overlaps_launches
