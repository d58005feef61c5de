"""Shares what the kernels of attention and of its gradients have in common in CUDA: parameters, and runs of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.cuda import CUDA
from jitgen.families.attention.rule.bounds import Words
from jitgen.families.attention.rule.context import Frame, Operand
from jitgen.kernel.printed_entry import map_names

WORDS = Words(
    "false",
    "true",
    "jitgen::lesser",
    "jitgen::greater",
    "jitgen::floor_divide(int64_t({0}), int64_t({1}))",
    CUDA.scalar,
)
RUN = 8
"""Columns of a row of results that one thread computes at a time: 16 bytes of 16-bit elements."""
BATCH_RANK = 3
"""Batch dimensions of a tensor map, which has two more."""


def parameters_of(frame: Frame, copied: Sequence[Operand], wide: bool) -> dict[str, Any]:
    """Builds what the templates read of a kernel alike.

    Args:
        copied: the operands that tensor maps copy, in their order.
        wide: whether indices have 64 bits.
    """
    return {
        "map_names": map_names(str(operand.pointer) for operand in copied),
        "index": "int64_t" if wide else "int32_t",
        "accumulator": frame.accumulator,
        "tasks": frame.tasks,
        "masked": frame.masked,
    }


def coordinates(steps: Sequence[tuple[str, str]]) -> str:
    """Prints the batch coordinates of a tensor map, which has one matrix where a stride is 0.

    Args:
        steps: stride and index of each dimension.
    """
    texts = [f"{stride} != 0 ? int({index}) : 0" for stride, index in steps]
    return ", ".join([*["0"] * (BATCH_RANK - len(texts)), *texts])


def run(operand: Operand, offset: str, step: str, unit: int) -> dict[str, Any]:
    """Describes an operand of results. A thread takes ``RUN`` neighbours of a row, by one access if ``is_vector``.

    Args:
        offset: of the first of them, ``step`` the stride from one to the next.
        unit: what the strides of contiguous operands are multiples of.
    """
    return {
        "index": operand.index,
        "storage": operand.storage,
        "type": operand.type,
        "value": operand.value,
        "pointer": operand.pointer,
        "offset": offset,
        "step": step,
        "is_vector": bool(operand.pointer) and operand.kind == "contiguous" and unit >= RUN,
    }
