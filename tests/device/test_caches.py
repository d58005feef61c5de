"""Caches of keys and values on a GPU: appends in both dialects, attention over pages and codes, one graph of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen.nn import KVCache, PagedKVCache, functional
from tests.attention import sample
from tests.caches import DEPTH, GROUPS, attention, bound

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
BATCH, HEADS, PLACES = 2, 2, 700


def made(kind: str, dtype: torch.dtype) -> Any:
    if kind == "paged":
        cache = PagedKVCache(BATCH, HEADS, 120, 16, 44, DEPTH, dtype=dtype, device="cuda")
        cache.table.copy_(torch.randperm(120)[:88].view(BATCH, 44))
        return cache
    return KVCache(BATCH, HEADS, PLACES, DEPTH, dtype=dtype, device="cuda")


def new(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return sample((BATCH, heads, tokens, DEPTH), seed=seed).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_caches(kind: str, dtype: torch.dtype) -> None:
    cache = made(kind, dtype)
    k, v = torch.zeros(2, BATCH, HEADS, 0, DEPTH)
    for number, tokens in enumerate((5, 1, 500, 1, 64, 1, 100)):
        added = [new(tokens, HEADS, 17 * number + n) for n in (1, 2)]
        q = new(tokens, GROUPS * HEADS, 17 * number)
        k, v = torch.cat([k, added[0].cpu()], 2), torch.cat([v, added[1].cpu()], 2)
        cache.append(*added)
        wanted = attention(q.cpu(), k, v, cache.lengths.cpu(), PLACES)
        allowed = 1e-4 if dtype == torch.float32 else bound(dtype, q, k, v)
        assert (cache.attend(q).cpu().double() - wanted).abs().amax().item() <= allowed
        cache.advance(tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_queries_of_16_bits(kind: str, dtype: torch.dtype) -> None:
    cache = made(kind, dtype)
    k, v = (new(PLACES - 1, HEADS, seed).bfloat16() for seed in (1, 2))
    cache.append(k, v)
    cache.lengths.copy_(torch.tensor([40, PLACES - 4]))
    for tokens in (1, 3, 2):
        q = new(tokens, GROUPS * HEADS, tokens).bfloat16()
        wanted = attention(q.cpu(), k.cpu().float(), v.cpu().float(), cache.lengths.cpu(), PLACES)
        codes = 0.0 if dtype == torch.bfloat16 else bound(dtype, q.cpu().float(), k.cpu().float(), v.cpu().float())
        # Weights, results and keys of codes have half a unit of bfloat16 in the last place each.
        allowed = 1.1 * codes + 3 * 2**-8 * float(v.abs().amax())
        assert (cache.attend(q).cpu().double() - wanted).abs().amax().item() <= allowed


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_one_graph_serves_all_lengths(kind: str) -> None:
    cache = made(kind, torch.float32)
    k, v = new(PLACES, HEADS, 1), new(PLACES, HEADS, 2)
    cache.append(k, v)
    q, added = new(1, GROUPS * HEADS, 3), [new(1, HEADS, seed) for seed in (4, 5)]
    cache.lengths.fill_(1)
    cache.append(*added)
    cache.attend(q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(*added)
        found = cache.attend(q)
        cache.advance()
    cache.append(*(x[:, :, 1:2] for x in (k, v)))  # what the first call replaced
    cache.lengths.copy_(torch.tensor([3, 690]))
    k, v = (torch.cat([x.cpu(), x.cpu()[:, :, :1]], 2) for x in (k, v))
    for _ in range(3):
        for number, at in enumerate(cache.lengths.tolist()):
            k[number, :, at], v[number, :, at] = (x.cpu()[number, :, 0] for x in added)
        wanted = attention(q.cpu(), k, v, cache.lengths.cpu(), PLACES)
        graph.replay()
        assert (found.cpu().double() - wanted).abs().amax().item() < 1e-4


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_appends_with_places_that_may_repeat(backend: str) -> None:
    compiled = jitgen.jit(lambda cache, new, at: cache.index_copy_(2, at, new), backend=backend)
    cache, added = torch.zeros(BATCH, HEADS, 300, DEPTH, device="cuda"), new(200, HEADS, 1)
    at = torch.randint(0, 300, (200,), device="cuda")
    wanted = torch.zeros_like(cache)
    for token, place in enumerate(at.tolist()):
        wanted[:, :, place] = added[:, :, token]
    compiled(cache, added, at)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_an_append_with_rotations(backend: str) -> None:
    def append(qkv: Any, cos: Any, sin: Any, keys: Any, values: Any, start: Any) -> Any:
        q, k, v = (x.unflatten(-1, (-1, 128)).transpose(1, 2) for x in qkv.split([512, 256, 256], -1))
        functional.append(keys, functional.rotary(k, cos, sin), start)
        functional.append(values, v, start)
        return functional.rotary(q, cos, sin)

    compiled = jitgen.jit(append, backend=backend)
    for tokens in (1, 7):
        qkv, angle = sample((2, tokens, 1024)).cuda(), sample((tokens, 64)).cuda()
        ours, start = torch.zeros(2, 2, 2, 50, 128, device="cuda"), torch.tensor([3, 40], device="cuda")
        theirs = ours.clone()
        found = compiled(qkv, angle.cos(), angle.sin(), *ours, start)
        wanted = append(qkv, angle.cos(), angle.sin(), *theirs, start)
        torch.testing.assert_close([found, ours], [wanted, theirs])
