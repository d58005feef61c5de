"""Defines the layout "blocks": codes of 8 bits in row-major order, and a scale for each block of 128 x 128.

It is of formats whose rows share scales in groups of 128 (``"fp8_e4m3.rows128"``, as DeepSeek-V3 has them). Kernels
multiply the codes by those of activations with a scale for 128 columns (``families/gemm/block_products.py``).

codes
    ``int8[N, K]`` or ``float8_e4m3fn[N, K]``: those of the portable layout, in the same memory.
scales
    ``float32[ceil(N / 128), K / 128]``, as in the portable layout.
"""

from __future__ import annotations

from jitgen.quant.layouts.rows import pack, unpack

__all__ = ["pack", "unpack"]
