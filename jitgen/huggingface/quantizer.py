"""Defines ``JitgenConfig`` for ``from_pretrained(..., quantization_config=...)``, and the quantiser behind it.

A weight is quantised when transformers has loaded it, and before it loads the next, so that memory never holds the
dense model. ``save_pretrained`` writes the files that ``jitgen.save_quantized`` writes, with the names that parameters
have in memory; ``from_pretrained`` reads them again after ``import jitgen.huggingface.quantizer``, as the same model or
as one with another head or none, and ``jitgen.load_quantized`` without transformers. That holds for models that
``jitgen.quantize_`` and ``jitgen.calibrate`` have quantised, too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant import io
from jitgen.quant.activations import check_activation
from jitgen.quant.experts import experts_of, rank
from jitgen.quant.formats import TENSOR_NAMES, check_group_size, find
from jitgen.quant.layers import QuantizedLinear
from jitgen.quant.modules import freeze_bias, quantize_
from jitgen.quant.qtensor import QTensor
from jitgen.quant.report import SkippedLayer

try:
    from transformers.core_model_loading import ConversionOps, PrefixChange
    from transformers.modeling_utils import PreTrainedModel
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils import logging
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise UnsupportedError(f"JitgenConfig needs transformers 5 ({error}): pip install 'transformers>=5'") from error

_log = logging.get_logger(__name__)
METHOD = "jitgen"
Formats = str | Mapping[str, "str | tuple[str, int | None] | None"]


@register_quantization_config(METHOD)
class JitgenConfig(QuantizationConfigMixin):
    """Says how a model's weights are quantised: the arguments of ``jitgen.quantize_``.

    Args:
        format: a format of docs/formats.md, or a mapping from patterns of module names to formats.
        group_size: columns that share a scale; None for one scale a row.
        modules_to_not_convert: names of modules that are left as they are; by default the output layer, and none with
            ``embeddings``.
        embeddings: whether embeddings are quantised too; one that is tied to the output layer shares its codes.
        method: how scales are found (``jitgen.quantize``).
        activation: how products quantise what they multiply with a weight, such as ``"int8"`` on a CPU, or a mapping
            from patterns of module names to it; None for not.

    Raises:
        FormatError: there is no such format, group size or activation.
    """

    def __init__(
        self,
        format: Formats = "int4",
        group_size: int | None = 128,
        modules_to_not_convert: list[str] | None = None,
        embeddings: bool = False,
        method: str = "mse",
        activation: str | Mapping[str, str | None] | None = None,
        **kwargs: Any,
    ):
        self.quant_method = METHOD
        if isinstance(format, str):
            group_size = check_group_size(find(format).group_size or group_size, format)
            if not isinstance(activation, Mapping):
                check_activation(activation, find(format), group_size)
        self.format, self.group_size = format, group_size
        self.modules_to_not_convert = modules_to_not_convert
        self.embeddings, self.method, self.activation = embeddings, method, activation


@register_quantizer(METHOD)
class JitgenQuantizer(HfQuantizer):
    """Makes ``QTensor``s of weights as transformers loads them, and reads those of files.

    Attributes:
        frozen_biases: the names of the biases of quantised layers that were trainable and are not any more. They are
            logged, too, at transformers' level ``info``.
        skipped: the weights that should be quantised and are not, and why. They are logged at the level ``warning``.
    """

    frozen_biases: tuple[str, ...] = ()
    conversions: tuple[Any, ...] = ()
    """What the model's ``_weight_conversions`` were before it was saved; empty until then."""

    requires_calibration = False
    quantization_config: JitgenConfig

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise UnsupportedError("device_map offloads to disk, which quantised weights are not; leave disk out of it")

    @property
    def quantized_element_size(self) -> float | None:
        format = self.quantization_config.format
        return find(format).bits / 8 if isinstance(format, str) else None

    def adjust_max_memory(self, max_memory: dict[str, Any]) -> dict[str, Any]:
        return {device: size * 0.9 for device, size in max_memory.items()}  # for scales, and the weight being quantised

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        config = self.quantization_config
        self.kept: set[str] = set()
        self.skipped: list[SkippedLayer] = []
        if not (config.embeddings and config.modules_to_not_convert is None):
            self.kept |= set(self.get_modules_to_not_convert(model, config.modules_to_not_convert))
        self.descriptions = _descriptions(checkpoint_files or ()) if self.pre_quantized else {}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            self._quantize_what_is_left(model)
        frozen = []
        for name, module in model.named_modules():
            if any(isinstance(parameter, QTensor) for parameter in module._parameters.values()):
                QuantizedLinear.convert(module)
                if freeze_bias(module):
                    frozen.append(f"{name}.bias".lstrip("."))
        self.frozen_biases = tuple(frozen)
        if self.skipped:
            first = "; ".join(f"{layer.name}: {layer.reason}" for layer in self.skipped[:3])
            _log.warning("not quantised: %d weights (%s)", len(self.skipped), first)
        if frozen:
            first = ", ".join(frozen[:3]) + (", ..." if len(frozen) > 3 else "")
            _log.info("no longer trainable: %d biases of quantised layers (%s)", len(frozen), first)
        return model

    def _quantize_what_is_left(self, model: Any) -> None:
        """Quantises what should have been quantised on loading: transformers asks only of the first parameter into
        which a tensor of the file is divided."""
        known = {layer.name for layer in self.skipped}
        left = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if not isinstance(parameter, QTensor) and self.param_needs_quantization(model, name)
        ]
        operation = _Quantize(self)
        for name, parameter in left:
            module, _, leaf = name.rpartition(".")
            if {name, module} & known:
                continue
            if parameter.is_meta:
                self.skipped.append(SkippedLayer(name, "it is offloaded, and one tensor of the file with others"))
            elif getattr(parameter, "_is_hf_initialized", False):
                made = operation.convert({name: parameter.detach()}, model=model, full_layer_name=name)[name]
                setattr(model.get_submodule(module), leaf, made)
            else:
                self.skipped.append(SkippedLayer(name, "the files do not have it, so it is random"))

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        if self.pre_quantized:
            return False
        name, _, leaf = param_name.rpartition(".")
        if any(name == kept or name.endswith(f".{kept}") or name.startswith(f"{kept}.") for kept in self.kept):
            return False
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) or (self.quantization_config.embeddings and type(module) is nn.Embedding):
            return leaf == "weight"
        return (type(module).__name__ == "Conv1D" and rank(module, leaf) == 2) or leaf in experts_of(module, name)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    @property
    def serialized_names(self) -> dict[str, list[str]]:
        if not self.pre_quantized:
            return {}
        leaves = sorted({name.rpartition(".")[2] for name in getattr(self, "descriptions", {})})
        return {leaf: [f"{leaf}.{suffix}" for suffix in TENSOR_NAMES] for leaf in leaves}

    def get_load_operations(self) -> dict[str, Any]:
        return {"deserialize": _Deserialize}

    def update_weight_conversions(self, weight_conversions: list[Any], *models: Any) -> list[Any]:
        if self.pre_quantized:
            # Files have the names of the model in memory, which some renamings would change again. Releases of
            # transformers that pass no model have no such renamings.
            names = [
                name + end for model in models for name in model.state_dict() for end in ("", f".{TENSOR_NAMES[0]}")
            ]
            weight_conversions = [one for one in weight_conversions if not _renames(one, names)]
        return super().update_weight_conversions(weight_conversions, *models)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        # save_pretrained reverts what from_pretrained did to names and tensors. It would divide experts, which are
        # quantised together, and would give tensors other names than the metadata has. Without conversions to revert,
        # files have the names of the model in memory, which load as they are.
        self.conversions = self.conversions or (getattr(model, "_weight_conversions", None),)
        model._weight_conversions = []
        # A tensor that is tied is stored under the name that transformers reads it by in every class, which need not be
        # the first: that of the embedding, and not of the head, which a model without it has no place for.
        state, tied = model.state_dict(), getattr(model, "all_tied_weights_keys", {})
        return io.flattened(dict(sorted(state.items(), key=lambda item: item[0] in tied)))

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        # save_pretrained writes the dtype's name into the config, from which transformers passes it.
        wanted: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for leaf, parameter in module._parameters.items():
                if isinstance(parameter, QTensor):
                    dense = made.get(id(parameter))
                    if dense is None:
                        weight = parameter.dequantize(wanted).contiguous()
                        dense = made[id(parameter)] = nn.Parameter(weight, requires_grad=False)
                    module._parameters[leaf] = dense
        # Files of the dense model have the names of the model's own checkpoints.
        if self.pre_quantized:
            model._weight_conversions = None  # has transformers look the model's conversions up
        elif self.conversions:
            (model._weight_conversions,) = self.conversions
        return model


