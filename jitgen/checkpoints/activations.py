"""Finds out how the programs that wrote a checkpoint quantise what its weights multiply, and has products do the same.

Sources: compressed-tensors' ``quantization/quant_args.py`` (``input_activations`` of a group), transformers'
``integrations/finegrained_fp8.py`` and ``fbgemm_fp8.py`` (``activation_scheme``, ``weight_block_size``), ModelOpt's
``quant_algo`` and Quark's ``input_tensors``. ``input_scale``, or ``activation_scale`` in transformers, is the size of a
step of the codes. What has no kind in ``quant/activations.py`` (4 bits, other blocks, zero-points) is left as floats,
and the report says so.

Kinds are finer where jitgen has no such: a scale of the whole tensor that is computed at each call is one of each row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.checkpoints.label import groups_of
from jitgen.checkpoints.source import Source
from jitgen.errors import FormatError
from jitgen.quant.activations import MX_BLOCK, bounded
from jitgen.quant.codes import BLOCK
from jitgen.quant.formats import find
from jitgen.quant.qtensor import QTensor

CHECKPOINT = "checkpoint"
"""The argument that has products do as the checkpoint says."""
_FLOAT8 = ("e4m3", "fp8", "float8")
_POWERS = ("torch.uint8", "uint8", "torch.float8_e8m0fnu")
"""How compressed-tensors calls scales that are powers of two."""
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Stated:
    """Says how activations are quantised, in a checkpoint's words.

    Attributes:
        words: for the report.
        kind: the name of a kind of ``ACTIVATIONS``; None where there is no such.
        static: whether the scale is in the checkpoint.
    """

    words: str
    kind: str | None
    static: bool = False


def applied(source: Source, name: str, weight: QTensor, wanted: str | None) -> tuple[QTensor, str | None]:
    """Returns ``weight``, called ``name``, with activations quantised as ``wanted`` says, and a note for the report.

    ``wanted``: ``"checkpoint"``, a kind, or None for none.

    Raises:
        FormatError: ``input_scale`` of the checkpoint is no scale.
    """
    if wanted is None:
        return (weight.with_activation(None) if weight.activation else weight), None
    prefix = name.removesuffix(".weight")
    stated = Stated(wanted, wanted) if wanted != CHECKPOINT else _stated(source, prefix)
    if weight.activation is not None and wanted == CHECKPOINT:
        return weight, weight.activation
    if stated is None:
        return weight, None
    if stated.kind is None:
        return weight, f"{stated.words}: left as floats, which have no kernels for it"
    wide = _widened(weight, stated.kind)
    try:
        made = wide.with_activation(stated.kind)
    except FormatError as error:
        if wanted != CHECKPOINT:
            raise FormatError(f"{name}: {error}") from None
        return weight, f"{stated.words}: left as floats, since {str(error).partition(';')[0]}"
    if not stated.static:
        return made, stated.kind
    scale_name = _input_scale(source, prefix)
    if scale_name is None:
        return made, f"{stated.kind}: {stated.words}, and there is no {prefix}.input_scale: a scale for each row"
    zero_name = f"{prefix}.input_zero_point"
    if zero_name in source and bool(source.read(zero_name).any()):
        return weight, f"{stated.words}: left as floats, since {zero_name} is not 0"
    scale = source.read(scale_name)
    if scale.numel() != 1:
        raise FormatError(f"{source.described(scale_name)} is not one scale of activations")
    try:
        return made.with_input_scale(scale.float()), f"{stated.kind}, static"
    except FormatError as error:
        raise FormatError(f"{scale_name}: {error}") from None


def _widened(weight: QTensor, kind: str) -> QTensor:
    """Returns an int8 weight with its 16-bit scales in float32, which have the same numbers: kernels of their own
    multiply such by int8 activations."""
    if weight.smoothing is not None:
        return _widened(weight.with_smoothing(None), kind).with_smoothing(weight.smoothing)
    format = find(weight.format)
    if format.row != "int8" or format.scale_dtype not in _NARROW or not kind.startswith("int8") or format.ordered:
        return weight
    name = ".".join(word for word in format.name.split(".") if word != format.scale)
    codes, scales = weight.portable_tensors()
    if bool((scales.abs() >= find("int8").scale_limit).any()):
        return weight
    facts: dict[str, Any] = {"transposed": weight.transposed, "experts": weight.token.experts}
    return QTensor((codes, scales.float()), name, weight.group_size, weight.token.weight_shape, weight.dtype, **facts)


def _input_scale(source: Source, prefix: str) -> str | None:
    """Returns the name of the static scale of what a weight multiplies; None if there is none."""
    names = (f"{prefix}.{name}" for name in ("input_scale", "activation_scale"))
    return next((name for name in names if name in source), None)


def _stated(source: Source, prefix: str) -> Stated | None:
    """Returns what the config, or the tensors beside a weight, say of its activations; None for floats."""
    groups = [group.get("input_activations") for group in groups_of(source, prefix)]
    described = [group for group in groups if isinstance(group, Mapping)]
    if groups:
        return _of_arguments(described[0]) if described and len(described) == len(groups) else None
    config, has_scale = source.config, _input_scale(source, prefix) is not None
    layers = config.get("quantized_layers")  # of ModelOpt's MIXED_PRECISION
    layer = layers.get(prefix) if isinstance(layers, Mapping) else None
    told = layer if isinstance(layer, Mapping) else config
    method, algorithm = str(config.get("quant_method")), str(told.get("quant_algo"))
    if method == "fbgemm_fp8":
        return Stated("fp8 for each row", _of_fbgemm(source, prefix))
    if method == "fp8":
        if config.get("activation_scheme") == "static":
            return Stated("static fp8", "fp8_e4m3", static=True)
        if config.get("weight_block_size") != [BLOCK, BLOCK]:
            return Stated("dynamic fp8", "fp8_e4m3")
        powers = ".powers" if config.get("scale_fmt") == "ue8m0" else ""
        return Stated("dynamic fp8", f"fp8_e4m3.block{BLOCK}{powers}")
    if "FP8_PB" in algorithm:  # weights in blocks, activations as they are
        return None
    if algorithm == "MXFP8":
        return Stated("mxfp8", "mxfp8")
    if "FP8" in algorithm:
        return Stated("static fp8" if has_scale else "fp8 for each row", "fp8_e4m3", static=has_scale)
    if "W8A8" in algorithm or "INT8" in algorithm:
        return Stated("int8", "int8", static=has_scale)
    if "NVFP4" in algorithm:
        return Stated("nvfp4", None)
    settings = config.get("global_quant_config")
    inputs = settings.get("input_tensors") if isinstance(settings, Mapping) else None
    inputs = inputs[0] if isinstance(inputs, list) and inputs else inputs
    return _of_quark(inputs) if isinstance(inputs, Mapping) else None


def _of_fbgemm(source: Source, prefix: str) -> str:
    """Returns the kind of FBGEMM's activations: the scale of a row is for magnitudes up to ``activation_scale_ub``."""
    most = source.config.get("activation_scale_ub")
    if f"{prefix}.input_scale_ub" in source:
        stored = source.read(f"{prefix}.input_scale_ub")
        most = float(stored) if stored.numel() == 1 else stored
    if most is None:
        return "fp8_e4m3"
    if not isinstance(most, int | float) or not 0 < most < float("inf"):
        raise FormatError(f"{prefix}: activation_scale_ub is {most!a:.80}, and not a number above 0")
    return bounded("fp8_e4m3", most)


