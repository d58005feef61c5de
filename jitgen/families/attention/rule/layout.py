"""Kinds and units of strides, as the layouts of attention and of its gradients say them."""

from __future__ import annotations

from jitgen.ir.views import Strided


def free_strides(view: Strided) -> tuple[int, ...]:
    """The strides of ``view``; a dimension of one element has stride 0."""
    return tuple(0 if size == 1 else stride for size, stride in zip(view.sizes, view.strides, strict=True))


def score_kind(by_row: bool, by_key: bool) -> str:
    """The kind of an operand of scores, by what of a tile an element depends on; one of ``context.LEVELS``."""
    return "both" if by_row and by_key else "row" if by_row else "key" if by_key else "task"
