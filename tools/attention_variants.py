"""Times the wgmma attention kernel with other schedules than the chosen one, beside cuDNN: ``python
tools/attention_variants.py 128 'block_n=128' 'overlap=False,stages=3'``.

Arguments are the depth of heads, then variants: fields of ``WgmmaSchedule`` that replace those of the chosen schedule.
Printed are TFLOP/s, full and causal, and the error beside float64 of some rows. B4 S4096 H32/8 bf16; a second argument
``S16384`` has B1 instead.
"""

from __future__ import annotations

import ast
import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jitgen
from jitgen.families.attention import wgmma

CHOSEN = wgmma.candidates


def microseconds(call: Callable[[], object], rounds: int = 9) -> float:
    """The median time of ``call`` on the device."""
    for _ in range(3):
        call()
    found = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(300_000)
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def variant(text: str) -> None:
    """From here on schedules have the fields that ``text`` says."""
    fields = {
        name: ast.literal_eval(value) for name, _, value in (each.partition("=") for each in text.split(",") if each)
    }
    wgmma.candidates = lambda *of: [replace(each, **fields) for each in CHOSEN(*of)]  # type: ignore[assignment]


def attention(causal: bool) -> Callable[..., Any]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def main(depth: int, variants: list[str], batch: int = 4, length: int = 4096) -> None:
    heads = 8 if depth >= 128 else 32
    q = torch.randn(batch, 32, length, depth, device="cuda").bfloat16()
    k, v = (torch.randn(batch, heads, length, depth, device="cuda").bfloat16() for _ in range(2))
    for causal in (False, True):
        flops = 4 * batch * 32 * length**2 * depth * (0.5 if causal else 1.0)
        function = attention(causal)
        wanted = function(q[:1, :1].double(), k[:1, :1].double(), v[:1, :1].double())
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            rate = flops / microseconds(functools.partial(function, q, k, v)) / 1e6
            print(f"D{depth} causal {causal:d}: cuDNN {rate:.0f}", flush=True)
        for text in variants:
            variant(text)
            plan = jitgen.jit(attention(causal), backend="cuda").bind(q, k, v)
            error = (plan(q, k, v)[:1, :1].double() - wanted).norm() / wanted.norm()
            rate = flops / microseconds(functools.partial(plan, q, k, v)) / 1e6
            print(f"D{depth} causal {causal:d}: {rate:.0f} error {float(error):.1e} {text}", flush=True)


if __name__ == "__main__":
    long = "S16384" in sys.argv
    names = [argument for argument in sys.argv[2:] if argument != "S16384"] or [""]
    main(int(sys.argv[1]), names, 1 if long else 4, 16384 if long else 4096)
