"""Measured choices of every family that has several candidates: each candidate is named by a row, and a row that is
tried is what is lowered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.families import registry
from jitgen.schedule import tuned
from jitgen.spec import TensorSpec
from tests.cuda_on_host import run
from tests.numeric import mismatch

TARGET = "sm_90a"


def softmax(x: Any) -> Any:
    return torch.softmax(x, -1)


def total(x: Any) -> Any:
    return x.sum(-1)


def normalized(x: Any) -> Any:
    return F.rms_norm(x, (x.shape[-1],))


def attention(x: Any) -> Any:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def product(x: Any) -> Any:
    return x @ x.mT


CASES = [
    *((softmax, (64, 16384)), (softmax, (4096, 512)), (total, (4096, 4096)), (normalized, (8192, 12345))),
    *(
        (attention, (2, 8, 500, 64)),
        (attention, (2, 8, 500, 128)),
        (attention, (2, 8, 4000, 128)),
        (product, (300, 512)),
    ),
]


def named(parameter: Any) -> str:
    return getattr(parameter, "__name__", None) or str(parameter)


def lowered(function: Callable[..., Any], shape: tuple[int, ...], **options: Any) -> Any:
    spec = TensorSpec(shape, torch.bfloat16)
    return jitgen.jit(backend="cuda", **options)(function).lower(spec, target=TARGET).lowered


def choices(low: Any) -> tuple[str, list[Any], Any]:
    """The family, the candidates and the facts of the first kernel."""
    kernel, device = low.program.kernels[0], low.route.device
    family = registry.family_of(kernel)
    problem = family.problem(kernel, low.layouts[0], low.laid_out.geometries[0], device)
    return family.name, list(family.candidates(problem, device)), family.facts(problem, device)


@pytest.mark.parametrize(("function", "shape"), CASES, ids=named)
def test_each_candidate_is_what_its_row_selects(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    low = lowered(function, shape)
    name, candidates, facts = choices(low)
    assert len(candidates) > 1
    assert len(set(candidates)) == len(candidates)
    if function is not product:  # these families have no model: the rule's choice is the first
        assert low.schedules[0] == candidates[0]
    for candidate in candidates[:6]:
        row = tuned.row_of(low.route.device.model.name, "cuda", facts, candidate)
        row = tuned.row_from_json(json.loads(json.dumps(row.as_json)))
        with tuned.trying(name, TARGET, row):
            again = lowered(function, shape)
        assert again.schedules[0] == candidate
        assert again.choices[0].row == row.digest


def test_what_no_batch_may_change_has_no_measured_choice() -> None:
    assert choices(lowered(softmax, (64, 16384), batch_invariant=True))[2] is None


@pytest.mark.parametrize(
    ("function", "shape", "same", "other"),
    [
        (softmax, (4096, 16384), (3000, 16384), (64, 16384)),
        (attention, (2, 8, 600, 64), (3, 8, 900, 64), (2, 8, 100, 64)),
    ],
)
def test_a_row_is_for_a_bucket(
    function: Callable[..., Any], shape: tuple[int, ...], same: tuple[int, ...], other: tuple[int, ...]
) -> None:
    facts = [choices(lowered(function, each))[2] for each in (shape, same, other)]
    assert facts[0] == facts[1]
    assert facts[0] != facts[2]


@pytest.mark.parametrize(("function", "shape"), [(normalized, (3, 2500)), (total, (6, 333))], ids=named)
def test_every_candidate_of_rows_is_right(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    low = lowered(function, shape)
    name, candidates, facts = choices(low)
    alone = [candidate for candidate in candidates if candidate.cluster == 1]  # the host has no clusters
    assert len(alone) > 1
    for candidate in alone:
        row = tuned.row_of(low.route.device.model.name, "cuda", facts, candidate)
        with tuned.trying(name, TARGET, row):
            (out,) = run(function, x)
        assert not mismatch(out, function(x.double())), candidate


def test_without_rows_no_facts_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tuned.has_rows("reduction", TARGET)
    monkeypatch.setattr("jitgen.families.rows.reduction.buckets.facts", None)
    lowered(softmax, (64, 16384))
