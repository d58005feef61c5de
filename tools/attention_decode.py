"""Times a decoder's step with other schedules than the chosen one, beside cuDNN: ``python tools/attention_decode.py
1x8192,16x8192 '' 'warps=4,blocks=3,cluster=4' 'ranges=16,cluster=1'``.

Arguments are cases, batch x keys, and variants: fields of the schedule that replace those of the chosen one, the blocks
of a cluster, and ranges of the keys that another kernel joins. H32/8 D128 bf16; microseconds, over copies that exceed
the cache, and the error of the first sequence beside float64.
"""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jitgen
from bench.timing import medians
from jitgen.families.attention.forward import decode, split_keys, wgmma
from jitgen.runtime import cuda

CHOSEN, CLUSTER, RANGES, LOAD = wgmma.candidates, decode.cluster, split_keys.splits, cuda.load


def load(*of: Any) -> Any:
    """As ``cuda.load``, of a function that takes clusters of more than eight blocks where the device does."""
    function, driver = LOAD(*of), cuda.bindings()
    with function.current():
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        driver.cuFuncSetAttribute(function.handle, kind, 1)
    return function


def attend(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def variant(text: str) -> None:
    """From here on schedules and launches are as ``text`` says."""
    wanted = {
        name: ast.literal_eval(value) for name, _, value in (each.partition("=") for each in text.split(",") if each)
    }
    cluster, ranges = wanted.pop("cluster", None), wanted.pop("ranges", None)

    def candidates(*of: Any) -> list[Any]:
        return [
            replace(each, **{f.name: wanted[f.name] for f in fields(each) if f.name in wanted}) for each in CHOSEN(*of)
        ]

    wgmma.candidates = candidates
    cuda.load = LOAD if cluster is None or cluster <= 8 else load
    decode.cluster = CLUSTER if cluster is None else lambda *of: cluster
    split_keys.splits = RANGES if ranges is None else lambda *of: ranges


def main(cases: list[tuple[int, int]], variants: list[str]) -> None:
    for batch, keys in cases:
        copies = max(2, min(6, 10**9 // (batch * keys * 8 * 128 * 4)))
        args = [
            tuple(torch.randn(batch, *s, 128, device="cuda").bfloat16() for s in ((32, 1), (8, keys), (8, keys)))
            for _ in range(copies)
        ]
        q, k, v = (tensor[:1].double() for tensor in args[0])
        wanted = attend(q, k, v)
        plans: dict[str, list[Any]] = {}
        errors = {}
        for text in variants:
            variant(text)
            plan = jitgen.jit(backend="cuda")(lambda q, k, v: attend(q, k, v)).bind(*args[0])
            out = torch.full_like(args[0][0], float("nan"))
            plan(*args[0], out=out)
            errors[text or "chosen"] = float((out[:1].double() - wanted).norm() / wanted.norm())
            plans[text or "chosen"] = [functools.partial(plan, *each) for each in args]
        with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = medians(plans | {"cuDNN": [functools.partial(attend, *each) for each in args]}, "cuda", 0.1)
        print(f"{batch}x{keys}:", f"cuDNN {found.pop('cuDNN') * 1e6:.1f};", end=" ")
        print("; ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in found.items()), end=" ")
        print(f"errors up to {max(errors.values()):.1e}", {n: e for n, e in errors.items() if not e < 6e-3}, flush=True)


if __name__ == "__main__":
    numbers = [tuple(map(int, case.split("x"))) for case in sys.argv[1].split(",")]
    main(numbers, sys.argv[2:] or [""])  # type: ignore[arg-type]
