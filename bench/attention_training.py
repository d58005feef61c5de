"""Times a training step of attention beside torch's: ``python -m bench.attention_training B4,H32,S4096,D128``.

``--random 12 --seed 3`` adds shapes drawn at random, and ``--json FILE`` writes all measurements with what made them.

For each shape, causal and full, in bfloat16: the forward and backward of jitgen and of torch's flash and cuDNN kernels,
and the backward alone, in milliseconds and in TFLOP/s (4 M N D for the forward and 10 for the backward, half of it
where causal). One line of JSON for each measurement."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jitgen
from bench.measurement import made
from bench.records import write
from bench.sizes import log_uniform
from bench.timing import event_seconds

PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def steps(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], g: torch.Tensor) -> tuple[float, float]:
    """(forward, backward) in milliseconds."""
    result = function(*inputs)

    def backward() -> None:
        torch.autograd.grad(result, inputs, g, retain_graph=True)

    return event_seconds(lambda: function(*inputs)) * 1e3, event_seconds(backward) * 1e3


def gradients(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], g: torch.Tensor) -> Any:
    return torch.autograd.grad(function(*inputs), inputs, g)


def measured(batch: int, heads: int, size: int, depth: int, causal: bool) -> Iterator[dict[str, Any]]:
    """The measurements of one shape."""
    torch.manual_seed(0)
    inputs = [torch.randn(batch, heads, size, depth, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    g = torch.randn(batch, heads, size, depth, device="cuda").bfloat16()

    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    flops = 2 * batch * heads * size * size * depth * (0.5 if causal else 1.0)
    shape = f"B{batch} H{heads} S{size} D{depth} {'causal' if causal else 'full'}"
    subjects: dict[str, Callable[..., Any]] = {name: jitgen.jit(backend=name)(attend) for name in ("triton", "auto")}
    for name, peer in PEERS.items():

        def torch_attend(q: Any, k: Any, v: Any, peer: Any = peer) -> Any:
            with sdpa_kernel([peer]):
                return attend(q, k, v)

        subjects[name] = torch_attend
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        wanted = gradients(attend, inputs, g)
    for name, function in subjects.items():
        try:
            found = gradients(function, inputs, g)
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
            forward, backward = steps(function, inputs, g)
        except RuntimeError as reason:
            yield {"shape": shape, "what": name, "error": str(reason)[:200]}
            continue
        yield {
            "shape": shape,
            "what": name,
            "forward ms": round(forward, 3),
            "backward ms": round(backward, 3),
            "backward TFLOP/s": round(5 * flops / backward / 1e9, 1),
            "both TFLOP/s": round(7 * flops / (forward + backward) / 1e9, 1),
            "relative difference": f"{error:.2g}",
        }


def drawn(count: int, seed: int) -> Iterator[tuple[int, int, int, int]]:
    """``count`` shapes (batch, heads, rows, depth): rows from 64 to 8192, log-uniform and not rounded."""
    generator = random.Random(seed)
    for _ in range(count):
        size = round(log_uniform(generator, 64, 8192))
        heads, depth = generator.choice((4, 8, 14, 16, 32)), generator.choice((64, 64, 80, 96, 128, 128))
        yield max(1, min(16, 65536 // (size * heads))), heads, size, depth


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help="such as B4,H32,S4096,D128")
    parser.add_argument("--random", type=int, default=0, help="so many shapes more, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="the file that the measurements are written to")
    parser.add_argument("--commit", help="for the file, where there is no git")
    options = parser.parse_args()
    shapes: list[Any] = [tuple(int(word[1:]) for word in case.split(",")) for case in options.cases]
    shapes += drawn(options.random, options.seed)
    rows = []
    for (batch, heads, size, depth), causal in itertools.product(shapes, (True, False)):
        for row in measured(batch, heads, size, depth, causal):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if options.json:
        write(options.json, made("bench.attention_training", options.commit) | {"rows": rows})


if __name__ == "__main__":
    main()
