"""The wgmma mainloops on a device against float64: every configuration, ragged shapes, strides, sizes of 0 and 1."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from wgmma_kernels import DENSE, ENTRY, QUANTIZED, Dense, Quantized

import jitgen
from jitgen.compilers import nvrtc
from jitgen.families.gemm import wgmma_tables
from jitgen.families.gemm.mainloops import WgmmaDense
from jitgen.families.gemm.wgmma_model import Times
from jitgen.kernel.launch import LaunchShape
from jitgen.runtime import cuda, residency
from jitgen.runtime.tensor_map import TensorMap
from jitgen.spec import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [
    (1, 1, 8),
    (17, 80, 72),
    (33, 272, 1000),
    (64, 256, 256),
    (100, 520, 448),
    (300, 1000, 520),
    (130, 2057, 2048),
]
"""(M, N of the first region, K)."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of the norm of the difference, relative to the result's: half a unit in the last place of the result."""


@functools.cache
def loaded(config: Quantized | Dense) -> cuda.Function:
    if cuda.target_of(0) != Target("cuda", "sm_90a"):
        pytest.skip("wgmma is sm_90a's alone")
    artifact = nvrtc.compile(config.source())
    return cuda.load(artifact.files["kernel.cubin"], ENTRY, 0, config.shared_bytes)


def mapped(tensor: torch.Tensor, box: tuple[int, int], swizzle: int = 128) -> bytes:
    dtype = str(tensor.dtype).removeprefix("torch.")
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    return TensorMap(0, 0, dtype, sizes, strides, box, swizzle).encode(tensor.data_ptr())


