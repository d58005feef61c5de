"""Declares the schedules of Triton's products: a class for each form, which ``gemm/triton.py`` explains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jitgen.schedule.declared import DeclaredSchedule, about

LEAST_CODES = 32
"""Extent of K that ``tl.dot`` takes at least where operands have 8 bits (``min_dot_size`` of Triton 3.6)."""


@dataclass(frozen=True)
class TritonMainloop(DeclaredSchedule):
    """Holds what the forms have in common.

    Attributes:
        block_m, block_n: the tile.
        slice_k: extent of K that one ``tl.dot`` reads.
        warps, stages: Triton's ``num_warps`` and ``num_stages``.
        raster: tiles that are walked along M before the next tile along N.
        k_splits: ranges of K whose sums go to a temporary.
        packed: whether codes are decoded with inline PTX.
        decoded: whether codes of 8 bits are multiplied as float16: floats on a target whose tensor cores do not take
            them, and all codes where ``slice_k`` is below ``LEAST_CODES``.
        wide: whether indices are 64-bit.
    """

    form: ClassVar[str]
    sentence = (
        *("{path} mainloop", "tiles of {block_m} x {block_n}, {slice_k} of K a step"),
        *("warps", "stages", "k_splits", "raster", "decoded", "wide"),
    )
    dependent_launch: ClassVar[bool] = True
    block_m: int
    block_n: int
    slice_k: int
    warps: int = field(metadata=about("{} warps a block"))
    stages: int = field(metadata=about("{} stages"))
    raster: int = field(default=1, metadata=about("raster of {} tiles"))
    k_splits: int = field(default=1, metadata=about("split-K by {}"))
    packed: bool = False
    decoded: bool = field(default=False, metadata=about("codes decoded to float16"))
    wide: bool = field(default=False, metadata=about("64-bit indices"))

    @property
    def path(self) -> str:
        return f"{self.form}_packed" if self.packed else self.form

    @property
    def slices(self) -> int:
        """Returns how many dots one iteration computes side by side, each over its own slice of K."""
        return 1

    @property
    def block_k(self) -> int:
        return self.slice_k * self.slices


@dataclass(frozen=True)
class TritonTokens(TritonMainloop):
    """Makes x the left operand of ``tl.dot``."""

    form: ClassVar[str] = "tokens"


@dataclass(frozen=True)
class TritonWeights(TritonMainloop):
    """Makes the weight the left operand of ``tl.dot``."""

    form: ClassVar[str] = "weights"


@dataclass(frozen=True)
class TritonSlices(TritonMainloop):
    """Makes the weight the left operand, and each warp multiply its own slice of an iteration's K."""

    form: ClassVar[str] = "slices"

    @property
    def slices(self) -> int:
        return self.warps
