"""Defines the layouts "rows" and "blocks": codes in row-major order, those of 8 bits as tensors of a dtype that
products multiply.

Kernels read it of formats whose codes are int8 or float8_e4m3fn, with one scale for each row: those that quantise
activations multiply codes by codes, and scale the sums. It differs from the portable layout in two tensors:

codes
    Those of fp8_e4m3 are ``float8_e4m3fn[N, Kp]``, in the same memory.
scales
    ``[N, groups]``, also where rows share a scale; floats are float32.

The layout "blocks" differs in one thing: it is of formats whose rows share scales in groups of 128
(``"fp8_e4m3.rows128"``, as DeepSeek-V3 has them), and its scales are those of the portable layout, one for each block
of 128 x 128: ``float32[ceil(N / 128), K / 128]``. Kernels multiply the codes by those of activations with a scale for
128 columns (``families/gemm/block_products.py``).
"""

from __future__ import annotations

import torch

from jitgen.quant.formats import Float, Format
from jitgen.quant.layouts import Tensors


def pack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from the portable layout to this one; in "rows" with one scale for each row."""
    codes, scales, *rest = tensors
    is_e4m3 = isinstance(format.code, Float) and format.code.specials == "nan"
    wide = scales.float() if scales.is_floating_point() else scales
    return (codes.view(torch.float8_e4m3fn) if is_e4m3 else codes, wide, *rest)


def unpack(format: Format, group_size: int | None, shape: tuple[int, int], tensors: Tensors) -> Tensors:
    """Converts ``tensors`` from this layout to the portable one; in "rows" with one scale for each row."""
    codes, scales, *rest = tensors
    return (codes.view(format.storage_dtype), scales.to(format.scale_dtype), *rest)
