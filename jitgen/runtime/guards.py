"""Whether tensors are still laid out as they were: the check in front of every warm launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each has the type, dtype, device, shape and strides of its counterpart.

    torch's own guard does it in one C++ call, 0.1 us a tensor where reading the attributes from Python costs 0.4. It is
    private to torch; where a version lacks it, the attributes are read.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (ImportError, TypeError):
        facts = [_facts(tensor) for tensor in tensors]
        return lambda *others: [_facts(tensor) for tensor in others] == facts


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad
