"""Calls of every family whose kernels for sm_90a have barriers, for ``barriers.py`` to count arrivals in.

::

    python tests/barrier_cases.py                     # every schedule that any of their kernels may have
    python tests/barrier_cases.py linear --most 20    # of one of them, so many

Sizes are small: of what is persistent, one cluster has all of the work.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import barriers
import torch
import torch.nn.functional as F
from barrier_launches import candidates, of_lowered

import jitgen
from jitgen.spec import TensorSpec

half, single = torch.bfloat16, torch.float32


def _dense(*shape: int, dtype: torch.dtype = half) -> TensorSpec:
    return TensorSpec(shape, dtype)


def _codes(columns: int, length: int, format: str = "int4", group: int | None = 128) -> TensorSpec:
    return TensorSpec((columns, length), half, format=format, group_size=group)


def attention(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def window(q: Any, k: Any, v: Any) -> Any:
    rows, keys = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    scores = (q @ k.transpose(-1, -2)).masked_fill((keys > rows) | (keys < rows - 100), float("-inf"))
    return torch.softmax(scores, -1) @ v


def swiglu(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def product(x: Any, y: Any) -> Any:
    return x @ y


def softmax(x: Any) -> Any:
    return torch.softmax(x, -1)


def softmax_of_columns(x: Any) -> Any:
    return torch.softmax(x, 0)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def add_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
    return F.rms_norm(x + residual, x.shape[-1:], weight, 1e-5)


linear = F.linear
CASES: dict[str, tuple[Callable[..., Any], tuple[TensorSpec, ...]]] = {
    "causal": (causal, 3 * (_dense(1, 2, 600, 128),)),
    "attention": (attention, (_dense(1, 132, 200, 64), *2 * (_dense(1, 132, 600, 64),))),
    "attention in clusters": (attention, (_dense(1, 2, 200, 64), *2 * (_dense(1, 2, 1500, 64),))),
    "attention with a mask in clusters": (causal, 3 * (_dense(1, 2, 900, 64),)),
    "attention, element by element": (causal, 3 * (_dense(1, 2, 300, 20),)),
    "attention with a window": (window, 3 * (_dense(1, 2, 900, 64),)),
    "gradients": (causal, 3 * (_dense(1, 2, 300, 128),)),
    "gradients, element by element": (causal, 3 * (_dense(1, 2, 300, 20),)),
    "gradients with a window": (window, 3 * (_dense(1, 2, 600, 64),)),
    "attention of few keys": (attention, (_dense(1, 4, 600, 128), *2 * (_dense(1, 4, 77, 128),))),
    "attention of few rows": (attention, (_dense(1, 4, 2, 128), *2 * (_dense(1, 4, 3000, 128),))),
    "linear": (linear, (_dense(600, 520), _dense(1000, 520))),
    "linear of 64 rows": (linear, (_dense(64, 1040), _dense(500, 1040))),
    "linear of a row": (linear, (_dense(1, 2048), _dense(500, 2048))),
    "linear of float32": (linear, (_dense(33, 777, dtype=single), _dense(100, 777, dtype=single))),
    "swiglu": (swiglu, (_dense(300, 520), *2 * (_dense(500, 520),))),
    "transposed": (product, (_dense(300, 520), _dense(520, 600))),
    "matrices": (product, (_dense(3, 300, 520), _dense(3, 520, 200))),
    "int4 of 256 rows": (linear, (_dense(256, 1024), _codes(520, 1024))),
    "int4 of 32 rows": (linear, (_dense(32, 1024), _codes(520, 1024))),
    "int4 of a row": (linear, (_dense(1, 2048), _codes(520, 2048))),
    "uint4 of 8 rows": (linear, (_dense(8, 2048), _codes(520, 2048, "uint4", 64))),
    "int8 of 128 rows": (linear, (_dense(128, 1024), _codes(520, 1024, "int8", None))),
    "swiglu of int4": (swiglu, (_dense(64, 1024), *2 * (_codes(520, 1024),))),
    "softmax": (softmax, (_dense(64, 151936),)),
    "softmax of columns": (softmax_of_columns, (_dense(8192, 1000),)),
    "layer_norm": (layer_norm, (_dense(8192, 65536), *2 * (_dense(65536),))),
    "layer_norm, staged": (layer_norm, (_dense(64, 151936), *2 * (_dense(151936),))),
    "layer_norm, persistent": (layer_norm, (_dense(64, 65536, dtype=single), *2 * (_dense(65536, dtype=single),))),
    "add_rms_norm": (add_rms_norm, (*2 * (_dense(64, 32768),), _dense(32768))),
    "add_rms_norm, staged": (add_rms_norm, (*2 * (_dense(64, 65536),), _dense(65536))),
}


def lowered(case: str) -> Any:
    """What the case lowers to; of gradients, the backward."""
    function, specs = CASES[case]
    backward = case.startswith("gradients")
    arguments = (torch.zeros(spec.shape, dtype=spec.dtype, requires_grad=True) for spec in specs) if backward else specs
    found = jitgen.jit(function).lower(*arguments, backend="cuda", target="sm_90a")
    return found.backward._lowered if backward else found._lowered


def checked(case: str, most: int | None = None) -> Iterator[str]:
    """Checks kernels of a case by so many of their schedules, the chosen one among them, and says which have barriers.

    Raises:
        Miscounted: one of them counts wrongly.
    """
    kernels = lowered(case)
    for number, own in enumerate(kernels.schedules):
        others = [schedule for schedule in candidates(kernels, number) if schedule != own]
        if most is not None and len(others) >= most:
            others = random.Random(case).sample(others, max(most - 1, 0))
        found: Counter[str] = Counter()
        for schedule in (own, *others):
            source, launch = of_lowered(kernels, number, schedule)
            ptx = barriers.compiled(source)
            if barriers.USES.search(ptx) is None:
                found["no barriers"] += 1
                continue
            try:
                barriers.check(source, launch, ptx=ptx)
            except barriers.Miscounted as fault:
                raise barriers.Miscounted(f"{case}, {schedule}: {fault}") from None
            found[f"clusters of {launch.cluster}"] += 1
        said = ", ".join(f"{count} with {what}" for what, count in sorted(found.items()))
        yield f"{case}, {source.name}: {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="case")
    parser.add_argument("--most", type=int, help="schedules of a kernel")
    options = parser.parse_args()
    faults = 0
    for case in options.cases or CASES:
        try:
            for line in checked(case, options.most):
                print(line, flush=True)
        except barriers.Miscounted as fault:
            faults += 1
            print(fault, flush=True)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
