"""Tensors on which schedules are timed leave a kernel its work: long lengths, different indices, open masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.deploy import manifest_schema, trials, work
from jitgen.deploy.trials import Program
from jitgen.spec import host_target

B, M, N, D, PAGE = 3, 16, 64, 8, 16


def ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(k.shape[-2]) < lengths[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    beyond = torch.arange(k.shape[-2]) >= lengths[:, None, None, None]
    return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(beyond, -math.inf), -1) @ v


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    before = torch.arange(k.shape[-2]) < starts[:, None, None, None]
    return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(before, -math.inf), -1) @ v


def offset(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    rows, keys = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keys <= rows + start)


def cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    keys, values = keys.index_copy(2, at, k), values.index_copy(2, at, v)
    mask = torch.arange(keys.shape[2]) <= at[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def paged(q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    keys = pages[table].flatten(1, 2)
    mask = torch.arange(keys.shape[1]) < lengths[:, None, None]
    return F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask)


def slots(pages: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    pages = pages.clone()
    pages[at // PAGE, at % PAGE] = x
    return pages


def documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ids[:, None, :, None] == ids[:, None, None])


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def hidden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(mask, -math.inf), -1) @ v


def looked_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return table[codes.long()]


def nibbles(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return table[(codes & 15).long()] - table[(codes >> 4).long()]


def pairs(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x[ids << 1] * x[(ids << 1) | 1] + x[(ids << 1) ^ 1]


def clamped(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x[at.clamp(0, x.shape[0] - 1)]


def greedy(words: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return words[(words[ids] @ words.T).argmax(-1)]


def reordered(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return x[keys.argsort(0)]


def next_slot(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(0, at, x)
    at.add_(1)
    return cache.sum(-1)


def one_hot(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x * (ids[:, None] == torch.arange(x.shape[1]))


def counted(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, weight, offs=counts.cumsum(0).int())


def summed(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).sum(-1)


def query(rows: int = M) -> torch.Tensor:
    return torch.randn(B, 2, rows, D)


def many(length: int = B, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(1, length + 1, dtype=dtype)


Q, K, MASK = query(), query(N), torch.ones(B, 2, M, N, dtype=torch.bool)


def distinct(end: int) -> Callable[[torch.Tensor], bool]:
    """Whether indices are different ones below ``end``, some of them in its upper half."""
    return lambda t: t.min() >= 0 and end / 2 <= t.max() < end and len(t.unique()) == t.numel()


def most(value: int) -> Callable[[torch.Tensor], bool]:
    return lambda t: bool((t == value).all())


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[Callable[[torch.Tensor], bool], ...]]] = {
    "lengths": (ragged, (Q, K, K, many()), (most(N),)),
    "lengths of 32 bits": (ragged, (Q, K, K, many(dtype=torch.int32)), (most(N),)),
    "lengths beyond which scores are filled": (filled, (Q, K, K, many()), (most(N),)),
    "beginnings of rows": (padded, (Q, K, K, many()), (most(0),)),
    "an offset of rows": (offset, (Q, K, K, torch.tensor(3)), (most(N - 1),)),
    "positions in a cache": (
        cached,
        (query(4), query(4), query(4), K, K, torch.arange(4)),
        (lambda t: t.tolist() == [N - 4, N - 3, N - 2, N - 1],),
    ),
    "pages and lengths": (
        paged,
        (torch.randn(B, M, D), torch.randn(40, PAGE, D), torch.arange(12).view(3, 4), many()),
        (distinct(40), most(4 * PAGE)),
    ),
    "slots of pages": (slots, (torch.randn(40, PAGE, D), torch.randn(9, D), torch.arange(9)), (distinct(40 * PAGE),)),
    "ids of words": (F.embedding, (torch.arange(14).view(2, 7), torch.randn(100, D)), (distinct(100),)),
    "classes": (F.cross_entropy, (torch.randn(9, 50), torch.arange(9)), (distinct(50),)),
    "a one-hot encoding": (one_hot, (torch.randn(6, 9), torch.arange(6)), (distinct(9),)),
    "codes of a table": (looked_up, (torch.randn(16), many(9, torch.uint8)), (distinct(16),)),
    "codes of 4 bits": (nibbles, (torch.randn(16), many(9, torch.uint8)), (lambda t: len(t.unique()) == 9,)),
    "pairs of rows": (pairs, (torch.randn(40, D), many(9)), (distinct(20),)),
    "indices that are clamped": (clamped, (torch.randn(40, D), many(9)), (distinct(40),)),
    "ids of words, of which others are computed": (greedy, (torch.randn(40, D), many(9)), (distinct(40),)),
    "keys that are sorted": (reordered, (torch.randn(40), torch.arange(40)), (lambda t: len(t.unique()) > 9,)),
    "documents": (documents, (Q, Q, Q, torch.zeros(B, M, dtype=torch.int64)), (most(0),)),
    "a mask": (masked, (Q, K, K, MASK), (lambda t: 0.8 < t.float().mean() < 0.95 and bool(t[..., 0].all()),)),
    "a mask that hides": (hidden, (Q, K, K, ~MASK), (lambda t: 0.8 < (~t).float().mean() < 0.95,)),
    "lengths of groups": (
        counted,
        (torch.randn(50, 32), torch.randn(4, 32, 16), torch.tensor([10, 20, 5, 15])),
        (lambda t: t.sum() == 50 and len(t.unique()) > 1,),
    ),
    "data": (summed, (torch.ones(4, 40, dtype=torch.int32),), (lambda t: t.min() > 0 and len(t.unique()) > 9,)),
}


@pytest.mark.parametrize("case", CASES)
def test_integers_leave_a_kernel_its_work(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments, expected = CASES[case]
    monkeypatch.setattr(trials, "ROTATED_BYTES", 1)
    with jitgen.record(tmp_path / "manifest.json"):
        jitgen.jit(backend="cpp")(lambda *tensors: function(*tensors)).lower(*arguments)
    entry = next(iter(manifest_schema.read(tmp_path / "manifest.json")))
    program = Program(entry, work.route_of(entry, host_target()), torch.device("cpu"))
    for copy in program._copies:
        integers = [tensor for tensor in copy if not tensor.is_floating_point()]
        for tensor, check in zip(integers, expected, strict=True):
            assert check(tensor), tensor
    results = program.results(program.calls())  # an index out of range would be an IndexError
    assert all(bool(result.isfinite().all()) for result in results)


def test_positions_that_calls_move_on_stay_within_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "ROTATED_BYTES", 1)
    with jitgen.record(tmp_path / "manifest.json"):
        jitgen.jit(next_slot, backend="cpp").lower(torch.randn(8, D), torch.randn(1, D), torch.tensor([3]))
    entry = next(iter(manifest_schema.read(tmp_path / "manifest.json")))
    program = Program(entry, work.route_of(entry, host_target()), torch.device("cpu"))
    timer = program.timer(program.calls())
    assert program.rounds({0: timer})[0].median > 0
    for *_, at in program._copies:
        assert 0 <= at.item() <= 8
