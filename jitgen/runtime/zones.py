"""Finds kernels that write outside of their tensors, at ``JITGEN_DEBUG=5``.

Around each tensor that a call allocates are zones of known bytes, which are looked at behind each kernel that a user
wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jitgen.errors import JitgenError

BYTES = 4096
"""Of the zone before a tensor, and of the one behind it."""
PATTERN = 0xA5


class Zones:
    """Holds the tensors of one call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memories: list[tuple[torch.Tensor, int]] = []

    def empty(self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor between two zones."""
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        own = 0 if 0 in sizes else (last + 1) * dtype.itemsize
        memory = torch.empty(2 * BYTES + own, dtype=torch.uint8, device=self._device)
        memory[:BYTES] = PATTERN
        memory[BYTES + own :] = PATTERN
        self._memories.append((memory, own))
        return torch.as_strided(memory[BYTES : BYTES + own].view(dtype), sizes, strides, BYTES // dtype.itemsize)

    def check(self, kernel: str) -> None:
        """Raises JitgenError if a zone has other bytes than before ``kernel``."""
        for memory, own in self._memories:
            for zone, where in ((memory[:BYTES], "before"), (memory[BYTES + own :], "behind")):
                changed = torch.nonzero(zone != PATTERN)
                if len(changed):
                    first = int(changed[0])
                    byte = first - BYTES if where == "before" else own + first
                    raise JitgenError(f"{kernel} has written to byte {byte} of a tensor of {own} bytes, {where} it")
