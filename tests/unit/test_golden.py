"""Generated sources that are kept for reading and comparing: one per template and notable feature.

``pytest tests/unit/test_golden.py --update-golden`` writes them anew; the diff is the review.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.kernel import render

GOLDEN = Path(__file__).parents[1] / "golden"
Spec = jitgen.TensorSpec


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def scaled_residual(x: torch.Tensor, residual: torch.Tensor, alpha: float) -> None:
    residual.add_(x.t() * alpha)


def quantize_row(x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return (x.float() * inverse[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)


def causal_mask(scores: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.arange(scores.shape[0])[:, None], torch.arange(scores.shape[1])
    return scores.masked_fill(rows < columns, float("-inf"))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def column_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 0)


def mlp_up(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def mlp_down(x: torch.Tensor, down: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + F.linear(x, down)


def gated_down(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + F.linear(F.silu(gate) * up, down)


def running_total(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x * weight, -1) * 2 + x


def running_extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = torch.cummax(x, 0)
    return values, places


def sampled(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(logits / temperature, 50)
    return values, indices


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Attention of one new row of each sequence over a cache, of which a tensor says how much is filled."""
    mask = torch.arange(k.shape[-2]) < lengths[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    scores = q @ k.transpose(-1, -2) * 0.125 + slopes[:, None, None] * (j - i)
    return torch.softmax(scores.masked_fill(j > i, float("-inf")), -1) @ v


def keys_and_values_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, top: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dK and dV of causal attention whose results are orthogonal to their gradients."""
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    scores = ((q @ k.transpose(-1, -2)).float() * 0.125).masked_fill(j > i, float("-inf"))
    weights = torch.exp(scores - top) / total
    of_scores = weights * (g @ v.transpose(-1, -2)).float() * 0.125
    return of_scores.to(q.dtype).transpose(-1, -2) @ q, weights.to(g.dtype).transpose(-1, -2) @ g


running_means = jitgen.cpp_kernel(
    r"""
extern "C" void running_means(const float* x, float* out, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) {
      sum += JITGEN_PROLOGUE(x[row * columns + i], row, i);
      out[row * columns + i] = JITGEN_EPILOGUE(sum / (i + 1), row, i);
    }
  }
}
""",
    "running_means",
)
column_sums = jitgen.cuda_kernel(
    r"""
