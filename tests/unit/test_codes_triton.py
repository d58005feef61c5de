"""Products of codes in Triton: each against float64 torch, under Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests import triton_codes
from tests.interpreter import Interpreter

QUICK = ("int4-32-int8", "fp8_e4m3-None-fp8_e4m3", "formula-weights", "formula-decoded", "scaled_mm", "chain", "blocks")


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_codes") as process:
        yield process


@pytest.mark.parametrize("check", triton_codes.CHECKS)
@pytest.mark.quick(where=lambda check: check in QUICK)
def test_codes(check: str, failures: Interpreter) -> None:
    assert failures[check] == []


def test_where_8_bit_floats_are_decoded_is_said() -> None:
    function = jitgen.jit(lambda x, w: F.linear(x, w), backend="triton")
    spec = jitgen.TensorSpec((4096, 4096), torch.bfloat16, format="fp8_e4m3", activation="fp8_e4m3")
    for target, decoded in (("sm_80", True), ("sm_89", False), ("sm_90a", False), ("sm_120", False)):
        explained = function.lower(jitgen.TensorSpec((64, 4096), torch.bfloat16), spec, target=target).explain()
        assert ("codes of 8 bits are decoded to float16" in explained) == decoded