def matrix(rows: int, columns: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Random, its rows 16 bytes apart or a multiple, in memory that is NaN elsewhere."""
    whole = torch.full((rows, -(-columns // 8) * 8 + 8), float("nan"), dtype=dtype, device="cuda")
    whole[:, :columns] = torch.randn(rows, columns, device="cuda") * scale
    return whole[:, :columns]


def run(config: Quantized | Dense, sizes: tuple[int, int, int], blocks: int | None = None) -> None:
    """Each region's result, written into poison, against float64 on the numbers the kernel multiplies."""
    m, n, k = sizes
    dtype = DTYPES[config.element]
    widths = [n, 8, 64 + n][: config.regions]
    lines = matrix(k, m, dtype) if isinstance(config, Dense) and config.x_transposed else matrix(m, k, dtype)
    x = lines.t() if isinstance(config, Dense) and config.x_transposed else lines
    maps: list[bytes] = []
    pointers: list[int] = []
    weights: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for width in widths:
        both: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(config.contractions):
            if isinstance(config, Quantized):
                group = config.group or None
                weight = jitgen.quantize(torch.randn(width, k, device="cuda"), config.format, group, layout="mma")
                codes, scales, *zeros = weight.tensors
                words = codes.view(torch.int32).view(codes.shape[0], -1)
                maps.append(mapped(words, config.box, 0))
                pointers += [codes.data_ptr(), scales.data_ptr(), zeros[0].data_ptr() if zeros else 0]
                exact = weight.dequantize(torch.float64)
                both.append((weight, exact.to(dtype).double() if group else exact))
            else:
                rows, columns = (k, width) if config.transposed else (width, k)
                dense = matrix(rows, columns, dtype, 0.05)
                own = min(width, config.weight_box) if config.swapped and config.trimmed else config.weight_box
                maps.append(mapped(dense, (config.depths[1] if config.transposed else own, 64)))
                both.append((dense, (dense.t() if config.transposed else dense).double()))
        weights.append(both)
    outputs = [torch.full((config.ranges * m, width), float("nan"), dtype=dtype, device="cuda") for width in widths]
    tile = config.tokens // config.multicast if isinstance(config, Quantized) else config.x_box
    tile = min(m, tile) if config.trimmed and not getattr(config, "swapped", False) else tile
    grid = (blocks or cuda.multiprocessors(0) * config.resident) // config.cluster * config.cluster
    parameters = "T" * (1 + len(maps)) + "P" * (len(pointers) + len(outputs)) + "i" * (len(widths) + 2)
    arguments = (*pointers, *(y.data_ptr() for y in outputs), *widths, m, k)
    box = (tile if x is lines or isinstance(config, Quantized) else config.depths[0], 64)
    values: tuple[int | bytes, ...] = (mapped(lines, box), *maps, *arguments)
    cluster = (config.cluster, 1, 1) if config.cluster > 1 else None
    function = loaded(config)
    launch = cuda.Launch(
        function, parameters, values, (grid, 1, 1), (config.threads, 1, 1), config.shared_bytes, cluster
    )
    launch(cuda.current_stream(0))
    depth = 64 * config.span if isinstance(config, Quantized) else 64
    ends = [-(-k // depth) * number // config.ranges * depth for number in range(config.ranges + 1)]
    ranges = [(a, min(b, k)) for a, b in itertools.pairwise(ends)]
    first = [y.clone() for y in outputs]
    launch(cuda.current_stream(0))
    for region, (y, again, both) in enumerate(zip(outputs, first, weights, strict=True)):
        sums = [torch.cat([x[:, a:b].double() @ weight[:, a:b].t() for a, b in ranges]) for _, weight in both]
        expected = (sums[0] + (2 * sums[1] if len(sums) == 2 else 0)) * (region + 1)
        error = (y.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], f"region {region}: {error:.2e}"
        assert torch.equal(y, again)


FEW = (QUANTIZED[0], QUANTIZED[6], QUANTIZED[9], DENSE[0], DENSE[1], DENSE[-13])


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("config", [*QUANTIZED, *DENSE], ids=repr)
@pytest.mark.quick(where=lambda config: config in FEW)
def test_against_float64(config: Quantized | Dense, sizes: tuple[int, int, int]) -> None:
    run(config, sizes)


ARRANGED = [config for config in DENSE if config.swapped or config.blocks > 1 or config.other_multicast > 1]


@pytest.mark.parametrize("config", [*FEW, *ARRANGED], ids=repr)
def test_any_grid_is_right(config: Quantized | Dense) -> None:
    for blocks in (config.cluster, 3 * config.cluster, 32 * config.cluster):
        run(config, (300, 1000, 520), blocks)


@pytest.mark.parametrize("tile", wgmma_tables.ARRANGED, ids=str)
@pytest.mark.quick(where=lambda tile: tile in wgmma_tables.ARRANGED[:4])
def test_candidates_that_share_or_swap_operands(tile: WgmmaDense, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a kernel with bias, gelu, a factor of each column and a residual, for rows that fill no tile."""
    monkeypatch.setattr(wgmma_tables, "DENSE", (tile,))
    monkeypatch.setattr(wgmma_tables, "DENSE_OF_MANY_ROWS", ())
    monkeypatch.setattr(wgmma_tables, "ARRANGED", ())
    monkeypatch.setattr(wgmma_tables, "NARROW", ())

    def rule(*x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x[0], x[1], x[2])) * x[3] + x[4]

    for m, n, k in ((193, 1000, 520), (511, 264, 1096)):
        x = [matrix(m, k, torch.bfloat16), matrix(n, k, torch.bfloat16, 0.05), torch.randn(n), torch.randn(n)]
        x = [each.to("cuda", torch.bfloat16) for each in (*x, torch.randn(m, n))]
        function = jitgen.jit(rule, backend="cuda")
        y, exact = function(*x), rule(*(each.double() for each in x))
        (schedule,) = function.lower(*x).lowered.schedules
        assert {each.columns for each in schedule.tilings} == {tile.columns}
        # Half a unit in the last place of the result, and of gelu's erfc, which is coarser in 16 bits.
        assert (y.double() - exact).norm() / exact.norm() < 2 * TOLERANCE[torch.bfloat16]
        assert torch.equal(y, function(*x))


def few_blocks(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets persistent kernels have ``count`` clusters at most."""

    def grid(function: cuda.Function, shape: LaunchShape) -> tuple[int, int, int]:
        blocks, *others = shape.grid
        return (blocks if shape.persistence is None else min(blocks, count * shape.cluster), *others)  # type: ignore

    monkeypatch.setattr(residency, "resident_grid", grid)


def shared_by(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets up to ``splits`` blocks of a cluster share the K of a tile; with 0 the model decides."""
    if splits:
        monkeypatch.setattr(Times, "least", lambda _self, _chip, _items, most, _fewest=1: (min(splits, most), 1.0))


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("splits", [0, 2, 4])
@pytest.mark.parametrize("weight", ["bfloat16", "int4", "int8"])
@pytest.mark.quick(where=lambda weight, splits, clusters: clusters == 1 and splits == 2)
def test_generated_kernels_are_right_on_any_grid(
    weight: str, splits: int, clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks have many tiles: stages of the next one are copied while results of this one are stored."""
    few_blocks(clusters, monkeypatch)
    shared_by(splits, monkeypatch)

    def rule(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b))

    for m, n, k in ((100, 2056, 2048), (300, 1000, 1024), (777, 640, 2048)):
        x, b = matrix(m, k, torch.bfloat16), torch.randn(n, device="cuda").bfloat16()
        w = torch.randn(n, k, device="cuda").bfloat16() * k**-0.5
        exact = w.double()
        if weight != "bfloat16":
            w = jitgen.quantize(w, weight, 128)
            exact = w.dequantize(torch.float64).bfloat16().double()
        y = jitgen.jit(rule, backend="cuda")(x, w, b)
        expected = rule(x.double(), exact, b.double())
        assert (y.double() - expected).norm() / expected.norm() < 2 * TOLERANCE[torch.bfloat16]


def test_extreme_scales() -> None:
    """Weights that the decoding scales by powers of two on their way must come out as they are."""
    for factor in (2.0**-100, 2.0**12):
        config = Quantized(tokens=64)
        weight = jitgen.quantize(torch.randn(256, 256, device="cuda") * factor, "int4", 128, layout="mma")
        x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
        y = torch.full((64, 256), float("nan"), dtype=torch.bfloat16, device="cuda")
        codes, scales = weight.tensors
        words = codes.view(torch.int32).view(codes.shape[0], -1)
        values = (
            mapped(x, (64, 64)),
            mapped(words, (16, 128), 0),
            codes.data_ptr(),
            scales.data_ptr(),
            0,
            y.data_ptr(),
        )
        launch = cuda.Launch(
            loaded(config), "TTPPPPiii", (*values, 256, 64, 256), (1, 1, 1), (config.threads, 1, 1), config.shared_bytes
        )
        launch(cuda.current_stream(0))
        expected = x.double() @ weight.dequantize(torch.float64).bfloat16().double().t()
        assert (y.double() - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]
