"""Grouped products in CUDA of weights and activations that are quantised: the kernels a GPU would get, run on the CPU
with the instructions of ``tests/host_ptx.cuh``, those of sm_90a with those of ``tests/host_wgmma.cuh``, too."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import jitgen
from jitgen.compilers import host
from jitgen.families.gemm import wgmma_tiles
from jitgen.families.gemm.mainloops import WgmmaQuantized
from jitgen.families.gemm.schedules import cuda
from tests.compile.test_byte_products_on_host import headers_of_bytes
from tests.compile.test_formats_on_host import host_headers
from tests.cuda_on_host import on_host, run
from tests.grouped import ACTIVATIONS, chosen, failure, product, rows_as_quantized, rows_of_groups

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


@pytest.mark.parametrize(("format", "group", "activation"), ACTIVATIONS)
@pytest.mark.quick(where=lambda activation: activation == "fp8_e4m3.block128")
def test_rows_of_groups(format: str, group: int | None, activation: str | None) -> None:
    x, dense = torch.randn(20, 256, dtype=torch.bfloat16), torch.randn(3, 128, 256, dtype=torch.bfloat16)
    weight = jitgen.quantize(dense, format, group_size=group, activation=activation)
    ends = torch.tensor([3, 3, 19], dtype=torch.int32)
    exact, rows = weight.dequantize(torch.float64), rows_as_quantized(x, activation)
    (found,) = run(product, x, weight, ends, target="sm_80", headers=host_headers())
    assert not failure(found, rows_of_groups(rows, exact, ends.tolist()), format)


TESTS = Path(__file__).parents[1]
BY_CODES = [each for each in ACTIVATIONS if each[0] != "int4" and each[2] is not None]
"""Experts whose codes sm_90a multiplies by those of the activation."""


def wgmma_headers() -> dict[str, str]:
    """The headers with instructions of a GPU, as they are on the host, those of Hopper too."""
    replaced = {"barrier": "barrier", "wgmma_ptx": "wgmma", "wgmma_bytes": "wgmma_bytes"}
    texts = {name: (TESTS / f"host_{of}.cuh").read_text() for name, of in replaced.items()}
    headers = {f"jitgen/{name}.cuh": text for name, text in texts.items()}
    return headers_of_bytes() | headers | {"jitgen/wgmma_atoms.cuh": "#pragma once\n"}


@pytest.mark.parametrize(("rows", "ends"), [(9, (4, 4, 8)), (300, (20, 20, 230)), (140, (0, 0, 0))])
@pytest.mark.parametrize(("format", "group", "activation"), BY_CODES)
@pytest.mark.quick(where=lambda activation, rows: activation == "fp8_e4m3.block128" and rows == 140)
def test_rows_of_groups_on_hopper(
    format: str, group: int | None, activation: str | None, rows: int, ends: tuple[int, ...]
) -> None:
    """Rows behind the last group are 0. Many rows of codes are multiplied by wgmma, few of codes in blocks too."""
    x, dense = torch.randn(rows, 256, dtype=torch.bfloat16), torch.randn(3, 256, 256, dtype=torch.bfloat16)
    weight = jitgen.quantize(dense, format, group_size=group, activation=activation)
    exact, quantized = weight.dequantize(torch.float64), rows_as_quantized(x, activation)
    (found,) = run(product, x, weight, torch.tensor(ends, dtype=torch.int32), headers=wgmma_headers())
    assert not failure(found, rows_of_groups(quantized, exact, ends), f"{format} {rows}")


@pytest.mark.parametrize(("rows", "ends"), [(150, (33, 33, 129)), (20, (4, 4, 18)), (200, (0, 129, 129))])
@pytest.mark.parametrize("tile", [(96, 1, 1, 1, 32), (128, 1, 2, 1, 64), (160, 1, 1, 2, 96)])
@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("mxfp4", None)])
@pytest.mark.quick(where=lambda format, rows, tile: format == "mxfp4" and rows == 150 and tile[0] == 96)
def test_the_last_tile_of_a_group_is_narrow(
    format: str, group: int | None, tile: tuple[int, ...], rows: int, ends: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Groups have last tiles of one row, of as many as a narrow one and of one more, and of all; or fewer rows."""
    tokens, warpgroups, blocks, span, narrow = tile
    only = WgmmaQuantized(tokens, warpgroups, blocks, span, stages=3, narrow=narrow)
    monkeypatch.setattr(wgmma_tiles, "grouped_candidates", lambda *arguments: [only])
    monkeypatch.setattr(cuda, "mma", lambda *arguments: [])
    x, dense = torch.randn(rows, 256, dtype=torch.bfloat16), torch.randn(3, 80, 256, dtype=torch.bfloat16)
    weight = jitgen.quantize(dense, format, group_size=group)
    (found,) = run(product, x, weight, torch.tensor(ends, dtype=torch.int32), headers=wgmma_headers())
    assert not failure(found, rows_of_groups(x.double(), weight.dequantize(torch.float64), ends), f"{format} {rows}")