def _of_arguments(arguments: Mapping[str, Any]) -> Stated:
    """Reads ``QuantizationArgs`` of compressed-tensors."""
    bits, type_, strategy = arguments.get("num_bits"), arguments.get("type"), arguments.get("strategy")
    dynamic, size, scales = arguments.get("dynamic"), arguments.get("group_size"), arguments.get("scale_dtype")
    kind = {(8, "int"): "int8", (8, "float"): "fp8_e4m3"}.get((bits, type_))  # type: ignore[arg-type]
    words = f"{'dynamic' if dynamic else 'static'} {type_} of {bits} bits for each {strategy}"
    if kind is None or (type_ == "int" and arguments.get("symmetric") is False and not dynamic):
        return Stated(words, None)
    if strategy == "group" and kind == "fp8_e4m3" and size == MX_BLOCK and str(scales) in _POWERS:
        return Stated(words, "mxfp8" if dynamic else None)
    if strategy == "group":
        return Stated(words, f"{kind}.block{BLOCK}" if size == BLOCK and dynamic else None)
    return Stated(words, kind, static=not dynamic)


def _of_quark(inputs: Mapping[str, Any]) -> Stated:
    dtype, dynamic = str(inputs.get("dtype")), inputs.get("is_dynamic") is not False
    words = f"{'dynamic' if dynamic else 'static'} {dtype}"
    if dtype == "int8":
        return Stated(words, "int8", static=not dynamic)
    return Stated(words, "fp8_e4m3" if dtype.startswith(_FLOAT8) else None, static=not dynamic)


class Loaded(dict[str, torch.Tensor]):
    """Holds the tensors of a checkpoint by name.

    Attributes:
        activations: by the name of a weight, how its products quantise activations, or why they do not.
        left_out: the names of scales of a cache of keys and values that the model has no place for.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], activations: Mapping[str, str], left_out: Collection[str] = ()
    ) -> None:
        super().__init__(tensors)
        self.activations, self.left_out = dict(activations), tuple(left_out)

    @property
    def report(self) -> str:
        """Says how many weights have their activations quantised, and how: a line for each way."""
        named: dict[str, list[str]] = {}
        for name, words in self.activations.items():
            named.setdefault(words, []).append(name)
        weights = sum(isinstance(tensor, QTensor) for tensor in self.values())
        floats = weights - len(self.activations)
        lines = [f"{len(names)} weights: activations {words} ({names[0]}, ...)" for words, names in named.items()]
        lines += [f"{floats} weights: activations as they are"] if floats else []
        if self.left_out:
            lines.append(
                f"{len(self.left_out)} scales of a cache of keys and values left out ({self.left_out[0]}, ...)"
            )
        return "\n".join(lines)
