"""Generated attention of few rows, compiled for the CPU and run there: rules, masks, shared heads, pages, codes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.nn import functional
from tests.attention import failure, formula, operands, sample
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BF16 = torch.bfloat16
HOST_PTX = Path(__file__).parents[1] / "host_ptx.cuh"


def on_host(function: Any, *args: Any) -> torch.Tensor:
    headers = {"jitgen/ptx.cuh": HOST_PTX.read_text()}
    low = jitgen.jit(function).lower(*args, backend="cuda", target="sm_90a")
    assert len(low.kernels) == 1, low.explain()
    assert "mma.sync" in low.explain()
    return run(function, *args, headers=headers)[0]


CASES = [
    (["scale"], ["causal"], 5, 300),
    (["scale", "distance"], ["window"], 3, 40),
    (["cap", "alternate"], ["prefix"], 8, 150),
    (["distance"], ["outside"], 11, 129),
    (["scale"], ["product"], 16, 33),
    ([], [], 1, 2),
]


@pytest.mark.parametrize(("rules", "masks", "rows", "keys"), CASES)
@pytest.mark.quick(where=lambda rows: rows == 11)
def test_rules_and_masks(rules: list[str], masks: list[str], rows: int, keys: int) -> None:
    q, k, v = operands((1, 2), rows, keys, 64, 128 if rows < 9 else 72, BF16)
    function = formula(rules, masks)
    wanted = function(q.double(), k.double(), v.double())
    assert failure(on_host(function, q, k, v), wanted, q, k, v, rounded=True) is None


def test_a_window_that_is_a_number_of_the_call() -> None:
    """Which tiles it hides depends on the number, so that bounds of tiles read it too."""

    def attend(q: Any, k: Any, v: Any, window: int) -> Any:
        i, j = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2], torch.arange(k.shape[-2])
        scores = (q @ k.transpose(-1, -2) * 0.125).masked_fill((j > i) | (i - j > window), float("-inf"))
        return torch.softmax(scores, -1) @ v

    q, k, v = operands((1, 2), 5, 300, 64, 64, BF16)
    for window in (7, 200):
        wanted = attend(q.double(), k.double(), v.double(), window)
        assert failure(on_host(attend, q, k, v, window), wanted, q, k, v, rounded=True) is None


@pytest.mark.slow
def test_heads_that_share_keys_and_a_mask_in_memory() -> None:
    q, k, v = sample((2, 6, 2, 40), BF16, 1), sample((2, 2, 200, 40), BF16, 2), sample((2, 2, 200, 128), BF16, 3)
    mask = sample((2, 200)) > 0

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    wanted = attend(q.double(), k.double(), v.double(), mask)
    found = on_host(attend, q, k, v, mask)
    assert failure(found, wanted, q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), rounded=True) is None


@pytest.mark.slow
def test_a_mask_of_a_cache_bounds_the_keys_that_are_read() -> None:
    """Keys outside of what it shows are NaN, but for those of the same tiles; lengths that differ; a sequence without
    keys; rows of the mask that are not aligned; a condition of indices beside it."""

    def attend(q: Any, k: Any, v: Any, mask: Any, window: int) -> Any:
        places = torch.arange(k.shape[2])
        seen = ~(mask | (places < window))
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

    keys, tile = 2301, 128
    ends = [(0, 40), (300, 1900), (2299, 2301), (5, 5), (0, 2301)]
    q, k, v = (sample((5, heads, n, 64), BF16, seed) for seed, (heads, n) in enumerate(((4, 1), (2, keys), (2, keys))))
    hides = torch.ones(5, 1, 1, keys, dtype=torch.bool)
    for number, (first, end) in enumerate(ends):
        hides[number, ..., first:end] = False
    wanted = attend(q.double(), k.double(), v.double(), hides, 7)
    bounds = q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    poisoned = [k.clone(), v.clone()]
    for number, (first, end) in enumerate(ends):
        for tensor in poisoned if first < end else ():
            tensor[number, :, : max(0, first - 15) // tile * tile] = float("nan")
            tensor[number, :, -(-(end + 15) // tile) * tile :] = float("nan")
    assert failure(on_host(attend, q, *poisoned, hides, 7), wanted, *bounds, rounded=True) is None
    spread = torch.stack([hides, hides], -1).flatten(-2)[..., ::2]  # flags that are not neighbours: all keys are read
    assert failure(on_host(attend, q, k, v, spread, 7), wanted, *bounds, rounded=True) is None


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, BF16])
@pytest.mark.quick(where=lambda paged, dtype: paged and dtype == torch.int8)
def test_codes_and_pages(dtype: torch.dtype, paged: bool) -> None:
    shape = (20, 2, 16, 64) if paged else (2, 2, 80, 64)
    size = 1 if dtype == BF16 else 40
    codes = [
        (sample(shape, seed=seed) * size).clamp(0 if dtype == torch.uint8 else -120, 120).to(dtype) for seed in (1, 2)
    ]
    scales = [sample(shape[:-1], seed=seed).abs() * 0.02 for seed in (3, 4)]
    table = torch.randperm(20, generator=torch.Generator().manual_seed(5))[:10].reshape(2, 5)
    q, start = sample((2, 4, 1, 64), BF16), torch.tensor([3, 70])

    def attend(q: Any, key: Any, value: Any, of_key: Any, of_value: Any, table: Any, start: Any) -> Any:
        both = (key, of_key), (value, of_value)
        if paged:
            both = tuple((functional.paged(c, table), functional.paged(s, table)) for c, s in both)  # type: ignore[assignment]
        k, v = (c if c.dtype == BF16 else functional.dequantized(c, s, q.dtype) for c, s in both)
        return functional.attend(q, k, v, start)

    args = (q, *codes, *scales, table, start)
    found, reference = on_host(attend, *args), jitgen.jit(attend).reference(*args)
    torch.testing.assert_close(found.float(), reference.float(), atol=2**-6 * float(reference.abs().max()), rtol=2**-6)


def test_a_step_over_pages_of_codes_divides_in_32_bits_and_rounds_once() -> None:
    def attend(q: Any, codes: Any, scales: Any, table: Any, start: Any) -> Any:
        k = functional.dequantized(functional.paged(codes, table), functional.paged(scales, table), q.dtype)
        return functional.attend(q, k, k, start)

    codes, scales = torch.zeros(20, 2, 16, 64, dtype=torch.int8), torch.zeros(20, 2, 16)
    table, start = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    q = torch.zeros(2, 4, 1, 64, dtype=BF16)
    source = jitgen.jit(attend).lower(q, codes, scales, table, start, target="sm_90a").kernels[0].source
    divisions = [line for line in source.splitlines() if "floor_divide" in line or "remainder" in line]
    assert len(divisions) == 4  # of keys, their scales, values and theirs
    assert all("const int32_t" in line for line in divisions)
    assert source.count("jitgen::numbers_of(numbers, run)") == 2
    assert "jitgen::load(jitgen::store" not in source
