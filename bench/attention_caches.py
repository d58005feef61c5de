"""Times a decoder's step over caches of bfloat16 and of codes, in both GPU dialects (pages in CUDA):
``python -m bench.attention_caches 16x8192 1x8192``. H32/8 D128; microseconds of ``attend``, over caches that exceed the
second-level cache."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from bench.timing import medians
from jitgen.nn import KVCache, PagedKVCache

DTYPES = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)


def made(batch: int, keys: int, dtype: torch.dtype, paged: bool, backend: str) -> Any:
    """A full cache."""
    if paged:
        blocks = keys // 16
        cache: Any = PagedKVCache(
            batch, 8, batch * blocks, 16, blocks, 128, dtype=dtype, device="cuda", backend=backend
        )
        cache.table.copy_(torch.randperm(batch * blocks).view(batch, blocks))
    else:
        cache = KVCache(batch, 8, keys, 128, dtype=dtype, device="cuda", backend=backend)
    for tensor in (cache.keys, cache.values):
        tensor.copy_((torch.randn(tensor.shape, device="cuda") * (1 if dtype == torch.bfloat16 else 30)).to(dtype))
    cache.lengths.fill_(keys - 1)
    return cache


def main(cases: list[str]) -> None:
    for case in cases:
        batch, keys = map(int, case.split("x"))
        q = torch.randn(batch, 32, 1, 128, device="cuda").bfloat16()
        calls = {}
        for backend in ("cuda", "triton"):
            for dtype in DTYPES:
                for paged in (False, True) if backend == "cuda" else (False,):
                    count = max(2, min(6, 10**9 // (batch * keys * 8 * 128 * 2 * dtype.itemsize)))
                    caches = [made(batch, keys, dtype, paged, backend) for _ in range(count)]
                    name = f"{backend} {str(dtype)[6:]}{' paged' if paged else ''}"
                    calls[name] = [functools.partial(cache.attend, q) for cache in caches]
        found = medians(calls, "cuda", 0.2)
        print(case, "; ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in found.items()), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
