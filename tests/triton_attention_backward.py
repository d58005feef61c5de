"""The backward of attention in Triton against float64 torch, under Triton's interpreter on CPU tensors.

``tests/unit/test_attention_backward_triton.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests import attention_backward as functions
from tests.attention import MASKS, formula, operands, sample
from tests.attention_backward import compared
from tests.interpreter import Check, serve

CHECKS: dict[str, Check] = {}
SLOW = ("every_mask", "rules", "sizes")


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def dtypes() -> Iterator[str | None]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        args = operands((1, 2), 40, 140, 24, 20, dtype)
        yield from compared(formula(["cap"], ["window"]), *args, backend="triton")


@check
def sizes() -> Iterator[str | None]:
    for rows, keys, depth in ((1, 9, 16), (17, 65, 33), (129, 130, 20), (20, 0, 16), (0, 9, 16)):
        yield from compared(functions.sdpa, *operands((3, 2), rows, keys, depth, depth), backend="triton")


@check
def heads_that_share_keys() -> Iterator[str | None]:
    for function in (functions.grouped, functions.repeated):
        q, _, _ = operands((2, 4), 40, 70, 16, 16)
        _, k, v = operands((2, 2), 40, 70, 16, 24)
        yield from compared(function, q, k, v, backend="triton")


@check
def rules() -> Iterator[str | None]:
    q, k, v = operands((2, 3), 40, 50, 16, 16)
    yield from compared(functions.sunk, q, k, v, sample((3,)), backend="triton")
    yield from compared(functions.sloped, q, k, v, sample((3,)).abs(), backend="triton", fused=False)
    yield from compared(functions.biased, q, k, v, sample((3, 40, 50)), backend="triton", fused=False)


@check
def masks() -> Iterator[str | None]:
    shown = sample((40, 50)) > 0
    shown[3] = False  # a row without keys
    q, k, v = operands((2, 3), 40, 50, 16, 16)
    yield from compared(functions.shown, q, k, v, shown, backend="triton")
    ids = torch.arange(140).div(33, rounding_mode="floor").expand(1, 140).contiguous()
    yield from compared(functions.documents, *operands((1, 2), 140, 140, 16, 16), ids, backend="triton", fused=False)


@check
def every_mask() -> Iterator[str | None]:
    for name in MASKS:
        for rows, keys in ((63, 65), (130, 200)):
            yield from compared(formula(["scale"], [name]), *operands((1, 1), rows, keys, 16, 16), backend="triton")


if __name__ == "__main__":
    serve(CHECKS)
