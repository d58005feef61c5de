"""Times ordinary functions on a CPU: ``python -m bench.ordinary --json docs/measured/cpu-ordinary.json``.

Each is a function as people write it, of several kernels: an optimiser's orthogonalisation, scores of a beam search,
experts by gathered weights, a product of 8-bit integers that are quantised in the function, a vector quantiser. The
peers are eager torch and torch.compile in the same process and on the same data. All ways take turns, and a figure is
the least time of a call in microseconds, so that other work of the machine weighs least. On a machine that has other
work one thread (``--threads 1``) says more than several, which wait for one another. An error is relative, in norm,
against eager torch in float64, of the results that are not integers. The file is written after every case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import jitgen
from bench.measurement import made, relative_error
from bench.plans import counts, newton_schulz
from bench.records import write

Function = Callable[..., Any]


def beam_scores(logits: Tensor, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 8 best continuations of each sentence's 4 beams: their scores, normalised by length, beams and tokens."""
    vocabulary = logits.shape[-1]
    total = (scores[:, :, None] + F.log_softmax(logits, -1)) / (lengths[:, :, None] + 1) ** 0.6
    values, indices = total.flatten(1).topk(8)
    return values, indices // vocabulary, indices % vocabulary


def gathered_experts(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Two of eight experts for each token, whose weights are gathered."""
    weights, chosen = F.softmax(x @ router.T, -1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    inner = F.silu(torch.einsum("td,tkhd->tkh", x, up[chosen]))
    return (torch.einsum("tkh,tkdh->tkd", inner, down[chosen]) * weights[:, :, None]).sum(1)


def dynamic_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """A product by ``torch._int_mm`` of activations that are quantised by rows."""
    of_rows = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / of_rows).round().clamp(-127, 127).to(torch.int8)
    return torch._int_mm(codes, weight.T).to(x.dtype) * of_rows * scales


def nearest_codes(x: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest vectors of a codebook, and their numbers."""
    chosen = torch.cdist(x, codebook).argmin(-1)
    return codebook[chosen], chosen


def cases() -> Mapping[str, tuple[Function, tuple[Tensor, ...]]]:
    experts = [torch.randn(8, *shape) / shape[1] ** 0.5 for shape in ((512, 256), (256, 512))]
    return {
        "Newton-Schulz, 128 x 256": (newton_schulz, (torch.randn(128, 256),)),
        "beam search scoring": (
            beam_scores,
            (torch.randn(4, 4, 32000), torch.randn(4, 4), torch.randint(1, 50, (4, 4))),
        ),
        "experts by gathered weights, 4 tokens": (
            gathered_experts,
            (torch.randn(4, 256), torch.randn(8, 256) / 16, *experts),
        ),
        "experts by gathered weights, 64 tokens": (
            gathered_experts,
            (torch.randn(64, 256), torch.randn(8, 256) / 16, *experts),
        ),
        "_int_mm, dynamic, 64 rows": (
            dynamic_int8,
            (torch.randn(64, 1024), torch.randint(-127, 128, (1024, 1024), dtype=torch.int8), torch.rand(1024)),
        ),
        "vector quantiser by cdist": (nearest_codes, (torch.randn(1024, 64), torch.randn(512, 64))),
    }


def error(function: Function, reference: Function, arguments: tuple[Tensor, ...]) -> float:
    """The greatest relative error among the results of ``function``; of 8-bit codes the reference is in float32."""
    has_codes = any(tensor.dtype == torch.int8 for tensor in arguments)
    exact = [x.double() if x.is_floating_point() and not has_codes else x for x in arguments]
    results, wanted = function(*arguments), reference(*exact)
    pairs = [(results, wanted)] if isinstance(results, Tensor) else list(zip(results, wanted, strict=True))
    return max(relative_error(own, other.double()) for own, other in pairs if own.is_floating_point())


def least(ways: Mapping[str, Function], arguments: tuple[Tensor, ...], seconds: float) -> dict[str, float]:
    """The least time of a call of each of ``ways``, in seconds; they take turns for ``seconds`` in all."""
    for function in ways.values():
        for _ in range(3):
            function(*arguments)
    times = dict.fromkeys(ways, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for way, function in ways.items():
            started = time.perf_counter()
            function(*arguments)
            times[way] = min(times[way], time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="the cases whose names have one of these words")
    parser.add_argument("--seconds", type=float, default=3.0, help="to spend on the timing of a case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of all ways")
    parser.add_argument("--commit", help="the commit to record")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    record = made("bench.ordinary", options.commit, "cpu") | {"threads": options.threads, "rows": rows}
    for name, (function, arguments) in cases().items():
        if not any(word in name for word in options.only):
            continue
        own = jitgen.jit(function)
        with torch.no_grad():
            row: dict[str, Any] = {"case": name} | counts(own, arguments)
            row["error"] = error(own, function, arguments)
            ways = {"jitgen": own, "eager": function, "torch.compile": torch.compile(function, dynamic=False)}
            times = least(ways, arguments, options.seconds)
        row["us"] = {way: round(seconds * 1e6, 2) for way, seconds in times.items()}
        rows.append(row)
        print(*(f"{key} {value:.3g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
        if options.json:
            write(options.json, record)


if __name__ == "__main__":
    main()
