"""An add in plain Triton, launched by Triton itself: a peer of the overhead group. Imported only there."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(x + place, inside) + tl.load(y + place, inside), inside)
