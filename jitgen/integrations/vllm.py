"""Serves quantised models with vLLM: ``vllm serve MODEL --quantization jitgen``.

::

    vllm.general_plugins -> register()     every process of vLLM calls it, perhaps several times
    JitgenConfig                           which layers are quantised, and to what
    LinearMethod                           create_weights: dense, as vLLM loads and shards any checkpoint
                                           process_weights_after_loading: quantised, in the layout that kernels read
                                           apply: the operator ``jitgen::linear``, which torch.compile and graphs take

A layer's weight is quantised where it was loaded, one layer at a time, and its dense tensor is released. Then each
number of rows that vLLM captures in a CUDA graph is multiplied once, since nothing can be compiled within a capture.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from jitgen.call import linear_operator  # noqa: F401  registers jitgen::linear
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant import eager
from jitgen.quant.formats import check_group_size, find
from jitgen.quant.quantize import quantize

try:
    from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
    from vllm.model_executor.parameter import ModelWeightParameter
    from vllm.model_executor.utils import set_weight_attrs
except ImportError as error:
    raise UnsupportedError(f"jitgen.integrations.vllm needs vLLM ({error}): pip install vllm") from error

METHOD = "jitgen"
CAPTURED_ROWS = (1, 2, 4, *range(8, 513, 8))
"""Numbers of tokens that vLLM captures in CUDA graphs, unless it is told others."""
_OPTIONS = ("format", "group_size", "method", "activation", "ignore", "rows")

_multiplied: set[tuple[str, torch.device, bool, int]] = set()
"""Products that were made once, by the token of the weight, its device, whether there is a bias, and the rows."""


def register() -> None:
    """Has vLLM know of ``--quantization jitgen``: importing this module does that. It is the plugin's entry point."""


@register_quantization_config(METHOD)
class JitgenConfig(QuantizationConfig):
    """Says how the linear layers of a model are quantised.

    Args:
        format: a format of docs/formats.md.
        group_size: columns that share a scale; None for one scale a row.
        method: how scales are found (``jitgen.quantize``).
        activation: how products quantise what they multiply with a weight; None for not at all.
        ignore: patterns of names of layers that stay dense, such as ``"*.down_proj"``.
        rows: numbers of tokens whose kernels are there when a model has been loaded.

    Raises:
        FormatError: there is no such format or group size.
    """

    def __init__(
        self,
        format: str = "int4",
        group_size: int | None = 128,
        method: str = "mse",
        activation: str | None = None,
        ignore: Sequence[str] = (),
        rows: Sequence[int] = CAPTURED_ROWS,
    ):
        super().__init__()
        group_size = check_group_size(find(format).group_size or group_size, format)
        self.format, self.group_size, self.method, self.activation = format, group_size, method, activation
        self.ignore, self.rows = tuple(ignore), tuple(rows)

    def __repr__(self) -> str:
        return f"JitgenConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in _OPTIONS[:5])})"

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> JitgenConfig:
        """Reads ``quantization_config`` of a model's configuration.

        Raises:
            FormatError: it has an entry that is none of the arguments.
        """
        options = {name: value for name, value in config.items() if name != "quant_method"}
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise FormatError(f"quantization_config has {', '.join(unknown)}; expected {', '.join(_OPTIONS)}")
        return cls(**options)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns what computes ``layer``; None for what is no linear layer, such as attention or the output layer."""
        if not isinstance(layer, LinearBase):
            return None
        return UnquantizedLinearMethod() if self._is_ignored(prefix) else LinearMethod(self)

    def _is_ignored(self, prefix: str) -> bool:
        """Returns whether a layer stays dense; of layers that vLLM joins (``qkv_proj``) all must, or none."""
        parent, _, name = prefix.rpartition(".")
        joined: Collection[str] = self.packed_modules_mapping.get(name, ())
        names = [f"{parent}.{member}".lstrip(".") for member in joined] or [prefix]
        ignored = [any(fnmatch.fnmatchcase(path, pattern) for pattern in self.ignore) for path in (prefix, *names)]
        if not ignored[0] and len({*ignored[1:]}) > 1:
            raise UnsupportedError(f"{prefix} is one layer in vLLM: ignore all of {', '.join(names)}, or none")
        return any(ignored)


class LinearMethod(LinearMethodBase):
    """Computes a linear layer with a quantised weight."""

    def __init__(self, config: JitgenConfig):
        self.config = config

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Makes the dense weight that vLLM loads."""
        loader = extra_weight_attrs.pop("weight_loader")
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces the dense weight by the tensors of a quantised one, and makes the kernels of its products."""
        dense, config = layer.weight, self.config
        weight = quantize(
            dense.data, config.format, config.group_size, method=config.method, activation=config.activation
        )
        weight.relayout_(eager.kernels.layout_of(weight))
        dtype, device = dense.dtype, dense.device
        del layer.weight, dense
        stored = weight.stored
        layer.jitgen_token, layer.jitgen_names = stored.token.text, []
        for index, tensor in enumerate(stored.tensors):
            layer.jitgen_names.append(f"jitgen_{index}")
            layer.register_parameter(layer.jitgen_names[-1], nn.Parameter(tensor, requires_grad=False))
        bias = getattr(layer, "bias", None)
        for rows in config.rows:
            product = stored.token.text, device, bias is not None, rows
            if product not in _multiplied:
                _multiplied.add(product)
                self.apply(layer, torch.zeros(rows, weight.shape[1], dtype=dtype, device=device), bias)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        tensors = [getattr(layer, name) for name in layer.jitgen_names]
        product: torch.Tensor = torch.ops.jitgen.linear(x, tensors, bias, layer.jitgen_token)
        return product
