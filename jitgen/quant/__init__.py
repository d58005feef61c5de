"""Quantised weights: formats, how their codes lie in memory, and the tensor that holds them.

``formats`` is the table of formats; ``layouts`` the ways of laying codes out, one module each; ``quantize`` makes a
``QTensor`` (``qtensor``) of a weight, ``modules`` does so for every Linear of a model, ``io`` writes and reads files.
This package needs ``errors`` alone of jitgen, so that anything may need it; importing it imports none of its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch


def rebuild(*facts: Any) -> Any:
    """A ``QTensor`` from what its pickle holds: the arguments of ``qtensor.rebuild``."""
    from jitgen.quant import qtensor

    return qtensor.rebuild(*facts)


kernel: Callable[..., torch.Tensor] | None = None
"""``(x, weight, bias or None) -> y``, an eager ``F.linear`` by a generated kernel; see ``eager``."""

plain: ContextVar[bool] = ContextVar("plain", default=False)
"""Whether eager products dequantise and leave the rest to torch, as a reference must."""

# With ``import jitgen`` alone, torch.load(weights_only=True) reads checkpoints that hold quantised weights.
torch.serialization.add_safe_globals([rebuild])
