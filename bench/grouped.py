"""Grouped products of mixtures of experts on a GPU, beside torch and humming: values against float64, and times.

    python -m bench.grouped OUTPUT.json --seconds 80

Rows go to experts by Zipf laws (``EXPONENTS``; 0 is even). Times are of calls in one CUDA graph, in microseconds, of
graphs in turn. The calls take other experts each, and weights in turn, so that no L2 cache holds what a call reads.
Beside jitgen's dialects stand ``torch._grouped_mm`` of bfloat16 and, where it is installed, humming's products of
experts over weights that it quantised itself, of rows in the order of experts (``grouped_contiguous``) and of rows by
ids (``indexed``).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import jitgen
from bench.measurement import made
from bench.prebuild import compiling
from bench.timing import medians
from tests.grouped import rows_as_quantized

SHAPES = {
    "mixtral": (8, 2, 4096, 14336),
    "qwen3-30b": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "deepseek-v3 of 32": (32, 1, 7168, 2048),
    "deepgemm": (4, 1, 7168, 4096),
}
"""Experts, experts of a token, K and N of one projection. DeepSeek-V3's experts are the 32 of one of 8 devices, where a
token finds one of its 8; DeepGEMM publishes figures of 4 experts."""
TOKENS = (1, 4, 16, 64, 300, 1000, 4096)
EXPONENTS = (0.0, 0.8, 1.2)
COPIED_BYTES = 200e6
"""What the calls of a graph read together at least."""
FEW_TOKENS = 64
"""Tokens up to which calls differ by the experts that tokens choose, and humming's products by ids are timed too."""
SETS = 8
"""Choices of experts, of so few tokens."""
COPIES = 4
"""Copies of weights at most."""
KINDS = {"indexed": FEW_TOKENS, "grouped_contiguous": 1 << 30}
"""Humming's products of experts, and up to how many tokens each is timed."""
HUMMING_COLUMNS = 256
"""What humming pads columns to a multiple of: gpt-oss-20b's 2880 to 3072. It refuses them as they are."""
FORMATS: dict[str, tuple[str | None, int | None, str | None]] = {
    "bf16": (None, None, None),
    "int4": ("int4", 128, None),
    "mxfp4": ("mxfp4", None, None),
    "int8 by int8": ("int8", None, "int8"),
    "fp8 by fp8": ("fp8_e4m3", None, "fp8_e4m3"),
    "fp8 in blocks": ("fp8_e4m3.rows128", 128, "fp8_e4m3.block128"),
}
"""A format of weights, its group size, and the activation's."""
HUMMING = {
    "int4": {"dtype": "int4", "group_size": 128},
    "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
}


def product(x: Any, weight: Any, ends: Any) -> Any:
    return torch._grouped_mm(x, weight.transpose(-2, -1), ends)


def function_of(backend: str) -> Any:
    return jitgen.jit(backend=backend)(product)


def bits_of(name: str) -> float:
    """Bits of an element of a weight with its scales."""
    return {"bf16": 16.0, "int4": 4.125, "mxfp4": 4.25}.get(name, 8.0)


def takes(shape: str, name: str) -> bool:
    """Whether K of ``shape`` divides into groups of the format."""
    _, _, length, columns = SHAPES[shape]
    return name == "mxfp4" or (length % 128 == 0 and (name != "fp8 in blocks" or columns % 128 == 0))


def has_humming(name: str) -> bool:
    """Whether humming is there, and multiplies weights of the format."""
    return name in HUMMING and importlib.util.find_spec("humming") is not None


def compiled(backend: str, name: str, shape: str, *all_tokens: int) -> str:
    """Compiles what one ``backend`` has for these numbers of tokens; what went wrong, or nothing."""
    if backend == "humming":
        return Humming.compiled(name, shape, *all_tokens)
    (tokens,) = all_tokens
    experts, chosen, length, columns = SHAPES[shape]
    format, group, activation = FORMATS[name]
    spec = jitgen.TensorSpec(
        (experts, columns, length), torch.bfloat16, format=format, group_size=group, activation=activation
    )
    x = jitgen.TensorSpec((tokens * chosen, length), torch.bfloat16)
    try:
        ends = jitgen.TensorSpec((experts,), torch.int32)
        function_of(backend).lower(x, spec, ends, target="sm_90a", backend=backend).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def chosen_counts(experts: int, tokens: int, chosen: int, exponent: float, generator: torch.Generator) -> list[int]:
    """The rows of each expert, where each token chooses some without repetition by a Zipf law."""
    order = torch.randperm(experts, generator=generator)
    logits = -exponent * torch.log(1.0 + order.double())
    noise = -torch.log(-torch.log(torch.rand(tokens, experts, generator=generator, dtype=torch.float64)))
    ids = torch.topk(logits + noise, chosen, -1)[1]
    return list(torch.bincount(ids.flatten(), minlength=experts).tolist())


