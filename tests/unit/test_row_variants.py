"""Reductions whose schedules depend on how many long rows there are: few plans, prepared from one recorded call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec, lowering
from jitgen.deploy import manifest, prewarm, row_variants, work
from jitgen.device import Device
from jitgen.families.rows.reduction.row_chunks import SINGLE_BLOCK_ROWS
from jitgen.families.rows.reduction.schedule import (
    LONG_ROW,
    MANY_COLUMNS,
    MANY_ROWS,
    occupancy,
)
from jitgen.inspect import Lowered
from jitgen.schedule.chips import H200
from jitgen.spec import Target

VOCABULARY = 151936
ROWS = occupancy(H200)
"""Numbers of rows at which schedules change."""


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(logits, -1)


def standardized(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def lowered(rows: int, length: int, backend: str):
    return jitgen.jit(standardized).lower(TensorSpec((rows, length), torch.bfloat16), target="sm_90a", backend=backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_numbers_of_rows_share_plans(backend: str) -> None:
    alike = [
        (2, 7, ROWS.quarter),
        (33, SINGLE_BLOCK_ROWS),
        (SINGLE_BLOCK_ROWS + 1, ROWS.half),
        (65, ROWS.full),
        (500, ROWS.several),
    ]
    alike += [(2000, 8192)]
    long = [{lowered(count, VOCABULARY, backend).key for count in rows} for rows in alike]
    assert [len(keys) for keys in long] == [1] * len(alike)
    assert len(set().union(*long)) > 1
    short = {lowered(rows, LONG_ROW, backend).key for rows in (2, 33, ROWS.half, 65, 8192)}
    assert len(short) == 1


@pytest.mark.parametrize(
    ("rows", "blocks"), [(ROWS.quarter, 8), (ROWS.quarter + 1, 2), (ROWS.half, 2), (ROWS.half + 1, 8)]
)
def test_few_rows_have_a_multiprocessor_for_every_block(rows: int, blocks: int) -> None:
    low = lowered(rows, VOCABULARY, "cuda")
    assert f"__cluster_dims__({blocks}, 1, 1)" in low.source
    assert "2 passes" in low.explain()  # the mean and the deviations from it in one


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize(("length", "count"), [(VOCABULARY, 7), (2 * LONG_ROW, 5), (LONG_ROW, 1)])
def test_every_bucket_of_a_recorded_reduction(backend: str, length: int, count: int, tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    with jitgen.record(path):
        jitgen.jit(log_probabilities)(torch.randn(3, length))
    (entry,) = json.loads(path.read_text())["entries"]
    route = lowering.Route(backend, "nvrtc" if backend == "cuda" else backend, Target.parse("sm_90a"))
    found = [manifest.relower(variant, route) for variant in row_variants.variants(entry, route.device)]
    assert len(found) == count + 1  # and a single row, which is a trace of its own
    keys = {low.key for low in found}
    for rows in (2, 40, ROWS.half, 100):
        low = jitgen.jit(log_probabilities).lower(
            TensorSpec((rows, length), torch.float32), target="sm_90a", backend=backend
        )
        assert low.key in keys


def projected_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(heads.transpose(1, 2).flatten(2), weight)


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", ["x86-64-v3", "sm_90a"])
@pytest.mark.parametrize("recorded", [2, 100])
def test_every_length_of_a_prompt_whose_heads_share_keys(target: str, recorded: int, tmp_path: Path) -> None:
    """The rows of such heads are packed, and the weight fixes how many heads there are."""

    def lowered(rows: int) -> Lowered:
        head = [TensorSpec((1, heads, rows, 16), torch.bfloat16) for heads in (8, 2, 2)]
        weight = TensorSpec((64, 128), torch.bfloat16)
        return jitgen.jit(projected_attention).lower(*head, weight, target=target)

    path = tmp_path / "specs.json"
    with jitgen.record(path):
        lowered(recorded)
    (entry, *_) = json.loads(path.read_text())["entries"]
    route = work.route_of(entry, Target.parse(target))
    keys = {manifest.relower(variant, route).key for variant in row_variants.variants(entry, route.device)}
    missed = [rows for rows in (2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 129, 600) if lowered(rows).key not in keys]
    assert not missed


@pytest.mark.parametrize("rows", [100, MANY_ROWS, MANY_ROWS + 1])
def test_threads_take_several_of_many_short_rows(rows: int, tmp_path: Path) -> None:
    """Whichever is recorded, the kernels for few and for many are prepared."""
    path = tmp_path / "specs.json"
    with jitgen.record(path):
        jitgen.jit(lambda x: x.sum(-1))(torch.randn(rows, 32))
    (entry,) = json.loads(path.read_text())["entries"]
    route = lowering.Route("cuda", "nvrtc", Target.parse("sm_90a"))
    turns = {
        manifest.relower(variant, route).schedules[0].rows_per_iteration
        for variant in row_variants.variants(entry, route.device)
    }
    assert turns == {1, 2}


def test_many_columns_need_no_clusters(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    with jitgen.record(path):
        jitgen.jit(lambda x: x.sum(0))(torch.randn(1000, 96))
    (entry,) = json.loads(path.read_text())["entries"]
    route = lowering.Route("cuda", "nvrtc", Target.parse("sm_90a"))
    variants = row_variants.variants(entry, route.device)
    assert {variant["inputs"][0]["sizes"][1] for variant in variants} >= {96, 2 * MANY_COLUMNS}
    clusters = {manifest.relower(variant, route).schedules[0].cluster for variant in variants}
    assert clusters == {1, 2}


def test_the_rows_of_a_sum_are_its_results(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    with jitgen.record(path):
        jitgen.jit(lambda x: x.float().sum(-1))(torch.randn(3, 100000))
    (entry,) = json.loads(path.read_text())["entries"]
    device = Device(Target.parse("sm_90a"), "cuda")
    sizes = {tuple(variant["inputs"][0]["sizes"]) for variant in row_variants.variants(entry, device)}
    ends = {ROWS.quarter, SINGLE_BLOCK_ROWS, ROWS.half, ROWS.full, ROWS.several, 2 * ROWS.several}
    assert sizes >= {(count, 100000) for count in (ends - {ROWS.quarter}) | {1, 3}}


def test_of_too_many_combinations_one_size_at_a_time_is_varied_and_it_is_said(tmp_path: Path) -> None:
    """The backward of a batched product has three sizes with buckets, and one with a number of matrices."""

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ y)

    with jitgen.record(tmp_path / "step.json"):
        x, y = torch.randn(3, 40, 50, requires_grad=True), torch.randn(3, 50, 60, requires_grad=True)
        jitgen.jit(product)(x, y).sum().backward()
    device = Device(Target.parse("sm_90a"), "cuda")
    entries = json.loads((tmp_path / "step.json").read_text())["entries"]
    counts = {entry["name"]: len(row_variants.variants(entry, device)) for entry in entries}
    left_out = {entry["name"]: row_variants.combinations_left_out(entry, device) for entry in entries}
    assert left_out["product"] == 0
    assert left_out["product_backward"] > row_variants.MOST_COMBINATIONS
    assert counts["product_backward"] < 2 * row_variants.MOST_COMBINATIONS
    planned = [each for entry in entries for each, _ in prewarm._plan(entry, [device.target], tmp_path, [])]
    (skipped,) = (each for each in planned if each.origin == "skipped")
    assert "each was varied alone" in skipped.detail
