"""Layers of products of codes in blocks on a GPU, as DeepSeek-V3 has them: norm, product, pointwise work, product.

    python -m bench.quantised_blocks OUTPUT.json

``mlp`` is RMSNorm, SwiGLU and down; ``gelu`` is LayerNorm, one product, GELU and down. Times are in microseconds, of
calls in a CUDA graph whose weights are larger than the L2 cache, or all that a layer has where these are small. Errors
are by the norm, against products in float64 (float32 from 2**20 hidden numbers on) of the same codes of normed rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import made
from bench.prebuild import compile_each
from bench.timing import medians
from jitgen.quant.activations import ACTIVATIONS, codes_of, scales_of

ACTIVATION, FORMAT, BLOCK = "fp8_e4m3.block128", "fp8_e4m3.rows128", 128
SIZES = (
    *((1, 7168, 2048), (16, 4096, 14336), (16, 8192, 1024), (40, 5120, 1152), (70, 2048, 768), (128, 4096, 14336)),
    *((300, 8192, 1024), (512, 4096, 14336), (1000, 7168, 2048), (4096, 4096, 14336)),
)
"""Rows, columns of the layer, and hidden columns."""
MANY = 2**20
"""Hidden numbers from which on products in float64 take too long."""


def mlp(x: Any, gain: Any, gate: Any, up: Any, down: Any) -> Any:
    y = F.rms_norm(x, gain.shape, gain)
    return F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def gelu(x: Any, gain: Any, gate: Any, up: Any, down: Any) -> Any:
    return F.linear(F.gelu(F.linear(F.layer_norm(x, gain.shape, gain), gate)), down)


LAYERS: dict[str, Any] = {"mlp": mlp, "gelu": gelu}


def compiled(layer: str, sizes: tuple[int, int, int]) -> str:
    """Compiles the kernels into the store; what went wrong, or nothing."""
    rows, columns, hidden = sizes
    x, gain = jitgen.TensorSpec((rows, columns), torch.bfloat16), jitgen.TensorSpec((columns,), torch.bfloat16)
    weights = [
        jitgen.TensorSpec(shape, torch.bfloat16, format=FORMAT, group_size=BLOCK, activation=ACTIVATION)
        for shape in ((hidden, columns), (hidden, columns), (columns, hidden))
    ]
    try:
        jitgen.jit(backend="cuda")(LAYERS[layer]).lower(x, gain, *weights, target="sm_90a").compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def quantised(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kind = ACTIVATIONS[ACTIVATION]
    scales = scales_of(x, kind)
    return (codes_of(x, scales, kind).double() * scales.double().repeat_interleave(BLOCK, -1)).to(dtype)


def expected(layer: str, x: torch.Tensor, gain: torch.Tensor, *weights: Any) -> torch.Tensor:
    wide = torch.float32 if x.shape[0] * weights[0].shape[0] >= MANY else torch.float64
    gate, up, down = (weight.dequantize(wide).T for weight in weights)
    normed = (F.rms_norm if layer == "mlp" else F.layer_norm)(x.float(), gain.shape, gain.float())
    normed = quantised(normed.bfloat16(), wide)
    hidden = F.silu(normed @ gate) * (normed @ up) if layer == "mlp" else F.gelu(normed @ gate)
    return (quantised(hidden.bfloat16(), wide) @ down).double()


def measured(layer: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    rows, columns, hidden = sizes
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    gain = torch.rand(columns, dtype=torch.bfloat16, device="cuda") + 0.5
    weights = [
        jitgen.quantize(torch.randn(shape, device="cuda") * 0.05, FORMAT, BLOCK, method="absmax", activation=ACTIVATION)
        for shape in ((hidden, columns), (hidden, columns), (columns, hidden))
    ]
    run = jitgen.jit(backend="cuda")(LAYERS[layer])
    found, exact = run(x, gain, *weights), expected(layer, x, gain, *weights)
    return {
        "layer": layer,
        "sizes": list(sizes),
        "kernels": len(run.lower(x, gain, *weights).kernels),
        "error": ((found.double() - exact).norm() / exact.norm()).item(),
        "same bits": torch.equal(found, run(x, gain, *weights)),
        "us": medians({"": [partial(run, x, gain, *weights)]}, "cuda", 0.1)[""] * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    cases = list(itertools.product(LAYERS, SIZES))
    compile_each(compiled, cases)
    torch.manual_seed(36)
    results: list[dict[str, Any]] = []
    for case in cases:
        results.append(measured(*case))
        options.output.write_text(json.dumps(made("bench.quantised_blocks") | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
