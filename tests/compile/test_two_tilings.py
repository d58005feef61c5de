"""Sources with two entries: NVRTC compiles both, and each has resources of its own, without spills."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import nvrtc

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC and the headers of CUDA")


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.quick(where=lambda format: format is None)
def test_both_entries_compile_without_spills(format: str | None) -> None:
    function = jitgen.jit(lambda x, w: F.linear(x, w), backend="cuda")
    weight = jitgen.TensorSpec((3000, 4096), torch.bfloat16)
    w = weight if format is None else jitgen.quantize(torch.randn(3000, 4096), format, 128)
    found = set()
    for rows in (600, 777, 1000, 1400):
        program = function.lower(jitgen.TensorSpec((rows, 4096), torch.bfloat16), w, target="sm_90a").lowered
        source, _ = program.render(0)
        if len(program.schedules[0].tilings) == 2:
            found.add(program.launch(0).entry)
    assert found
    meta = nvrtc.compile(source).meta
    (other,) = meta["entries"]
    assert other == f"{source.name}_1"
    assert meta["spill_bytes"] == meta["entries"][other]["spill_bytes"] == 0
    assert min(meta["registers"], meta["entries"][other]["registers"]) > 0
