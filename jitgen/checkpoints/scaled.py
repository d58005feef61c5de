"""Reads 8-bit weights stored as they are, with their scales: compressed-tensors' float-quantized and int-quantized, and
the fp8 of ModelOpt, Quark, FBGEMM and DeepSeek.

Sources: compressed-tensors' ``compressors/naive_quantized`` and ``quantization/lifecycle/forward.py``; transformers'
``integrations/finegrained_fp8.py`` for ``weight_scale_inv``, which multiplies in spite of its name. ``weight [N, K]``
is float8 or int8, ``weight_scale`` has one number, ``[N]`` or ``[N, 1]``, ``[N, groups]``, or one for each block of 128
x 128. Scales of e8m0 (``scale_fmt: ue8m0``) are powers of two; those of blocks of 32 are mxfp8's, and may be bytes.
Integers of fewer bits may lie in int8, as the config says (``num_bits``). ``activations.py`` reads the scales of
activations (``input_scale``).

Numbers: ``code * scale`` (``(code - zero) * scale`` of integers with zero-points) rounded to the model's dtype, which
is what the libraries compute: equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from jitgen.checkpoints.label import Label
from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.checkpoints.weight import GO_BY_TENSORS, assembled, nominal
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.activations import MX_BLOCK
from jitgen.quant.codes import BLOCK, CODES, FLOAT8
from jitgen.quant.qtensor import QTensor

MX_FORMATS = {torch.float8_e4m3fn: "mxfp8", torch.float8_e5m2: "mxfp8_e5m2"}
"""The formats of 8-bit floats with a power of two for every ``MX_BLOCK`` columns of a row."""
FLOATS = {code.dtype: code.format for name, code in CODES.items() if name in FLOAT8 and code.format}
_OTHERS = (
    *("weight_zero_point", "weight_g_idx", "weight_shape"),
    *("input_scale", "activation_scale", "input_zero_point", "input_global_scale", "input_scale_ub"),
    "pre_quant_scale",
)


def activation_names(source: Source, prefix: str) -> list[str]:
    """Lists the tensors that describe a weight or its activations."""
    return [f"{prefix}.{name}" for name in _OTHERS if f"{prefix}.{name}" in source]


def find(source: Source) -> Iterator[Claim]:
    for suffix in (".weight_scale", ".weight_scale_inv"):
        for prefix in source.ending(suffix):
            weight = f"{prefix}.weight"
            if source.is_of(weight, *FLOATS, torch.int8) and len(source.shape(weight)) == 2:
                uses = (weight, prefix + suffix, *activation_names(source, prefix))
                yield Claim(weight, uses, partial(_read, source, prefix, prefix + suffix))


def _read(source: Source, prefix: str, scale_name: str) -> QTensor:
    return pre_scaled(source, prefix, _plain(source, prefix, scale_name))


def _plain(source: Source, prefix: str, scale_name: str) -> QTensor:
    name = f"{prefix}.weight"
    codes, scales = source.read(name), source.read(scale_name)
    dtype = nominal(source, scales)
    blocks = (codes.shape[0], codes.shape[1] // MX_BLOCK)
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu) and codes.dtype in MX_FORMATS and scales.shape == blocks:
        _require_labelled(source, prefix, codes, scales, "")
        return assembled(
            name, MX_FORMATS[codes.dtype], codes.view(torch.uint8), scales.view(torch.uint8), MX_BLOCK, dtype
        )
    scales = scales.float() if scales.dtype == torch.float8_e8m0fnu else scales  # float32 has these numbers
    scales, group_size, qualifier = shared(name, codes.shape, scales)
    bits = _require_labelled(source, prefix, codes, scales, qualifier)
    zero_name = f"{prefix}.weight_zero_point"
    if codes.dtype in FLOATS:
        if zero_name in source and bool(source.read(zero_name).float().any()):
            raise UnsupportedError(f"{name}: {zero_name} has zero-points of floats, which no format has")
        return assembled(
            name, FLOATS[codes.dtype], codes.view(torch.uint8), scales, group_size, dtype, qualifier=qualifier
        )
    if zero_name in source and not source.is_of(zero_name, torch.int8, torch.int16, torch.int32, torch.int64):
        raise FormatError(f"{source.described(zero_name)} is of no signed integers")
    if zero_name in source and source.read(zero_name).numel() != scales.numel():
        raise FormatError(f"{source.described(zero_name)} is not one zero-point for each scale, {list(scales.shape)}")
    if zero_name not in source or not bool((zeros := source.read(zero_name).reshape(scales.shape)).any()):
        return assembled(name, f"int{bits}", codes, scales, group_size, dtype, qualifier=qualifier)
    half = 1 << (bits - 1)
    unsigned, zeros = (codes.short() + half).to(torch.uint8), (zeros.int() + half).to(torch.uint8)
    return assembled(name, f"uint{bits}", unsigned, scales, group_size, dtype, zeros=zeros, qualifier=qualifier)


def _require_labelled(source: Source, prefix: str, codes: torch.Tensor, scales: torch.Tensor, qualifier: str) -> int:
    """Returns how many bits codes have. Raises FormatError if the config says other codes, or other rows and columns
    that share a scale."""
    name, label = f"{prefix}.weight", Label.read(source, prefix)
    bits = 8
    if codes.dtype == torch.int8 and len(label.num_bits) == 1 and 2 <= min(label.num_bits) < 8:
        bits = min(label.num_bits)
        half = 1 << (bits - 1)
        if codes.numel() and not -half <= int(codes.min()) <= int(codes.max()) < half:
            raise FormatError(
                f"{name}: the config says num_bits {bits}, and it has codes from {int(codes.min())} to "
                f"{int(codes.max())}; {GO_BY_TENSORS}"
            )
    label.require(name, "num_bits", {bits}, "its codes have 8 bits")
    kind = "float" if codes.dtype in FLOATS else "int"
    label.require(name, "type", {kind}, f"its codes are of {codes.dtype}")
    if source.config.get("quant_method") == "compressed-tensors":
        label.require_groups(name, scales, (codes.shape[0], codes.shape[1]))
    shape = source.config.get("weight_block_size")
    blocks = label.block_structure | ({tuple(shape)} if isinstance(shape, list) else set())
    if qualifier == "rows128" and blocks and (BLOCK, BLOCK) not in blocks:
        raise FormatError(
            f"{name}: the config says blocks of {sorted(blocks)}, and its scales {list(scales.shape)} are "
            f"of blocks of {BLOCK} x {BLOCK}; {GO_BY_TENSORS}"
        )
    told = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(str(source.config.get("fmt")))
    if told is not None and codes.dtype in FLOATS and codes.dtype != told:
        raise FormatError(
            f"{name}: the config says {source.config['fmt']}, and codes are of {codes.dtype}; {GO_BY_TENSORS}"
        )
    return bits


def pre_scaled(source: Source, prefix: str, weight: QTensor) -> QTensor:
    """Returns ``weight`` with the factors of an activation's columns beside it, as AWQ and SmoothQuant of ModelOpt
    have them (``pre_quant_scale``)."""
    name = f"{prefix}.pre_quant_scale"
    return smoothed(name, weight, source.read(name)) if name in source else weight


def smoothed(name: str, weight: QTensor, factors: torch.Tensor) -> QTensor:
    """Returns ``weight``, which multiplies the columns of activations by ``factors``, called ``name``, first.

    Raises:
        FormatError: they are not a number above 0 for each column.
    """
    if bool((factors == 1).all()):
        return weight
    try:
        return weight.with_smoothing(factors)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


def shared(name: str, shape: torch.Size, scales: torch.Tensor) -> tuple[torch.Tensor, int | None, str]:
    """Returns ``[R, groups]`` scales of a weight of ``shape``, the group size, and the qualifier of rows that share
    scales."""
    rows, columns = shape
    if scales.dim() == 4 and scales.shape[1] == scales.shape[3] == 1:  # of blocks, as ModelOpt's FP8_PB_WO has them
        scales = scales.flatten(2).squeeze(1)
    if scales.numel() == 1:
        return scales.reshape(1, 1), None, "" if rows == 1 else "tensor"
    if scales.shape in ((rows,), (rows, 1)):
        return scales.reshape(rows, 1), None, ""
    if scales.dim() == 2 and scales.shape[0] == rows and columns % scales.shape[1] == 0:
        return scales, columns // scales.shape[1], ""
    if tuple(scales.shape) == (-(-rows // BLOCK), -(-columns // BLOCK)):
        return scales, BLOCK, "rows128"
    raise FormatError(
        f"{name}: scales {list(scales.shape)} of a weight {list(shape)}; expected one, one a row, one a group, "
        f"or one a block of {BLOCK} x {BLOCK}"
    )


READER = Reader(
    "8-bit weights beside their scales",
    frozenset({"compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "quark"}),
    find,
    (".weight_scale", ".weight_scale_inv"),
)
