"""Lets ``DistributedDataParallel`` broadcast quantised weights from one process to the others.

Its broadcast views every parameter as one row of numbers, which a quantised weight is not. So the weights' own tensors
are broadcast in its place: all processes have those of the first one, as they have its plain parameters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from jitgen.quant.weights import is_quantized

_MODULE = "torch.distributed.utils"
_FUNCTION = "_sync_params_and_buffers"


def let_be_broadcast() -> None:
    """Has torch broadcast the tensors of quantised weights. It may be called again.

    Where torch has no function of that name, ``DistributedDataParallel`` refuses such a model as before.
    """
    if not torch.distributed.is_available():
        return
    utils: Any = importlib.import_module(_MODULE)
    broadcast = getattr(utils, _FUNCTION, None)
    if broadcast is not None and not hasattr(broadcast, "of_quantized"):
        setattr(utils, _FUNCTION, _with_quantized(broadcast))


def _with_quantized(broadcast: Callable[..., None]) -> Callable[..., None]:
    """Extends ``broadcast``, which takes plain tensors, to states with quantised weights."""

    def broadcast_states(group: Any, states: list[torch.Tensor], bucket_size: int, source: int) -> None:
        weights = [state for state in states if is_quantized(state)]
        plain = [state for state in states if not is_quantized(state)]
        with torch.no_grad():
            # Processes may have converted a weight to different layouts: the portable one is the same for all.
            copies = [tuple(map(torch.clone, weight.portable_tensors())) for weight in weights]
            broadcast(group, plain + [tensor for copy in copies for tensor in copy], bucket_size, source)
            for weight, copy in zip(weights, copies, strict=True):
                weight.overwrite(copy)

    broadcast_states.of_quantized = True  # type: ignore[attr-defined]
    return broadcast_states
