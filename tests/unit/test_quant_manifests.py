"""A manifest that is recorded on one backend has what any other one asks for, also of products that quantise their
activations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host, nvrtc
from jitgen.deploy import manifest as manifests
from jitgen.deploy import manifest_schema
from jitgen.errors import FormatError
from jitgen.lowering import Route
from jitgen.quant.activations import ACTIVATIONS, check_activation
from jitgen.quant.formats import FORMATS, find
from jitgen.spec import Target, TensorSpec

ROUTES = (("cuda", "sm_90a"), ("triton", "sm_90a"), ("cuda", "sm_80"), ("cpp", "x86-64-v4"))
QUALIFIED = (
    *("int8.static", "int8.smoothed", "int4.ordered", "int8.bfloat16"),
    *("fp8_e4m3.static", "fp8_e4m3.rows128", "fp8_e4m3.tensor"),
)


def quantised() -> Iterator[tuple[str, int | None, str]]:
    """Yields every format, with a group size, and a kind of activations that its products may quantise."""
    for name in (*FORMATS, *QUALIFIED):
        row = find(name)
        for group in (128, None) if row.row in ("int8", "uint4", "fp8_e4m3") and row.scale_rows == 1 else (128,):
            group = row.group_size or group
            for activation in ACTIVATIONS:
                try:
                    check_activation(activation, row, group, 256)
                except FormatError:
                    continue
                yield name, group, activation


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w.T)


def swiglu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, w)[:, :128].repeat(1, 2)


def experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.expand(2, -1, -1), w.mT)


def recorded(
    path: Path, function: Callable[..., Any], specs: tuple[TensorSpec, ...], target: str, backend: str
) -> list[Mapping[str, Any]]:
    with jitgen.record(path):
        jitgen.jit(function).lower(*specs, target=target, backend=backend)
    return list(manifest_schema.read(path))


def keys(entries: list[Mapping[str, Any]], backend: str, target: str) -> set[str]:
    route = Route(backend, {"cuda": "nvrtc", "triton": "triton", "cpp": "host"}[backend], Target.parse(target))
    return {manifests.relower(entry, route).key for entry in entries}


def specs_of(format: str, group: int | None, activation: str, *shape: int) -> tuple[TensorSpec, ...]:
    weight = TensorSpec(shape, torch.bfloat16, format=format, group_size=group, activation=activation)
    return TensorSpec((48, 256), torch.bfloat16), weight


@pytest.mark.parametrize(("format", "group", "activation"), list(quantised()))
@pytest.mark.covering(1)
def test_a_manifest_has_what_every_backend_asks_for(
    format: str, group: int | None, activation: str, tmp_path: Path
) -> None:
    specs = specs_of(format, group, activation, 256, 256)
    entries = recorded(tmp_path / "cpu.json", linear, specs, "x86-64-v3", "cpp")
    for backend, target in ROUTES if find(format).tiled else ROUTES[:2]:
        asked = jitgen.jit(linear, backend=backend).lower(*specs, target=target).key
        assert keys(entries, backend, target) == {asked}


@pytest.mark.parametrize("function", [transposed, swiglu, experts])
@pytest.mark.parametrize(
    ("format", "group", "activation"),
    [("int8", None, "int8"), ("int4", 128, "int8"), ("fp8_e4m3", None, "fp8_e4m3"), ("uint4", 128, "fp8_e4m3")],
)
@pytest.mark.covering(1)
def test_views_of_weights_and_experts(
    function: Callable[..., Any], format: str, group: int | None, activation: str, tmp_path: Path
) -> None:
    shape = (2, 256, 256) if function is experts else (256, 256)
    specs = specs_of(format, group, activation, *shape)
    entries = recorded(tmp_path / "specs.json", function, specs, "x86-64-v3", "cpp")
    for backend, target in ROUTES:
        if (function is not experts) or backend != "cuda" or target == "sm_90a":
            asked = jitgen.jit(function, backend=backend).lower(*specs, target=target).key
            assert keys(entries, backend, target) == {asked}


def test_activations_of_a_manifest_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    recorded(path, linear, specs_of("int4", 128, "int8", 256, 256), "x86-64-v3", "cpp")
    content = json.loads(path.read_text())
    (node,) = (node for node in content["entries"][0]["graph"]["nodes"] if node["op"] == "dequantize")
    for wrong in ("int9", "fp8_e4m3.block64", 8):
        node["attrs"][3] = wrong
        path.write_text(json.dumps(content))
        with pytest.raises(jitgen.CacheError, match="activation"):
            manifest_schema.read(path)


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
def test_what_was_recorded_on_a_cpu_is_served_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = jitgen.quantize(torch.randn(96, 256), "int4", 128, activation="int8")
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "development"))
    with jitgen.record(tmp_path / "specs.json"):
        expected = jitgen.jit(linear)(x, weight)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "deployed"))
    jitgen.prewarm(tmp_path / "specs.json", targets=["cpu", "sm_90a"])
    with jitgen.strict():
        assert torch.equal(jitgen.jit(linear)(x, weight), expected)
        jitgen.jit(linear).lower(TensorSpec((5, 256), x.dtype), weight, target="sm_90a").compile()