def _descriptions(files: Any) -> dict[str, str]:
    """Returns the weights that files of ``save_pretrained`` describe."""
    from safetensors import safe_open

    descriptions: dict[str, str] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            descriptions |= io.content(str(path), file.metadata() or {})[0]
    if files and not descriptions:
        raise FormatError(f"{files[0]} has no weights of jitgen, which its config says it has")
    return descriptions


def _renames(conversion: Any, names: list[str]) -> bool:
    """Returns whether a conversion of transformers renames one of ``names``.

    ``PrefixChange`` is for files of a model with another head or none, and is never said to.
    """
    tried = copy.deepcopy(conversion)  # which remembers whether it was in use
    return not isinstance(conversion, PrefixChange) and any(tried.rename_source_key(name)[0] != name for name in names)


def _description(descriptions: Mapping[str, str], name: str, prefix: str) -> str | None:
    """Returns what the file says of a model's weight. The file may be of the model with a head, and the model the one
    within it that its heads call ``prefix``, or the other way round."""
    names = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((descriptions[known] for known in names if known in descriptions), None)


class _Quantize(ConversionOps):
    """Quantises the parameter that was loaded, or those that one tensor of the file was divided into."""

    def __init__(self, hf_quantizer: JitgenQuantizer):
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        model: Any = None,
        full_layer_name: str = "",
        missing_keys: Any = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        values = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        if len(values) == 1:  # whose key may be a pattern of names
            return {full_layer_name: self._quantized(model, full_layer_name, *values.values())}
        needs = self.hf_quantizer.param_needs_quantization
        return {
            name: self._quantized(model, name, value) if needs(model, name) else value for name, value in values.items()
        }

    def _quantized(self, model: Any, full_name: str, value: torch.Tensor) -> torch.Tensor:
        name, _, leaf = full_name.rpartition(".")
        module, config = model.get_submodule(name), self.hf_quantizer.quantization_config
        alone = _Alone(module, name, leaf, value)
        formats = config.format
        if isinstance(formats, Mapping):  # lists in a config that was read from JSON
            formats = {key: tuple(one) if isinstance(one, list) else one for key, one in formats.items()}
        report = quantize_(
            alone.root,
            formats,
            config.group_size,
            method=config.method,
            activation=config.activation,
            embeddings=config.embeddings,
        )
        self.hf_quantizer.skipped.extend(report.skipped)
        _mark_loaded(module, leaf)
        return alone.parameter


