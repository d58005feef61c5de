"""Caches of keys and values: appends in place in one kernel, pages, rings and codes, against float64 attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.nn import KVCache, PagedKVCache, functional
from tests.attention import INF, failure, sample
from tests.caches import DEPTH, GROUPS, attention, bound

BATCH, HEADS, PLACES = 2, 2, 37


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def split(qkv: Any) -> tuple[Any, Any, Any]:
    widths = [GROUPS * HEADS * DEPTH, HEADS * DEPTH, HEADS * DEPTH]
    return tuple(x.unflatten(-1, (-1, DEPTH)).transpose(1, 2) for x in qkv.split(widths, -1))


def index_copied(cache: Any, new: Any, at: Any) -> None:
    cache.index_copy_(2, at, new)


def assigned(cache: Any, new: Any, at: Any) -> None:
    cache[:, :, at] = new


def sliced(cache: Any, new: Any, at: int) -> None:
    cache[:, :, at : at + new.shape[2]] = new


def put(cache: Any, new: Any, at: Any) -> None:
    functional.append(cache, new, at)


def by_sequence(cache: Any, new: Any, at: Any) -> None:
    cache[torch.arange(new.shape[0]), :, at] = new[:, :, 0]


FORMS: dict[Callable[..., None], tuple[Any, int, int]] = {
    index_copied: (torch.tensor([5]), 1, 1),
    assigned: (torch.tensor([4, 9, 36]), 3, 2),
    sliced: (7, 3, 1),
    put: (torch.tensor([0, 34]), 3, 1),
    by_sequence: (torch.tensor([3, 36]), 1, 1),
}
"""Ways to write an append, with where, the number of tokens and that of kernels: one more where places may repeat."""


@pytest.mark.quick(where=lambda form: form in (assigned, put))
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_an_append_is_one_kernel_with_rope_and_the_split(form: Callable[..., None]) -> None:
    at, tokens, kernels = FORMS[form]

    def append(qkv: Any, cos: Any, sin: Any, keys: Any, values: Any, at: Any) -> Any:
        q, k, v = split(qkv)
        form(keys, rotated(k, cos, sin), at)
        form(values, v, at)
        return rotated(q, cos, sin)

    compiled = jitgen.jit(append)
    qkv, (cos, sin) = sample((BATCH, tokens, 8 * DEPTH)), (sample((tokens, DEPTH), seed=n) for n in (1, 2))
    ours = [sample((BATCH, HEADS, PLACES, DEPTH), seed=n) for n in (3, 4)]
    theirs = [cache.clone() for cache in ours]
    assert len(compiled.lower(qkv, cos, sin, *ours, at).kernels) == kernels
    found, wanted = compiled(qkv, cos, sin, *ours, at), append(qkv, cos, sin, *theirs, at)
    torch.testing.assert_close([found, *ours], [wanted, *theirs])


def test_of_tokens_with_one_place_the_last_stays() -> None:
    def both(cache: Any, other: Any, new: Any, at: Any) -> None:
        index_copied(cache, new, at)
        index_copied(other, new * 2, at)

    compiled = jitgen.jit(both)
    caches, new = sample((2, BATCH, HEADS, PLACES, DEPTH)), sample((BATCH, HEADS, 5, DEPTH), seed=1)
    wanted, at = caches.clone(), torch.tensor([3, 7, 3, 0, 3])
    assert len(compiled.lower(*caches, new, at).kernels) == 2
    compiled(*caches, new, at)
    for number in range(2):
        wanted[number][:, :, [3, 7, 0]] = new[:, :, [4, 1, 3]] * (number + 1)
    assert torch.equal(caches, wanted)


def test_an_index_out_of_range_is_reported_and_leaves_the_others() -> None:
    compiled = jitgen.jit(lambda cache, new, at: assigned(cache, new, at))
    for at in ([3, PLACES], [-PLACES - 1, 3]):
        cache = torch.zeros(BATCH, HEADS, PLACES, DEPTH)
        with pytest.raises(IndexError, match="out of range"):
            compiled(cache, torch.ones(BATCH, HEADS, 2, DEPTH), torch.tensor(at))
        assert torch.equal(cache.sum((0, 1, 3)).nonzero(), torch.tensor([[3]]))


def test_what_reads_an_argument_before_and_after_its_update() -> None:
    def before(cache: Any, new: Any, at: Any) -> Any:
        old = cache * 2
        functional.append(cache, new, at)
        return old, cache.sum(-1)

    def after(cache: Any, new: Any, at: Any) -> Any:
        functional.append(cache, new, at)
        return cache, cache[:, :, :9] + 1, torch.softmax(cache, -1)

    def twice(caches: Any, new: Any, at: Any) -> Any:
        functional.append(caches[0], new, at)
        functional.append(caches[1], new + 1, at)
        functional.append(caches[0], new + 2, at + 1)
        return caches.sum(0)

    at, new = torch.tensor([2, 30]), sample((BATCH, HEADS, 3, DEPTH), seed=1)
    for function, shape in ((before, ()), (after, ()), (twice, (2,))):
        ours = sample((*shape, BATCH, HEADS, PLACES, DEPTH))
        theirs = ours.clone()
        found, wanted = jitgen.jit(function)(ours, new, at), function(theirs, new, at)
        torch.testing.assert_close(found, wanted)
        assert torch.equal(ours, theirs)


def test_a_step_of_a_layer_is_an_append_and_an_attention() -> None:
    def step(qkv: Any, cos: Any, sin: Any, keys: Any, values: Any, start: Any) -> Any:
        q, k, v = split(qkv)
        functional.append(keys, rotated(k, cos, sin), start)
        functional.append(values, v, start)
        return functional.attend(rotated(q, cos, sin), keys, values, start)

    compiled = jitgen.jit(step)
    for tokens in (1, 3):
        qkv, (cos, sin) = sample((BATCH, tokens, 8 * DEPTH)), (sample((tokens, DEPTH), seed=n) for n in (1, 2))
        ours = [sample((BATCH, HEADS, PLACES, DEPTH), seed=n) for n in (3, 4)]
        theirs, start = [cache.clone() for cache in ours], torch.tensor([0, 20])
        assert len(compiled.lower(qkv, cos, sin, *ours, start).kernels) == 2
        found, wanted = compiled(qkv, cos, sin, *ours, start), step(qkv, cos, sin, *theirs, start)
        torch.testing.assert_close([found, *ours], [wanted, *theirs])


# --------------------------------------------------------------------------------------------------------------- caches


def wrong(found: torch.Tensor, wanted: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """``failure``, where heads share keys."""
    return failure(found, wanted, q, *(x.repeat_interleave(GROUPS, 1) for x in (k, v)))


def made(kind: str, dtype: torch.dtype) -> Any:
    if kind == "paged":
        cache = PagedKVCache(BATCH, HEADS, 40, 3, 13, DEPTH, dtype=dtype)
        cache.table.copy_(torch.randperm(40, generator=torch.Generator().manual_seed(0))[:26].view(BATCH, 13))
        return cache
    return KVCache(BATCH, HEADS, PLACES, DEPTH, dtype=dtype, window=8 if kind == "ring" else None, tokens=5)


@pytest.mark.quick(where=lambda kind, dtype: (kind, dtype) in (("paged", torch.int8), ("ring", torch.float32)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "ring"])
def test_caches(kind: str, dtype: torch.dtype) -> None:
    cache = made(kind, dtype)
    cache.lengths.copy_(torch.tensor([0, 0]))
    k, v = torch.zeros(2, BATCH, HEADS, 0, DEPTH)
    for number, tokens in enumerate((5, 1, 1, 4, 1, 5, 1, 5, 1, 1, 1, 5)):
        new = [sample((BATCH, HEADS, tokens, DEPTH), seed=17 * number + n) for n in (1, 2)]
        q = sample((BATCH, GROUPS * HEADS, tokens, DEPTH), seed=17 * number)
        k, v = torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)
        cache.append(*new)
        found = cache.attend(q)
        wanted = attention(q, k, v, cache.lengths, 8 if kind == "ring" else PLACES)
        if dtype == torch.float32:
            assert wrong(found, wanted, q, k, v) is None
        else:
            assert (found.double() - wanted).abs().amax().item() <= bound(dtype, q, k, v)
        cache.advance(tokens)


@pytest.mark.slow
def test_sequences_of_different_lengths_and_every_edge_of_a_tile() -> None:
    contiguous, paged = made("contiguous", torch.float32), made("paged", torch.float32)
    k, v = sample((BATCH, HEADS, PLACES, DEPTH), seed=1), sample((BATCH, HEADS, PLACES, DEPTH), seed=2)
    for cache in (contiguous, paged):
        cache.append(k, v)
    for first in (0, 1, 14, 15, 16, 17, 31, 33, 35):
        for cache in (contiguous, paged):
            cache.lengths.copy_(torch.tensor([first, PLACES - 2 - first]))
        q = sample((BATCH, GROUPS * HEADS, 2, DEPTH), seed=first)
        found, wanted = contiguous.attend(q), attention(q, k, v, contiguous.lengths, PLACES)
        assert wrong(found, wanted, q, k, v) is None
        assert wrong(paged.attend(q), wanted, q, k, v) is None


@pytest.mark.parametrize("depth", [16, 40, 96])
def test_one_token_reads_tiles_of_keys_that_masks_leave(depth: int) -> None:
    """Of values of one vector and of several, with two queries for a key; what is behind the last key has no weight."""
    query, keys, values = (torch.randn(2, heads, length, depth) for heads, length in ((4, 1), (2, 300), (2, 300)))
    step = jitgen.jit(functional.attend)
    for last in (0, 127, 128, 270):
        hidden = torch.arange(300)[:, None] > last
        new = step(query, keys.masked_fill(hidden, 1e30), values.masked_fill(hidden, 1e30), torch.tensor([last, last]))
        seen = (query, keys[:, :, : last + 1], values[:, :, : last + 1])
        wanted = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in seen), enable_gqa=True)
        torch.testing.assert_close(new.double(), wanted, atol=2e-6, rtol=2e-5)


def test_pages_in_any_layout_and_a_page_that_is_not_there() -> None:
    def heads_last(q: Any, k_pages: Any, v_pages: Any, table: Any, start: Any) -> Any:
        k, v = (x[table].view(table.shape[0], -1, HEADS, DEPTH).transpose(1, 2) for x in (k_pages, v_pages))
        return functional.attend(q, k, v, start)

    q, start = sample((BATCH, GROUPS * HEADS, 1, DEPTH)), torch.tensor([4, 11])
    for size in (1, 3, 16):
        pages = [sample((20, size, HEADS, DEPTH), seed=n) for n in (1, 2)]
        table = torch.randperm(20, generator=torch.Generator().manual_seed(size))[: 2 * -(-12 // size)].view(2, -1)
        for dtype in (torch.int64, torch.int32):
            low = jitgen.jit(heads_last).lower(q, *pages, table.to(dtype), start)
            assert len(low.kernels) == 1, low.explain()
            found = jitgen.jit(heads_last)(q, *pages, table.to(dtype), start)
            k, v = (x[table].reshape(BATCH, -1, HEADS, DEPTH).transpose(1, 2) for x in pages)
            assert wrong(found, attention(q, k, v, start, 99), q, k, v) is None
    table[1, 0] = 20
    with pytest.raises(IndexError):
        jitgen.jit(heads_last)(q, *pages, table, start)


def test_pages_and_codes_run_in_the_dialect_whose_kernel_reads_them() -> None:
    def attend(q: Any, codes: Any, scales: Any, table: Any, start: Any) -> Any:
        k = functional.dequantized(functional.paged(codes, table), functional.paged(scales, table), q.dtype)
        return functional.attend(q, k, k, start)

    codes, scales = torch.zeros(20, 2, 16, 64, dtype=torch.int8), torch.zeros(20, 2, 16)
    table, start = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for rows, dialect in ((1, "mma.sync"), (40, "tl.dot")):
        q = torch.zeros(2, 4, rows, 64, dtype=torch.bfloat16)
        low = jitgen.jit(attend).lower(q, codes, scales, table, start, target="sm_90a")
        assert len(low.kernels) == 1, low.explain()
        assert dialect in low.explain() + low.kernels[0].source
    assert len(jitgen.jit(attend).lower(q, codes, scales, table, start, target="sm_90a", backend="cuda").kernels) > 1


def test_a_ring_buffer_refuses_more_tokens_than_it_keeps() -> None:
    with pytest.raises(ValueError, match="larger tokens="):
        made("ring", torch.float32).append(*torch.zeros(2, BATCH, HEADS, 6, DEPTH))


def test_a_cache_keeps_floats_or_codes() -> None:
    with pytest.raises(ValueError, match=r"torch.int8, .*not torch.int32"):
        KVCache(1, 1, 8, 4, dtype=torch.int32)


def test_tokens_that_do_not_fit_are_refused_with_the_sizes_of_the_cache() -> None:
    cache = KVCache(BATCH, HEADS, 5, DEPTH)
    with pytest.raises(ValueError, match=rf"k is .*: \({BATCH}, {HEADS}, tokens, {DEPTH}\)"):
        cache.append(*torch.zeros(2, BATCH, HEADS + 1, 2, DEPTH))
    with pytest.raises(ValueError, match="v is"):
        cache.append(torch.zeros(BATCH, HEADS, 2, DEPTH), torch.zeros(BATCH, HEADS, 2, DEPTH + 1))
    with pytest.raises(IndexError, match="5 positions; make it with a larger length"):
        cache.append(*torch.zeros(2, BATCH, HEADS, 6, DEPTH))
    paged = PagedKVCache(BATCH, HEADS, 4, 2, 2, DEPTH)
    with pytest.raises(IndexError, match="2 blocks of 2 positions"):
        paged.append(*torch.zeros(2, BATCH, HEADS, 5, DEPTH))


@pytest.mark.parametrize("kind", ["contiguous", "paged", "ring"])
def test_an_append_of_other_shapes_is_refused(kind: str) -> None:
    cache = made(kind, torch.float32)
    with pytest.raises(ValueError, match="k has 2 tokens and v 1"):
        cache.append(torch.ones(BATCH, HEADS, 2, DEPTH), torch.ones(BATCH, HEADS, 1, DEPTH))
    with pytest.raises(ValueError, match="k is"):
        cache.append(*torch.ones(2, HEADS, DEPTH))
    with pytest.raises(ValueError, match="v is"):
        cache.append(torch.ones(BATCH, HEADS, 2, DEPTH), torch.ones(HEADS, DEPTH))
    assert not cache.keys.any()
    assert not cache.values.any()


# ----------------------------------------------------------------------------------------------------- packed sequences


@pytest.mark.quick(where=lambda causal, dtype: causal == (dtype == torch.int32))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_a_loop_over_them(causal: bool, dtype: torch.dtype) -> None:
    compiled = jitgen.jit(functional.attend_varlen)
    for rows, keys in (((5, 0, 15, 16), (7, 3, 0, 40)), ((1, 17, 33), (1, 16, 34))):
        cu_q, cu_k = (torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=dtype) for x in (rows, keys))
        q, k, v = (sample((sum(n), h, DEPTH), seed=s) for s, (n, h) in enumerate(((rows, 4), (keys, 2), (keys, 2))))
        found = compiled(q, k, v, cu_q, cu_k, causal)
        for number, (m, n) in enumerate(zip(rows, keys, strict=True)):
            own = (q[cu_q[number] :][:m], k[cu_k[number] :][:n], v[cu_k[number] :][:n])
            a, b, c = (x.transpose(0, 1) for x in own)
            b, c = b.repeat_interleave(GROUPS, 0), c.repeat_interleave(GROUPS, 0)
            hidden = torch.arange(n) > torch.arange(m)[:, None] + n - m if causal else torch.zeros(m, n) > 0
            scores = (a.double() @ b.double().transpose(-1, -2) * DEPTH**-0.5).masked_fill(hidden, -INF)
            wanted = torch.softmax(scores, -1).nan_to_num() @ c.double() if n else torch.zeros(4, m, DEPTH).double()
            mine = found[cu_q[number] :][:m].transpose(0, 1)
            assert failure(mine, wanted, a, b, c) is None


# ---------------------------------------------------------------------------------------------- beside attention


@pytest.mark.quick(where=lambda interleaved, rotary: interleaved and rotary == 6)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [DEPTH, 6])
def test_rotary(interleaved: bool, rotary: int) -> None:
    compiled = jitgen.jit(lambda x, cos, sin: functional.rotary(x, cos, sin, interleaved))
    x, angle = sample((BATCH, HEADS, 5, DEPTH)), sample((5, rotary // 2), seed=1)
    assert len(compiled.lower(x, angle.cos(), angle.sin()).kernels) == 1
    found = compiled(x, angle.cos(), angle.sin())
    pairs = x[..., :rotary].double()
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    wanted = torch.cat([turned, x[..., rotary:].double()], -1)
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-6)


def test_complex_rotations_say_how_to_write_them() -> None:
    def rotate(x: Any, freqs: Any) -> Any:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs).flatten(-2)

    x, angle = sample((BATCH, HEADS, 5, DEPTH)), sample((5, DEPTH // 2), seed=1)
    freqs = torch.polar(torch.ones_like(angle), angle)
    for args in ((x, freqs), (x, angle)):
        with pytest.raises(jitgen.UnsupportedError, match="interleaved=True"):
            jitgen.jit(rotate)(*args)
    found = jitgen.jit(functional.rotary)(x, freqs.real, freqs.imag, True)
    torch.testing.assert_close(found, rotate(x, freqs), atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_normed_and_rotated_queries_and_keys_are_two_kernels_before_attention() -> None:
    def attend(q: Any, k: Any, v: Any, weight: Any, cos: Any, sin: Any) -> Any:
        q, k = (functional.rotary(torch.nn.functional.rms_norm(x, (DEPTH,), weight), cos, sin) for x in (q, k))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    q, k, v = (sample((BATCH, HEADS, 9, DEPTH), seed=n) for n in range(3))
    weight, angle = sample((DEPTH,), seed=4), sample((9, DEPTH // 2), seed=5)
    compiled, args = jitgen.jit(attend), (q, k, v, weight, angle.cos(), angle.sin())
    found, wanted = compiled(*args), attend(*(x.double() for x in args))
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_greedy_sampling_and_gumbel_noise() -> None:
    logits, table = sample((4, 50)), sample((50, 8), seed=1)
    found = jitgen.jit(lambda x, table: torch.nn.functional.embedding(x.argmax(-1), table))(logits, table)
    assert torch.equal(found, table[logits.argmax(-1)])
    gumbel = jitgen.jit(lambda x: (x - torch.log(-torch.log(torch.rand_like(x)))).argmax(-1))
    likely = torch.full((2000, 3), -INF)
    likely[:, 1], likely[:, 2] = math.log(0.25), math.log(0.75)
    assert len(gumbel.lower(likely).kernels) == 1
    torch.manual_seed(0)
    counts = gumbel(likely).bincount(minlength=3)
    # Of 2000 draws of 3/4 the standard deviation is 19.4; five of these.
    assert counts[0] == 0
    assert abs(counts[2].item() - 1500) < 97
