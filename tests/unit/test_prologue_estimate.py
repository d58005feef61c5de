"""Whether a product computes its activation is decided by an estimate of its tiles, before they are chosen: how near
the estimate is to the choice."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.device import Device
from jitgen.families.gemm.claim import Prologue
from jitgen.families.gemm.schedule import bucket
from jitgen.families.gemm.schedules.cuda_streams import estimated_block_rows
from jitgen.spec import Target


def ratios(format: str | None) -> list[float]:
    """The estimated rows of a block as multiples of the chosen ones, of layers of Llama 3 and of random shapes."""
    numbers, found = random.Random(0), []
    shapes = [(6144, 4096), (28672, 4096), (4096, 14336)]
    shapes += [(numbers.randint(4, 256) * 128, numbers.randint(4, 256) * 128) for _ in range(5)]
    quantized: Any = {"format": format, "group_size": 128} if format else {}
    function, device = jitgen.jit(F.linear, backend="cuda"), Device(Target("cuda", "sm_90a"), "cuda")
    for columns, length in shapes:
        for rows in (1, 8, 16):
            asked = Prologue(bucket(rows), columns, length, "bfloat16", format, ("relu",), False)
            x = TensorSpec((rows, length), torch.bfloat16)
            w = TensorSpec((columns, length), torch.bfloat16, **quantized)
            (chosen,) = function.lower(x, w, target="sm_90a").lowered.schedules
            if hasattr(chosen, "row_tiles"):
                found.append(estimated_block_rows(asked, device) / (16 * chosen.row_tiles * chosen.warps_n))
    return found


@pytest.mark.parametrize("format", [None, "int4"])
def test_the_estimate_of_a_blocks_rows_is_near_the_choice(format: str | None) -> None:
    found = ratios(format)
    assert len(found) >= 20
    assert sum(ratio == 1 for ratio in found) >= 0.9 * len(found)
    assert all(0.5 <= ratio <= 2 for ratio in found)
