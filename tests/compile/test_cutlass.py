"""A kernel of CUTLASS compiles by NVRTC, without nvcc and without a GPU. Each takes a minute of a slow processor."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import disassemble, nvrtc
from jitgen.families.gemm.schedules import cutlass

PACKAGES = ("nvidia-cutlass", "cuda")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(nvrtc.toolchain(PACKAGES) is None, reason=f"NVRTC: {nvrtc.missing(PACKAGES)}"),
]


def block(x: Any, w: Any, b: Any, s: Any, r: Any) -> torch.Tensor:
    return F.gelu(x @ w + b) * s + r


def linear(x: Any, w: Any) -> torch.Tensor:
    return F.linear(x, w)


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.bfloat16)


BLOCK = (block, (spec(777, 256), spec(256, 512), spec(512), spec(512), spec(777, 512)))
ROUNDED = (lambda x, w: F.linear(x, w).float().sin(), (spec(777, 256), spec(512, 256)))
LINEAR = (linear, (spec(777, 256), spec(512, 256)))


@pytest.mark.parametrize(("case", "tile"), [(BLOCK, (128, 128, 2)), (LINEAR, (128, 256, 1)), (ROUNDED, (128, 256, 2))])
def test_it_multiplies_by_wgmma_and_stores_by_tensor_maps(case: Any, tile: Any, monkeypatch: Any) -> None:
    function, specs = case
    monkeypatch.setattr(cutlass, "TILES", (tile,))
    compiled = jitgen.jit(backend="cutlass")(function).lower(*specs, target="sm_90a").compile()
    (report,) = compiled.report
    assert report["spill_bytes"] == 0
    assert "nvidia-cutlass " + importlib.metadata.version("nvidia-cutlass") in report["toolchain"]
    code = disassemble.sass(compiled.asm["cubin"])
    assert f"HGMMA.64x{tile[1]}x16.F32.BF16" in code
    assert "UTMASTG" in code
    mainloop = code[code.index("HGMMA") : code.rindex("HGMMA")]
    assert "CALL" not in mainloop  # around a call every wgmma waits for the one before it