def _mark_loaded(module: nn.Module, leaf: str) -> None:
    """Keeps transformers from initialising a module that has no other parameter; some models would write into it."""
    if all(parameter is None for other, parameter in module._parameters.items() if other != leaf):
        module._is_hf_initialized = True  # type: ignore[assignment]


class _Alone:
    """Wraps a module in one of the same class and name with one parameter alone, so that ``quantize_`` sees it by its
    full name.

    Attributes:
        root: the model that has nothing else.
    """

    def __init__(self, module: nn.Module, name: str, leaf: str, value: torch.Tensor):
        single = nn.Module()
        single.__class__ = type(module)
        single.__dict__ |= {key: kept for key, kept in module.__dict__.items() if not key.startswith("_")}
        single._parameters[leaf] = nn.Parameter(value, requires_grad=value.is_floating_point())
        self.root = nn.Module()
        above, *names = self.root, *name.split(".")
        for child in names[:-1]:
            above._modules[child] = nn.Module()
            above = above._modules[child]  # type: ignore[assignment]
        above._modules[names[-1]] = single
        self._single, self._leaf = single, leaf

    @property
    def parameter(self) -> torch.Tensor:
        parameter: torch.Tensor = self._single._parameters[self._leaf]  # type: ignore[assignment]
        return parameter


class _Deserialize(ConversionOps):
    """Makes a weight of its tensors in a file."""

    def __init__(self, hf_quantizer: JitgenQuantizer):
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        text = _description(self.hf_quantizer.descriptions, full_layer_name, getattr(model, "base_model_prefix", ""))
        if text is None:
            raise FormatError(f"{full_layer_name}: the file does not describe it; its tensors are {sorted(input_dict)}")
        tensors = {}
        for key, value in input_dict.items():
            suffix = key.rpartition(".")[2]
            tensors[f"{full_layer_name}.{suffix}"] = value[0] if isinstance(value, list) else value
        weight = io.from_tensors(tensors, full_layer_name, text)
        name, _, leaf = full_layer_name.rpartition(".")
        _mark_loaded(model.get_submodule(name), leaf)
        return {full_layer_name: nn.Parameter(weight, requires_grad=False)}


def _config_of(model: nn.Module) -> JitgenConfig:
    """Returns the config of a model that ``quantize_`` or ``calibrate`` has quantised."""
    weights: dict[str, QTensor] = {}
    dense: list[str] = []
    for name, module in model.named_modules():
        made = {leaf: one for leaf, one in module._parameters.items() if isinstance(one, QTensor)}
        weights |= {name if leaf == "weight" else f"{name}.{leaf}".lstrip("."): one for leaf, one in made.items()}
        if isinstance(module, nn.Linear) and not made:
            dense.append(name)
    formats = {name: (one.format, one.group_size) for name, one in weights.items()}
    activations = {name: one.activation for name, one in weights.items()}
    format, group_size = next(iter(formats.values()))
    return JitgenConfig(
        format if len(set(formats.values())) == 1 else formats,
        group_size,
        dense,
        embeddings=any(
            isinstance(module.weight, QTensor) for module in model.modules() if type(module) is nn.Embedding
        ),
        activation=activations if len(set(activations.values())) > 1 else next(iter(activations.values())),
    )


def _with_quantizer(save: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``PreTrainedModel.save_pretrained`` for models with quantised weights and without a quantiser: these have
    one while they are saved."""

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        has_none = getattr(self, "hf_quantizer", None) is None
        if not (has_none and any(isinstance(parameter, QTensor) for parameter in self.parameters())):
            return save(self, *args, **kwargs)
        conversions, config = getattr(self, "_weight_conversions", None), _config_of(self)
        self.hf_quantizer, self.config.quantization_config = JitgenQuantizer(config, pre_quantized=False), config
        try:
            return save(self, *args, **kwargs)
        finally:
            self.hf_quantizer, self._weight_conversions = None, conversions
            del self.config.quantization_config

    return save_pretrained


PreTrainedModel.save_pretrained = _with_quantizer(PreTrainedModel.save_pretrained)
