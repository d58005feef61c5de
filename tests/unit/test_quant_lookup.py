"""Rows of a quantised weight by a kernel: each layout's addresses, ``F.embedding`` eager and within a jit function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.errors import JitgenError, UnsupportedError
from jitgen.quant import lookup
from jitgen.quant.formats import FORMATS, find

VARIED = ("uint4.floatzeros", "int4.float16", "fp8_e4m3.rows128", "int8.tensor", "int6.e4m3", "uint3.e8m0")
INDEX = torch.tensor([[3, 36, 0, 16], [17, 3, 15, 31]])


@pytest.mark.parametrize("format", [*FORMATS, *VARIED])
def test_addresses_are_those_of_the_layouts(format: str) -> None:
    torch.manual_seed(0)
    row = find(format)
    for group in (row.group_size,) if row.group_size else (None, 32, 96):
        weight = jitgen.quantize(torch.randn(37, 150).bfloat16(), format, group)
        exact = weight.dequantize()[INDEX]
        for layout in lookup.ADDRESSES:
            laid_out = weight.with_layout(layout)
            assert torch.equal(lookup.rows(laid_out.tensors, laid_out.token, INDEX), exact), (group, layout)


@pytest.mark.parametrize("format", ["int4", "int8", "nf4", "nvfp4", "int3", "mxfp8", "uint4.floatzeros"])
@pytest.mark.quick(where=lambda format: format in ("int4", "nvfp4"))
def test_an_embedding_is_one_kernel(format: str) -> None:
    torch.manual_seed(1)
    weight = jitgen.quantize(torch.randn(37, 150).bfloat16(), format, find(format).group_size or 32)
    exact = weight.dequantize()
    found = F.embedding(INDEX, weight)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact[INDEX])
    assert torch.equal(F.embedding(INDEX.int()[:, :0], weight), exact[INDEX[:, :0]])
    embed = jitgen.jit(lambda index, weight: F.embedding(index, weight) * 2)
    assert torch.equal(embed(INDEX, weight), exact[INDEX] * 2)
    assert len(embed.lower(INDEX, weight).kernels) == 1
    for backend in ("cuda", "triton"):
        spec = jitgen.TensorSpec((37, 150), torch.bfloat16, format=format, group_size=weight.group_size)
        index = jitgen.TensorSpec(("B", 5), torch.int64)
        assert len(embed.lower(index, spec, target="sm_90a", backend=backend).kernels) == 1


@pytest.mark.parametrize("wrong", [37, 40, 48, -1])
def test_an_index_out_of_range_is_an_error(wrong: int) -> None:
    weight = jitgen.quantize(torch.randn(37, 64), "int8")
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([0, wrong]), weight)


def test_an_embedding_and_its_output_layer_in_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    embedding = nn.Embedding(37, 64)
    jitgen.quantize_(embedding, "int8", embeddings=True)
    dense = embedding.weight.dequantize()

    def function(index: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(embedding(index)), embedding.weight)

    logits = jitgen.jit(function)
    exact = F.linear(torch.tanh(dense[INDEX]), dense)
    with jitgen.record(tmp_path / "specs.json"):
        torch.testing.assert_close(logits(INDEX), exact)
    (entry,) = json.loads((tmp_path / "specs.json").read_text())["entries"]
    assert '"cpu"' in json.dumps(entry["graph"])  # the weight keeps its layout
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    jitgen.prewarm(tmp_path / "specs.json", targets=["cpu"], jobs=1)
    with jitgen.strict():
        torch.testing.assert_close(jitgen.jit(function)(INDEX), exact)
    with pytest.raises(JitgenError, match="record it with this backend"):
        jitgen.prewarm(tmp_path / "specs.json", targets=["sm_90a"], jobs=1)
    with jitgen.record(tmp_path / "apart.json"):
        hidden = embedding(INDEX)
        torch.testing.assert_close(F.linear(torch.tanh(hidden), embedding.weight), exact)
    assert len(json.loads((tmp_path / "apart.json").read_text())["entries"]) >= 2
    jitgen.prewarm(tmp_path / "apart.json", targets=["cpu"], jobs=1)


def test_what_has_no_kernel() -> None:
    weight = jitgen.quantize(torch.randn(37, 64), "int8")
    with pytest.raises(UnsupportedError, match="max_norm"):
        F.embedding(INDEX, weight, max_norm=1.0)
    with pytest.raises(UnsupportedError):
        F.embedding(INDEX, weight.t())
    with pytest.raises(UnsupportedError):
        jitgen.jit(lambda index, weight: F.embedding(index, weight))(INDEX, weight.t())
