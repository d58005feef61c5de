"""Generated gradients of attention for Hopper, compiled for the CPU and run there, with tensor copies and wgmma."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import jitgen
from tests.attention import INF, sample
from tests.cuda_on_host import run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TESTS = Path(__file__).parents[1]
HEADERS = {
    f"jitgen/{name}.cuh": (TESTS / f"host_{of}.cuh").read_text()
    for name, of in (("ptx", "ptx"), ("wgmma_ptx", "wgmma"), ("barrier", "barrier"))
}
BF16 = torch.bfloat16


def backward(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of softmax(rule(q k^T / 4)) v as a plain function, whose derivative ``rule`` says too."""

    def function(q: Any, k: Any, v: Any, g: Any, top: Any, total: Any, delta: Any) -> Any:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        s, slope = rule((q @ k.transpose(-1, -2)).to(top.dtype) * 0.25, i, j)
        p = torch.exp(s - top) / total
        ds = p * ((g @ v.transpose(-1, -2)).to(top.dtype) - delta) * slope * 0.25
        p, ds = p.to(v.dtype), ds.to(q.dtype)
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g

    return function


def causal(s: Any, i: Any, j: Any) -> Any:
    return s.masked_fill(j > i, -INF), 1.0


def capped(s: Any, i: Any, j: Any) -> Any:
    t = torch.tanh(s / 5)
    return (5 * t).masked_fill((j > i) | (i - j > 70), -INF), 1 - t * t


def plain(s: Any, i: Any, j: Any) -> Any:
    return s + 0.01 * (i - j).abs(), 1.0


CASES = [(causal, 70, 150, 64, 64), (capped, 150, 90, 40, 72), (plain, 65, 33, 128, 64)]


@pytest.mark.parametrize(("rule", "rows", "keys", "depth", "width"), CASES)
@pytest.mark.quick(where=lambda rule: rule is causal)
def test_against_float64(rule: Callable[..., Any], rows: int, keys: int, depth: int, width: int) -> None:
    shapes = (rows, depth), (keys, depth), (keys, width), (rows, width)
    q, k, v, g = (sample((1, 1, *shape), BF16, number) for number, shape in enumerate(shapes))
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    s, _ = rule((q.double() @ k.double().transpose(-1, -2)) * 0.25, i, j)
    top = s.amax(-1, keepdim=True)
    total = torch.exp(s - top).sum(-1, keepdim=True)
    delta = (torch.exp(s - top) / total * (g.double() @ v.double().transpose(-1, -2))).sum(-1, keepdim=True)
    of_rows = [t.float() for t in (top, total, delta)]
    function = backward(rule)
    low = jitgen.jit(function).lower(q, k, v, g, *of_rows, backend="cuda", target="sm_90a")
    assert low.explain().count("wgmma, 128 rows a block") == len(low.kernels) == 2, low.explain()
    wanted = function(*(t.double() for t in (q, k, v, g)), top, total, delta)
    for found, reference in zip(run(function, q, k, v, g, *of_rows, headers=HEADERS), wanted, strict=True):
        error = (found.double() - reference).norm() / reference.norm()
        assert error < 2**-7, error  # each factor of a sum is rounded to 8 bits once, and so is the sum


def test_a_factor_within_a_mask() -> None:
    """Tiles without a masked pair have a factor of all pairs, and tiles with one do not: their sums are one."""

    def function(q: Any, k: Any, v: Any, g: Any) -> Any:
        hidden = torch.arange(k.shape[-2]) > torch.arange(q.shape[-2])[:, None]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        s = (q @ k.transpose(-1, -2)).to(wide).masked_fill(hidden, -INF)
        p = torch.exp(s * 0.1)
        ds = (p * (g @ v.transpose(-1, -2)).to(wide) * 0.1).masked_fill(hidden, 0.0)
        p, ds = p.to(v.dtype), ds.to(q.dtype)
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g

    q, k, v, g = (sample((1, 1, rows, 32), BF16, number) for number, rows in enumerate((300, 270, 270, 300)))
    low = jitgen.jit(function).lower(q, k, v, g, backend="cuda", target="sm_90a")
    assert low.explain().count("wgmma, 128 rows a block") == len(low.kernels) == 2, low.explain()
    wanted = function(*(t.double() for t in (q, k, v, g)))
    for found, reference in zip(run(function, q, k, v, g, headers=HEADERS), wanted, strict=True):
        error = (found.double() - reference).norm() / reference.norm()
        assert error < 2**-7, error


@pytest.mark.parametrize(
    ("written", "instead", "name"),
    [
        (
            "barrier_init(tile_empty(stage), Shape::consumers / 32 * warp_arrivals)",
            "barrier_init(tile_empty(stage), 99)",
            "tile_empty",
        ),
        ("barrier_init(block_full(), Shape::copiers)", "barrier_init(block_full(), 1)", "block_full"),
    ],
)
def test_a_barrier_that_counts_other_arrivals_than_come_is_named(written: str, instead: str, name: str) -> None:
    header = "jitgen/attention_backward_block.cuh"
    text = (TESTS.parent / "templates/attention_backward/include" / header).read_text()
    assert written in text
    q, k, v, g = (sample((1, 1, 500, 16), BF16, number) for number in range(4))
    of_rows = [torch.ones(1, 1, 500, 1)] * 3
    changed = HEADERS | {header: text.replace(written, instead)}
    with pytest.raises(AssertionError, match=f"hangs: thread .*{name}"):
        run(backward(lambda s, i, j: (s, 1.0)), q, k, v, g, *of_rows, headers=changed)
