"""Times convolutions and their gradients beside eager torch on a CPU: ``python -m bench.convolutions --json c.json``.

Sizes are those of ResNet, AlexNet, MobileNet, ConvNeXt, wav2vec and volumes. A figure is the least time of a call in
milliseconds, of repetitions in which eager and jitgen take turns: ``wall`` and ``processor``. Of one thread, other work
on the machine disturbs the latter less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import made
from bench.records import write

Shape = tuple[int, ...]
CASES: dict[str, tuple[Callable[..., Any], Shape, Shape, dict[str, Any]]] = {
    "7 x 7, stride 2, 3 to 64, of 224": (F.conv2d, (4, 3, 224, 224), (64, 3, 7, 7), {"stride": 2, "padding": 3}),
    "3 x 3, 64, of 56": (F.conv2d, (4, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
    "3 x 3, 128, of 28": (F.conv2d, (4, 128, 28, 28), (128, 128, 3, 3), {"padding": 1}),
    "3 x 3, 256, of 14": (F.conv2d, (4, 256, 14, 14), (256, 256, 3, 3), {"padding": 1}),
    "3 x 3, 512, of 7": (F.conv2d, (4, 512, 7, 7), (512, 512, 3, 3), {"padding": 1}),
    "3 x 3, 512, of 7, one image": (F.conv2d, (1, 512, 7, 7), (512, 512, 3, 3), {"padding": 1}),
    "3 x 3, stride 2, 128 to 256": (F.conv2d, (4, 128, 28, 28), (256, 128, 3, 3), {"padding": 1, "stride": 2}),
    "1 x 1, 64 to 256, of 56": (F.conv2d, (4, 64, 56, 56), (256, 64, 1, 1), {}),
    "1 x 1, 256 to 64, of 56": (F.conv2d, (4, 256, 56, 56), (64, 256, 1, 1), {}),
    "1 x 1, stride 2, 1024 to 2048": (F.conv2d, (4, 1024, 14, 14), (2048, 1024, 1, 1), {"stride": 2}),
    "5 x 5, 32 to 64, of 28": (F.conv2d, (8, 32, 28, 28), (64, 32, 5, 5), {"padding": 2}),
    "11 x 11, stride 4, 3 to 64": (F.conv2d, (4, 3, 224, 224), (64, 3, 11, 11), {"stride": 4, "padding": 2}),
    "depthwise 3 x 3, 144, of 56": (F.conv2d, (4, 144, 56, 56), (144, 1, 3, 3), {"padding": 1, "groups": 144}),
    "depthwise 3 x 3, stride 2": (
        F.conv2d,
        (4, 144, 56, 56),
        (144, 1, 3, 3),
        {"padding": 1, "groups": 144, "stride": 2},
    ),
    "depthwise 7 x 7, 96, of 56": (F.conv2d, (4, 96, 56, 56), (96, 1, 7, 7), {"padding": 3, "groups": 96}),
    "depthwise 7 x 7, 384, of 14": (F.conv2d, (4, 384, 14, 14), (384, 1, 7, 7), {"padding": 3, "groups": 384}),
    "32 groups, 3 x 3, 128": (F.conv2d, (4, 128, 56, 56), (128, 4, 3, 3), {"padding": 1, "groups": 32}),
    "audio, 10, stride 5, 1 to 512": (F.conv1d, (4, 1, 16000), (512, 1, 10), {"stride": 5}),
    "audio, 3, stride 2, 512": (F.conv1d, (2, 512, 800), (512, 512, 3), {"stride": 2}),
    "audio, 3, dilation 4, 128": (F.conv1d, (4, 128, 2000), (128, 128, 3), {"dilation": 4, "padding": 4}),
    "volume, 3 x 3 x 3, 32": (F.conv3d, (2, 32, 8, 28, 28), (32, 32, 3, 3, 3), {"padding": 1}),
    "transposed 4 x 4, stride 2": (F.conv_transpose2d, (8, 128, 16, 16), (128, 64, 4, 4), {"stride": 2, "padding": 1}),
    "channels last, 3 x 3, 64": (F.conv2d, (4, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
    "channels last, depthwise 7 x 7": (F.conv2d, (4, 96, 56, 56), (96, 1, 7, 7), {"padding": 3, "groups": 96}),
    "bfloat16, 3 x 3, 64": (F.conv2d, (4, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
}


def least(calls: Sequence[Callable[[], Any]], seconds: float) -> list[dict[str, float]]:
    """Returns the least wall and processor time of each call, in milliseconds; calls take turns."""
    for call in calls:
        call()
    found = [{"wall": float("inf"), "processor": float("inf")} for _ in calls]
    end, turns = time.perf_counter() + seconds, 0
    while turns < 3 or time.perf_counter() < end:
        turns += 1
        for call, times in zip(calls, found, strict=True):
            wall, processor = time.perf_counter(), time.process_time()
            call()
            times["wall"] = min(times["wall"], (time.perf_counter() - wall) * 1e3)
            times["processor"] = min(times["processor"], (time.process_time() - processor) * 1e3)
    return [{name: round(value, 3) for name, value in times.items()} for times in found]


def measure(name: str, threads: int, seconds: float) -> dict[str, Any]:
    """Measures one case: the convolution, and its gradients by the images and by the filters."""
    function, shape, weight, options = CASES[name]
    x, w = torch.randn(shape), torch.randn(weight)
    if name.startswith("channels last"):
        x, w = (tensor.to(memory_format=torch.channels_last) for tensor in (x, w))
    if name.startswith("bfloat16"):
        x, w = x.bfloat16(), w.bfloat16()

    def convolution(x: Any, w: Any) -> Any:
        return function(x, w, **options)

    own = jitgen.jit(convolution)
    row: dict[str, Any] = {"case": name, "threads": threads}
    with torch.no_grad():
        times = least([lambda: convolution(x, w), lambda: own(x, w)], seconds)
    row["forward"] = dict(zip(("eager", "jitgen"), times, strict=True))
    for which in ("images", "filters"):
        inputs = x.detach().requires_grad_(which == "images"), w.detach().requires_grad_(which == "filters")
        wanted, results = inputs[which == "filters"], (convolution(*inputs), own(*inputs))
        g = torch.randn_like(results[0])
        calls = [
            lambda y=y: torch.autograd.grad(y, wanted, g, retain_graph=True)  # noqa: B023
            for y in results
        ]
        row[which] = dict(zip(("eager", "jitgen"), least(calls, seconds), strict=True))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="the cases whose name has this")
    parser.add_argument("--seconds", type=float, default=0.5, help="to spend on each figure")
    parser.add_argument("--commit", help="the commit to record")
    parser.add_argument("--note", help="what to say of the machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = made("bench.convolutions", options.commit, "cpu") | {"note": options.note, "what": __doc__.splitlines()[0]}
    rows: list[dict[str, Any]] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in CASES:
            if options.only in name:
                rows.append(measure(name, threads, options.seconds))
                kind = "processor" if threads == 1 else "wall"
                ratios = {
                    way: rows[-1][way]["eager"][kind] / rows[-1][way]["jitgen"][kind]
                    for way in ("forward", "images", "filters")
                }
                print(f"{threads} {name:32}", *(f"{way} {ratio:.2f}" for way, ratio in ratios.items()), flush=True)
                if options.json:
                    write(options.json, record | {"rows": rows})


if __name__ == "__main__":
    main()
