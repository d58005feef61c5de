"""Caches of keys and values, and packed sequences, in Triton against float64 torch, under Triton's interpreter.

``tests/unit/test_caches_triton.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import jitgen
from jitgen.nn import KVCache, PagedKVCache, functional
from tests.attention import failure, sample
from tests.caches import DEPTH, GROUPS, attention, bound
from tests.interpreter import Check, serve

CHECKS: dict[str, Check] = {}
BATCH, HEADS = 2, 2


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def filled(cache: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    new = [sample((BATCH, HEADS, tokens, DEPTH), seed=n) for n in (1, 2)]
    cache.append(*new)
    return new[0], new[1]


@check
def appends_and_reads() -> Iterator[str | None]:
    table = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:26].view(BATCH, 13)
    for dtype in (torch.float32, torch.int8):
        contiguous = KVCache(BATCH, HEADS, 37, DEPTH, dtype=dtype, backend="triton")
        paged = PagedKVCache(BATCH, HEADS, 40, 3, 13, DEPTH, dtype=dtype, backend="triton")
        paged.table.copy_(table)
        for cache in (contiguous, paged):
            k, v = filled(cache, 37)
            for first, rows in ((0, 1), (16, 3), (34, 3)):
                cache.lengths.copy_(torch.tensor([first, 34 - first]))
                q = sample((BATCH, GROUPS * HEADS, rows, DEPTH), seed=first)
                found, wanted = cache.attend(q), attention(q, k, v, cache.lengths, 99)
                if dtype == torch.float32:
                    yield failure(found, wanted, q, *(x.repeat_interleave(GROUPS, 1) for x in (k, v)))
                else:
                    yield None if (found.double() - wanted).abs().amax() <= bound(dtype, q, k, v) else "codes"


@check
def ring() -> Iterator[str | None]:
    cache = KVCache(BATCH, HEADS, 0, DEPTH, window=8, tokens=5, backend="triton")
    k, v = torch.zeros(2, BATCH, HEADS, 0, DEPTH)
    for number, tokens in enumerate((5, 1, 5, 1, 5)):
        new = [sample((BATCH, HEADS, tokens, DEPTH), seed=17 * number + n) for n in (1, 2)]
        q = sample((BATCH, GROUPS * HEADS, tokens, DEPTH), seed=17 * number)
        k, v = torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)
        cache.append(*new)
        wanted = attention(q, k, v, cache.lengths, 8)
        yield failure(cache.attend(q), wanted, q, *(x.repeat_interleave(GROUPS, 1) for x in (k, v)))
        cache.advance(tokens)


@check
def ranges_share_the_keys_that_are_there() -> Iterator[str | None]:
    cache = KVCache(BATCH, HEADS, 700, DEPTH, backend="triton")
    k, v = filled(cache, 700)
    for lengths in ([0, 699], [63, 64], [65, 128], [511, 3]):
        cache.lengths.copy_(torch.tensor(lengths))
        q = sample((BATCH, GROUPS * HEADS, 1, DEPTH), seed=lengths[0])
        wanted = attention(q, k, v, cache.lengths, 999)
        yield failure(cache.attend(q), wanted, q, *(x.repeat_interleave(GROUPS, 1) for x in (k, v)))


@check
def documents_skip_tiles() -> Iterator[str | None]:
    compiled = jitgen.jit(functional.attend_varlen, backend="triton")
    for rows, keys in (((40, 0, 70), (90, 3, 64)), ((1, 65), (128, 65))):
        cu_q, cu_k = (torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()]) for x in (rows, keys))
        q, k, v = (sample((sum(n), h, DEPTH), seed=s) for s, (n, h) in enumerate(((rows, 4), (keys, 2), (keys, 2))))
        for causal in (False, True):
            found = compiled(q, k, v, cu_q, cu_k, causal)
            wanted = functional.attend_varlen(q.double(), k.double(), v.double(), cu_q, cu_k, causal)
            a, b, c = (x.transpose(0, 1) for x in (q, k, v))
            b, c = (x.repeat_interleave(GROUPS, 0) for x in (b, c))
            yield failure(found.transpose(0, 1), wanted.transpose(0, 1), a, b, c)
    # Sequences that have blocks of rows and tiles of keys of their own: what another one has does not reach a result.
    cu = torch.tensor([0, 128, 168])
    q, k, v = sample((168, 4, DEPTH)), sample((168, 2, DEPTH), seed=1), sample((168, 2, DEPTH), seed=2)
    found = compiled(q, k, v, cu, cu, True)
    for other, own in ((slice(0, 128), slice(128, 168)), (slice(128, 168), slice(0, 128))):
        poisoned = v.clone()
        poisoned[other] = float("nan")
        same = torch.equal(compiled(q, k, poisoned, cu, cu, True)[own], found[own])
        yield None if same else "other sequences are read"


if __name__ == "__main__":
    serve(CHECKS)
