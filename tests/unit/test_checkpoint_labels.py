"""What a config says of a weight is compared with its tensors by every reader: widths, groups, layouts, codes.

A row is a checkpoint whose numbers are right without the label, and a label that says something else.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import checkpoint_writers as writers
import pytest
import torch

import jitgen
from jitgen.checkpoints import torchao
from jitgen.errors import FallbackWarning, FormatError, UnsupportedError

CT = writers.config_groups
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "packed, bits": ("pack-quantized", CT(num_bits=8), "the config says 8 bits"),
    "packed, kind": ("pack-quantized", CT(type="float"), "type float"),
    "packed, channel": ("pack-quantized", CT(strategy="channel"), "strategy channel"),
    "packed, tensor": ("pack-quantized", CT(strategy="tensor"), "strategy tensor"),
    "packed, groups": ("pack-quantized", CT(strategy="group", group_size=64), "groups of 64"),
    "packed, its own group": ("pack-quantized", CT("re:.*l$", num_bits=2), "the config says 2 bits"),
    "packed, symmetric": ("pack-quantized, zeros", CT(symmetric=True), "symmetric"),
    "nvfp4, bits": ("compressed-tensors nvfp4", CT(num_bits=8), "num_bits 8"),
    "nvfp4, groups": ("compressed-tensors nvfp4", CT(group_size=32), "groups of 32"),
    "fp8, kind": ("float-quantized", CT(type="int"), "type int"),
    "fp8, bits": ("float-quantized", CT(num_bits=4), "num_bits 4"),
    "fp8, strategy": ("float-quantized", CT(strategy="tensor"), "strategy tensor"),
    "fp8, blocks": ("fp8 in blocks", {"quant_method": "fp8", "weight_block_size": [64, 128]}, "blocks of"),
    "fp8, codes": ("float-quantized", {"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    "int8, kind": ("int-quantized", CT(type="float"), "type float"),
    "modelopt, algorithm": ("modelopt nvfp4", {"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
    "modelopt, groups": ("modelopt nvfp4", {"quant_method": "modelopt", "group_size": 32}, "groups of 32"),
    "gptq, sym": ("gptq, asymmetric", {"checkpoint_format": "gptq", "sym": True}, "symmetric"),
    "awq, bits": ("awq", {"quant_method": "awq", "bits": 8}, "8 bits"),
    "awq, w_bit": ("awq", {"quant_method": "awq", "w_bit": 3}, "3 bits"),
    "awq, version": ("awq", {"quant_method": "awq", "version": "gemv"}, "version gemv"),
    "awq, groups": ("awq", {"quant_method": "awq", "q_group_size": 32}, "32 columns each"),
    "gemv, groups": ("awq, gemv", {"quant_method": "awq", "group_size": 128}, "groups of 128"),
    "gemv, no label": ("awq, gemv", {}, "do not tell the group size"),
    "hqq, bits": ("hqq", {"quant_config": {"weight_quant_params": {"nbits": 8}}}, "nbits 8"),
    "hqq, groups": ("hqq", {"quant_config": {"weight_quant_params": {"group_size": 128}}}, "group_size 128"),
    "nf4, kind": ("nf4", {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "fp4"}, "other codes"),
    "nf4, 8 bits": ("nf4", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "other codes"),
    "llm.int8, 4 bits": ("llm.int8", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "load_in_4bit"),
    "quark, groups": (
        "quark int4",
        {"global_quant_config": {"weight": {"dtype": "int4", "group_size": 32}}},
        "groups of",
    ),
    "quark, packing": (
        "quark int4",
        {"global_quant_config": {"weight": {"dtype": "int4"}}, "export": {"pack_method": "other"}},
        "pack_method 'other'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_label_of_something_else_is_an_error(case: str) -> None:
    kind, config, problem = WRONG[case]
    state, _ = writers.EXACT[kind][0]()
    with pytest.raises(FormatError, match=problem):
        jitgen.load_quantized(state, config=config)


RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("pack-quantized", CT(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)),
    "packed, another group": (
        "pack-quantized",
        {
            "config_groups": {
                "a": {"targets": ["re:.*k_proj"], "weights": {"num_bits": 8}},
                "b": {"targets": ["l"], "weights": {"num_bits": 4}},
            }
        },
    ),
    "fp8": ("float-quantized", CT(num_bits=8, type="float", strategy="channel")),
    "fp8 tensor": ("float-quantized, tensor", CT(num_bits=8, type="float", strategy="tensor")),
    "fp8 blocks": ("fp8 in blocks", {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}),
    "int8": ("int-quantized", CT(num_bits=8, type="int", strategy="channel")),
    "nvfp4": ("modelopt nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "gptq": ("gptq, symmetric", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "awq": ("awq", {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}),
    "hqq": ("hqq", {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}),
    "nf4": ("nf4", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "llm.int8": ("llm.int8", {"quant_method": "bitsandbytes", "load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_label_of_what_is_there_is_none(case: str) -> None:
    kind, config = RIGHT[case]
    state, dense = writers.EXACT[kind][0]()
    weight = jitgen.load_quantized(state, config=config)["l.weight"]
    assert torch.equal(weight.dequantize(dense.dtype), dense)  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------------- two packings


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 480, 4096])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dense", [False, True])
def test_both_packings_of_compressed_tensors(bits: int, columns: int, dense: bool) -> None:
    """Right with the width in the config; without it right, or refused where the tensors allow two."""
    state, exact = writers.packed_integers(rows=16, columns=columns, bits=bits, dense=dense)
    weight = jitgen.load_quantized(state, config=CT(num_bits=bits))["l.weight"]
    assert torch.equal(weight.dequantize(exact.dtype), exact)  # type: ignore[attr-defined]
    try:
        weight = jitgen.load_quantized(state)["l.weight"]
    except FormatError as error:
        assert "pass the config" in str(error)  # noqa: PT017 (either is right)
    else:
        assert torch.equal(weight.dequantize(exact.dtype), exact)  # type: ignore[attr-defined]


def test_the_release_decides_where_one_width_allows_both_packings() -> None:
    """Two words have 20 codes of 3 bits in either way; here none of them has bits where the other way has its gaps."""
    codes = torch.zeros(16, 20, dtype=torch.long)
    codes[:, 0] = 3
    state = {"l.weight_packed": writers.words(codes, 3), "l.weight_scale": torch.ones(16, 1)}
    state["l.weight_shape"] = torch.tensor([16, 20])
    with pytest.raises(FormatError, match="num_bits and version"):
        jitgen.load_quantized(state, config=CT(num_bits=3))
    for version in ("0.17.1", "0.18.0", "0.20"):
        weight = jitgen.load_quantized(state, config=CT(num_bits=3) | {"version": version})["l.weight"]
        assert torch.equal(weight.dequantize(), codes.float() - 4)  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------------------- torchao


def integers(bits: int, zeros: bool, **changes: Any) -> tuple[Any, torch.Tensor]:
    half = 1 << bits - 1
    codes = torch.randint(-half, half, (8, 64), dtype=torch.int8)
    scales, points = torch.rand(8, 2) + 0.5, torch.randint(-half, half, (8, 2), dtype=torch.int8) * int(zeros)
    facts = {"qdata": codes, "scale": scales, "zero_point": points, "target_dtype": f"int{bits}", "block_size": [1, 32]}
    spread = scales.repeat_interleave(32, 1)
    return facts | changes, (codes.int() - points.repeat_interleave(32, 1).int()) * spread


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_of_torchao(bits: int, zeros: bool) -> None:
    facts, exact = integers(bits, zeros)
    weight = torchao._convert("l.weight", "IntxUnpackedToInt8Tensor", facts)
    assert torch.equal(weight.dequantize(), exact)
    if not zeros:
        weight = torchao._convert("l.weight", "IntxUnpackedToInt8Tensor", facts | {"zero_point": None})
        assert torch.equal(weight.dequantize(), exact)


def test_facts_of_torchao_that_differ_are_errors() -> None:
    facts, _ = integers(8, False)
    with pytest.raises(FormatError, match="its dtype is int4"):
        torchao._convert("l.weight", "IntxUnpackedToInt8Tensor", facts | {"target_dtype": "int4"})
    with pytest.raises(FormatError, match=r"blocks of \[1, 16\]"):
        torchao._convert("l.weight", "IntxUnpackedToInt8Tensor", facts | {"block_size": [1, 16]})
    factors = torch.rand(facts["qdata"].shape[1]) + 0.5
    weight = torchao._convert("l.weight", "IntxUnpackedToInt8Tensor", facts | {"act_pre_scale": factors})
    assert weight.smoothing is not None
    assert torch.equal(weight.smoothing.flatten(), factors)
    with pytest.raises(FormatError, match=r"l.weight: act_pre_scale: "):
        torchao._convert("l.weight", "IntxUnpackedToInt8Tensor", facts | {"act_pre_scale": -factors})


# ----------------------------------------------------------------------------------------------------- what is not read


@pytest.mark.parametrize("kind", ["modelopt nvfp4", "float-quantized"])
def test_bad_factors_of_columns_are_refused(kind: str) -> None:
    state, _ = writers.EXACT[kind][0]()
    columns = jitgen.load_quantized(state)["l.weight"].shape[1]
    for factors in (torch.zeros(columns), torch.full((columns,), torch.nan), torch.rand(columns + 1)):
        with pytest.raises(FormatError, match=r"l.pre_quant_scale: "):
            jitgen.load_quantized(state | {"l.pre_quant_scale": factors})


def test_a_version_of_awq_for_one_kernel_is_named() -> None:
    state = {"l.qweight": torch.zeros(12, 256, dtype=torch.int16), "l.qzeros": torch.zeros(8, 48).half()}
    state["l.scales"] = torch.ones(8, 48).half()
    with pytest.raises(UnsupportedError, match="gemv_fast"):
        jitgen.load_quantized(state, config={"quant_method": "awq", "version": "GEMV_FAST"})


def gguf_of(path: Path, number: int, size: int) -> dict[str, torch.Tensor]:
    """A file of a tensor that is read, one of type ``number`` and ``size`` bytes, and the dense one."""
    data, dense = writers.q4_0()
    writers.gguf(path, {"good": ("Q4_0", (8, 64), data), "other": ("Q8_0", (8, 256), bytes(range(256)) * size)})
    text = path.read_bytes()
    at = text.index(b"other") + 5 + 4 + 16
    path.write_bytes(text[:at] + struct.pack("<I", number) + text[at + 4 :])
    return {"good": dense}


def test_one_tensor_of_gguf_that_is_not_read_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IQ2_XXS by the library where that is there; without it, and for types that nobody knows, an error names it."""
    iq2, unknown = tmp_path / "iq2.gguf", tmp_path / "unknown.gguf"
    dense = gguf_of(iq2, 16, 8 * 66)["good"]
    gguf_of(unknown, 99, 8 * 66)
    library = pytest.importorskip("gguf", reason="gguf dequantises: pip install gguf")
    with pytest.warns(FallbackWarning, match="other is of GGUF's type IQ2_XXS"):
        found = jitgen.load_quantized(iq2)
    rows = torch.tensor(list((bytes(range(256)) * 8 * 66)[: 8 * 66]), dtype=torch.uint8).view(8, 66).numpy()
    expected = library.quants.dequantize(rows, library.GGMLQuantizationType.IQ2_XXS)
    assert torch.equal(found["other"], torch.from_numpy(expected))
    assert torch.equal(found["good"].dequantize(), dense)  # type: ignore[attr-defined]
    for path in (iq2, unknown):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "gguf", None)
            with pytest.raises(UnsupportedError, match="strict=False"):
                jitgen.load_quantized(path)
            with pytest.warns(FallbackWarning, match="left out"):
                assert list(jitgen.load_quantized(path, strict=False)) == ["good"]


def test_experts_and_vectors_of_gguf(tmp_path: Path) -> None:
    data, dense = writers.q4_0(rows=8, columns=64)
    tensors = {"experts": ("Q4_0", (4, 2, 64), data), "vector": ("Q4_0", (512,), data)}
    writers.gguf(tmp_path / "m.gguf", tensors)
    found = jitgen.load_quantized(tmp_path / "m.gguf")
    assert torch.equal(found["experts"].dequantize(), dense.view(4, 2, 64))  # type: ignore[attr-defined]
    assert torch.equal(found["experts"][2].dequantize(), dense[4:6])  # type: ignore[attr-defined]
    assert torch.equal(found["vector"], dense.flatten())


def test_a_big_endian_file_of_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64))
    with pytest.raises(FormatError, match="big-endian"):
        jitgen.load_quantized(tmp_path / "m.gguf")
