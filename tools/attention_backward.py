"""The kernels of attention's gradients on Hopper, ``attention_backward.cuh``: checked against float64, and timed beside
torch's. Run ``python tools/attention_backward.py [times] [results.json]`` from the root, on a GPU of sm_90a.

Prints, unless only ``times`` are wanted, for each configuration the greatest error of dQ, dK and dV, relatively to the
norm of what they add up; then times in microseconds and the rate in TFLOP/s of five products, without what a causal
mask hides. ``jitgen`` is the whole backward, with the sums of dO * O.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))
import jitgen
from jitgen.compilers import nvrtc
from jitgen.runtime import cuda
from jitgen.runtime.tensor_map import TensorMap
from tests.backward_kernels import Backward

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WINDOW = 200


compiled = functools.cache(lambda config: nvrtc.compile(config.source()))


@functools.cache
def loaded(config: Backward) -> Any:
    return cuda.load(compiled(config).files["kernel.cubin"], config.name, 0, config.shared_bytes)


def mapped(tensor: torch.Tensor, rows: int) -> bytes:
    name = str(tensor.dtype).removeprefix("torch.")
    sizes, strides = (1, *tensor.shape), (0, *tensor.stride())
    return TensorMap(0, 0, name, sizes, strides, (1, 1, 1, rows, 64), 128).encode(tensor.data_ptr())


def prepared(
    config: Backward, q: Any, k: Any, v: Any, g: Any, lse: Any, delta: Any, outputs: Any, scale: float
) -> Callable[[], None]:
    block = (k, v) if config.by_keys else (q, g)
    tile = (q, g) if config.by_keys else (k, v)
    batch, row_heads, rows, depth = q.shape
    heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    maps = [*(mapped(t, config.block) for t in block), *(mapped(t, config.tile) for t in tile)]
    out0, out1 = outputs if config.by_keys else (outputs[0], outputs[0])
    items, tasks = (keys, heads) if config.by_keys else (rows, row_heads)
    pieces = -(-items // config.block) * tasks * batch
    values = (
        *maps,
        *(tensor.data_ptr() for tensor in (lse, delta, out0, out1)),
        *(batch, heads, row_heads // heads, *((keys, rows) if config.by_keys else (rows, keys)), depth, width),
        scale,
    )
    grid = min(pieces, cuda.multiprocessors(0))
    launch = cuda.Launch(
        loaded(config), "TTTTPPPPiiiiiiif", values, (grid, 1, 1), (config.threads, 1, 1), config.shared_bytes
    )
    return lambda: launch(cuda.current_stream(0))


def hidden(mask: str, rows: int, keys: int) -> torch.Tensor | None:
    i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")
    return {"full": None, "causal": j > i, "window": (j > i) | (j < i - WINDOW)}[mask]


def reference(q: Any, k: Any, v: Any, g: Any, mask: str, scale: float) -> tuple[Any, ...]:
    """Gradients in float64, log-sum-exp, and delta."""
    q, k, v, g = (t.double() for t in (q, k, v, g))
    shared = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    s = q @ wide_k.transpose(-1, -2) * scale
    hides = hidden(mask, q.shape[2], k.shape[2])
    if hides is not None:
        s = s.masked_fill(hides, float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[..., None]).nan_to_num(0.0)
    delta = ((p @ wide_v) * g).sum(-1)
    dp = g @ wide_v.transpose(-1, -2)
    ds, most = p * (dp - delta[..., None]) * scale, p * (dp.abs() + delta.abs()[..., None]) * scale
    fold = lambda t: t.unflatten(1, (k.shape[1], shared)).sum(2)  # noqa: E731
    found = ds @ wide_k, fold(ds.transpose(-1, -2) @ q), fold(p.transpose(-1, -2) @ g)
    sizes = most @ wide_k.abs(), fold(most.transpose(-1, -2) @ q.abs()), fold(p.transpose(-1, -2) @ g.abs())
    return *found, lse, delta, [float(size.norm()) for size in sizes]


def error(found: torch.Tensor, wanted: torch.Tensor, size: float) -> float:
    """Of the norms, relatively to that of what is added up."""
    if found.isnan().any():
        return float("inf")
    return float((found.double() - wanted).norm()) / size


def check(by_keys: Backward, by_rows: Backward, shape: tuple[int, ...]) -> float:
    batch, heads, shared, rows, keys, depth, width = shape
    dtype = DTYPES[by_keys.element]
    q, g = (torch.randn(batch, heads * shared, rows, d, device="cuda").to(dtype) for d in (depth, width))
    k, v = (torch.randn(batch, heads, keys, d, device="cuda").to(dtype) for d in (depth, width))
    scale = depth**-0.5
    dq, dk, dv, lse, delta, sizes = reference(q, k, v, g, by_keys.mask, scale)
    worst, of_rows = 0.0, [lse.float(), delta.float()]
    for _ in range(2):
        found = [torch.full_like(t, float("nan")) for t in (q, k, v)]
        prepared(by_keys, q, k, v, g, of_rows[0], of_rows[1], found[1:], scale)()
        prepared(by_rows, q, k, v, g, of_rows[0], of_rows[1], found[:1], scale)()
        torch.cuda.synchronize()
        errors = [error(f, w, s) for f, w, s in zip(found, (dq, dk, dv), sizes, strict=True)]
        worst = max([worst, *errors])
        if not worst < 2**-8:
            print("WRONG", shape, by_keys.mask, errors, flush=True)
    return worst


def timed(calls: list[Callable[[], Any]], rounds: int = 5, burst: int = 6) -> list[float]:
    """Medians over rounds of each call's microseconds, several in a row, so that the host is ahead of the device."""
    for call in calls:
        for _ in range(3):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            call()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(burst):
                call()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / burst)
    return [statistics.median(found) for found in times]


