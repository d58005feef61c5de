"""Takes apart one step of decoding: every launch of its CUDA graph, with its bytes, its time, and the gap before it.

    python -m bench.whole_timeline --sizes llama-3-8b --batch 2 --json timeline.json

The times are those of a replay under torch's profiler (CUPTI), of which each kernel's begin and end are taken; the
bytes are those that the kernel's plan moves. A gap is negative where a kernel began before the one ahead had ended, as
programmatic dependent launch allows. The bandwidth is that of a sum of 2 GiB in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.measurement import made
from bench.whole_models import SIZES, cache_of, graph_of, milliseconds, model_of, read_bandwidth


class Launches:
    """Notes what launchers launch, in their order, while ``noting`` is true.

    Attributes:
        rows: for each launch its entry, bytes, and whether it has the attribute of programmatic dependent launch.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.noting = False

    def install(self) -> None:
        from jitgen.call.specialization import Specialization
        from jitgen.kernel.launch import OVERLAPS

        bind = Specialization.bind

        def bound(specialization: Any, lowered: Any, kernels: Any, *others: Any) -> Any:
            launch = bind(specialization, lowered, kernels, *others)
            rows = []
            for number, built in enumerate(kernels):
                work, shape = lowered.work(number), lowered.launch(number)
                if work.elements:
                    row = {"program": lowered.graph.name, "kernel": built.name, "bytes": work.moved}
                    row |= {"entry": built.entry + shape.entry}
                    row |= {"grid": shape.grid, "block": shape.block, "pdl": OVERLAPS in shape.attributes}
                    rows.append(row)

            def noted(*arguments: Any) -> Any:
                if self.noting:
                    self.rows.extend(rows)
                return launch(*arguments)

            noted.source = getattr(launch, "source", "")  # type: ignore[attr-defined]
            return noted

        setattr(Specialization, "bind", bound)  # noqa: B010  its type is no method's


def kernels_of(replay: Callable[[], None]) -> list[tuple[str, float, float]]:
    """Returns name, begin and end in microseconds of each kernel of one replay: of the median of five."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(7):
            replay()
            torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    count = len(events) // 7
    steps = [events[number * count : (number + 1) * count] for number in range(2, 7)]
    steps.sort(key=lambda step: step[-1].time_range.end - step[0].time_range.start)
    begin = steps[2][0].time_range.start
    return [(event.name, event.time_range.start - begin, event.time_range.end - begin) for event in steps[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="llama-3-8b", choices=SIZES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--quantize", help="a format, for the layers of the model but not the head")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import jitgen

    launches = Launches()
    launches.install()
    model = model_of(options.sizes, "cuda", torch.bfloat16)
    if options.quantize:
        jitgen.quantize_(model.model, options.quantize, group_size=128)
    jitgen.compile(model)
    cache = cache_of(model)
    with torch.no_grad():
        tokens = torch.randint(0, SIZES[options.sizes]["vocab_size"], (options.batch, options.prompt), device="cuda")
        model(tokens, past_key_values=cache)
        current = tokens[:, :1].clone()

        def step() -> None:
            current.copy_(model(current, past_key_values=cache).logits[:, -1:].argmax(-1))

        step()
        step()
        launches.noting = True
        replay = graph_of(step)
        launches.noting = False
        replay()
        torch.cuda.synchronize()
        taken = milliseconds(replay)
        kernels = kernels_of(replay)
    bandwidth = read_bandwidth()
    entries, noted = {row["entry"] for row in launches.rows}, iter(launches.rows)
    rows: list[dict[str, Any]] = []
    before = 0.0
    for name, begin, end in kernels:
        row: dict[str, Any] = {"name": name[:120], "us": round(end - begin, 2), "gap us": round(begin - before, 2)}
        if name in entries:
            row |= next(noted, {})
            row["of bandwidth"] = round(row.get("bytes", 0) / (end - begin) * 1e6 / bandwidth, 3)
        rows.append(row)
        before = max(before, end)
    gaps = [row["gap us"] for row in rows[1:]]
    summary = made("bench.whole_timeline") | {
        "sizes": options.sizes,
        "batch": options.batch,
        "weights": options.quantize or "bfloat16",
        "graph ms": round(taken, 4),
        "profiled ms": round(before / 1e3, 4),
        "bandwidth GB/s": round(bandwidth / 1e9, 1),
        "bytes": sum(row.get("bytes", 0) for row in rows),
        "launches": len(rows),
        "gaps us": round(sum(gap for gap in gaps if gap > 0), 1),
        "median gap us": statistics.median(gaps),
        "overlaps us": round(sum(gap for gap in gaps if gap < 0), 1),
        "without pdl": sorted({row.get("kernel", row["name"]) for row in rows if not row.get("pdl")}),
        "not matched": len([*noted]),
    }
    print(json.dumps(summary, indent=1), flush=True)
    for row in rows[:60]:
        print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(summary | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