@pytest.mark.parametrize(("format", "group"), [("fp8_e4m3.rows128", 128), ("int8", None)])
def test_rows_with_ids_on_hopper(format: str, group: int | None) -> None:
    activation = "int8" if group is None else "fp8_e4m3.block128"
    x, dense = torch.randn(3, 256, dtype=torch.bfloat16), torch.randn(5, 128, 256, dtype=torch.bfloat16)
    weight = jitgen.quantize(dense, format, group_size=group, activation=activation)
    ids = torch.tensor([4, 0, -2])
    exact, quantized = weight.dequantize(torch.float64), rows_as_quantized(x, activation)
    (found,) = run(chosen, x, weight, ids, headers=wgmma_headers())
    wanted = 2 * torch.einsum("snk,sk->sn", exact[ids], quantized)
    assert not failure(found, wanted, format)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [None, "int4", "int8", "mxfp4"])
@pytest.mark.quick(where=lambda format, dtype, target: format == "int4" or (format is None and target == "sm_80"))
def test_rows_with_ids(format: str | None, dtype: torch.dtype, target: str) -> None:
    """Rows of ragged lengths; the first and the last of the matrices, and one that several rows choose."""
    x, dense = torch.randn(5, 96, dtype=dtype), torch.randn(4, 48, 96, dtype=dtype)
    weight = jitgen.quantize(dense, format, group_size=32 if format == "int4" else None) if format else dense
    exact = (weight.dequantize(torch.float64) if format else dense).double()
    ids = torch.tensor([3, 0, 0, -2, 1])
    (found,) = run(chosen, x, weight, ids, target=target, headers=host_headers())
    wanted = 2 * torch.einsum("snk,sk->sn", exact[ids], x.double())
    assert not failure(found, wanted, f"{format} {dtype} {target}")


def test_an_instruction_that_the_host_does_not_know_is_named() -> None:
    x, dense, ids = torch.randn(2, 64), torch.randn(3, 32, 64), torch.tensor([2, 0])
    with pytest.raises(AssertionError, match=r"cp.async.*, which the host does not know"):
        run(chosen, x, dense, ids)


_TILES = r"""
#include "jitgen/gemm_groups.cuh"

struct Params { const int64_t* ends; int* out; int groups; int rows; };
extern "C" __global__ void tiles(const __grid_constant__ Params params) {
  const int total = jitgen::tiles_of_groups<8>(params.ends, 1, params.groups, params.rows);
  const jitgen::GroupTile found =
      jitgen::group_of_tile<8>(params.ends, 1, params.groups, params.rows, int(blockIdx.x));
  if (threadIdx.x != 0) return;
  int* const out = params.out + blockIdx.x * 5;
  out[0] = total;
  out[1] = found.group;
  out[2] = found.begin;
  out[3] = found.end;
  out[4] = found.tile;
}
"""


@pytest.mark.parametrize("groups", [1, 31, 32, 127, 128, 129, 300])
@pytest.mark.quick(where=lambda groups: groups == 300)
def test_tiles_of_groups(groups: int, tmp_path: Path) -> None:
    """Tiles are those of the groups in their order, then those of the rows of none, then none; also where ends descend
    or are beyond the rows."""
    source, rows = random.Random(groups), 3 * groups + 9
    ends = sorted(source.randint(0, rows - 5) for _ in range(groups))
    for bad in (-7, rows + 50, rows // 2):
        ends[source.randrange(groups)] = bad
    wanted, begin = list[list[int]](), 0
    for group, raw in enumerate([*ends, rows]):
        end = max(begin, min(max(raw, 0), rows))
        count, number = -(-(end - begin) // 8), group if group < groups else -1
        wanted += [[number, begin, end, tile] for tile in range(count)]
        begin = min(max(raw, 0), rows)
    x, weight = (jitgen.TensorSpec(size, torch.bfloat16) for size in ((8, 64), (2, 64, 64)))
    low = jitgen.jit(product).lower(x, weight, jitgen.TensorSpec((2,), torch.int32), target="sm_80", backend="cuda")
    headers = low._lowered.render(0)[0].headers
    run_tiles = on_host(SimpleNamespace(name="tiles", text=_TILES, headers=headers), tmp_path, host_headers())
    out = torch.full((len(wanted) + 2, 5), 99, dtype=torch.int32)
    of_ends = torch.tensor(ends)
    run_tiles(out.shape[0], 32, struct.pack("2Q2i", of_ends.data_ptr(), out.data_ptr(), groups, rows))
    assert out[:, 0].tolist() == [len(wanted)] * out.shape[0]
    assert out[:, 1:].tolist() == [*wanted, [-1, 0, 0, -1], [-1, 0, 0, -1]]