SHAPES = [
    (1, 2, 1, rows, keys)
    for rows, keys in (
        (1, 1),
        (1, 127),
        (63, 65),
        (64, 64),
        (65, 63),
        (127, 129),
        (129, 127),
        (1000, 1023),
        (1023, 1000),
        (1, 1023),
        (1000, 1),
    )
]


CASES = [
    (4, 32, 1, 4096, 128, True),
    (4, 32, 1, 4096, 128, False),
    (4, 32, 1, 4096, 64, True),
    (4, 8, 4, 4096, 128, True),
    (16, 32, 1, 1024, 128, True),
    (1, 32, 1, 16384, 128, True),
]
"""(B, heads of keys, heads that share them, M = N, D, causal)."""
KEYS = {128: [(64, 3, False)], 64: [(64, 4, True), (96, 3, False)]}
ROWS = {128: [(128, 2, False)], 64: [(128, 3, True)]}
"""(rows of a tile, stages, whether the last product runs on) by D."""


def configs(depth: int, mask: str) -> list[Backward]:
    """The kernels that are timed by themselves."""
    found = [Backward(True, 2, tile, depth, depth, stages, mask, overlap=runs) for tile, stages, runs in KEYS[depth]]
    return found + [
        Backward(False, 2, tile, depth, depth, stages, mask, overlap=runs) for tile, stages, runs in ROWS[depth]
    ]


def main() -> None:
    results: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    paths = [Path(name) for name in sys.argv[1:] if name != "times"]
    path = paths[0] if paths else None

    def keep(name: str, value: Any) -> None:
        results[name] = value
        print(name, value, flush=True)
        if path is not None:
            path.write_text(json.dumps(results, indent=1))

    torch.manual_seed(0)
    for element in () if "times" in sys.argv else ("bfloat16", "float16"):
        for mask in ("full", "causal", "window"):
            for depth in (64, 80, 96, 128) if element == "bfloat16" else (128,):
                wide = 64 if depth == 64 else 96 if depth <= 96 else 128
                keys = Backward(depth=wide, width=wide, mask=mask, element=element)
                rows = Backward(
                    by_keys=False, tile=96, stages=2, overlap=True, depth=wide, width=wide, mask=mask, element=element
                )
                worst = max(check(keys, rows, (*shape, depth, depth)) for shape in SHAPES)
                worst = max(worst, check(keys, rows, (2, 2, 3, 300, 400, depth, depth)))
                keep(f"error {element} {mask} {depth}", worst)
    every = {each for *_, depth, causal in CASES for each in configs(depth, "causal" if causal else "full")}
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(compiled, every))
    for batch, heads, shared, length, depth, causal in CASES:
        q, g = (torch.randn(batch, heads * shared, length, depth, device="cuda").bfloat16() for _ in range(2))
        k, v = (torch.randn(batch, heads, length, depth, device="cuda").bfloat16() for _ in range(2))
        mask = "causal" if causal else "full"
        flops = 10 * batch * heads * shared * length**2 * depth / (2 if causal else 1)
        calls: dict[str, Callable[[], Any]] = {}
        lse, delta = (torch.full((batch, heads * shared, length), number, device="cuda") for number in (5.0, 0.0))
        found = [torch.empty_like(t) for t in (q, k, v)]
        for config in configs(depth, mask):
            of = found[1:] if config.by_keys else found[:1]
            name = f"{config.name}, {config.tile} {config.stages} {config.overlap}"
            calls[name] = prepared(config, q, k, v, g, lse, delta, of, depth**-0.5)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]

        def attend(q: Any, k: Any, v: Any, causal: bool = causal, shared: int = shared) -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared > 1)

        out = jitgen.jit(attend)(*leaves)
        calls["jitgen"] = functools.partial(torch.autograd.grad, out, leaves, g, retain_graph=True)
        peers = [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)]
        for name, backend in peers:
            with sdpa_kernel(backend):
                out = attend(*leaves)
            calls[name] = functools.partial(torch.autograd.grad, out, leaves, g, retain_graph=True)
        for name, time in zip(calls, timed(list(calls.values())), strict=True):
            keep(
                f"B{batch} H{heads * shared}/{heads} S{length} D{depth} {mask}: {name}",
                [round(time), round(flops / time / 1e6)],
            )
        del q, k, v, g, leaves, found, calls, lse, delta, out
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
