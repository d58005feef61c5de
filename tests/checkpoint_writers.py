"""Writers of other programs' checkpoints by their documented layouts, each with the dense weight that it stands for.

Each is a plain loop or shift over codes, independent of the readers. The sources are named in the readers' docstrings.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from jitgen.quant.formats import NF4

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A state dict with one weight, ``l.weight``, and the dense weight."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as rows of int32 words, each one sequence of bits."""
    missing = -codes.shape[1] * bits % 32
    sequence = (codes.long().unsqueeze(-1) >> torch.arange(bits) & 1).flatten(1)
    sequence = torch.nn.functional.pad(sequence, (0, missing)).view(codes.shape[0], -1, 32)
    return (sequence << torch.arange(32)).sum(-1).to(torch.uint32).view(torch.int32)


def words_apart(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as rows of int32 words, each with as many whole codes as it has place for."""
    each = 32 // bits
    found = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    return (found << bits * torch.arange(each)).sum(-1).to(torch.uint32).view(torch.int32)


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """``int32[n, N / 8]``: the nibbles of a word are columns 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
    found = sum(codes.long()[:, column::8] << 4 * nibble for nibble, column in enumerate(AWQ_ORDER))
    return found.to(torch.uint32).view(torch.int32)  # type: ignore[union-attr]


def bytes_of_halves(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the low half first."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def _scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape) * 0.1 + 0.01).to(dtype)


def gptq(
    rows: int = 48, columns: int = 128, bits: int = 4, group: int = 32, sym: bool = False, act: bool = False, v: int = 1
) -> Written:
    groups, half = columns // group, 1 << bits - 1
    codes = torch.randint(0, 1 << bits, (columns, rows))
    zeros = torch.full((groups, rows), half) if sym else torch.randint(1, 1 << bits, (groups, rows))
    scales, index = _scales(groups, rows), torch.arange(columns) // group
    index = index[torch.randperm(columns)] if act else index
    state = {
        "l.qweight": words(codes.t(), bits).t().contiguous(),
        "l.qzeros": words(zeros - int(v == 1), bits),
        "l.scales": scales,
        "l.g_idx": index.int(),
    }
    return state, ((codes - zeros[index]).half() * scales[index]).t()


def awq(rows: int = 48, columns: int = 128, group: int = 64) -> Written:
    codes, zeros = torch.randint(0, 16, (columns, rows)), torch.randint(0, 16, (columns // group, rows))
    scales, index = _scales(columns // group, rows), torch.arange(columns) // group
    state = {"l.qweight": awq_words(codes), "l.qzeros": awq_words(zeros), "l.scales": scales}
    return state, ((codes - zeros[index]).half() * scales[index]).t()


def awq_gemv(rows: int = 48, columns: int = 128, group: int = 64) -> Written:
    """AutoAWQ's version GEMV: along K, in order, with scales and zero-points padded to whole words and more."""
    groups = columns // group
    multiple = max(1, 128 // group)
    width = math.ceil(math.ceil(groups / 8) / multiple) * multiple
    codes, zeros = torch.randint(0, 16, (rows, columns)), torch.randint(0, 16, (rows, groups))
    scales, index = _scales(rows, groups), torch.arange(columns) // group
    pad = torch.nn.functional.pad
    state = {"l.qweight": words(codes, 4), "l.qzeros": words(pad(zeros, (0, 8 * width - groups)), 4)}
    state["l.scales"] = pad(scales, (0, 8 * width - groups))
    return state, (codes - zeros[:, index]).half() * scales[:, index]


def hqq(rows: int = 48, columns: int = 128, bits: int = 4, group: int = 64) -> Written:
    """The encoded form that safetensors files have; (code - zero) * scale is exact for these zero-points."""
    codes = torch.randint(0, 1 << bits, (rows * columns // group, group))
    scales, zeros = _scales(len(codes), 1), torch.randint(1, 4 << bits, (len(codes), 1)).half() / 4
    if bits == 8:
        packed = codes.to(torch.uint8)
    elif bits == 3:
        packed = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % 10)).view(10, -1, group)
        packed = sum(part << 27 - 3 * i for i, part in enumerate(packed)).to(torch.int32)  # type: ignore[union-attr]
    else:
        parts = codes.view(8 // bits, -1, group)
        packed = sum(part << 8 - bits * (i + 1) for i, part in enumerate(parts)).to(torch.uint8)  # type: ignore[union-attr]
    facts = {"nbits": bits, "group_size": group, "axis": 1}
    state = {"l.W_q": packed, "l.scale": scales, "l.zero": zeros, "l.shape": torch.tensor([rows, columns])}
    state |= {f"l.{name}": torch.tensor(value, dtype=torch.int32) for name, value in facts.items()}
    return state, ((codes.half() - zeros) * scales).view(rows, columns)


def nf4(
    rows: int = 48,
    columns: int = 128,
    block: int = 64,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
) -> Written:
    codes = torch.randint(0, 16, (rows * columns,))
    blocks = len(codes) // block
    table, absmax = torch.tensor(NF4), _scales(blocks, dtype=torch.float32)
    facts = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    state = {"l.weight.absmax": absmax}
    if nested:
        codes_of_absmax, map_of_absmax = torch.randint(0, 256, (blocks,), dtype=torch.uint8), torch.linspace(-1, 1, 256)
        outer = _scales(-(-blocks // 256), dtype=torch.float32)
        facts |= {"nested_blocksize": 256, "nested_offset": 0.25, "nested_dtype": "float32"}
        state = {"l.weight.absmax": codes_of_absmax, "l.weight.nested_absmax": outer}
        state["l.weight.nested_quant_map"] = map_of_absmax
        absmax = map_of_absmax[codes_of_absmax.long()] * outer.repeat_interleave(256)[:blocks] + torch.tensor(0.25)
    described = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    state |= {"l.weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)}
    state |= {"l.weight.quant_map": table, "l.weight.quant_state.bitsandbytes__nf4": described}
    state["l.weight"] = state["l.weight"].flatten().view(storage).unsqueeze(1)
    return state, (table[codes] * absmax.repeat_interleave(block)).view(rows, columns).bfloat16()


def llm_int8(rows: int = 48, columns: int = 128) -> Written:
    codes, largest = torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows)
    return {"l.weight": codes, "l.SCB": largest}, (codes * (largest / 127).unsqueeze(1)).half()


def packed_integers(
    rows: int = 64,
    columns: int = 128,
    bits: int = 4,
    group: int = 32,
    zeros: bool = False,
    act: bool = False,
    dense: bool = True,
) -> Written:
    """compressed-tensors' pack-quantized; as releases up to 0.17 wrote it unless ``dense``."""
    half, words = 1 << bits - 1, globals()["words"] if dense else words_apart
    codes, scales = torch.randint(-half, half, (rows, columns)), _scales(rows, columns // group, dtype=torch.bfloat16)
    state = {"l.weight_packed": words(codes + half, bits), "l.weight_scale": scales}
    state["l.weight_shape"] = torch.tensor([rows, columns])
    index = torch.arange(columns) // group
    points = torch.zeros(rows, columns // group, dtype=torch.long)
    if zeros:
        points = torch.randint(-half, half, points.shape)
        state["l.weight_zero_point"] = words((points + half).t(), bits).t().contiguous()
    if act:
        index = index[torch.randperm(columns)]
        state["l.weight_g_idx"] = index.int()
    return state, (codes - points[:, index]).bfloat16() * scales[:, index]


def float8(rows: int = 256, columns: int = 384, kind: str = "row", suffix: str = "weight_scale") -> Written:
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    shapes = {"row": (rows, 1), "tensor": (), "group": (rows, columns // 128), "block": (rows // 128, columns // 128)}
    scales = _scales(*shapes[kind], dtype=torch.bfloat16)
    along_rows = scales.repeat_interleave(128, 0) if kind == "block" else scales
    spread = along_rows.repeat_interleave(128, 1) if kind in ("group", "block") else along_rows
    return {"l.weight": weight, f"l.{suffix}": scales}, weight.bfloat16() * spread


def int8_rows(rows: int = 48, columns: int = 128, zeros: bool = False) -> Written:
    """compressed-tensors' int-quantized."""
    codes, scales = torch.randint(-128, 128, (rows, columns), dtype=torch.int8), _scales(rows, 1, dtype=torch.bfloat16)
    state, points = {"l.weight": codes, "l.weight_scale": scales}, torch.zeros(rows, 1, dtype=torch.int8)
    if zeros:
        points = state["l.weight_zero_point"] = torch.randint(-128, 128, (rows, 1), dtype=torch.int8)
    return state, (codes.int() - points.int()).bfloat16() * scales


def nvfp4(rows: int = 48, columns: int = 128, modelopt: bool = True) -> Written:
    codes = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, columns // 16) * 400 + 1).to(torch.float8_e4m3fn)
    factor = torch.tensor(2.0**-12 * 1.25 if modelopt else 2048.0)
    packed = bytes_of_halves(codes)
    if modelopt:
        state = {"l.weight": packed, "l.weight_scale": scales, "l.weight_scale_2": factor}
    else:
        state = {"l.weight_packed": packed, "l.weight_scale": scales, "l.weight_global_scale": factor.view(1)}
    combined = scales.float() * factor if modelopt else scales.float() / factor
    return state, (E2M1[codes] * combined.repeat_interleave(16, 1)).bfloat16()


def quark(rows: int = 48, columns: int = 128, group: int = 64, signed: bool = True, reorder: bool = True) -> Written:
    packed = awq_words if reorder else lambda codes: words(codes, 4)
    codes, index = torch.randint(0, 16, (columns, rows)), torch.arange(columns) // group
    scales = _scales(columns // group, rows, dtype=torch.bfloat16)
    zeros = torch.zeros(columns // group, rows, dtype=torch.long)
    zeros = zeros if signed else torch.randint(1, 16, zeros.shape)
    state = {"l.weight": packed(codes), "l.weight_scale": scales, "l.weight_zero_point": packed(zeros)}
    values = (codes ^ 8) - 8 if signed else codes
    return state, ((values - zeros[index]).bfloat16() * scales[index]).t()


def mxfp4(rows: int = 48, columns: int = 128, name: str = "weight") -> Written:
    codes = torch.randint(0, 16, (rows, columns))
    scales = torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8)
    dense = E2M1[codes] * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    return {f"l.{name}": bytes_of_halves(codes), "l.weight_scale": scales}, dense.bfloat16()


def flattened_torchao(
    rows: int = 48, columns: int = 128
) -> tuple[dict[str, torch.Tensor], dict[str, str], torch.Tensor]:
    """A Float8Tensor as torchao's flatten_tensor_state_dict writes it: tensors, metadata, the dense weight."""
    state, dense = float8(rows, columns)
    tensors = {"l._weight_qdata": state["l.weight"], "l._weight_scale": state["l.weight_scale"]}
    attributes = {"block_size": [1, columns], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
    facts = {"_type": "Float8Tensor", "_data": attributes, "_tensor_data_names": ["qdata", "scale"]}
    return tensors, {"tensor_names": json.dumps(["l.weight"]), "l.weight": json.dumps(facts)}, dense


# ----------------------------------------------------------------------------------------------------------------- GGUF

GGUF_TYPES = {"F32": (0, 1, 4), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q8_0": (8, 32, 34), "Q6_K": (14, 256, 210)}


def _half(value: float) -> bytes:
    return struct.pack("<e", value)


def q4_0(rows: int = 8, columns: int = 64) -> tuple[bytes, torch.Tensor]:
    """The bytes of a tensor, and the dense weight, float32."""
    data, dense = b"", torch.empty(rows * columns // 32, 32)
    for block in dense:
        d, codes = struct.unpack("<e", _half(float(torch.randn(()))))[0], torch.randint(0, 16, (32,)).tolist()
        data += _half(d) + bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
        block.copy_(torch.tensor([(code - 8) * d for code in codes]))
    return data, dense.view(rows, columns)


def q4_1(rows: int = 8, columns: int = 64, flat: bool = False) -> tuple[bytes, torch.Tensor]:
    """``flat``: the scale is 0, so that each block is its minimum."""
    data, dense = b"", torch.empty(rows * columns // 32, 32)
    for block in dense:
        d = 0.0 if flat else struct.unpack("<e", _half(float(torch.rand(()) + 0.1)))[0]
        minimum, codes = struct.unpack("<e", _half(float(torch.randn(()))))[0], torch.randint(0, 16, (32,)).tolist()
        data += _half(d) + _half(minimum) + bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
        block.copy_(torch.tensor([code * d + minimum for code in codes], dtype=torch.float64))
    return data, dense.view(rows, columns)


def gguf(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], keys: Mapping[str, Any] = {}) -> None:
    """A file of version 3; ``tensors`` are (type, torch shape, bytes) by name."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, value in keys.items():
        kind = struct.pack("<IQ", 10, value) if isinstance(value, int) else struct.pack("<I", 8) + text(value)
        head += text(key) + (struct.pack("<II", 4, value) if key == "general.alignment" else kind)
    data = b""
    for name, (kind_name, shape, bytes_) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += text(name) + sizes + struct.pack("<IQ", GGUF_TYPES[kind_name][0], len(data))
        data += bytes_ + bytes(-len(bytes_) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def config_groups(*targets: str, **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors with one group."""
    group = {"targets": list(targets or ("Linear",)), "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


EXACT: dict[str, tuple[Callable[[], Written], dict[str, Any], str]] = {
    "gptq, asymmetric": (gptq, {"checkpoint_format": "gptq"}, "uint4.float16"),
    "gptq, symmetric": (lambda: gptq(sym=True), {}, "int4.float16"),
    "gptq, version 2": (lambda: gptq(v=2), {"checkpoint_format": "gptq_v2"}, "uint4.float16"),
    "gptq, act-order": (lambda: gptq(act=True), {"checkpoint_format": "gptq"}, "uint4.float16.ordered"),
    "gptq, 3 bits": (lambda: gptq(rows=64, bits=3), {"checkpoint_format": "gptq"}, "uint3.float16"),
    "gptq, 8 bits": (lambda: gptq(bits=8, sym=True, act=True), {}, "int8.float16.ordered"),
    "awq": (awq, {}, "uint4.float16"),
    "awq, gemv": (awq_gemv, {"version": "gemv", "group_size": 64}, "uint4.float16"),
    "awq, gemv, groups of 32": (lambda: awq_gemv(group=32), {"group_size": 32}, "uint4.float16"),
    "hqq": (hqq, {}, "uint4.float16.floatzeros"),
    "hqq, 3 bits": (lambda: hqq(bits=3), {}, "uint3.float16.floatzeros"),
    "hqq, 1 bit": (lambda: hqq(bits=1), {}, "uint1.float16.floatzeros"),
    "nf4": (nf4, {}, "nf4"),
    "nf4, nested": (lambda: nf4(nested=True), {}, "nf4"),
    "nf4, stored as bfloat16": (lambda: nf4(storage=torch.bfloat16), {}, "nf4"),
    "nf4, stored as float32": (lambda: nf4(storage=torch.float32), {}, "nf4"),
    "llm.int8": (llm_int8, {}, "int8"),
    "pack-quantized": (packed_integers, {}, "int4"),
    "pack-quantized, 3 bits": (lambda: packed_integers(bits=3, columns=96), {}, "int3"),
    "pack-quantized, zeros": (lambda: packed_integers(zeros=True), {}, "uint4"),
    "pack-quantized, 5 bits, zeros": (lambda: packed_integers(bits=5, zeros=True), {}, "uint5"),
    "pack-quantized, 3 bits apart": (lambda: packed_integers(bits=3, dense=False), {}, "int3"),
    "pack-quantized, 5 bits apart, zeros": (lambda: packed_integers(bits=5, zeros=True, dense=False), {}, "uint5"),
    "pack-quantized, 6 bits apart": (lambda: packed_integers(bits=6, dense=False), {}, "int6"),
    "pack-quantized, 7 bits apart": (lambda: packed_integers(bits=7, dense=False), config_groups(num_bits=7), "int7"),
    "pack-quantized, act-order": (lambda: packed_integers(act=True), {}, "int4.ordered"),
    "float-quantized": (float8, {}, "fp8_e4m3.bfloat16"),
    "float-quantized, tensor": (lambda: float8(kind="tensor"), {}, "fp8_e4m3.bfloat16.tensor"),
    "float-quantized, groups": (lambda: float8(kind="group"), {}, "fp8_e4m3.bfloat16"),
    "fp8 in blocks": (lambda: float8(kind="block", suffix="weight_scale_inv"), {}, "fp8_e4m3.bfloat16.rows128"),
    "int-quantized": (int8_rows, {}, "int8.bfloat16"),
    "int-quantized, zeros": (lambda: int8_rows(zeros=True), {}, "uint8.bfloat16"),
    "compressed-tensors nvfp4": (lambda: nvfp4(modelopt=False), {}, "nvfp4"),
    "compressed-tensors mxfp4": (lambda: mxfp4(name="weight_packed"), {}, "mxfp4"),
    "modelopt nvfp4": (nvfp4, {}, "nvfp4"),
    "quark int4": (quark, {"global_quant_config": {"weight": {"dtype": "int4"}}}, "int4"),
    "quark int4, in order": (
        lambda: quark(reorder=False),
        {"global_quant_config": {"weight": {"dtype": "int4", "group_size": 64}}, "export": {"pack_method": "order"}},
        "int4",
    ),
    "quark uint4": (lambda: quark(signed=False), {"global_quant_config": {"weight": {"dtype": "uint4"}}}, "uint4"),
    "quark mxfp4": (mxfp4, {}, "mxfp4"),
}
"""Kinds of checkpoints whose numbers are equal to the bit: the writer, the config, the format that is chosen."""
