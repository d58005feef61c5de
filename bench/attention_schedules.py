"""Times attention kernels with other schedules than the chosen one, beside torch's.

::

    python -m bench.attention_schedules causal,4,32,8,4096,4096,128 '' 'block_n=112' 'overlap=False,stages=3'
    python -m bench.attention_schedules full,16,32,8,1,8192,128 '' 'warps=4,blocks=3,cluster=4' 'ranges=16,cluster=1'

The first argument is a case: a rule of ``jitgen bench attention``, then B, the heads of the query, those of the keys,
M, N and D. The others are variants: fields of the schedule that replace those of the chosen one, and for few rows
``cluster``, the blocks of a cluster, and ``ranges``, the ranges of the keys that another kernel joins. Printed are
microseconds in a CUDA graph over copies that exceed the cache, TFLOP/s of the scores that a mask leaves, and the
relative error against float64, the larger one of the first head and the last.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

import jitgen
from bench import suite
from bench.attention import Case, error_of, function_of, operands, peers
from bench.timing import Call, medians
from jitgen.families.attention.forward import decode, split_keys, wgmma
from jitgen.runtime import cuda

CHOSEN, LOAD = wgmma.candidates, cuda.load
BUDGET = 0.2
"""Seconds of timing for each case."""


def load(*arguments: Any) -> Any:
    """Loads as ``cuda.load`` does, and lets the function take clusters of more than eight blocks."""
    function, driver = LOAD(*arguments), cuda.bindings()
    with function.current():
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        driver.cuFuncSetAttribute(function.handle, kind, 1)
    return function


@contextmanager
def using(variant: str) -> Iterator[None]:
    """Within it, schedules and launches are as ``variant`` says."""
    words = (word.partition("=") for word in variant.split(",") if word)
    wanted = {name: ast.literal_eval(value) for name, _, value in words}
    cluster, ranges = wanted.pop("cluster", None), wanted.pop("ranges", None)

    def candidates(*arguments: Any) -> list[Any]:
        return [
            replace(chosen, **{field.name: wanted[field.name] for field in fields(chosen) if field.name in wanted})
            for chosen in CHOSEN(*arguments)
        ]

    with ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(wgmma, "candidates", new=candidates))
        if cluster is not None:
            replaced.enter_context(mock.patch.object(decode.DecodeSchedule, "cluster", return_value=cluster))
            if cluster > 8:
                replaced.enter_context(mock.patch.object(cuda, "load", new=load))
        if ranges is not None:
            replaced.enter_context(mock.patch.object(split_keys, "splits", return_value=ranges))
        yield


def main(case: Case, variants: list[str]) -> None:
    bench, function = suite.configure("cuda", quick=True, backend="cuda"), function_of(case.rule)
    copies = [operands(case, bench, torch.bfloat16) for _ in range(max(2, min(6, 2 * bench.elements // case.moved)))]
    calls: dict[str, list[Call]] = {}
    errors = []
    for variant in variants:
        out = torch.full_like(copies[0][0], torch.nan)
        with using(variant):
            # A function of its own for each variant, so that a schedule is chosen anew.
            plan = jitgen.jit(backend="cuda")(lambda q, k, v, slopes: function(q, k, v, slopes)).bind(*copies[0])
            plan(*copies[0], out=out)
        errors.append(error_of(function, copies[0], out))
        calls[variant or "chosen"] = [partial(plan, *operand) for operand in copies]
    for name, peer in peers(case, bench):
        calls[name] = [partial(peer, *operand) for operand in copies]
    seconds = medians(calls, "cuda", BUDGET)
    rates = (f"{name} {time * 1e6:.1f} us {case.flops / time / 1e12:.0f}" for name, time in seconds.items())
    print(f"{case}:", "; ".join(rates), "errors", *(f"{error:.1e}" for error in errors), flush=True)


if __name__ == "__main__":
    rule, *sizes = sys.argv[1].split(",")
    batch, heads, shared, rows, keys, depth = map(int, sizes)
    with torch.no_grad():
        main(Case(batch, heads, shared, rows, keys, depth, rule), sys.argv[2:] or [""])
