"""Grouped products on a GPU against float64: how rows are divided, formats, layouts, epilogues, and bad offsets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import jitgen
from jitgen.families.gemm import wgmma_tiles
from jitgen.families.gemm.mainloops import WgmmaQuantized
from jitgen.families.gemm.schedules import cuda
from tests.grouped import (
    ACTIVATIONS,
    CHOSEN,
    SEVERAL_IDS,
    chosen,
    gated,
    lengths_of_groups,
    of_lengths,
    product,
    rows_as_quantized,
    two_products,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BACKENDS = ("cuda", "triton")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2.0**-7, F16: 2.0**-9, F32: 2.0**-18}
"""Of the norm of the difference, relative to the result's. Decoded weights are rounded to the dtype of x."""
SIZES = [(1, 5, 64, 64), (7, 1, 96, 128), (200, 3, 72, 200), (300, 33, 130, 136), (1000, 8, 256, 512)]
SIZES += [(1500, 4, 264, 192), (4096, 512, 64, 128), (5000, 128, 384, 256)]
"""Rows, groups, N and K."""


def divisions(rows: int, groups: int) -> dict[str, list[int]]:
    """Ends of groups, by a name for how they divide the rows."""
    source = random.Random(rows + groups)
    drawn = sorted(source.randint(0, rows) for _ in range(groups))
    few = sorted(source.randint(0, min(rows, 2 * groups)) for _ in range(groups))
    one = source.randrange(groups)
    return {
        "even": [rows * (group + 1) // groups for group in range(groups)],
        "drawn, rows of none": drawn,
        "drawn": [*drawn[:-1], rows],
        "one group": [rows if group >= one else 0 for group in range(groups)],
        "few rows": few,
        "no rows": [0] * groups,
    }


def made(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def rows_of_groups(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    wanted, begin = x.new_zeros(x.shape[0], weight.shape[1], dtype=torch.float64), 0
    for group, end in enumerate(ends):
        if end > begin:
            wanted[begin:end] = x[begin:end].double() @ weight[group].double().T
        begin = end
    return wanted


def compare(found: torch.Tensor, wanted: torch.Tensor, what: str, dtype: torch.dtype | None = None) -> None:
    assert found.shape == wanted.shape, what
    assert found.isfinite().all(), what
    tolerance = TOLERANCE[found.dtype if dtype is None else dtype]
    error = (found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    assert not found.numel() or error <= tolerance, f"{what}: {error:.3g}"


def check(backend: str, x: torch.Tensor, weight: Any, exact: torch.Tensor) -> None:
    """The product of every division of the rows, by one plan, with rows behind it that stay as they are."""
    run, (rows, columns) = jitgen.jit(backend=backend)(product), (x.shape[0], exact.shape[1])
    memory = torch.full((rows + 300, columns), 7.0, device="cuda", dtype=x.dtype)
    for name, ends in divisions(rows, exact.shape[0]).items():
        memory.fill_(7.0)
        offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
        run.bind(x, weight, offsets)(x, weight, offsets, out=memory[:rows])
        what = f"{tuple(x.shape)} {tuple(exact.shape)} {name}"
        compare(memory[:rows], rows_of_groups(x, exact, ends), what)
        assert (memory[rows:] == 7).all(), f"{what}: written behind the rows"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dense_weights(size: tuple[int, int, int, int], dtype: torch.dtype, backend: str) -> None:
    rows, groups, columns, length = size
    x, weight = made(rows, length, dtype=dtype), made(groups, columns, length, dtype=dtype)
    check(backend, x, weight, weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [40, 900])
def test_layouts(rows: int, backend: str) -> None:
    """Weights along N, rows and matrices with gaps, operands that are not aligned."""
    x, weight = made(rows, 128), made(6, 192, 128)
    check(backend, x, weight.mT.contiguous().mT, weight)
    wide, many = made(rows, 256), made(12, 192, 128)
    check(backend, wide[:, 64:192], many[::2], many[::2])
    odd = made(rows, 129)
    check(backend, odd[:, 1:], weight, weight)
    check(backend, x.T.contiguous().T, weight, weight)


FORMATS = [("int4", 128), ("int4", 32), ("int4", None), ("uint4", 64), ("int8", None), ("int8", 64), ("mxfp4", None)]
FORMATS += [("nvfp4", None), ("fp8_e4m3", None), ("int3", 64), ("mxfp8", None), ("nf4", 64)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_quantised_weights(format: str, group: int | None, backend: str) -> None:
    dtype = BF16 if group != 64 else F16
    few = [(3, 5, 64, 128), (40, 8, 528, 1024), (70, 9, 144, 256), (300, 200, 128, 512)]
    for rows, groups, columns, length in (*few, (700, 5, 160, 384), (3000, 64, 128, 256)):
        dense = made(groups, columns, length)
        weight = jitgen.quantize(dense, format, group)
        check(backend, made(rows, length, dtype=dtype), weight, weight.dequantize(torch.float64))


NARROW = [(96, 3, 1, 32), (96, 2, 2, 32), (128, 3, 1, 64), (160, 3, 1, 96), (192, 2, 1, 128)]


@pytest.mark.parametrize("tile", NARROW, ids=str)
@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("mxfp4", None)])
def test_narrow_last_tiles(
    format: str, group: int | None, tile: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups whose last tiles have fewer rows than a narrow one, as many, or more; the same bits at every call."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("tiles of Hopper")
    tokens, warpgroups, blocks, narrow = tile
    only = WgmmaQuantized(tokens, warpgroups, blocks, 1, stages=8, narrow=narrow)
    monkeypatch.setattr(wgmma_tiles, "grouped_candidates", lambda *arguments: [only])
    monkeypatch.setattr(cuda, "mma", lambda *arguments: [])
    for rows, groups, columns, length in ((20, 3, 528, 256), (700, 5, 160, 1024), (3000, 33, 208, 384)):
        weight = jitgen.quantize(made(groups, columns, length), format, group)
        check("cuda", x := made(rows, length), weight, weight.dequantize(torch.float64))
        ends = torch.tensor(divisions(rows, groups)["drawn"], device="cuda", dtype=torch.int32)
        run = jitgen.jit(backend="cuda")(product)
        first = run(x, weight, ends)
        assert all(torch.equal(run(x, weight, ends), first) for _ in range(5))


BY_CODES = [each for each in ACTIVATIONS if each[2] is not None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "format", "group"),
    [*((dtype, None, None) for dtype in TOLERANCE), *((BF16, format, group) for format, group in FORMATS)],
    ids=str,
)
@pytest.mark.parametrize("size", [(2, 5, 64, 64), (8, 128, 96, 256), (17, 3, 80, 192), (300, 4, 208, 320)], ids=str)
def test_the_row_of_one_token(
    size: tuple[int, int, int, int], dtype: torch.dtype, format: str | None, group: int | None, backend: str
) -> None:
    """It is read where it is, by every row of every group, from any address."""
    rows, groups, columns, length = size
    if length % (group or 32):
        pytest.skip("K is no number of groups")
    dense = made(groups, columns, length, dtype=dtype)
    weight = jitgen.quantize(dense, format, group_size=group) if format else dense
    exact = weight.dequantize(torch.float64) if format else dense
    run = jitgen.jit(lambda x, w, ends, order: product(x[order // 2], w, ends), backend=backend)
    order = torch.arange(rows, device="cuda")  # all but two are out of range, where the first row is read
    for x in (made(1, length, dtype=dtype), made(1, length + 1, dtype=dtype)[:, 1:]):
        for name, ends in divisions(rows, groups).items():
            found = run(x, weight, torch.tensor(ends, device="cuda", dtype=torch.int32), order)[: ends[-1]]
            compare(found, rows_of_groups(x.expand(rows, -1), exact, ends)[: ends[-1]], f"{size} {name}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "group", "activation"), BY_CODES)
def test_quantised_activations(format: str, group: int | None, activation: str, backend: str) -> None:
    """Codes by codes: for few rows and many, of groups that are empty or have them all, and rows of no group."""
    run = jitgen.jit(backend=backend)(product)
    sizes = ((1, 5, 128, 128), (40, 9, 256, 384), (700, 5, 384, 256), (3000, 64, 256, 512), (4000, 3, 1152, 1024))
    for rows, groups, columns, length in sizes:
        x, dense = made(rows, length), made(groups, columns, length)
        weight = jitgen.quantize(dense, format, group, activation=activation)
        exact, values = weight.dequantize(torch.float64), rows_as_quantized(x, activation)
        memory = torch.full((rows + 300, columns), 7.0, device="cuda", dtype=BF16)
        for name, ends in divisions(rows, groups).items():
            memory.fill_(7.0)
            offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
            run.bind(x, weight, offsets)(x, weight, offsets, out=memory[:rows])
            what = f"{format} {rows} {groups} {columns} {length} {name}"
            compare(memory[:rows], rows_of_groups(values, exact, ends), what, BF16)
            assert (memory[rows:] == 7).all(), f"{what}: written behind the rows"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "group", "activation"), BY_CODES)
def test_gate_and_up_of_quantised_activations(format: str, group: int | None, activation: str, backend: str) -> None:
    run = jitgen.jit(backend=backend)(gated)
    for rows in (9, 200, 2500):
        x, dense, scales = made(rows, 256), made(7, 768, 256) / 16, torch.rand(rows, device="cuda")
        weight = jitgen.quantize(dense, format, group, activation=activation)
        exact, values = weight.dequantize(torch.float64), rows_as_quantized(x, activation)
        for name, ends in divisions(rows, 7).items():
            offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
            gate, up = rows_of_groups(values, exact, ends).chunk(2, -1)
            wanted = F.silu(gate) * up * scales.double()[:, None]
            found = run(x, weight, offsets, scales)
            assert found.isfinite().all(), name
            # Products that are stored are rounded before their product is.
            assert (found.double() - wanted).norm() <= 2.0**-6 * wanted.norm().clamp_min(1e-30), f"{rows} {name}"


@pytest.mark.parametrize(("format", "group", "activation"), BY_CODES)
def test_matrices_of_quantised_activations_that_ids_choose(format: str, group: int | None, activation: str) -> None:
    run = jitgen.jit(backend="cuda")(chosen)
    for rows, groups, columns, length in ((1, 8, 256, 512), (33, 5, 128, 128)):
        x, dense = made(rows, length), made(groups, columns, length)
        ids = torch.randint(-groups, groups, (rows,), device="cuda")
        weight = jitgen.quantize(dense, format, group, activation=activation)
        wanted = 2 * torch.einsum("snk,sk->sn", weight.dequantize(torch.float64)[ids], rows_as_quantized(x, activation))
        compare(run(x, weight, ids), wanted, "by ids", BF16)


def test_a_weight_with_scales_of_blocks_is_cut_anywhere() -> None:
    """Columns of a product, and rows of a weight, that begin within a block, with one, and at any row."""

    def parts(x: Any, w: Any) -> Any:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up, F.linear(x, w[128:]), F.linear(x, w[48:]), F.linear(x, w)[:, 64:200] * 2

    for backend in BACKENDS:
        x, dense = made(300, 256), made(384, 256) / 16
        weight = jitgen.quantize(dense, "fp8_e4m3.rows128", 128, activation="fp8_e4m3.block128")
        whole = rows_as_quantized(x, "fp8_e4m3.block128") @ weight.dequantize(torch.float64).T
        gate, up = whole.chunk(2, -1)
        wanted = (F.silu(gate) * up, whole[:, 128:], whole[:, 48:], 2 * whole[:, 64:200])
        for number, (found, exact) in enumerate(
            zip(jitgen.jit(backend=backend)(parts)(x, weight), wanted, strict=True)
        ):
            compare(found, exact, f"{backend} {number}", BF16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", [None, "int4", "uint4", "mxfp4"])
@pytest.mark.parametrize("rows", [9, 200, 2000])
def test_epilogues(rows: int, format: str | None, backend: str) -> None:
    """Gate and up in one kernel, times a number for each row."""
    x, dense, scales = made(rows, 256), made(7, 320, 256), torch.rand(rows, device="cuda")
    weight = jitgen.quantize(dense, format) if format else dense
    exact = weight.dequantize(torch.float64) if format else dense.double()
    run = jitgen.jit(backend=backend)(gated)
    for name, ends in divisions(rows, 7).items():
        offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
        gate, up = rows_of_groups(x, exact, ends).chunk(2, -1)
        assert len(run.lower(x, weight, offsets, scales).kernels) == 1
        compare(run(x, weight, offsets, scales), F.silu(gate) * up * scales.double()[:, None], name, BF16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_lengths_of_groups(dtype: torch.dtype, backend: str) -> None:
    run = jitgen.jit(backend=backend)(of_lengths)
    for rows, groups, columns, length in ((20, 5, 24, 30), (130, 9, 264, 700), (64, 130, 64, 1000)):
        x, weight = made(rows, length, dtype=dtype), made(length, columns, dtype=dtype)
        for name, ends in divisions(length, groups).items():
            offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
            compare(run(x, weight, offsets), lengths_of_groups(x, weight, ends), f"{length} {name}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_matrices_that_ids_choose(backend: str) -> None:
    run = jitgen.jit(backend=backend)(chosen)
    for rows, groups, columns, length in ((1, 8, 256, 512), (8, 128, 80, 256), (33, 5, 64, 128)):
        x, dense = made(rows, length), made(groups, columns, length)
        ids = torch.randint(-groups, groups, (rows,), device="cuda")
        for weight in (dense, jitgen.quantize(dense, "int4", 128)):
            exact = weight.dequantize(torch.float64) if isinstance(weight, jitgen.QTensor) else dense.double()
            wanted = 2 * torch.einsum("snk,sk->sn", exact[ids], x.double())
            compare(run(x, weight, ids), wanted, "by ids")
            outside = ids.clone()
            outside[0] = 3 * groups
            found = run(x, weight, outside)
            assert (found[0] == 0).all()
            compare(found[1:], wanted[1:], "beside an id of no group")


@pytest.mark.parametrize(
    ("format", "group", "activation", "rows"),
    [("int8", None, "int8", 2**24 + 5), ("fp8_e4m3.rows128", 128, "fp8_e4m3.block128", 2**25 + 5)],
)
def test_rows_with_ids_whose_tiles_have_more_rows_than_32_bits(
    format: str, group: int | None, activation: str, rows: int
) -> None:
    """Each row has a tile of its own, of up to 128 rows, of 64 where wgmma multiplies."""
    groups, last = 5, slice(-300, None)
    weight = jitgen.quantize(made(groups, 128, 128), format, group_size=group, activation=activation)
    x = torch.empty(rows, 128, device="cuda", dtype=BF16).normal_()
    ids = torch.randint(-groups, groups, (rows,), device="cuda")
    found, exact = jitgen.jit(chosen, backend="cuda")(x, weight, ids)[last], weight.dequantize(torch.float64)[ids[last]]
    compare(found, 2 * torch.einsum("snk,sk->sn", exact, rows_as_quantized(x[last], activation)), "the last rows", BF16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.parametrize("rows", [30, 1500])
def test_bad_offsets_write_nothing_outside(rows: int, format: str | None, backend: str) -> None:
    run: Callable[..., Any] = jitgen.jit(backend=backend)(product)
    x, dense = made(rows, 128), made(5, 192, 128)
    weight = jitgen.quantize(dense, format) if format else dense
    memory = torch.full((3 * rows, 192), 7.0, device="cuda", dtype=BF16)
    for ends in ((9, 3, 30, 12, 30), (-5, 3, 300, 100, 7), (2**31 - 1, -(2**31), 500, 0, 2**30), (500,) * 5):
        offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
        run.bind(x, weight, offsets)(x, weight, offsets, out=memory[rows : 2 * rows])  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        assert (torch.cat([memory[:rows], memory[2 * rows :]]) == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", [None, "int4"])
def test_bits_are_the_same_in_a_graph(format: str | None, backend: str) -> None:
    """One graph computes what any offsets ask for."""
    run, dense = jitgen.jit(backend=backend)(product), made(16, 256, 512)
    weight = jitgen.quantize(dense, format) if format else dense
    x, offsets = made(777, 512), torch.zeros(16, device="cuda", dtype=torch.int32)
    run(x, weight, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x, weight, offsets)
    for name, ends in divisions(777, 16).items():
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert torch.equal(result, run(x, weight, offsets)), name


@pytest.mark.parametrize("format", ["int4", "uint4", "mxfp4", "int8"])
@pytest.mark.parametrize("size", [(1, 5, 64, 64), (8, 128, 96, 256), (17, 300, 80, 192), (8, 33, 1040, 512)], ids=str)
def test_two_products_of_one_division(size: tuple[int, int, int, int], format: str) -> None:
    """A kernel of the graph writes the ends of groups, others at every replay."""
    rows, groups, columns, length = size
    group = 32 if "int4" in format else None
    up, down = (jitgen.quantize(made(groups, *shape), format, group) for shape in ((length, length), (columns, length)))
    run, x = jitgen.jit(backend="cuda")(two_products), made(rows, length) * length**-0.5
    exact = [weight.dequantize(torch.float64) for weight in (up, down)]
    counts, graph = torch.zeros(groups, device="cuda", dtype=torch.int64), torch.cuda.CUDAGraph()
    run(x, up, down, counts)
    with torch.cuda.graph(graph):
        results = [run(x, up, down, counts) for _ in range(2)]
    for name, ends in divisions(rows, groups).items():
        counts.copy_(torch.tensor(ends).diff(prepend=torch.zeros(1, dtype=torch.int64)))
        graph.replay()
        hidden = rows_of_groups(x, exact[0], ends).relu().to(x.dtype)
        compare(results[1][: ends[-1]], rows_of_groups(hidden, exact[1], ends)[: ends[-1]], f"{size} {name}")
        assert torch.equal(*results), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SEVERAL_IDS)
def test_matrices_by_ids_of_several_dimensions(name: str, backend: str) -> None:
    function = SEVERAL_IDS[name]
    for tokens, count in ((7, 2), (1, 3), (64, 4), (300, 8)):
        x, w = torch.randn(tokens, 24, device="cuda"), torch.randn(5, 40, 24, device="cuda")
        ids = torch.randint(-5, 5, (tokens, count), device="cuda")
        for dtype in (BF16, F32):
            operands = x.to(dtype), w.to(dtype)
            got, want = (
                jitgen.jit(backend=backend)(function)(*operands, ids),
                function(*(t.double() for t in operands), ids),
            )
            assert (got.double() - want).norm() <= TOLERANCE[dtype] * want.norm(), (tokens, count, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CHOSEN)
def test_matrices_that_one_id_a_slice_or_an_einsum_chooses(name: str, backend: str) -> None:
    x, ids = made(3, 256), torch.randint(0, 5, (3, 2), device="cuda")
    weight = jitgen.quantize(made(5, 144, 256), "int4", 128)
    wanted = CHOSEN[name](x.double(), weight.dequantize(torch.float64), ids)
    found = jitgen.jit(backend=backend)(CHOSEN[name])(x, weight, ids)
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= TOLERANCE[BF16] * wanted.norm()


def block_of_experts(x: Any, router: Any, up: Any, down: Any, count: int) -> Any:
    """Routing, two grouped products with SwiGLU between, and the weighted sum, as transformers has them."""
    weights, ids = torch.topk(torch.softmax(F.linear(x, router), -1, dtype=torch.float), count, -1)
    weights, ids = (weights / weights.sum(-1, keepdim=True)).to(x.dtype).reshape(-1), ids.reshape(-1)
    experts = router.shape[0]
    ordered, order = torch.sort(ids)
    counts = torch.histc(ordered.int(), bins=experts, min=0, max=experts - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.shape[0], device=order.device)
    gate, value = torch._grouped_mm(x[order // count], up.transpose(-2, -1), ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * value, down.transpose(-2, -1), ends) * weights[order].unsqueeze(-1)
    return rows[ranks].view(x.shape[0], count, -1).sum(1).to(x.dtype)


def _is_decided(logits: torch.Tensor, count: int) -> bool:
    """Whether no rounding of ``logits`` to bfloat16 changes which are the first ``count``: by four of its last bits."""
    ordered = logits.float()[0].sort(descending=True)[0]
    return (ordered[count - 1] - ordered[count]).item() > 4 * 2.0**-8 * ordered.abs().max().item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", [None, "int4", "mxfp4", "int8"])
@pytest.mark.parametrize(("experts", "count"), [(128, 8), (8, 2), (40, 16), (5, 1)])
def test_blocks_of_experts_of_one_token(experts: int, count: int, format: str | None, backend: str) -> None:
    """All calls in one graph, one after another, of tokens that choose other experts each: where a kernel reads ids and
    weights while the one ahead runs, it must not read those of another call."""
    width, inner = 256, 384
    router, up, down = made(experts, width), made(experts, 2 * inner, width) / 16, made(experts, width, inner) / 16
    weights = [jitgen.quantize(w, format) if format else w for w in (up, down)]
    exact_up, exact_down = (w.dequantize(torch.float64) if format else w.double() for w in weights)
    run = jitgen.jit(backend=backend)(lambda x, router, up, down: block_of_experts(x, router, up, down, count))
    xs = [x for x in made(200, 1, width) if _is_decided(F.linear(x, router), count)][:24]
    assert len(xs) == 24
    alone = [run(x, router, *weights).clone() for x in xs]
    for x, found in zip(xs, alone, strict=True):
        shares, (ids,) = torch.topk(torch.softmax(F.linear(x, router), -1, dtype=torch.float), count, -1)
        shares = (shares / shares.sum(-1, keepdim=True)).double()[0]
        wanted = torch.zeros(1, width, dtype=torch.float64, device="cuda")
        for share, expert in zip(shares, ids.tolist(), strict=True):
            gate, value = F.linear(x.double(), exact_up[expert]).chunk(2, -1)
            wanted += share * F.linear(F.silu(gate) * value, exact_down[expert])
        compare(found, wanted, f"{experts} {count}", BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run(x, router, *weights) for x in xs]
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(result, other) for result, other in zip(results, alone, strict=True))
