"""Times a training step of attention beside torch's: ``python tools/attention_training.py B4,H32,S4096,D128``.

``--random 12 --seed 3`` adds shapes drawn at random, and ``--json FILE`` writes all measurements with what made them.

For each shape, causal and full, in bfloat16: the forward and backward of jitgen and of torch's flash and cuDNN kernels,
and the backward alone, in milliseconds and in TFLOP/s (4 M N D for the forward and 10 for the backward, half of it
where causal). With ``tiles1`` or ``tiles2``, instead the kernel with so many results under other tiles, so that a rule
may be chosen. One line of JSON for each measurement."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jitgen
from tools import device_record

PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def milliseconds(call: Callable[[], Any], repeats: int = 8) -> float:
    """The median time of ``call`` on the device."""
    for _ in range(3):
        call()
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[repeats // 2]


def steps(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], g: torch.Tensor) -> tuple[float, float]:
    """(forward, backward) in milliseconds."""
    result = function(*inputs)

    def backward() -> None:
        torch.autograd.grad(result, inputs, g, retain_graph=True)

    return milliseconds(lambda: function(*inputs)), milliseconds(backward)


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
    subjects: dict[str, Callable[..., Any]] = {name: jitgen.jit(attend, backend=name) for name in ("triton", "auto")}
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


def variants(results: int, batch: int, heads: int, size: int, depth: int) -> Iterator[dict[str, Any]]:
    """The causal backward under other tiles of its kernel with so many results."""
    from jitgen.families.attention.backward import schedule

    chosen = schedule.tiles_of
    tiles = itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3))
    # A warp has 16 rows of a product at least; more than 64 x 128 products are no registers for four warps.
    for tile in (each for each in tiles if each[0] * each[1] <= 2048 * each[2] and each[0] >= 16 * each[2]):
        schedule.tiles_of = _only(tile, results, chosen)
        name = f"{'dQ' if results == 1 else 'dK, dV'} {tile}"
        try:
            for row in measured_one(batch, heads, size, depth, True):
                yield {"tiles": name, **row}
        except Exception as reason:
            yield {"tiles": name, "error": f"{type(reason).__name__} {str(reason)[:120]}"}
    schedule.tiles_of = chosen


def _only(tile: tuple[int, ...], results: int, chosen: Callable[..., Any]) -> Callable[..., Any]:
    """``tile`` for kernels of so many ``results``, and what is ``chosen`` for others."""
    return lambda large, count, *more: tile if count == results else chosen(large, count, *more)


def measured_one(batch: int, heads: int, size: int, depth: int, causal: bool) -> Iterator[dict[str, Any]]:
    """The backward in Triton, of a function of its own, so that a schedule is chosen anew."""
    inputs = [torch.randn(batch, heads, size, depth, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    g = torch.randn(batch, heads, size, depth, device="cuda").bfloat16()

    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    result = jitgen.jit(attend, backend="triton")(*inputs)
    yield {"ms": round(milliseconds(lambda: torch.autograd.grad(result, inputs, g, retain_graph=True), 5), 3)}


def drawn(count: int, seed: int) -> Iterator[tuple[int, int, int, int]]:
    """``count`` shapes (batch, heads, rows, depth): rows from 64 to 8192, log-uniform and not rounded."""
    generator = random.Random(seed)
    for _ in range(count):
        size = round(2 ** generator.uniform(6, 13))
        heads, depth = generator.choice((4, 8, 14, 16, 32)), generator.choice((64, 64, 80, 96, 128, 128))
        yield max(1, min(16, 65536 // (size * heads))), heads, size, depth


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help="B4,H32,S4096,D128, or tiles1, tiles2")
    parser.add_argument("--random", type=int, default=0, help="so many shapes more, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="the file that the measurements are written to")
    parser.add_argument("--commit", help="for the file, where there is no git")
    options = parser.parse_args()
    shapes = [tuple(int(word[1:]) for word in case.split(",")) for case in options.cases if case.startswith("B")]
    shapes += drawn(options.random, options.seed)
    kernels = [int(case.removeprefix("tiles")) for case in options.cases if case.startswith("tiles")]
    found = []
    for shape in shapes:
        rows = [variants(results, *shape) for results in kernels]
        rows = rows or [measured(*shape, causal) for causal in (True, False)]
        for row in itertools.chain(*rows):
            print(json.dumps(row), flush=True)
            found.append(row)
    if options.json:
        facts = device_record.facts(options.commit)
        command = shlex.join(["python", "tools/attention_training.py", *options.cases])
        command += f" --random {options.random} --seed {options.seed}"
        options.json.write_text(json.dumps(facts | {"command": command, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