def error_of(found: torch.Tensor, x: torch.Tensor, exact: torch.Tensor, counts: list[int]) -> float:
    """The largest relative error of the three experts with the most rows."""
    worst, ends = 0.0, torch.tensor(counts).cumsum(0).tolist()
    for expert in sorted(range(len(counts)), key=counts.__getitem__)[-3:]:
        rows = slice(ends[expert] - counts[expert], ends[expert])
        wanted = x[rows] @ exact[expert].double().T
        if wanted.numel():
            worst = max(worst, ((found[rows].double() - wanted).norm() / wanted.norm()).item())
    return worst


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.02


class Humming:
    """Products of experts by humming, of ``dense`` weights that it quantises."""

    def __init__(self, dense: torch.Tensor, name: str) -> None:
        from humming.layer import HummingLayer  # type: ignore[import-not-found]
        from humming.schema import HummingWeightSchema  # type: ignore[import-not-found]

        experts, columns, length = dense.shape
        layer = HummingLayer(
            shape_n=columns,
            shape_k=length,
            weight_config=dict(HUMMING[name]),
            num_experts=experts,
            pad_n_to_multiple=HUMMING_COLUMNS,
            torch_dtype=dense.dtype,
        ).cuda()
        tensors = HummingWeightSchema.quant_tensor(dense, layer.weight_schema, dense.dtype)
        self.exact = layer.weight_schema.dequant_tensors(tensors).view(dense.shape)
        layer.load_from_tensors(tensors)
        layer.transform()
        self.layers, self.experts = [layer], experts

    @staticmethod
    def config(layer: Any, rows: int, kind: str) -> dict[str, Any]:
        """The configuration that humming's heuristic takes for so many rows."""
        from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

        return dict(get_heuristics_config(layer.humming_config, shape_m=rows, gemm_type=kind))

    @classmethod
    def compiled(cls, name: str, shape: str, *tokens: int) -> str:
        """Compiles humming's kernels into its cache, in parallel; what went wrong, or nothing."""
        from humming.kernel.humming import HummingKernel  # type: ignore[import-not-found]

        experts, chosen, length, columns = SHAPES[shape]
        try:
            layer = cls(drawn(experts, columns, length), name).layers[0]  # of a datatype that codes decide
            for kind, most in KINDS.items():
                rows = [count * chosen for count in tokens if count <= most]
                configs = [(0, 1 << 30, cls.config(layer, count, kind)) for count in rows]
                HummingKernel.prepare_kernels(layer.humming_config.to_str(), {"gemm_type": kind}, configs)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
        return ""

    def copied(self, count: int) -> None:
        self.layers += [deepcopy(self.layers[0]) for _ in range(count - len(self.layers))]

    def calls(self, kind: str, x: torch.Tensor, counts: list[list[int]]) -> list[Any]:
        """A call for each list of counts, over weights in turn."""
        from humming.testing.data import generate_moe_tensors  # type: ignore[import-not-found]

        config = self.config(self.layers[0], x.shape[0], kind)
        options = {
            "compute_config": json.dumps({"gemm_type": kind}),
            "tuning_config": json.dumps(config, default=lambda value: value.value),
        }
        calls = []
        for number, each in enumerate(counts):
            ids = torch.arange(self.experts, device="cuda").repeat_interleave(torch.tensor(each, device="cuda"))
            _, layout, rows, experts, padded = generate_moe_tensors(
                ids.int()[:, None], self.experts, kind, block_size_config=config["block_shape"][0]
            )
            layer = self.layers[number % len(self.layers)]
            tensors = {"expert_layout": layout, "sorted_ids": rows, "expert_ids": experts, "num_tokens_padded": padded}
            calls.append(partial(layer, x, top_k=1, **tensors, **options))
        return calls


@dataclass
class Weights:
    """Weights of a shape in a format, for all numbers of tokens, with what multiplies them.

    Attributes:
        dense, quantised: copies of the weights as torch and as jitgen multiply them.
        exact: the numbers that jitgen's have.
        humming: its layers; None without it.
    """

    dense: list[torch.Tensor]
    quantised: list[Any]
    exact: torch.Tensor
    humming: Humming | None

    @classmethod
    def drawn(cls, shape: str, name: str, beside_humming: bool) -> Weights:
        experts, _, length, columns = SHAPES[shape]
        dense = drawn(experts, columns, length)
        format, group, activation = FORMATS[name]
        weight: Any = jitgen.quantize(dense, format, group, method="absmax", activation=activation) if format else dense
        humming = None
        try:
            humming = Humming(dense, name) if beside_humming else None
        except Exception as error:
            print("humming", shape, name, f"{type(error).__name__}: {str(error)[:300]}", flush=True)
        return cls([dense], [weight], weight.dequantize(torch.bfloat16) if format else dense, humming)

    def copied(self, count: int) -> tuple[list[torch.Tensor], list[Any]]:
        for kept in (self.dense, self.quantised):
            kept += [kept[0].clone() for _ in range(count - len(kept))]
        if self.humming is not None:
            self.humming.copied(count)
        return self.dense[:count], self.quantised[:count]