template <typename T>
__global__ void __launch_bounds__(256) column_sums(const T* __restrict__ x, T* sums, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  T sum = 0;
  for (int row = 0; row < rows; ++row) sum += JITGEN_PROLOGUE(x[row * columns + column], row, column);
  sums[column] = JITGEN_EPILOGUE(sum, 0, column);
}
""",
    "column_sums<float>",
)


def own_running_means(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    running_means(F.relu(x), out, x.shape[0], x.shape[1])
    return out * torch.sigmoid(gate)


def own_column_sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    sums = torch.empty(x.shape[1], device=x.device)
    column_sums[-(-x.shape[1] // 256), 256](x * weight[:, None], sums, x.shape[0], x.shape[1])
    return (sums + bias).bfloat16()


def own_softmax(x: torch.Tensor, bias: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import triton

    from tests import own_kernels

    out, columns = torch.empty_like(x), x.shape[1]
    block = triton.next_power_of_2(columns)
    own_kernels.softmax[(x.shape[0],)](out, x + bias, out.stride(0), out.stride(0), columns, BLOCK_SIZE=block)
    return out, (out * gate).bfloat16()


half, single = torch.bfloat16, torch.float32
INT4 = Spec((14336, 4096), half, format="int4", group_size=128)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, str]] = {
    "silu_and_mul.cpp": (silu_and_mul, (Spec(("M", 1024), half),), "cpp", "x86-64-v4"),
    "silu_and_mul.cu": (silu_and_mul, (Spec(("M", 1024), half),), "cuda", "sm_90a"),
    "silu_and_mul.py": (silu_and_mul, (Spec(("M", 1024), half),), "triton", "sm_90a"),
    "rope.cu": (rope, (Spec(("B", "S", 128), half), Spec(("S", 128), half), Spec(("S", 128), half)), "cuda", "sm_80"),
    "rope.py": (
        rope,
        (Spec(("B", "S", 128), half), Spec(("S", 128), half), Spec(("S", 128), half)),
        "triton",
        "gfx942",
    ),
    "scaled_residual.cpp": (
        scaled_residual,
        (Spec((64, 32), single), Spec((32, 64), single), 0.5),
        "cpp",
        "x86-64-v3",
    ),
    "quantize_row.cu": (quantize_row, (Spec(("M", 4096), half), Spec(("M",), single)), "cuda", "sm_90a"),
    "quantize_row.py": (quantize_row, (Spec(("M", 4096), half), Spec(("M",), single)), "triton", "sm_90a"),
    "softmax.cpp": (softmax, (Spec(("M", "N"), half),), "cpp", "x86-64-v4"),
    "softmax.cu": (softmax, (Spec((100_000, 64), half),), "cuda", "sm_90a"),
    "column_softmax.cu": (column_softmax, (Spec((512, 4096), half),), "cuda", "sm_90a"),
    "causal_mask.cpp": (causal_mask, (Spec(("Q", "K"), single),), "cpp", "x86-64-v4"),
    "mlp_up.cu": (mlp_up, (Spec((1, 4096), half), *2 * [INT4]), "cuda", "sm_90a"),
    "mlp_up_of_many_rows.cu": (mlp_up, (Spec((512, 4096), half), *2 * [INT4]), "cuda", "sm_90a"),
    "linear.cu": (
        linear,
        (Spec((1000, 4096), half), Spec((6144, 4096), half), Spec((6144,), half)),
        "cuda",
        "sm_90a",
    ),
    "causal_attention.cu": (
        causal_attention,
        (Spec((2, 32, 1000, 128), half), *2 * [Spec((2, 8, 1000, 128), half)]),
        "cuda",
        "sm_90a",
    ),
    "decode.cu": (
        decode,
        (Spec((4, 32, 1, 128), half), *2 * [Spec((4, 8, 4096, 128), half)], Spec((4,), torch.int64)),
        "cuda",
        "sm_90a",
    ),
    "mlp_down.py": (
        mlp_down,
        (Spec((64, 14336), half), Spec((4096, 14336), half, format="int4", group_size=128), Spec((64, 4096), half)),
        "triton",
        "sm_90a",
    ),
    "gated_down.cu": (
        gated_down,
        (*2 * [Spec((4, 4096), half)], Spec((4096, 4096), half), Spec((4, 4096), half)),
        "cuda",
        "sm_90a",
    ),
    "running_total.cpp": (running_total, 2 * (Spec(("M", 1024), single),), "cpp", "x86-64-v4"),
    "running_total.cu": (running_total, 2 * (Spec((4096, 4096), half),), "cuda", "sm_90a"),
    "running_total.py": (running_total, 2 * (Spec((4096, 4096), half),), "triton", "sm_90a"),
    "running_extremes.cpp": (running_extremes, (Spec((1024, "N"), single),), "cpp", "x86-64-v4"),
    "running_extremes.cu": (running_extremes, (Spec((1024, 8192), half),), "cuda", "sm_90a"),
    "sampled.cpp": (sampled, (Spec(("M", 32000), single), 0.7), "cpp", "x86-64-v4"),
    "sampled.cu": (sampled, (Spec((64, 32000), half), 0.7), "cuda", "sm_90a"),
    "sampled.py": (sampled, (Spec((64, 1000), half), 0.7), "triton", "sm_90a"),
    "alibi.cpp": (alibi, (*3 * [Spec((2, 8, "N", 64), half)], Spec((8,), half)), "cpp", "x86-64-v4"),
    "alibi.cu": (alibi, (*3 * [Spec((2, 8, 1024, 64), half)], Spec((8,), half)), "cuda", "sm_90a"),
    "alibi.py": (alibi, (*3 * [Spec((2, 8, 1024, 64), half)], Spec((8,), half)), "triton", "sm_90a"),
    "keys_and_values_gradient.cu": (
        keys_and_values_gradient,
        (*4 * [Spec((2, 8, 1024, 64), half)], *2 * [Spec((2, 8, 1024, 1), single)]),
        "cuda",
        "sm_90a",
    ),
    "causal_mask.py": (causal_mask, (Spec(("Q", "K"), single),), "triton", "sm_90a"),
    "own_running_means.cpp": (
        own_running_means,
        (Spec(("M", 100), single), Spec((100,), single)),
        "cpp",
        "x86-64-v4",
    ),
    "own_column_sums.cu": (
        own_column_sums,
        (Spec(("M", 1000), single), Spec(("M",), single), Spec((1000,), single)),
        "cuda",
        "sm_90a",
    ),
    "own_softmax.py": (
        own_softmax,
        (Spec(("M", 1000), single), Spec((1000,), single), Spec(("M", 1000), single)),
        "triton",
        "sm_90a",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments, backend, target = CASES[name]
    if function is own_softmax:
        pytest.importorskip("triton")
    monkeypatch.setattr(render, "e4m3fn_saturates", lambda: True)  # which torch 2.11 does not
    source = jitgen.jit(function).lower(*arguments, backend=backend, target=target).source
    path = GOLDEN / name
    if request.config.getoption("--update-golden"):
        path.write_text(source)
    assert path.is_file(), f"no golden source {path.name}; make it with --update-golden"
    assert source == path.read_text(), f"{name} is generated differently; if that is meant, run with --update-golden"


@pytest.mark.parametrize("name", CASES)
def test_a_banner_is_in_words(name: str) -> None:
    """A schedule is described, and not printed as Python writes it."""
    banner = (GOLDEN / name).read_text().split("\n\n")[0]
    assert "Schedule(" not in banner
    assert "=" not in banner.replace(">=", "")


def test_no_golden_source_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir() if path.name != "__pycache__"} == set(CASES)
