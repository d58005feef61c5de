"""Rewrites products of scaled codes to products of the codes: a scale belongs to ``BLOCK`` elements along K, and for a
weight also to ``BLOCK`` rows, as in DeepSeek-V3.

In ``((q * s) @ (p * t).T)`` the scales differ along K, so that they do not leave the sum. The product becomes one of
``dequantize`` nodes in the layout ``BLOCKS``; its mainloop adds the sums of each block, times the scales of both, up in
float32. Scales of rows and columns may follow. The wgmma mainloop has this (``gemm_wgmma_dense.cuh``), and so have
those of Triton (``triton_products.py``): elsewhere the formula stays as it stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.device import Device
from jitgen.ir import symbols
from jitgen.ir.analysis import one_of, unrounded, varies
from jitgen.ir.equations import axes, equation
from jitgen.ir.graph import Node
from jitgen.ir.nodes import BLOCKS, CAST, CONTRACT, GROUPED
from jitgen.ir.symbols import Size
from jitgen.quant.activations import MX_BLOCK
from jitgen.quant.codes import BLOCK, CODES

SCALED = {"sm_100": ("mxfp8", "mxfp4"), "sm_103": ("mxfp8", "mxfp4"), "sm_120": ("mxfp8",), "sm_121": ("mxfp8",)}
"""What ``tcgen05.mma`` with block scales, and from ``sm_120`` ``mma.sync``, multiply by float8_e4m3fn codes. For mxfp4
weights Triton 3.6 and 3.9 have no instruction on ``sm_120``."""

if TYPE_CHECKING:
    from jitgen.families.gemm.code_products import Operand
    from jitgen.ir.views import Mover


def multiplies_blocks(device: Device) -> bool:
    """Returns whether ``device`` has a mainloop of products with scales of blocks."""
    if device.dialect == "triton":
        return True
    return device.dialect == "cuda" and device.target.arch == "sm_90a" and device.has_tensor_maps


def scaled_formats(device: Device) -> tuple[str, ...]:
    """Returns the formats of weights that ``device`` multiplies by codes with a scale for each 32 columns of a row, in
    one instruction (MX): by Triton's ``tl.dot_scaled``, which decodes to bfloat16 where there is none."""
    if device.dialect != "triton":
        return ()
    return next((formats for arch, formats in SCALED.items() if device.target.arch.startswith(arch)), ())


def scales_of_blocks(scale: Node, mover: Mover, is_weight: bool, block: int = BLOCK) -> Node | None:
    """Returns ``scale``, of the shape of an operand's codes, as one number for each block: (rows, K / block), or of a
    weight (rows / BLOCK, K / BLOCK); None if it differs within blocks, or the operand has no whole number of them."""
    *lead, length = scale.shape
    if scale.dtype != "float32" or not _divides(length, mover, block):
        return None
    steps: Any = symbols.floordiv(length, block)
    if not is_weight:
        one = _one_for_each(scale, (*lead, steps, block), (len(lead) + 1,), (*lead, steps), mover)
        return None if one is None else mover.move(one, ("reshape",), (symbols.product(lead), steps))
    if len(lead) != 1 or not _divides(lead[0], mover):
        return None
    rows, shape = lead[0], (symbols.floordiv(lead[0], BLOCK), steps)
    whole = _one_for_each(scale, (shape[0], BLOCK, steps, BLOCK), (1, 3), shape, mover)
    if whole is not None:
        return whole
    one = _one_for_each(scale, (rows, steps, BLOCK), (2,), (rows, steps), mover)
    return None if one is None else _one_for_each(one, (shape[0], BLOCK, steps), (1,), shape, mover)


