"""The wgmma kernels of operands of one byte that the rule chooses for many rows, compiled without a device: sums are
read while other products run, which the assembler must not serialise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from jitgen.compilers import nvrtc

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")

FLOAT8 = torch.float8_e4m3fn
MOST_SPILLED = 320
"""Bytes of a thread: what lives from tile to tile may spill, sums and operands of products may not."""


def rowwise(x: Any, w: Any, s: Any, t: Any) -> Any:
    return ((x.float() @ w.float().T) * s * t).to(torch.bfloat16)


def blocks(x: Any, w: Any, s: Any, t: Any) -> Any:
    wide = (x.float().unflatten(-1, (-1, 128)) * s.unsqueeze(-1)).flatten(-2)
    weight = w.float().view(w.shape[0] // 128, 128, w.shape[1] // 128, 128) * t[:, None, :, None]
    return (wide @ weight.view(w.shape).T).to(torch.bfloat16)


def operands(kind: str, m: int, n: int, k: int) -> list[jitgen.TensorSpec]:
    shapes = ((m, 1), (n,)) if kind == "rowwise" else ((m, k // 128), (n // 128, k // 128))
    return [jitgen.TensorSpec(shape, FLOAT8) for shape in ((m, k), (n, k))] + [
        jitgen.TensorSpec(shape, torch.float32) for shape in shapes
    ]


@pytest.mark.parametrize("sizes", [(4096, 8192, 4096), (1057, 4480, 4352)], ids=str)
@pytest.mark.parametrize("function", [rowwise, blocks])
@pytest.mark.quick(where=lambda function, sizes: function is rowwise and sizes[0] == 4096)
def test_nothing_is_serialised(
    function: Callable[..., Any], sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    low = jitgen.jit(function).lower(*operands(function.__name__, *sizes), target="sm_90a", backend="cuda")
    check(low.lowered.render(0)[0], monkeypatch)


def test_codes_of_4_bits_are_not_serialised(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jitgen.TensorSpec((4096, 4096), torch.bfloat16)
    w = jitgen.TensorSpec((4096, 4096), torch.bfloat16, format="int4", group_size=128, activation="int8")
    low = jitgen.jit(torch.nn.functional.linear).lower(x, w, target="sm_90a", backend="cuda")
    check(low.lowered.render(1)[0], monkeypatch)


def check(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[str] = []
    parse = nvrtc.parse_resources
    monkeypatch.setattr(nvrtc, "parse_resources", lambda log, name: logs.append(log) or parse(log, name))
    artifact = nvrtc.compile(source)
    assert not re.search(r"C75\d\d|warning", logs[0]), logs[0]
    assert artifact.meta["spill_bytes"] <= MOST_SPILLED
