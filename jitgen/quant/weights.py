"""Quantised weights among the arguments of a call are unpacked into plain tensors, in the layout that kernels read.

The rest of jitgen meets a ``QTensor`` as a node of the argument tree (``Stored``): its tensors are leaves like
all others, and its token (format, group size, layout, shape) belongs to the structure of the tree and thereby to the
signature. A weight in the portable layout is converted in place when a function first takes it, so that memory holds it
once, in the layout of that function's backend. A weight that two backends share has a copy in the layout of each.

Nothing here imports ``QTensor`` before a program has made one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils import _pytree as pytree

from jitgen.errors import FormatError, UnsupportedError
from jitgen.ir.views import ROW_TILE
from jitgen.spec import TensorSpec, dtype_name

if TYPE_CHECKING:
    from jitgen.quant.layouts import Tensors
    from jitgen.quant.qtensor import QTensor
    from jitgen.quant.storage import Stored
    from jitgen.quant.token import Token

LAYOUTS = {"cpp": "cpu", "cuda": "mma", "cutlass": "mma", "triton": "interleaved"}
"""The layout that the kernels of each backend read."""
ROWS_BESIDE = ("interleaved", "mma")
"""Layouts of backends that read the layout ``rows`` too, of weights whose products multiply codes by codes."""


@dataclass(frozen=True)
class Layouts:
    """Says in which layouts kernels read quantised weights; without a backend all are portable.

    Attributes:
        own: the backend's own layout, a value of ``LAYOUTS``.
        groups_by_codes: whether grouped products multiply codes by codes, and read the matrices of experts in ``rows``
            and ``blocks`` too.
    """

    own: str = "portable"
    groups_by_codes: bool = False


PORTABLE = Layouts()
CODE_COLUMNS = 16
"""K is a multiple of this many columns in the layout ``mma8``."""
SHORTEST_CODES = 64
"""The least number of columns in the layout ``mma8``: the only mainloop that reads it takes so many of K at a time."""


def exist() -> bool:
    """Returns whether this process may have made a quantised weight; if not, no argument needs to be looked at."""
    return "jitgen.quant.qtensor" in sys.modules


def is_quantized(value: Any) -> TypeGuard[QTensor]:
    """Returns whether ``value`` is a ``QTensor``."""
    kind = _class_of("jitgen.quant.qtensor", "QTensor")
    return kind is not None and isinstance(value, kind)


def is_unpacked(value: Any) -> bool:
    """Returns whether ``value`` is a quantised weight that ``unpack`` returned."""
    kind = _class_of("jitgen.quant.storage", "Stored")
    return kind is not None and isinstance(value, kind)


def _class_of(module: str, name: str) -> Any:
    """Returns a class of a module that may not be imported yet, or that another thread imports now; None while it is
    not."""
    return getattr(sys.modules.get(module), name, None)


def is_described(value: Any) -> bool:
    """Returns whether ``value`` is the spec of a quantised weight."""
    return isinstance(value, TensorSpec) and value.format is not None


def among(values: Any) -> bool:
    """Returns whether a structure of arguments contains a quantised weight or the spec of one."""
    return any(is_quantized(leaf) or is_described(leaf) for leaf in pytree.tree_leaves(values))


def tensor_positions(tree: Any) -> frozenset[int]:
    """Returns the indices of those leaves of an argument structure that are tensors of quantised weights.

    ``tree``: None if the arguments are a plain sequence, which contains no unpacked weights.
    """
    if tree is None:
        return frozenset()
    numbered = pytree.tree_unflatten(range(tree.num_leaves), tree)
    leaves = pytree.tree_leaves(numbered, is_leaf=is_unpacked)
    return frozenset(index for leaf in leaves if is_unpacked(leaf) for index in leaf.tensors)


def unpack(values: Any, layout_of: Callable[[Any], str], in_place: bool = True) -> Any:
    """Returns ``values`` with every quantised weight, and every spec of one, unpacked in the layout
    ``layout_of(weight)``.

    ``in_place``: whether a weight in the portable layout is itself converted. Otherwise a copy is, so that inspecting
    what would run leaves the weight unchanged.
    """

    def unpack_leaf(leaf: Any) -> Any:
        if is_quantized(leaf):
            weight: Any = leaf if in_place else leaf.detach()
            return unpack_weight(weight, layout_of(leaf))
        return _unpack_spec(leaf, layout_of(leaf)) if is_described(leaf) else leaf

    return pytree.tree_map(unpack_leaf, values)


def unpack_weight(weight: QTensor, layout: str) -> Stored:
    """Returns ``weight`` unpacked in ``layout``; a weight in the portable layout is itself converted to ``layout``."""
    _check_experts(weight.token)
    if weight.token.layout == "portable" != layout:
        weight.relayout_(layout)
    return weight.stored_in(layout)


def _check_experts(token: Token) -> None:
    """Raises UnsupportedError for matrices in one weight that kernels cannot tell apart."""
    if token.experts and token.weight_shape[0] // token.experts % ROW_TILE:
        raise UnsupportedError(
            f"a weight of {token.experts} matrices of {token.weight_shape[0] // token.experts} rows in jitgen.jit: "
            f"kernels read blocks of {ROW_TILE} rows; pass weight[i], and loop outside"
        )


def layout_of(weight: QTensor | TensorSpec | Token, layouts: Layouts) -> str:
    """Returns the layout in which kernels that read ``layouts`` read ``weight``: their backend's own, or one that
    ``layout_for_codes`` names."""
    if weight.activation is None:
        return layouts.own
    token: Any = weight.token if is_quantized(weight) else weight
    shape = getattr(token, "weight_shape", token.shape)
    if 0 in shape:  # no mainloop of codes takes it
        return layouts.own
    described = token.format, token.group_size, shape[-1], token.activation
    return layout_for_codes(*described, layouts, of_groups=len(token.shape) > 2)


def layout_for_codes(
    format: str, group_size: int | None, columns: int, activation: str, layouts: Layouts, of_groups: bool = False
) -> str:
    """Returns the layout in which kernels read a matrix that multiplies quantised activations: their backend's own, or
    ``rows`` where they multiply 8-bit codes by the activation's and scale sums of whole rows. In CUDA it may be
    ``mma8``, of 4-bit codes that meet int8 activations, or ``blocks``, where weights and activations have scales of
    blocks. The matrices ``of_groups`` of 4-bit codes are in the backend's own layout."""
    layout = layouts.own
    if layout not in ROWS_BESIDE or (of_groups and not layouts.groups_by_codes):
        return layout
    from jitgen.quant.activations import kind_of
    from jitgen.quant.codes import CODES, longest_exact_sum
    from jitgen.quant.formats import find

    kind, row = kind_of(activation), find(format)
    has_codes = row.row == CODES[dtype_name(kind.dtype)].format and row.scale_dtype.is_floating_point
    if has_codes and kind.block and row.scale_rows == group_size == kind.block:
        return "blocks"
    if (
        not of_groups
        and layout == "mma"
        and kind.is_integer
        and kind.block is None
        and row.stored.tiled
        and row.bits == 4
    ):
        return "mma8" if columns % CODE_COLUMNS == 0 and columns >= SHORTEST_CODES else layout
    if group_size is not None:
        return layout
    exact = not kind.is_integer or columns <= longest_exact_sum("int8", "int8")
    return "rows" if has_codes and kind.block is None and exact else layout


