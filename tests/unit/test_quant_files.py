"""Quantised weights in safetensors files."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import jitgen
from jitgen import _data
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant import io
from jitgen.quant.formats import find
from jitgen.quant.layouts import LAYOUTS
from jitgen.quant.qtensor import QTensor
from tests import fresh

FORMATS = ("int8", "int4", "uint4", "int3", "uint2.floatzeros", "fp8_e4m3.tensor", "nvfp4")


def same(one: QTensor, other: QTensor) -> bool:
    return one.token is other.token and all(map(torch.equal, one.tensors, other.tensors))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_tensors_and_back(format: str, layout: str) -> None:
    for shape in ((17, 129), (0, 64), (3, 0)):
        weight = jitgen.quantize(
            torch.randn(shape).bfloat16(), format, None if format == "nvfp4" else 32, layout=layout
        )
        for tensor in (weight, weight.t()):
            tensors = io.state_tensors(tensor, "a.weight")
            assert list(tensors) == [f"a.weight.{part}" for part in find(format).tensor_names]
            assert all(type(part) is torch.Tensor for part in tensors.values())
            text = io.description(tensor)
            assert json.loads(text)["format"] == format
            assert same(io.from_tensors(tensors, "a.weight", text), tensor.with_layout("portable"))


def test_what_does_not_fit_is_refused() -> None:
    weight = jitgen.quantize(torch.randn(4, 64), "int4", 32)
    tensors, text = io.state_tensors(weight, "w"), io.description(weight)
    for broken in ("", "[]", "{}", text.replace("float32", "int8"), text.replace("[4, 64]", "[4]")):
        with pytest.raises(FormatError, match="does not describe"):
            io.from_tensors(tensors, "w", broken)
    with pytest.raises(FormatError, match="int8, int4, uint4"):
        io.from_tensors(tensors, "w", text.replace("int4", "int9"))
    with pytest.raises(FormatError, match=r"no tensor w\.scales"):
        io.from_tensors({"w.codes": weight.codes}, "w", text)
    with pytest.raises(FormatError, match=r"w: .*scales bfloat16\[4, 2\]"):
        io.from_tensors(tensors, "w", text.replace("[4, 64]", "[4, 128]").replace("32", "64", 1))
    with pytest.raises(FormatError, match=r"w: "):
        io.from_tensors(tensors | {"w.scales": weight.scales.float()}, "w", text)


def test_without_safetensors_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UnsupportedError, match="pip install safetensors"):
        io.save_quantized({}, tmp_path / "w.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file(tmp_path: Path, layout: str) -> None:
    pytest.importorskip("safetensors")
    model = nn.ModuleDict({"a": nn.Linear(64, 48), "b": nn.Linear(64, 48, bias=False), "norm": nn.LayerNorm(48)})
    model["b"].weight = model["a"].weight
    jitgen.quantize_(model, "uint4", 32, layout=layout)
    model["norm"].bias = nn.Parameter(torch.randn(48 * 2)[::2])
    path = tmp_path / "model.safetensors"
    io.save_quantized(model, path)
    assert path.stat().st_size < 48 * (32 + 2 * 2 + 2) + 3 * 48 * 4 + 2000, "tied weights are stored once"
    state = io.load_quantized(path)
    assert set(state) == set(model.state_dict())
    assert state["a.weight"] is state["b.weight"]
    assert same(state["a.weight"], model["a"].weight.with_layout("portable"))
    assert torch.equal(state["norm.bias"], model["norm"].bias)
    fresh = nn.ModuleDict({"a": nn.Linear(64, 48), "b": nn.Linear(64, 48, bias=False), "norm": nn.LayerNorm(48)})
    fresh.requires_grad_(False).load_state_dict(state, assign=True)
    x = torch.randn(3, 64)
    for name in ("a", "b"):
        torch.testing.assert_close(fresh[name](x), model[name](x))


def test_slices_of_one_tensor_and_plain_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    whole = torch.randn(8, 4)
    path = tmp_path / "w.safetensors"
    io.save_quantized({"top": whole[:4], "bottom": whole[4:], "turned": whole.t(), "empty": torch.empty(0)}, path)
    state = io.load_quantized(path)
    assert torch.equal(torch.cat([state["top"], state["bottom"]]), whole)
    assert torch.equal(state["turned"], whole.t())
    safetensors.save_file({"x": whole}, path)
    assert torch.equal(io.load_quantized(path)["x"], whole)
    with pytest.raises(UnsupportedError, match="step is a int"):
        io.save_quantized({"step": 3}, path)  # type: ignore[dict-item]


def test_a_file_has_the_permissions_of_a_new_file_or_of_the_one_it_replaces(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path, other = tmp_path / "w.safetensors", tmp_path / "other"
    before = os.umask(0o027)
    try:
        io.save_quantized({"w": torch.ones(2)}, path)
        other.touch()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode) == 0o640
    path.chmod(0o444)
    io.save_quantized({"w": torch.zeros(2)}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert torch.equal(io.load_quantized(path)["w"], torch.zeros(2))
    with pytest.raises(FormatError, match="there is no directory"):
        io.save_quantized({"w": torch.ones(2)}, tmp_path / "missing" / "w.safetensors")


def test_a_file_that_cannot_be_written_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors.torch")

    def fails(*arguments: object, **options: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(safetensors, "save_file", fails)
    with pytest.raises(OSError, match="the disk is full"):
        io.save_quantized({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_damaged_description_is_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "w.safetensors"
    for metadata, message in (
        ("{", "not readable"),
        ('{"schema": 99, "weights": {}, "aliases": {}}', "schema 99"),
        ('{"schema": 1, "weights": {}, "aliases": {"a": "b"}}', "not there"),
    ):
        safetensors.save_file({"x": torch.ones(1)}, path, metadata={io.METADATA_KEY: metadata})
        with pytest.raises(FormatError, match=message):
            io.load_quantized(path)


def test_importing_jitgen_imports_little_of_this() -> None:
    script = (
        "import sys, jitgen\n"
        "heavy = ('qtensor', 'quantize', 'modules', 'io', 'layouts', 'functions')\n"
        "print([name for name in heavy if f'jitgen.quant.{name}' in sys.modules])\n"
        "assert jitgen.quantize and jitgen.quantize_ and jitgen.QTensor\n"
        "print('safetensors' in sys.modules)\n"
    )
    done = fresh.run(script, cwd=_data.checkout_directory())
    assert done.stdout.split("\n")[:2] == ["[]", "False"]


@pytest.mark.parametrize("what", ["model.safetensors", [torch.zeros(2)], {1: torch.zeros(2)}], ids=repr)
def test_what_is_no_model_is_not_saved(what: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"not a (str|list): call save_quantized|1 is no name"):
        jitgen.save_quantized(what, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_directory_is_no_file_to_save_to(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(FormatError, match=r"is a directory; pass the file to write: .*model\.safetensors"):
        jitgen.save_quantized(model, tmp_path)
    with pytest.raises(FormatError, match=r"there is no directory .*nowhere; make it first"):
        jitgen.save_quantized(model, tmp_path / "nowhere" / "file")
    with pytest.raises(FormatError, match="is no path"):
        jitgen.save_quantized(model, 3)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
