"""An add in plain Triton, launched by Triton itself: a peer of the group ``overhead``, which alone imports it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    inside = index < count
    tl.store(out + index, tl.load(x + index, inside) + tl.load(y + index, inside), inside)