def dense(
    tensors: Tensors, format: str, group_size: int | None, layout: str, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Returns the weight (N, K) that ``tensors`` in ``layout`` represent, as a plain tensor."""
    from jitgen.quant import formats, layouts
    from jitgen.quant.decode import decode

    row = formats.find(format)
    with torch.no_grad():
        portable = layouts.convert(tensors, layout, "portable", row, group_size, shape)
        return decode(row, group_size, shape, portable, dtype)


def converted(tensors: Tensors, token: Token, layout: str) -> Tensors:
    """Returns the tensors of the weight that ``token`` describes, in another layout."""
    from jitgen.quant import formats, layouts

    return layouts.convert(
        tensors, token.layout, layout, formats.find(token.format), token.group_size, token.weight_shape
    )


def _unpack_spec(spec: TensorSpec, layout: str) -> Stored:
    """Returns the specs of the tensors that a weight with the spec ``spec`` has in ``layout``."""
    from jitgen.quant.storage import Stored
    from jitgen.quant.token import intern

    if not all(isinstance(size, int) for size in spec.shape):
        raise FormatError(f"{spec}: the sizes of a quantised weight are numbers; only an activation's may be symbolic")
    assert spec.format is not None
    *experts, rows, columns = map(int, spec.shape)
    shape = (rows * max(math.prod(experts), 1), columns)
    tensors = described_tensors(spec.format, spec.group_size, shape, layout)
    facts = spec.format, spec.group_size, layout, shape, spec.dtype, torch.device("meta")
    token = intern(*facts, experts=experts[0] if experts else None, activation=spec.activation)
    _check_experts(token)
    return Stored(tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors), token)


def described_tensors(format: str, group_size: int | None, shape: tuple[int, int], layout: str) -> Tensors:
    """Returns the tensors of a weight of ``shape`` (N, K) in ``layout``, on the meta device: shapes and dtypes only."""
    from jitgen.quant import formats, layouts
    from jitgen.quant.layouts import portable

    row = formats.find(format)
    with torch._C.DisableTorchFunction():
        tensors = portable.empty(row, group_size, shape, "meta")
        return layouts.convert(tensors, "portable", layout, row, group_size, shape)
