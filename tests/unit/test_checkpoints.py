"""``load_quantized``: every kind of checkpoint has the numbers that it stands for, or is refused by name."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoint_writers as writers
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.checkpoints import gguf
from jitgen.checkpoints.table import READERS
from jitgen.errors import FallbackWarning, FormatError, UnsupportedError
from jitgen.quant.qtensor import QTensor

pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")
from safetensors.torch import save_file


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))


@pytest.mark.parametrize("kind", writers.EXACT)
def test_numbers_are_equal_to_the_bit(kind: str) -> None:
    write, config, format = writers.EXACT[kind]
    state, dense = write()
    found = jitgen.load_quantized(state, config=config, dtype=dense.dtype)
    assert list(found) == ["l.weight"]
    weight = found["l.weight"]
    assert isinstance(weight, QTensor)
    assert weight.format == format
    assert torch.equal(weight.dequantize(), dense)


@pytest.mark.parametrize(
    "kind",
    ["gptq, act-order", "gptq, 8 bits", "pack-quantized, act-order", "int-quantized", "fp8 in blocks", "hqq, 3 bits"],
)
@pytest.mark.quick(where=lambda kind: "act-order" in kind)
def test_products_are_those_of_the_numbers(kind: str) -> None:
    write, config, _ = writers.EXACT[kind]
    weight = jitgen.load_quantized(write()[0], config=config)["l.weight"]
    x = torch.randn(5, weight.shape[1])
    exact = x.double() @ weight.dequantize(torch.float64).t()
    magnitude = x.double().abs() @ weight.dequantize(torch.float64).abs().t()
    # Sums of K terms in float32: at most K roundings of partial sums below the sum of magnitudes.
    assert ((F.linear(x, weight) - exact).abs() <= weight.shape[1] * 2.0**-23 * magnitude).all()


def test_an_ordered_weight_is_a_quantized_weight(tmp_path: Path) -> None:
    state, dense = writers.gptq(act=True)
    weight = jitgen.load_quantized(state, config={"checkpoint_format": "gptq"})["l.weight"]
    assert torch.equal(weight[3:9].dequantize(), dense[3:9])
    for layout in ("mma", "interleaved", "cpu"):
        assert torch.equal(weight.with_layout(layout).dequantize(), dense)
    with pytest.raises(UnsupportedError, match="another order"):
        weight[:, :32]
    jitgen.save_quantized({"l.weight": weight}, tmp_path / "own.safetensors")
    assert torch.equal(jitgen.load_quantized(tmp_path / "own.safetensors")["l.weight"].dequantize(), dense)
    fused = jitgen.jit(lambda x, w: torch.relu(F.linear(x, w)) + 1)
    x = torch.randn(3, 128)
    torch.testing.assert_close(fused(x, weight), fused.reference(x, weight))
    x.requires_grad_(True)
    F.linear(x, weight).sum().backward()
    exact = weight.dequantize(torch.float32)  # unlike `dense`, it is not rounded to float16
    torch.testing.assert_close(x.grad, exact.sum(0).expand(3, -1), rtol=1e-4, atol=1e-4)


def test_versions_of_gptq_are_told_by_numbers_or_label() -> None:
    for version, label in ((1, "gptq"), (2, "gptq_v2")):
        symmetric, dense = writers.gptq(sym=True, v=version)
        assert torch.equal(jitgen.load_quantized(symmetric)["l.weight"].dequantize(), dense)
        other = {"checkpoint_format": "gptq_v2" if version == 1 else "gptq", "sym": True}
        with pytest.raises(FormatError, match=r"l.qzeros: all zero-points are .*version"):
            jitgen.load_quantized(symmetric, config=other)
        asymmetric, dense = writers.gptq(v=version)
        with pytest.raises(FormatError, match="nothing tells whether zero-points are stored less one"):
            jitgen.load_quantized(asymmetric)
        config = {"quantization_config": {"checkpoint_format": label}}
        assert torch.equal(jitgen.load_quantized(asymmetric, config=config)["l.weight"].dequantize(), dense)


def test_a_zero_point_of_0_borrows_from_the_whole_word() -> None:
    state, _ = writers.gptq(v=2)
    zeros = torch.randint(0, 16, (4, 48))
    one_in_each = sum(1 << shift for shift in range(0, 32, 4))
    stored = ((writers.words(zeros, 4).long() - one_in_each) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    first = jitgen.load_quantized(state | {"l.qzeros": stored}, config={"checkpoint_format": "gptq"})["l.weight"]
    assert torch.equal(first.zeros, zeros.t().to(torch.uint8))


# ----------------------------------------------------------------------------------------------------------------- GGUF


def test_gguf(tmp_path: Path) -> None:
    first, second, flat = writers.q4_0(), writers.q4_1(), writers.q4_1(flat=True)
    norm = torch.randn(7)
    tensors = {
        "blk.0.attn_q.weight": ("Q4_0", (8, 64), first[0]),
        "blk.0.attn_k.weight": ("Q4_1", (8, 64), second[0]),
        "flat": ("Q4_1", (8, 64), flat[0]),
        "norm.weight": ("F32", (7,), norm.numpy().tobytes()),
    }
    writers.gguf(tmp_path / "model.gguf", tensors, {"general.architecture": "llama", "general.alignment": 32})
    found = jitgen.load_quantized(tmp_path / "model.gguf")
    assert torch.equal(found["norm.weight"], norm)
    assert torch.equal(found["blk.0.attn_q.weight"].dequantize(), first[1])
    assert torch.equal(found["flat"].dequantize(), flat[1])
    # The zero-point is rounded, and so are the difference and the product: gguf.py has the bound.
    error = (found["blk.0.attn_k.weight"].dequantize(torch.float64) - second[1]).abs()
    assert (error <= 2.0**-22 * (second[1].abs() + 2 * second[1].abs().amax())).all()


def test_every_type_of_gguf_against_its_library(tmp_path: Path) -> None:
    library = pytest.importorskip("gguf", reason="gguf writes and reads GGUF files: pip install gguf")
    import numpy

    random = numpy.random.default_rng(0)
    expected, writer = {}, library.GGUFWriter(tmp_path / "model.gguf", "llama")
    for name in gguf.TYPES:
        kind = library.GGMLQuantizationType[name]
        numbers, size = library.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (16 * 512 // numbers, size), dtype=numpy.uint8)
        for place in {
            "Q2_K": (80, 82),
            "Q3_K": (108,),
            "Q6_K": (208,),
            "Q4_K": (0, 2),
            "Q5_K": (0, 2),
            "Q4_1": (0, 2),
            "Q5_1": (0, 2),
        }.get(name, (0,)):
            scales = (random.random((len(blocks), 1)) * 0.01 + 0.001).astype(numpy.float16)
            blocks[:, place : place + 2] = scales.view(numpy.uint8)
        if name == "MXFP4":
            blocks[:, 0] = random.integers(100, 140, len(blocks))
        blocks = blocks.reshape(16, -1)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        expected[name] = torch.from_numpy(library.quants.dequantize(blocks, kind).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = jitgen.load_quantized(tmp_path / "model.gguf")
    for name, dense in expected.items():
        if name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"):
            assert (found[name].dequantize() - dense).abs().max() <= 2.0**-21 * dense.abs().max(), name
        else:
            assert torch.equal(found[name].dequantize(), dense), name


# ---------------------------------------------------------------------------------------------------------------- files


def test_torchao_files(tmp_path: Path) -> None:
    tensors, metadata, dense = writers.flattened_torchao()
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    weight = jitgen.load_quantized(tmp_path / "model.safetensors")["l.weight"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.dequantize(), dense)
    del tensors["l._weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(FormatError, match=r"l._weight_scale is missing"):
        jitgen.load_quantized(tmp_path / "model.safetensors")


def sharded(directory: Path, config: dict[str, Any] | None = None) -> torch.Tensor:
    state, dense = writers.gptq()
    shards = {"a.safetensors": ["l.qweight", "l.g_idx"], "b.safetensors": ["l.qzeros", "l.scales"]}
    for shard, names in shards.items():
        save_file({name: state[name] for name in names}, directory / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantization = config or {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization, "torch_dtype": "bfloat16"}))
    return dense


def test_a_directory_of_shards(tmp_path: Path) -> None:
    dense = sharded(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        weight = jitgen.load_quantized(path)["l.weight"]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.dequantize(torch.float16), dense)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FormatError, match=r"shard b.safetensors is missing, which has l.qzeros"):
        jitgen.load_quantized(tmp_path)


def test_a_label_of_another_kind_is_an_error(tmp_path: Path) -> None:
    dense = sharded(tmp_path, {"quant_method": "awq"})
    with pytest.raises(FormatError, match=r"the config says awq, and l.qweight is laid out as GPTQ"):
        jitgen.load_quantized(tmp_path)
    weight = jitgen.load_quantized(tmp_path, config={"checkpoint_format": "gptq"})["l.weight"]
    assert torch.equal(weight.dequantize(torch.float16), dense)


@pytest.mark.parametrize(("key", "value", "problem"), [("bits", 8, "8 bits"), ("group_size", 64, "groups of 64")])
def test_a_label_of_other_numbers_is_an_error(key: str, value: int, problem: str) -> None:
    state, dense = writers.gptq(act=True)
    config = {"checkpoint_format": "gptq", key: value}
    with pytest.raises(FormatError, match=problem):
        jitgen.load_quantized(state, config=config)
    found = jitgen.load_quantized(state, config=config | {"dynamic": {"l": {}}})
    assert torch.equal(found["l.weight"].dequantize(), dense)


def test_hqq_of_other_numbers_of_codes_is_an_error() -> None:
    state, _ = writers.hqq()
    for change in ({"l.W_q": state["l.W_q"].repeat(2, 1)}, {"l.nbits": torch.tensor(1, dtype=torch.int32)}):
        with pytest.raises(FormatError, match=r"W_q.* has not 48 x 128 codes"):
            jitgen.load_quantized(state | change)


_OTHER_DTYPE = {
    "hqq": ("l.W_q", lambda codes: codes.t().contiguous(), "has not 48 x 128 codes"),
    "hqq, 3 bits": ("l.W_q", lambda codes: codes.to(torch.int16), "has not 48 x 128 codes"),
    "nf4, nested": ("l.weight.nested_absmax", torch.Tensor.int, "does not fit"),
    "int-quantized, zeros": ("l.weight_zero_point", torch.Tensor.bool, "of no signed integers"),
    "quark uint4": ("l.weight_zero_point", torch.Tensor.float, "packed in integers"),
    "modelopt nvfp4": ("l.weight_scale_2", torch.Tensor.bool, "factor of the whole weight is of torch.bool"),
    "compressed-tensors mxfp4": ("l.weight_packed", lambda codes: codes[:, :-1], "not whole blocks of 32"),
}
"""Kind of ``writers.EXACT`` -> the tensor that is changed, how, and what the error says."""


@pytest.mark.parametrize("kind", _OTHER_DTYPE)
def test_a_tensor_of_another_dtype_or_shape_is_no_other_number(kind: str) -> None:
    writer, config, _ = writers.EXACT[kind]
    name, change, problem = _OTHER_DTYPE[kind]
    state, _ = writer()
    with pytest.raises(FormatError, match=problem):
        jitgen.load_quantized(state | {name: change(state[name])}, config=config)


def test_floats_with_zero_points_are_refused() -> None:
    state, dense = writers.float8()
    zeros = torch.zeros(len(dense), 1, dtype=torch.float8_e4m3fn)
    found = jitgen.load_quantized(state | {"l.weight_zero_point": zeros})["l.weight"]
    assert torch.equal(found.dequantize(), dense)
    with pytest.raises(UnsupportedError, match="zero-points of floats"):
        jitgen.load_quantized(state | {"l.weight_zero_point": zeros.bfloat16() + 1})


def test_scales_of_compressed_tensors_are_of_the_groups() -> None:
    state, dense = writers.packed_integers()
    scales = state["l.weight_scale"]
    with pytest.raises(FormatError, match="not of groups of a weight"):
        jitgen.load_quantized(state | {"l.weight_scale": scales.t().contiguous()})
    for bytes_ in (torch.uint8, torch.int8, torch.int32):
        with pytest.raises(FormatError, match=rf"l.weight.*scales are of {bytes_}"):
            jitgen.load_quantized(state | {"l.weight_scale": torch.full_like(scales, 120).to(bytes_)})
    config = {"config_groups": {"0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}}}
    for change in (scales.repeat(1, 2), scales[:, :1].contiguous()):
        with pytest.raises(FormatError, match="the config says groups of 32"):
            jitgen.load_quantized(state | {"l.weight_scale": change}, config=config)
    assert torch.equal(jitgen.load_quantized(state, config=config)["l.weight"].dequantize(), dense)


def test_messages_name_what_is_wrong(tmp_path: Path) -> None:
    state, _ = writers.gptq(act=True)
    for change, problem in (
        ({"l.scales": state["l.scales"].int()}, "l.scales.*no floating-point"),
        ({"l.qzeros": state["l.qzeros"].long()}, "l.qzeros.*is not int32"),
        ({"l.qweight": state["l.qweight"][:12]}, "l.qweight.*has 96 columns.*l.g_idx"),
    ):
        with pytest.raises(FormatError, match=problem):
            jitgen.load_quantized(state | change, config={"checkpoint_format": "gptq"})
    (tmp_path / "x.gguf").write_bytes(b"junk")
    for path, problem in ((tmp_path / "x.gguf", "no GGUF file"), ("", "no checkpoint"), (None, "no checkpoint")):
        with pytest.raises(FormatError, match=problem):
            jitgen.load_quantized(path)  # type: ignore[arg-type]


def test_an_index_that_leaves_its_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../w.safetensors"}}')
    with pytest.raises(FormatError, match="is not a file beside it"):
        jitgen.load_quantized(tmp_path)


def test_pickles_are_read_by_name_alone(tmp_path: Path) -> None:
    state, dense = writers.awq()
    torch.save(state, tmp_path / "model.bin")
    with pytest.raises(UnsupportedError, match="pickle=True"):
        jitgen.load_quantized(tmp_path / "model.bin")
    assert torch.equal(jitgen.load_quantized(tmp_path / "model.bin", pickle=True)["l.weight"].dequantize(), dense)
    torch.save({"l": Path("x")}, tmp_path / "model.bin")
    with pytest.raises(FormatError, match="weights_only"):
        jitgen.load_quantized(tmp_path / "model.bin", pickle=True)


def test_files_of_jitgen(tmp_path: Path) -> None:
    weight = jitgen.quantize(torch.randn(8, 64), "int3", 32)
    jitgen.save_quantized({"a": weight, "b": weight, "c": torch.ones(3)}, tmp_path / "own.safetensors")
    found = jitgen.load_quantized(tmp_path / "own.safetensors")
    assert found["a"] is found["b"]
    assert torch.equal(found["a"].dequantize(), weight.dequantize())
    assert torch.equal(found["c"], torch.ones(3))


# --------------------------------------------------------------------------------------------------------------- damage


def broken(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    write, config, _ = writers.EXACT[kind]
    return write()[0], config


@pytest.mark.parametrize("kind", writers.EXACT)
def test_a_checkpoint_that_lacks_or_truncates_a_tensor_is_an_error(kind: str) -> None:
    # Without these the others are a weight too, unless a config says more; a scale for all fits any number of rows.
    optional = ("g_idx", "weight_g_idx", "weight_zero_point")
    for name in broken(kind)[0]:
        state, config = broken(kind)
        tensor = state.pop(name)
        if not name.endswith(optional):
            with pytest.raises((FormatError, UnsupportedError), match=r"l\."):
                jitgen.load_quantized(state, config=config)
        if tensor.dim() and tensor.numel() > 1 and kind not in ("float-quantized, tensor", "fp8 in blocks"):
            with pytest.raises((FormatError, UnsupportedError), match=r"l\."):
                jitgen.load_quantized(state | {name: tensor[:-1]}, config=config)


def test_a_config_says_what_must_be_there() -> None:
    state, _ = writers.gptq(act=True)
    del state["l.g_idx"]
    with pytest.raises(FormatError, match=r"l.g_idx is missing"):
        jitgen.load_quantized(state, config={"checkpoint_format": "gptq", "desc_act": True})
    state, _ = writers.packed_integers(zeros=True)
    del state["l.weight_zero_point"]
    with pytest.raises(FormatError, match=r"l.weight_zero_point is missing"):
        jitgen.load_quantized(state, config={"config_groups": {"a": {"weights": {"symmetric": False}}}})
    with pytest.raises(FormatError, match="the config says 32 columns each"):
        jitgen.load_quantized(writers.awq()[0], config={"group_size": 32})


@pytest.mark.parametrize("kind", ["gptq, asymmetric", "nf4", "pack-quantized", "float-quantized", "modelopt nvfp4"])
def test_scales_that_are_not_finite_are_an_error(kind: str) -> None:
    state, config = broken(kind)
    name = next(name for name in state if name.endswith(("scale", "scales", "absmax")))
    scales = state[name].float()
    scales.view(-1)[1] = float("nan")
    with pytest.raises(FormatError, match=r"l\.weight: .*NaN"):
        jitgen.load_quantized(state | {name: scales.to(state[name].dtype)}, config=config)


def test_truncated_files_are_errors(tmp_path: Path) -> None:
    writers.gguf(tmp_path / "m.gguf", {"w": ("Q4_0", (8, 64), writers.q4_0()[0])}, {"general.name": "x"})
    save_file(writers.awq()[0], tmp_path / "m.safetensors")
    for name in ("m.gguf", "m.safetensors"):
        content = (tmp_path / name).read_bytes()
        for length in (0, 3, 9, 40, len(content) // 2, len(content) - 1):
            (tmp_path / name).write_bytes(content[:length])
            with pytest.raises(FormatError, match=r"m\."):
                jitgen.load_quantized(tmp_path / name)


def test_damaged_heads_of_gguf_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writers.gguf(path, {"w": ("Q4_0", (8, 64), writers.q4_0()[0])}, {"general.name": "x"})
    content = path.read_bytes()
    for place in range(4, 100):
        for value in (0x00, 0x7F, 0xFF):
            path.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            with contextlib.suppress(FormatError, UnsupportedError):  # any other exception fails
                jitgen.load_quantized(path)


def test_codes_that_nobody_knows_are_an_error() -> None:
    with pytest.raises(FormatError, match=r"l.weight, int8\[4, 8\] is codes, and no scales belong to it"):
        jitgen.load_quantized({"l.weight": torch.ones(4, 8, dtype=torch.int8)})
    with pytest.raises(FormatError, match=r"l.absmax, .* is not laid out as bitsandbytes"):
        jitgen.load_quantized({"l.absmax": torch.ones(4)})


# --------------------------------------------------------------------------------------------------------------- models


def test_a_model_is_filled(tmp_path: Path) -> None:
    state, dense = writers.gptq(sym=True)
    bias = torch.randn(48)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 48), nn.LayerNorm(48))
    norm = {"1.weight": torch.randn(48), "1.bias": torch.zeros(48)}
    found = {name.replace("l.", "0."): tensor for name, tensor in state.items()} | {"0.bias": bias} | norm
    jitgen.load_quantized(found, model=model, dtype=torch.float32)
    assert isinstance(model[0].weight, QTensor)
    assert isinstance(model[0].weight, nn.Parameter)
    assert not model[0].bias.requires_grad
    assert model[1].weight.requires_grad
    x = torch.randn(2, 128)
    assert torch.equal(model[0].weight.dequantize(torch.float16), dense)
    expected = F.layer_norm(F.linear(x, model[0].weight.dequantize(), bias), (48,), *norm.values())
    torch.testing.assert_close(model(x), expected)


def test_a_checkpoint_that_does_not_fit_leaves_the_model_unchanged() -> None:
    state = {name.replace("l.", "0."): tensor for name, tensor in writers.gptq(sym=True)[0].items()}
    model = nn.Sequential(nn.Linear(128, 48, bias=False), nn.Linear(48, 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(FormatError, match=r"it lacks 1.weight, 1.bias; rename="):
        jitgen.load_quantized(state, model=model)
    with pytest.raises(FormatError, match=r"the model has no place for 2.weight"):
        jitgen.load_quantized(state | {"2.weight": torch.ones(1)}, model=model)
    with pytest.raises(FormatError, match=r"1.bias is \[9\], and the model has \[8\]"):
        jitgen.load_quantized(state | {"1.weight": before["1.weight"], "1.bias": torch.ones(9)}, model=model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.warns(FallbackWarning, match=r"it lacks 1.weight, 1.bias; parameters that it lacks stay"):
        jitgen.load_quantized(state, model=model, strict=False)
    assert isinstance(model[0].weight, QTensor)


def test_names_are_mapped_and_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(48, 128)
            self.head = nn.Linear(128, 48, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    jitgen.load_quantized(writers.awq()[0], model=model, rename={"l.weight": "head.weight"})
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, QTensor)
    assert model.embedding(torch.tensor([3, 5])).shape == (2, 128)


def test_readers_have_names_and_a_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    for reader in READERS:
        assert f"`jitgen/checkpoints/{reader.find.__module__.rpartition('.')[2]}.py`" in page, reader.name


def test_a_fifo_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="no regular file"):
        jitgen.load_quantized(tmp_path / "model.safetensors")


ODD = ("gptq", ["gptq"], 4, 2.5, True, {"quant_method": ["gptq"]}, {5: 6}, {"config_groups": 3}, {"bits": "four"}, None)


@pytest.mark.parametrize("kind", ["gptq", "nf4", "pack-quantized", "modelopt nvfp4", "hqq, 3 bits"])
def test_a_config_of_another_shape_is_an_error_or_read(kind: str, tmp_path: Path) -> None:
    """Every value of a config, and the config itself, replaced by one of another type."""
    kind = next(name for name in writers.EXACT if name.startswith(kind))
    state, config = broken(kind)
    configs = [*ODD, *({**config, key: value} for key in config for value in ODD)]
    for found in configs:
        for given in ({"quantization_config": found}, found):
            if given is not None:
                with contextlib.suppress(FormatError, UnsupportedError):  # any other exception fails
                    jitgen.load_quantized(state, config=given)
    save_file(state, tmp_path / "m.safetensors")
    for found in ("gptq", ["gptq"], 4):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": found}))
        with pytest.raises(FormatError, match="quantization_config in its config is"):
            jitgen.load_quantized(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(FormatError, match="not readable"):
        jitgen.load_quantized(tmp_path)


def test_a_key_that_is_no_name_is_an_error() -> None:
    with pytest.raises(FormatError, match="the key 5, not a name"):
        jitgen.load_quantized({"a": torch.ones(2), 5: torch.ones(2)})


@pytest.mark.parametrize("shape", [(0, 1 << 63), (1 << 62, 4, 0), (1 << 40, 1 << 40)])
def test_a_gguf_shape_that_no_tensor_has_is_an_error(shape: tuple[int, ...], tmp_path: Path) -> None:
    writers.gguf(tmp_path / "m.gguf", {"w": ("F32", shape, b"")}, {})
    with pytest.raises(FormatError, match="more than any tensor has"):
        jitgen.load_quantized(tmp_path / "m.gguf")


@pytest.mark.parametrize("value", [5, "qdata", {"qdata": 1}, [5], [None], None])
def test_metadata_of_torchao_of_another_shape_is_an_error(value: Any, tmp_path: Path) -> None:
    facts = {"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": value}
    save_file(
        {"_w_qdata": torch.ones(2)}, tmp_path / "m.safetensors", {"tensor_names": '["w"]', "w": json.dumps(facts)}
    )
    with pytest.raises(FormatError):
        jitgen.load_quantized(tmp_path / "m.safetensors")


_LOAD = """
import sys, threading, torch, jitgen
peak, done = 0, threading.Event()
def anonymous():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) // 1024
def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous() - before)
torch.zeros(8).view(torch.uint8).any()
import jitgen.checkpoints.load
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
state = jitgen.load_quantized(sys.argv[1])
done.set()
print(len(state), sum(weight.numel() for weight in state.values()), peak)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_file_of_4_gib_is_read_a_weight_at_a_time(tmp_path: Path) -> None:
    weights, rows, columns = 64, 8192, 8192
    header: dict[str, Any] = {}
    at = 0
    for number in range(weights):
        for name, dtype, shape, size in (
            ("weight", "F8_E4M3", [rows, columns], rows * columns),
            ("weight_scale", "F32", [rows, 1], rows * 4),
        ):
            header[f"layers.{number}.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:  # sparse: zeros that take no space
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    assert path.stat().st_size > 4 << 30
    done = subprocess.run([sys.executable, "-c", _LOAD, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, elements, megabytes = map(int, done.stdout.split())
    assert (count, elements) == (weights, weights * rows * columns)
    # A weight has 64 MiB, and its check needs two more of that size; the file itself stays mapped.
    assert megabytes < 400, megabytes
