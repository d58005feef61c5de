"""Times a decoder's step with other schedules than the chosen one, beside cuDNN: ``python tools/attention_decode.py ''
'block_n=128,stages=2'``. H32/8 D128 bf16; microseconds, over copies that exceed the cache."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F
from attention_variants import variant
from torch.nn.attention import SDPBackend, sdpa_kernel

import jitgen
from jitgen.bench.timing import medians

CASES = ((1, 1024), (1, 8192), (4, 3000), (16, 2048), (16, 8192), (64, 4096))
"""(B, N)"""


def attend(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def main(variants: list[str]) -> None:
    for batch, keys in CASES:
        copies = max(2, min(6, 10**9 // (batch * keys * 8 * 128 * 4)))
        args = [
            tuple(torch.randn(batch, *s, 128, device="cuda").bfloat16() for s in ((32, 1), (8, keys), (8, keys)))
            for _ in range(copies)
        ]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = medians({"cuDNN": [functools.partial(attend, *each) for each in args]}, "cuda", 0.1)
        for text in variants:
            variant(text)
            plan = jitgen.jit(backend="cuda")(lambda q, k, v: attend(q, k, v)).bind(*args[0])
            found |= medians({text or "chosen": [functools.partial(plan, *each) for each in args]}, "cuda", 0.1)
        print(batch, keys, {name: round(seconds * 1e6, 1) for name, seconds in found.items()}, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [""])
