"""Updates in place of tensors that were made in inference mode, which torch allows there alone.

Neighbours: ``launcher.py`` and ``call/`` ask before they write.
"""

from __future__ import annotations

import torch

from jitgen.errors import UnsupportedError


def refuse(name: str, tensor: torch.Tensor, line: str | None = None) -> None:
    """Raises UnsupportedError if ``tensor``, which is updated, was made in inference mode, and the call is outside of
    it.

    Args:
        line: of the user's, where the update is.
    """
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        where = f", at {line}" if line else ""
        raise UnsupportedError(
            f"{name} updates a tensor in place that was made in inference mode{where}; torch allows that within "
            "torch.inference_mode() alone: call it there, or clone the tensor before the call"
        )
