"""Products without rows, columns or a K are lowered for every dialect, chip and kind of weight."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.families.gemm.stream_tiles import StreamWeights, candidates, microseconds
from jitgen.schedule.chips import CHIPS

TARGETS = [("cuda", "sm_80"), ("cuda", "sm_90a"), ("triton", "sm_90a"), ("triton", "gfx942")]
WEIGHTS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int64": torch.int64, "int4": None, "int8": None}


def linear(x: Any, w: Any) -> Any:
    return F.linear(x, w)


def activated(x: Any, w: Any) -> Any:
    return F.linear(F.relu(x), w)


def gated(x: Any, w: Any) -> Any:
    return F.relu(F.linear(x, w)) * F.linear(x, w)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("backend", "target"), [*TARGETS, ("cpp", None)])
@pytest.mark.covering(1)
def test_empty_products_are_lowered(backend: str, target: str | None, kind: str) -> None:
    dtype = WEIGHTS[kind]
    extra = {} if dtype else {"format": kind}
    for function in (linear, activated, gated):
        jitted = jitgen.jit(function, backend=backend)
        for rows, (columns, length) in itertools.product((0, 5, 16, 300), ((0, 4096), (16, 0), (16, 4096))):
            if rows and columns and length:
                continue
            x = TensorSpec((rows, length), dtype or torch.bfloat16)
            w = TensorSpec((columns, length), dtype or torch.bfloat16, **extra)  # type: ignore[arg-type]
            lowered = jitted.lower(x, w, target=target) if target else jitted.lower(x, w)
            assert lowered.kernels


@pytest.mark.parametrize("chip", [c for c in CHIPS if c.read_rate and not c.modelled_as], ids=lambda chip: chip.name)
@pytest.mark.parametrize("quantized", [True, False])
def test_the_model_of_streamed_weights_takes_empty_sizes(chip: Any, quantized: bool) -> None:
    for tiles, length in ((0, 64), (0, 0), (3, 0), (0, 4096)):
        weights = StreamWeights(tiles, 1, length, 4.0 if quantized else 16.0, quantized, True, chip)
        for tokens in (1, 8, 16):
            for each in candidates(tokens, weights, has_clusters=len(chip.clusters) > 1):
                assert 0 < microseconds(each, tokens, weights, 0) < 1e4