def measured(
    shape: str, tokens: int, name: str, exponent: float, weights: Weights, options: argparse.Namespace
) -> dict[str, Any]:
    experts, chosen, length, columns = SHAPES[shape]
    backends = options.backends
    rows, generator = tokens * chosen, torch.Generator().manual_seed(options.seed + tokens + experts)
    x = torch.randn(rows, length, device="cuda", dtype=torch.bfloat16)
    sets = SETS if tokens <= FEW_TOKENS else 1
    counts = [chosen_counts(experts, tokens, chosen, exponent, generator) for _ in range(sets)]
    ends = [torch.tensor(each, device="cuda").cumsum(0).to(torch.int32) for each in counts]
    used = sum(count > 0 for each in counts for count in each) / sets
    bytes_read = used * columns * length * bits_of(name) / 8
    dense, quantised = weights.copied(min(COPIES, math.ceil(COPIED_BYTES / sets / bytes_read)))
    order = [(number % sets, number % len(dense)) for number in range(max(sets, len(dense)))]
    row: dict[str, Any] = {"shape": shape, "tokens": tokens, "format": name, "zipf": exponent}
    row["most"], row["used"] = max(counts[0]), used
    calls: dict[str, Callable[[], list[Any]]] = {}
    for backend in backends:
        run = function_of(backend)
        calls[backend] = lambda run=run: [partial(run, x, quantised[w], ends[s]) for s, w in order]  # type: ignore[misc]
    if "torch" in options.peers:
        calls["torch bf16"] = lambda: [partial(product, x, dense[w], ends[s]) for s, w in order]
    peer, activation = weights.humming, FORMATS[name][2]
    timed: dict[str, list[Any]] = {}
    for kind in [kind for kind, most in KINDS.items() if peer is not None and tokens <= most]:
        calls[f"humming {kind}"] = lambda kind=kind: peer.calls(kind, x, [counts[s] for s, _ in order])  # type: ignore
    values = rows_as_quantized(x, activation)
    for subject, listed in calls.items():
        try:
            each = listed()
            result = each[0]()
            if subject in backends:
                row[f"{subject} error"] = error_of(result, values, weights.exact, counts[0])
                assert torch.equal(result, each[0]()), "other bits"
            elif peer is not None and subject != "torch bf16":
                row[f"{subject} error"] = error_of(result, x.double(), peer.exact, counts[0])
            timed[subject] = each
        except Exception as error:
            row[subject] = f"{type(error).__name__}: {str(error)[:200]}"
    times = {subject: seconds * 1e6 for subject, seconds in medians(timed, "cuda", 0.0).items()}
    row |= times
    best = min((times[backend] for backend in backends if backend in times), default=None)
    if best is not None:
        row["TFLOP/s"] = 2e-6 * rows * length * columns / best
        row["TB/s"] = 1e-6 * bytes_read / best
        for rival in ("torch", "humming"):
            rivals = [time for subject, time in times.items() if subject.startswith(rival)]
            if rivals:
                row[f"{rival} / jitgen"] = min(rivals) / best
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--shapes", nargs="*", default=["qwen3-30b", "mixtral"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--formats", nargs="*", default=["bf16", "int4"], choices=FORMATS)
    parser.add_argument("--exponents", nargs="*", type=float, default=EXPONENTS)
    parser.add_argument("--backends", nargs="*", default=["cuda", "triton"], choices=["cuda", "triton"])
    parser.add_argument("--peers", nargs="*", default=["torch", "humming"], choices=["torch", "humming"])
    parser.add_argument("--seed", type=int, default=37)
    options = parser.parse_args()
    started = time.time()
    kinds = [(shape, name) for name in options.formats for shape in options.shapes if takes(shape, name)]
    peers = {name for name in options.formats if has_humming(name) and "humming" in options.peers}
    jobs = {
        (shape, name): [("humming", name, shape, *options.tokens)] * (name in peers)
        + [(backend, name, shape, tokens) for tokens in options.tokens for backend in options.backends]
        for shape, name in kinds
    }
    results: list[dict[str, Any]] = []
    with compiling(compiled, jobs) as wait_for, torch.no_grad():
        record = made("bench.grouped")
        for shape, name in kinds:
            wait_for((shape, name))
            print(shape, name, f"compiled after {time.time() - started:.0f} s", flush=True)
            torch.manual_seed(options.seed)
            weights = Weights.drawn(shape, name, name in peers)
            for tokens, exponent in itertools.product(options.tokens, options.exponents):
                if time.time() - started > options.seconds:
                    return
                results.append(measured(shape, tokens, name, exponent, weights, options))
                options.output.write_text(json.dumps(record | {"results": results}, indent=1))
            print(shape, name, f"{time.time() - started:.0f} s", flush=True)
            del weights
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
