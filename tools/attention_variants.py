"""Times the wgmma attention kernel with other schedules than the chosen one, beside cuDNN: ``python
tools/attention_variants.py 64 causal,alibi '' 'block_n=112' 'overlap=False,stages=3'``.

Arguments are the depth of heads, rules of ``jitgen bench attention``, then variants: fields of ``WgmmaSchedule`` that
replace those of the chosen schedule. Printed are microseconds, TFLOP/s of the scores that a mask leaves, and the error
of the first head beside float64. B4 S4096 H32/8 bf16 (D64: H32/32); a last argument ``S16384`` has B1 instead.
"""

from __future__ import annotations

import ast
import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import jitgen
from bench.attention import Case, function_of, operands
from bench.measurement import Bench
from jitgen.families.attention.forward import wgmma

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


def main(depth: int, rules: list[str], variants: list[str], batch: int = 4, length: int = 4096) -> None:
    heads = 8 if depth >= 128 else 32
    for rule in rules:
        case = Case(batch, 32, heads, length, length, depth, rule)
        function = function_of(rule)
        args = operands(case, Bench("cuda", 0, 0.1, False, 1), torch.bfloat16)
        wanted = function(*(tensor.double() for tensor in (*(each[:1, :1] for each in args[:3]), args[3][:1])))
        calls = {}
        if rule in ("full", "causal"):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                calls["cuDNN"] = microseconds(functools.partial(function, *args))
        errors = {}
        for text in variants:
            variant(text)
            plan = jitgen.jit(function, backend="cuda").bind(*args)
            errors[text] = float((plan(*args)[:1, :1].double() - wanted).norm() / wanted.norm())
            calls[text or "chosen"] = microseconds(functools.partial(plan, *args))
        rates = (f"{name} {found:.0f} us {case.flops / found / 1e6:.0f}" for name, found in calls.items())
        print(f"D{depth} {rule}:", "; ".join(rates), f"errors up to {max(errors.values()):.1e}", flush=True)


if __name__ == "__main__":
    long = "S16384" in sys.argv
    names = [argument for argument in sys.argv[3:] if argument != "S16384"] or [""]
    with torch.no_grad():
        main(int(sys.argv[1]), sys.argv[2].split(","), names, 1 if long else 4, 16384 if long else 4096)
