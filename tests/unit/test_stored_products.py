"""No product is computed twice: what other kernels read of it is stored once (``families/gemm/stored.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import host
from jitgen.lowering import Lowered

ROWS, WIDTH, HIDDEN, HEADS = 48, 64, 96, 4
TARGETS = ("x86-64-v3", "sm_90a", "gfx942")


def normed_blocks(x: Any, *weights: Any) -> Any:
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + F.silu(F.rms_norm(x, (WIDTH,)) @ up) @ down
    return x


def plain_blocks(x: Any, *weights: Any) -> Any:
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + F.silu(x @ up) @ down
    return x


def decoder_layer(x: Any, g: Any, wq: Any, wk: Any, wv: Any, wo: Any, wg: Any, wu: Any, wd: Any) -> Any:
    h = F.rms_norm(x, (WIDTH,), g)
    q, k, v = (F.linear(h, w).view(1, x.shape[1], HEADS, -1).transpose(1, 2) for w in (wq, wk, wv))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(x.shape), wo)
    h = F.rms_norm(x, (WIDTH,), g)
    return x + F.linear(F.silu(F.linear(h, wg)) * F.linear(h, wu), wd)


def read_by_several(x: Any, w: Any, v: Any) -> Any:
    y = x @ w
    return y.relu(), F.softmax(y, -1), (y.sigmoid() * 2) @ v, y.sum(-1)


def products_that_need_each_other(x: Any, w: Any, v: Any) -> Any:
    y, z = x @ w, x.sin() @ w
    return (y * z) @ v, F.softmax(z - y, -1), y + z


def gate_and_up(x: Any, gate: Any, up: Any) -> Any:
    """Three values of two products, of which only the last one has both."""
    g, u = x @ gate, x @ up
    return g.tanh(), u.sin(), g * u, F.softmax(g, -1), F.softmax(u, -1)


def shapes_of(function: Callable[..., Any]) -> list[tuple[int, ...]]:
    if function in (normed_blocks, plain_blocks):
        return [(ROWS, WIDTH), *((WIDTH, HIDDEN), (HIDDEN, WIDTH)) * 4]
    if function is decoder_layer:
        hidden = [(HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
        return [(1, ROWS, WIDTH), (WIDTH,), *[(WIDTH, WIDTH)] * 4, *hidden]
    return [(ROWS, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN) if function is gate_and_up else (HIDDEN, WIDTH)]


def products_of(lowered: Lowered) -> int:
    return sum(len(body.contractions) for kernel in lowered.program.kernels for body in kernel.bodies)


CASES = [(normed_blocks, 8), (plain_blocks, 8), (decoder_layer, 9), (read_by_several, 2)]
CASES += [(products_that_need_each_other, 3), (gate_and_up, 2)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("function", "products"), CASES)
def test_each_product_is_computed_once(function: Callable[..., Any], products: int, target: str) -> None:
    specs = [TensorSpec(shape, torch.bfloat16) for shape in shapes_of(function)]
    lowered = jitgen.jit(function).lower(*specs, target=target).lowered
    # Two products of attention are inside of its kernel.
    assert products_of(lowered) == products, jitgen.jit(function).lower(*specs, target=target).explain()


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("format", [None, "int4"])
def test_products_of_one_activation_are_one_kernel(rows: int, format: str | None) -> None:
    """Those of a decoder's queries, keys and values too, which attention reads by heads, and the rotation of both is
    another one: norm, products, rotation, attention, product and sum, norm, gate and up, down and sum."""
    weight = TensorSpec((WIDTH, WIDTH), torch.bfloat16, format=format, group_size=format and 32)
    x, angle = TensorSpec((1, rows, WIDTH), torch.bfloat16), TensorSpec((rows, WIDTH // HEADS), torch.bfloat16)

    def layer(x: Any, wq: Any, wk: Any, wv: Any, cos: Any, sin: Any, wo: Any, wg: Any, wu: Any, wd: Any) -> Any:
        h = F.rms_norm(x, (WIDTH,))
        q, k, v = (F.linear(h, w).view(1, x.shape[1], HEADS, -1).transpose(1, 2) for w in (wq, wk, wv))
        q, k = (a * cos + torch.cat([-a.chunk(2, -1)[1], a.chunk(2, -1)[0]], -1) * sin for a in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(x.shape), wo)
        h = F.rms_norm(x, (WIDTH,))
        return x + F.linear(F.silu(F.linear(h, wg)) * F.linear(h, wu), wd)

    specs = [x, *3 * [weight], angle, angle, *4 * [weight]]
    program = jitgen.jit(layer).lower(*specs, target="sm_90a").lowered.program
    families = [kernel.family for kernel in program.kernels]
    assert families.count("gemm") == 4
    assert rows == 1 or families == [
        *("reduction", "gemm", "elementwise", "attention"),
        "gemm",
        "reduction",
        *2 * ["gemm"],
    ]


@pytest.mark.parametrize(("function", "per_block"), [(normed_blocks, 3), (plain_blocks, 2)])
def test_blocks_of_a_residual_stream_are_alike(function: Callable[..., Any], per_block: int) -> None:
    """So that kernels, bytes and the time of partitioning grow with the number of blocks and no faster."""
    moved = {}
    for blocks in (2, 4, 12):
        specs = [
            TensorSpec(shape, torch.bfloat16) for shape in [(ROWS, WIDTH), *((WIDTH, HIDDEN), (HIDDEN, WIDTH)) * blocks]
        ]
        lowered = jitgen.jit(function).lower(*specs, target="sm_90a").lowered
        assert len(lowered.program.kernels) == per_block * blocks
        moved[blocks] = sum(lowered.work(number).moved for number in range(per_block * blocks))
    assert moved[12] - moved[4] == 4 * (moved[4] - moved[2])


def test_sum_of_a_residual_stream_has_its_dtype_in_memory() -> None:
    """The norm after it squares it in float32; what is stored is the sum, of two bytes an element."""
    specs = [TensorSpec(shape, torch.bfloat16) for shape in shapes_of(normed_blocks)]
    program = jitgen.jit(normed_blocks).lower(*specs, target="sm_90a").lowered.program
    assert {buffer.dtype for buffer in program.temporaries} == {"bfloat16"}


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("function", [plain_blocks, read_by_several, products_that_need_each_other, gate_and_up])
@pytest.mark.covering(1)
def test_against_float64(function: Callable[..., Any], gradients: bool) -> None:
    torch.manual_seed(0)
    shapes = shapes_of(function)
    arguments = [torch.randn(shape) / math.sqrt(shape[0]) for shape in shapes]
    exact = [argument.double().requires_grad_(gradients) for argument in arguments]
    arguments = [argument.requires_grad_(gradients) for argument in arguments]
    found, expected = jitgen.jit(function)(*arguments), function(*exact)
    found, expected = (each if isinstance(each, tuple) else (each,) for each in (found, expected))
    if gradients:
        seeds = [torch.randn_like(each) for each in found]
        found += torch.autograd.grad(found, arguments, seeds)
        expected += torch.autograd.grad(expected, exact, [seed.double() for seed in seeds])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_an_epilogue_reads_what_is_reduced_beside_its_product() -> None:
    """Squared sizes of rows and columns, as distances by a product have them, are no reason to store the product."""

    def nearest(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.cdist(x, codes).argmin(-1)
        return codes[index], index

    x, codes = torch.randn(70, 24), torch.randn(41, 24)
    assert len(jitgen.jit(torch.cdist).lower(x, codes).kernels) == 3
    found = jitgen.jit(nearest)
    assert len(found.lower(x, codes).kernels) == 5
    distances = (x.double()[:, None] - codes.double()).norm(dim=-1)
    taken, index = found(x, codes)
    assert torch.equal(taken, codes[index])
    assert bool((distances.gather(1, index[:, None])[:, 0] <= distances.amin(-1) + 1e-5).all())


@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"])
@pytest.mark.parametrize(
    "shapes", [((2, 30, 9), (2, 40, 9)), ((3, 1, 26, 4), (2, 3, 4)), ((26, 0), (3, 0)), ((0, 3), (9, 3))]
)
@pytest.mark.covering(1)
def test_distances_are_those_of_differences(shapes: tuple[tuple[int, ...], ...], mode: str) -> None:
    x, y = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)

    def distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, y, compute_mode=mode)

    found, wanted = jitgen.jit(distances)(x, y), (x.unsqueeze(-2) - y.unsqueeze(-3)).norm(dim=-1)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-7)
    given = torch.randn_like(found)
    for got, want in zip(*(torch.autograd.grad(d, (x, y), given) for d in (found, wanted)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    same = jitgen.jit(lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist"))
    assert torch.autograd.grad(same(x).sum(), x)[0].isfinite().all()
