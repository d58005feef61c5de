"""Attention in Triton against float64 torch, under Triton's interpreter on CPU tensors.

``tests/unit/test_attention_triton.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from tests.attention import INF, MASKS, failure, formula, operands, sample
from tests.attention_programs import program
from tests.interpreter import Check, serve

CHECKS: dict[str, Check] = {}
SLOW = ("every_mask_at_the_edges_of_tiles", "random_programs")


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def plain(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


def compared(function: Callable[..., Any], *args: torch.Tensor, kernels: int = 1) -> Iterator[str | None]:
    """What is wrong with the result of ``function``, or with the number of its kernels."""
    compiled = jitgen.jit(function, backend="triton")
    low = compiled.lower(*args)
    yield None if len(low.kernels) == kernels else low.explain()
    wanted = function(*(a.double() if a.is_floating_point() else a for a in args))
    found = compiled(*args)
    # Weights are rounded to 16 bits where the values have these.
    narrow = torch.finfo(found.dtype).eps * args[2].double().abs().amax() if found.element_size() == 2 else 0.0
    error = (found.double() - wanted).abs().nan_to_num()
    exact = failure(found, wanted, *args[:3])
    yield exact if exact and (not narrow or error.max() > 2 * narrow) else None


@check
def dtypes() -> Iterator[str | None]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield from compared(formula(["cap"], ["window"]), *operands((2, 2), 40, 140, 24, 40, dtype))


@check
def sizes() -> Iterator[str | None]:
    edges = ((2, 2, 16), (15, 63, 17), (16, 64, 16), (17, 65, 33), (129, 129, 64))
    for rows, keys, depth in (*edges, (20, 0, 16), (0, 9, 16)):
        yield from compared(plain, *operands((1, 2), rows, keys, depth, depth))


@check
def masks() -> Iterator[str | None]:
    for name in ("causal", "window", "extrema"):
        yield from compared(formula(["distance"], [name]), *operands((1, 2), 70, 150, 16, 16))


@check
def every_mask_at_the_edges_of_tiles() -> Iterator[str | None]:
    for name in MASKS:
        for rows, keys in ((63, 63), (64, 64), (65, 65), (130, 200)):
            yield from compared(formula(["scale"], [name]), *operands((1, 1), rows, keys, 16, 16))


@check
def a_mask_of_a_cache() -> Iterator[str | None]:
    """What it hides before the first key that it shows, and behind the last, is not read: NaN in other tiles."""

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask)

    for rows, keys in ((1, 1300), (20, 300)):
        q, k, v = operands((4, 1), rows, keys, 16, 16)
        mask = torch.zeros(4, 1, 1, keys, dtype=torch.bool)
        ends = ((0, keys // 9), (keys // 2, keys - 1), (0, keys), (5, 5))
        for number, (first, end) in enumerate(ends):
            mask[number, ..., first:end] = True
        wanted, sizes = attend(q.double(), k.double(), v.double(), mask), (q, k.clone(), v.clone())
        for number, (first, end) in enumerate(ends):
            for tensor in (k, v) if first < end else ():
                tensor[number, :, : first // 128 * 128] = torch.nan
                tensor[number, :, -(-end // 128) * 128 :] = torch.nan
        yield failure(jitgen.jit(attend, backend="triton")(q, k, v, mask), wanted, *sizes)


@check
def a_bias_and_rows_without_keys() -> Iterator[str | None]:
    def attend(q: Any, k: Any, v: Any, bias: Any, shown: Any) -> Any:
        return torch.softmax(torch.where(shown, q @ k.transpose(-1, -2) + bias, -INF), -1) @ v

    shown = sample((20, 70)) > 0
    shown[3] = False
    yield from compared(attend, *operands((2, 3), 20, 70, 16, 16), sample((3, 1, 70)), shown)

    def sdpa(q: Any, k: Any, v: Any, shown: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, shown)

    yield from compared(sdpa, *operands((2, 3), 20, 70, 16, 16), shown)


@check
def strides_and_shared_heads() -> Iterator[str | None]:
    packed = sample((2, 33, 3, 4, 16))
    q, k, v = (packed[:, :, number].transpose(1, 2) for number in range(3))
    yield from compared(plain, q, k, v)
    for rows in (2, 33):

        def repeated(q: Any, k: Any, v: Any) -> Any:
            return plain(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))

        compiled = jitgen.jit(repeated, backend="triton")
        found = compiled(q[:, :, :rows], k[:, :2], v[:, :2])
        wide = [each.double() for each in (q[:, :, :rows], k[:, :2], v[:, :2])]
        yield failure(found, repeated(*wide), q, k, v)
        yield None if len(compiled.lower(q[:, :, :rows], k[:, :2], v[:, :2]).kernels) == 1 else "heads are copied"


@check
def split_keys() -> Iterator[str | None]:
    for keys in (600, 4200):
        yield from compared(plain, *operands((1, 2), 3, keys, 16, 24), kernels=2)
    yield from compared(formula([], ["window"]), *operands((1, 2), 3, 600, 16, 24), kernels=2)

    def beside(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.transpose(-1, -2)
        return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)

    q, k, v = operands((1, 2), 3, 600, 16, 24)
    compiled = jitgen.jit(beside, backend="triton")
    found, wanted = compiled(q, k, v), beside(q.double(), k.double(), v.double())
    yield failure(found[0], wanted[0], q, k, v)
    yield None if (found[1].double() - wanted[1]).abs().max() < 1e-5 else "log-sum-exp"
    yield None if torch.equal(found[0], compiled(q, k, v)[0]) else "two calls differ"


@check
def random_programs() -> Iterator[str | None]:
    for seed in range(12):
        yield random_program(seed)


def random_program(seed: int) -> str | None:
    """What is wrong with the result of a program of the grammar in ``tests/attention_programs.py``."""
    drawn = program(seed, (torch.float32, torch.float16))
    q, k, v = drawn.args[:3]
    found = jitgen.jit(drawn.function, backend="triton")(*drawn.args)
    wanted = drawn.function(*(arg.double() if arg.is_floating_point() else arg for arg in drawn.args))
    if isinstance(found, tuple):
        found, wanted = found[0], wanted[0]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    # Keys' factors multiply values there, which are rounded once more than the weights.
    wrong = failure(found, wanted, q, k, v if v.dtype == torch.float32 else 3 * v, rounded=v.dtype != torch.float32)
    return wrong and f"{seed}: {wrong} ({drawn.words})"


if __name__ == "__main__":
    serve(CHECKS)
