"""Defines ``QuantizedLinear``, the ``nn.Linear`` that ``quantize_`` leaves, whose call goes to the kernel.

``F.linear`` with a ``QTensor`` asks torch for a handler, and the handler asks what each operand is (``functions.py``,
``eager.py``): a dozen Python calls. This layer knows that its weight is quantised, and asks only what may differ from
call to call. Where something needs more than a kernel (autocast, torch.compile, a trace, a mode, a tensor subclass,
tangents) it is ``F.linear``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from jitgen.errors import UnsupportedError
from jitgen.quant import eager
from jitgen.quant.eager import kernels
from jitgen.quant.qtensor import QTensor

# Each of these is asked at every call, and an attribute of a module takes time.
_modes, _autocast = torch._C._len_torch_function_stack, torch._C._is_any_autocast_enabled
_dynamo = torch.compiler.is_dynamo_compiling
_dequantizes = eager.dequantizes.get
_dtypes = frozenset(eager.DTYPES)


class QuantizedLinear(nn.Linear):
    """Multiplies with a weight that is a ``QTensor``; ``convert`` makes one of an ``nn.Linear``."""

    @staticmethod
    def convert(module: nn.Module) -> None:
        """Converts a Linear in place, unless it is a subclass that may compute something else."""
        if type(module) is nn.Linear:
            module.__class__ = QuantizedLinear

    def __prepare_scriptable__(self) -> nn.Module:
        """Raises UnsupportedError, which ``torch.jit.script`` meets when it asks for the module."""
        raise UnsupportedError(
            "torch.jit.script compiles no layer with a quantised weight; use torch.export.export or torch.compile"
        )

    def forward(self, input: Tensor) -> Tensor:
        try:
            weight, bias = self._parameters["weight"], self._parameters["bias"]
        except KeyError:  # one was replaced by a plain tensor, or has a parametrisation
            return F.linear(input, self.weight, self.bias)
        if (
            type(input) is Tensor
            and type(weight) is QTensor
            and not (_modes() or _autocast() or _dynamo() or _dequantizes() or torch.compiler._is_compiling_flag)
            and forward_ad._current_level < 0
            and input.dtype in _dtypes
            and (input.is_cpu or input.is_cuda)
            and not weight.stored.token.transposed
        ):
            if bias is None:
                return kernels.plain(input, weight)
            if type(bias) is nn.Parameter:
                return kernels.biased(input, weight, bias)
        return F.linear(input, weight, bias)  # type: ignore[arg-type]
