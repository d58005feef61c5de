"""Times products that quantise their activations on a CPU, beside torch's: ``python -m bench.quantized_activations``.

Times on one thread are of the processor (``time.process_time``), and on several threads of the clock. They are the
least of rounds in which the peers take turns: on a machine that others load, too, these depend on them the least.
``_int_mm`` of torch takes minutes for many rows, and is timed for one. Where the packages onnxruntime and onnx are
installed, MatMulNBits with ``accuracy_level`` 4 is a peer.

On a processor with more, the instructions of AVX2 alone are timed by ``JITGEN_CPU_TARGET=x86-64-v3
JITGEN_CXXFLAGS=-DJITGEN_LEVEL_ALONE ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 FBGEMM_ENABLE_INSTRUCTIONS=AVX2``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench import records
from bench.measurement import made
from bench.sizes import log_uniform
from jitgen.spec import dtype_name, host_target

GROUP = 128
ROWS = (1, 16, 128, 1000)
CHOICES = "JITGEN_CXXFLAGS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS"
"""Variables that choose instructions."""
Calls = dict[str, Callable[[], Any]]


def least(calls: Calls, seconds: float) -> dict[str, float]:
    """Returns the least time of each call, in seconds; each is called twice at least."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, float("inf"))
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 2 or time.perf_counter() < end:
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
        rounds += 1
    return best


