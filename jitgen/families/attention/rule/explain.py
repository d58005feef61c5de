"""Says in words what masks do to tiles, as far as a kernel knows before it computes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from jitgen.families.attention.rule.bounds import mask_ends, masks_of, tile_ends, told_masks
from jitgen.ir.body import Body, Instruction
from jitgen.ir.ops import INTS


@dataclass(frozen=True)
class Read:
    """Describes an operand of the rule: see ``Operand`` of ``rule/context.py``."""

    index: int
    kind: str
    dtype: str
    pointer: bool

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTS


def told(
    instructions: Sequence[Instruction],
    body: Body,
    kinds: Mapping[int, str] | Sequence[str],
    dialect: str,
    *,
    forward: bool = True,
    bounds_keys: bool = False,
) -> frozenset[int]:
    """Returns the positions of the masks of ``instructions`` by which a kernel of ``dialect`` skips tiles.

    Args:
        kinds: of the operands, by their numbers.
        bounds_keys: whether it reads the keys from the first to the last that masks of keys in memory show.
    """
    reads = [
        Read(i.attr, kinds[i.attr], body.operands[i.attr].dtype, i.op == "load")
        for i in instructions
        if i.op in ("load", "iota")
    ]
    known = tile_ends(reads, dialect, forward=forward)
    return told_masks(instructions, known | mask_ends(reads, ("key",)) if bounds_keys else known)


def words_of(instructions: Sequence[Instruction], skipping: Set[int]) -> str:
    """Says what becomes of tiles that the masks of ``instructions`` hide.

    Args:
        skipping: the positions of those by which tiles are skipped.
    """
    if skipping == masks_of(instructions).keys():
        return "a tile hidden as a whole is skipped, an open one has no mask code"
    if skipping:
        return "a tile that some of them hide as a whole is skipped"
    return "no tile is skipped, as mask values are not known before one is computed"
