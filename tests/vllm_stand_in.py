"""Stands for vLLM as far as ``jitgen/integrations/vllm.py`` uses it: its published classes and what they require."""

from __future__ import annotations

import abc
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

METHODS: dict[str, type] = {}


def register_quantization_config(name: str) -> Callable[[type], type]:
    def register(config: type) -> type:
        if name in METHODS:
            raise ValueError(f"the quantization method {name} is registered")
        if not issubclass(config, QuantizationConfig):
            raise ValueError("not a QuantizationConfig")
        METHODS[name] = config
        return config

    return register


class QuantizeMethodBase(abc.ABC):
    @abc.abstractmethod
    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None: ...

    @abc.abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor: ...

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return


class LinearMethodBase(QuantizeMethodBase): ...


class QuantizationConfig(abc.ABC):
    def __init__(self) -> None:
        super().__init__()
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abc.abstractmethod
    def get_name(self) -> str: ...

    @abc.abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]: ...

    @classmethod
    @abc.abstractmethod
    def get_min_capability(cls) -> int: ...

    @staticmethod
    @abc.abstractmethod
    def get_config_filenames() -> list[str]: ...

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig: ...

    @abc.abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None: ...


class ModelWeightParameter(nn.Parameter):
    def __new__(cls, data: torch.Tensor, **kwargs: Any) -> ModelWeightParameter:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: torch.Tensor, input_dim: int, output_dim: int, weight_loader: Callable[..., None]):
        self.input_dim, self.output_dim, self.weight_loader = input_dim, output_dim, weight_loader


def set_weight_attrs(weight: torch.Tensor, attributes: dict[str, Any] | None) -> None:
    for name, value in (attributes or {}).items():
        assert not hasattr(weight, name), f"overwriting {name}"
        setattr(weight, name, value)


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None: ...

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class LinearBase(nn.Module):
    """A layer of which this process has a part: columns or rows of the whole weight, as vLLM shards them."""

    def __init__(
        self, whole: list[torch.Tensor], config: QuantizationConfig, prefix: str, bias: bool = False, part: int = 0,
        parts: int = 1, along: int = 0,
    ):  # fmt: skip
        super().__init__()
        self.prefix = prefix
        method = config.get_quant_method(self, prefix)
        assert method is not None
        self.quant_method = method
        shards = [tensor.chunk(parts, along)[part] for tensor in whole]
        outputs = [shard.shape[0] for shard in shards]
        self.bias = nn.Parameter(torch.randn(sum(outputs), dtype=whole[0].dtype)) if bias else None
        sizes = {"input_size": whole[0].shape[1], "output_size": sum(tensor.shape[0] for tensor in whole)}
        method.create_weights(
            self, input_size_per_partition=shards[0].shape[1], output_partition_sizes=outputs,
            params_dtype=whole[0].dtype, weight_loader=self.weight_loader, **sizes,
        )  # fmt: skip
        begin = 0
        for shard in shards:
            weight: Any = self.weight
            weight.weight_loader(weight, shard, begin)
            begin += shard.shape[0]
        method.process_weights_after_loading(self)

    @staticmethod
    def weight_loader(parameter: nn.Parameter, loaded: torch.Tensor, begin: int) -> None:
        parameter.data.narrow(0, begin, loaded.shape[0]).copy_(loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, self.bias)


_MODULES = {
    "vllm": (),
    "vllm.model_executor": (),
    "vllm.model_executor.utils": (set_weight_attrs,),
    "vllm.model_executor.parameter": (ModelWeightParameter,),
    "vllm.model_executor.layers": (),
    "vllm.model_executor.layers.linear": (LinearBase, LinearMethodBase, UnquantizedLinearMethod),
    "vllm.model_executor.layers.quantization": (register_quantization_config,),
    "vllm.model_executor.layers.quantization.base_config": (QuantizationConfig, QuantizeMethodBase),
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has ``import vllm`` find these."""
    METHODS.clear()
    monkeypatch.delitem(sys.modules, "jitgen.integrations.vllm", raising=False)
    for name, members in _MODULES.items():
        module = types.ModuleType(name)
        vars(module).update({member.__name__: member for member in members})
        monkeypatch.setitem(sys.modules, name, module)