def of_weight(weight: Node, mover: Mover) -> tuple[Node, Node]:
    """Returns the codes of ``weight``, which is in the layout ``BLOCKS`` or a view of such a weight, and their scales:
    rows from a block on, or the matrices of groups, (groups, rows, K) and (groups, rows / BLOCK, K / BLOCK)."""
    codes, scales = weight.under_views.inputs
    for attrs, shape in weight.movements:
        *lead, rows, _ = shape
        in_blocks: Any = (*lead, symbols.floordiv(symbols.add(rows, BLOCK - 1), BLOCK), scales.shape[-1])
        codes = mover.move(codes, attrs, shape)
        if attrs[0] == "slice":
            attrs = ("slice", attrs[1], symbols.floordiv(attrs[2], BLOCK), 1)
        scales = mover.move(scales, attrs, in_blocks)
    return codes, scales


def _divides(size: Size, mover: Mover, block: int = BLOCK) -> bool:
    return mover.decide(symbols.compare("eq", symbols.mod(size, block), 0))


def _one_for_each(
    scale: Node, blocked: tuple[Any, ...], dims: tuple[int, ...], shape: tuple[Any, ...], mover: Mover
) -> Node | None:
    """Returns one number for each block, in ``shape``, of ``scale`` as it is ``blocked``; None if it differs along
    ``dims``."""
    whole = mover.move(scale, ("reshape",), blocked)
    return None if varies(whole, dims) else mover.move(one_of(whole, dims, mover), ("reshape",), shape)


def product_of_blocks(node: Node, left: Operand, right: Operand, mover: Mover) -> Node | None:
    """Returns the product of the codes of ``node``'s operands with their scales of blocks, float32 of its shape."""
    formats = [CODES[operand.codes.dtype].format for operand in (left, right)]
    if (node.kind is CONTRACT and axes(node.attrs.equation).batch) or None in formats:
        return None
    make, rows, length = mover.builder.make, symbols.product(left.codes.shape[:-1]), left.codes.shape[-1]
    x = mover.move(left.codes, ("reshape",), (rows, length)) if len(left.codes.shape) > 2 else left.codes
    described = (x, left.blocks, formats[0]), (right.codes, right.blocks, f"{formats[1]}.rows128")
    operands = [
        make("dequantize", (codes, scales), "float32", codes.shape, (format, BLOCK, BLOCKS))
        if scales is not None
        else codes
        for codes, scales, format in described
    ]
    if node.kind is GROUPED:
        attrs = node.attrs._replace(accumulator="float32", precision="ieee")
        return make("grouped", (*operands, node.inputs[2]), "float32", node.shape, attrs, node.location)
    shape = (rows, node.shape[-1])
    product = make("contract", operands, "float32", shape, (equation(0, 1), "float32", "ieee"), node.location)
    return product if shape == node.shape else make("view", (product,), "float32", node.shape, ("reshape",))


def product_of_scaled(node: Node, x: Node, weight: Node, mover: Mover) -> Node | None:
    """Returns the product ``node`` of a quantised weight and of the codes of ``x``, float32 values of codes with a
    scale for each ``MX_BLOCK`` columns, which is a power of two; None where ``x`` is no such, or
    ``node`` is of several matrices."""
    if x.op != "mul" or node.kind is not CONTRACT or axes(node.attrs.equation).batch:
        return None
    values, scale = x.inputs
    if values.kind is not CAST:
        values, scale = scale, values
    if values.kind is not CAST or values.inputs[0].dtype != "float8_e4m3fn":
        return None
    scales = scales_of_blocks(scale, mover, False, MX_BLOCK)
    if scales is None:
        return None
    make, (codes,), length = mover.builder.make, values.inputs, x.shape[-1]
    rows = symbols.product(codes.shape[:-1])
    codes = mover.move(codes, ("reshape",), (rows, length)) if len(codes.shape) > 2 else codes
    left = make("dequantize", (codes, scales), "float32", codes.shape, ("mxfp8", MX_BLOCK, BLOCKS))
    attrs = equation(0, 1), "float32", "ieee"
    product = make("contract", (left, weight), "float32", (rows, node.shape[-1]), attrs, node.location)
    product = product if product.shape == node.shape else make("view", (product,), "float32", node.shape, ("reshape",))
    return product if node.dtype == "float32" else unrounded(product, node.dtype, mover)
