"""The manifests of known models that jitgen ships: they are what their script writes, and serve real calls."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

import jitgen
from jitgen import _data
from jitgen.cli.group import jitgen as command
from jitgen.compilers import host, nvrtc
from jitgen.deploy import catalog, manifest_schema, prewarm
from jitgen.spec import SCHEMA

CHECKOUT = _data.checkout_directory()
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="needs the source checkout")
NAMES = ("granite-8b", "llama-3-70b", "llama-3-8b", "qwen2.5-7b")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    assert CHECKOUT is not None
    spec = importlib.util.spec_from_file_location("record_manifests", CHECKOUT / "tools" / "record_manifests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["record_manifests"] = module
    spec.loader.exec_module(module)
    return module


def test_they_are_found_by_name(script: ModuleType, tmp_path: Path) -> None:
    assert tuple(catalog.names()) == NAMES == tuple(sorted(script.MODELS))
    with pytest.raises(jitgen.CacheError, match="llama-3-70b, llama-3-8b"):
        catalog.find("llama-3-9b")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick(where=lambda name: name == "qwen2.5-7b")
def test_they_are_what_their_script_writes(
    name: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a program would miss what was built for it: run `make manifests`."""
    monkeypatch.setattr("sys.argv", ["record_manifests.py", name, "--directory", str(tmp_path)])
    script.main()

    def entries(path: Path) -> list[str]:
        # ``variant`` tells entries of one file apart; it changes with every schedule.
        found = [{k: v for k, v in entry.items() if k != "variant"} for entry in manifest_schema.read(path)]
        return sorted(json.dumps(entry, sort_keys=True) for entry in found)

    assert entries(tmp_path / f"{name}.json") == entries(catalog.find(name))


def part(name: str, signature: str, path: Path) -> Path:
    """The entries of this signature, as a manifest of their own."""
    entries = [e for e in manifest_schema.read(catalog.find(name)) if prewarm.signature_of(e) == signature]
    assert entries
    path.write_text(json.dumps({"schema": SCHEMA, "entries": entries}))
    return path


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("rows", [(16,), (2, 8)], ids=str)
@pytest.mark.quick(where=lambda rows: len(rows) == 2)
def test_a_norm_of_llama_is_served_strictly(
    rows: tuple[int, ...], own_store: Path, tmp_path: Path, script: ModuleType
) -> None:
    sizes = ", ".join(map(str, (*rows, 4096)))
    jitgen.prewarm(part("llama-3-8b", f"rms_norm(bfloat16[{sizes}], bfloat16[4096])", tmp_path / "norm.json"), ["cpu"])

    def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (4096,), weight, 1e-5)

    weight = torch.randn(4096).bfloat16()
    with jitgen.strict():
        for lead in ((1,), (7,), (300,)) if len(rows) == 1 else ((1, 1), (1, 9), (3, 1), (2, 5)):
            x = torch.randn(*lead, 4096).bfloat16()
            exact = F.rms_norm(x.double(), (4096,), weight.double(), 1e-5)
            # One rounding to bfloat16 (unit roundoff 2^-8) of float32 values, whose errors are far smaller.
            torch.testing.assert_close(
                jitgen.jit(rms_norm)(x, weight).double(), exact, rtol=2**-8 + 4096 * 2**-24, atol=0
            )


@pytest.mark.slow
@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_a_quantised_linear_of_llama_is_served_strictly(own_store: Path, tmp_path: Path) -> None:
    """As an undecorated model after ``quantize_`` calls it."""
    path = part("llama-3-8b", "_linear(bfloat16[16, 4096], int4 g128[1024, 4096])", tmp_path / "linear.json")
    jitgen.prewarm(path, ["cpu"])
    weight = jitgen.quantize(torch.randn(1024, 4096).bfloat16(), "int4", 128)
    dense = weight.dequantize(torch.float64)
    with jitgen.strict(), torch.no_grad():
        for count in (1, 5, 40):
            x = torch.randn(count, 4096).bfloat16()
            exact = x.double() @ dense.T
            # A sum of 4096 float32 products, rounded once to bfloat16 (unit roundoff 2^-8).
            bound = 2**-8 * exact.abs() + 4096 * 2**-24 * (x.double().abs() @ dense.abs().T)
            assert ((F.linear(x, weight).double() - exact).abs() <= bound).all()


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
def test_a_part_of_one_is_built_for_a_gpu_by_name(own_store: Path) -> None:
    done = CliRunner().invoke(
        command, ["prewarm", "llama-3-8b", "--target", "sm_90a", "--shard", "7/400", "--jobs", "1", "--json"]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["complete"]
    assert {entry["origin"] for entry in report["entries"]} <= {"compiled", "store"}
    assert 1 <= len(report["entries"]) <= 2