@dataclass(frozen=True)
class Weights:
    """Holds one weight (columns, length) as each peer takes it.

    Attributes:
        made: jitgen's, by format and activation.
        dynamic: torch.ao's layer of dynamically quantised activations.
        codes: of int8.
        packed, scales: of ``_weight_int4pack_mm_for_cpu``.
        session: onnxruntime's; None where it is not installed.
    """

    dense: torch.Tensor
    made: Mapping[tuple[str, str | None], torch.Tensor]
    dynamic: torch.nn.Module
    codes: torch.Tensor
    packed: torch.Tensor
    scales: torch.Tensor
    session: Any

    @staticmethod
    def of(columns: int, length: int) -> Weights:
        dense = torch.randn(columns, length)
        made = {
            (format, activation): jitgen.quantize(
                dense, format, GROUP if format == "int4" else None, method="absmax", activation=activation
            )
            for format, activation in (("int8", "int8"), ("int4", "int8"), ("int4", None))
        }
        model = torch.nn.Sequential(torch.nn.Linear(length, columns, bias=False)).requires_grad_(False)
        model[0].weight.data = dense
        dynamic = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
        codes = torch.randint(-127, 128, (columns, length), dtype=torch.int8)
        nibbles = torch.randint(0, 16, (columns, length), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 8)
        scales = torch.rand(length // GROUP, columns, 2, dtype=torch.bfloat16)
        return Weights(dense, made, dynamic, codes, packed, scales, onnx_session(columns, length))


def onnx_session(columns: int, length: int) -> Any:
    """Returns a session of onnxruntime that multiplies ``x`` by an int4 weight (columns, length)."""
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return None
    onnx, onnxruntime = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    helper, number = onnx.helper, onnx.TensorProto.FLOAT

    codes = torch.randint(0, 256, (columns, length // GROUP, GROUP // 2), dtype=torch.uint8)
    weights = [
        onnx.numpy_helper.from_array(value.numpy(), name)
        for name, value in (("codes", codes), ("scales", torch.rand(columns * length // GROUP)))
    ]
    sizes = {"K": length, "N": columns, "bits": 4, "block_size": GROUP, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "codes", "scales"], ["y"], domain="com.microsoft", **sizes)
    x, y = (
        helper.make_tensor_value_info(name, number, ["rows", size]) for name, size in (("x", length), ("y", columns))
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "product", [x], [y], weights), opset_imports=opsets)
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # its threads would take others' time
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@jitgen.jit
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


@jitgen.jit
def integers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(x, weight.T)


def calls_of(weights: Weights, rows: int) -> Calls:
    """Returns the products of ``rows`` rows by name."""
    x = torch.randn(rows, weights.dense.shape[1])
    half, codes = x.bfloat16(), torch.randint(-127, 128, x.shape, dtype=torch.int8)
    packed, made = (half, weights.packed, GROUP, weights.scales), weights.made
    calls: Calls = {
        "int8 weights, int8 activations, float32": lambda: linear(x, made["int8", "int8"]),
        "int4 weights, int8 activations, bfloat16": lambda: linear(half, made["int4", "int8"]),
        "int4 weights, int8 activations, float32": lambda: linear(x, made["int4", "int8"]),
        "int4 weights, bfloat16": lambda: linear(half, made["int4", None]),
        "float32": lambda: linear(x, weights.dense),
        "_int_mm": lambda: integers(codes, weights.codes),
        "torch.ao dynamic int8, float32": lambda: weights.dynamic(x),
        "torch int4pack_mm, bfloat16": lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(*packed),
        "torch float32": lambda: F.linear(x, weights.dense),
    }
    if weights.session is not None:
        calls["onnxruntime MatMulNBits, float32"] = lambda: weights.session.run(None, {"x": x.numpy()})
    if rows == 1:
        calls["torch _int_mm"] = lambda: torch._int_mm(codes, weights.codes.T)
    return calls


def planes_of(columns: int, length: int) -> Callable[[int], Calls]:
    """Makes weights of 2 and 3 bits, and returns their products of some rows by name."""
    dense = torch.randn(columns, length)
    made = {
        (format, activation): jitgen.quantize(dense, format, GROUP, method="absmax", activation=activation)
        for format in ("int2", "int3", "uint3")
        for activation in ("int8", None)
    }

    def calls(rows: int) -> Calls:
        x = torch.randn(rows, length)
        return {
            f"{format} weights, {f'{activation} activations, ' if activation else ''}{dtype_name(one.dtype)}": (
                functools.partial(linear, one, weight)
            )
            for (format, activation), weight in made.items()
            for one in (x.bfloat16(), x)
        }

    return calls


def measured(
    columns: int, length: int, rows: tuple[int, ...], seconds: float, planes: bool = False
) -> list[dict[str, Any]]:
    """Measures products of some numbers of rows with a weight (columns, length)."""
    calls = planes_of(columns, length) if planes else functools.partial(calls_of, Weights.of(columns, length))
    found = []
    for count in rows:
        times = least(calls(count), seconds)
        found.append({"rows": count, "columns": columns, "length": length, "seconds": times})
        print(count, columns, length, {name: f"{1e3 * value:.3g} ms" for name, value in times.items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="for the rounds of one product, at least")
    parser.add_argument("--random", type=int, default=4, help="weights of random sizes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--planes", action="store_true", help="weights of 2 and 3 bits, without torch's products")
    parser.add_argument("--json", help="where the figures are written")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    draw = random.Random(arguments.seed)
    products = measured(14336, 4096, ROWS, arguments.seconds, arguments.planes)
    for _ in range(arguments.random):
        columns = 16 * (2 * int(log_uniform(draw, 500, 8000) / 32) + 1)
        length = GROUP * round(log_uniform(draw, 500, 8000) / GROUP)
        rows = tuple(sorted(round(log_uniform(draw, 1, 500)) for _ in range(3)))
        products += measured(columns, length, rows, arguments.seconds, arguments.planes)
    if arguments.json:
        load = [round(number, 1) for number in os.getloadavg()]
        facts = {
            **made("bench.quantized_activations", device="cpu"),
            "target": str(host_target()),
            **{name: os.environ[name] for name in CHOICES if name in os.environ},
            "cores": os.cpu_count(),
            "threads": arguments.threads,
            "load_average": load,
            "times": "least of rounds in turn, seconds, of the processor on one thread; others used the machine, too",
        }
        records.write(Path(arguments.json), {"environment": facts, "products": products})


if __name__ == "__main__":
    main()
