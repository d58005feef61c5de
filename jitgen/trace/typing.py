"""Applies torch's rules for result dtypes and shapes (promotion, broadcasting) to nodes and numbers.

Every row builds on ``pointwise`` or on ``operand`` and ``expand`` here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import NumberRangeError, UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Node, Shape
from jitgen.ir.ops import OPS
from jitgen.ir.symbols import Expr
from jitgen.quant.codes import FLOAT8
from jitgen.spec import DTYPES, dtype_name
from jitgen.trace.guards import default_dtype
from jitgen.trace.numbers import SymbolicNumber, unwrap

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

Value = Any
"""A ``Node`` or a number."""

STORAGE_ONLY = FLOAT8
"""Dtypes that torch has no arithmetic for: they are loaded, stored, moved and cast."""


def _wrapped(value: Any) -> torch.dtype:
    """Returns the dtype that a Python number has in torch's promotion."""
    kind = symbols.kind_of(unwrap(value))
    if kind == "float":
        return torch.get_default_dtype()
    if kind in ("bool", "int"):
        return torch.bool if kind == "bool" else torch.int64
    raise TypeError(f"expected a tensor or a number, got {type(value).__name__}")


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.is_floating_point or not (higher == torch.bool or lower.is_floating_point):
        return higher
    return torch.promote_types(higher, lower)


def result_dtype(*values: Any) -> str:
    """Returns the dtype of an operation on tensors and numbers, as ATen's ``result_type`` computes it.

    Tensors with dimensions have precedence over 0-d tensors, and these over numbers. A class of lower precedence
    affects the result only where its kind (bool, integer, floating) is higher.
    """
    classes: list[torch.dtype | None] = [None, None, None]
    for value in values:
        if isinstance(value, Node):
            rank, dtype = (0 if value.shape else 1), DTYPES[value.dtype]
        else:
            rank, dtype = 2, _wrapped(value)
        previous = classes[rank]
        classes[rank] = dtype if previous is None else torch.promote_types(previous, dtype)
    tensors = _combine(classes[0], classes[1])
    result = _combine(tensors, classes[2])
    assert result is not None
    if classes[2] is not None and classes[2].is_floating_point and not (tensors and tensors.is_floating_point):
        result = default_dtype()
    return dtype_name(result)


def float_dtype(dtype: str) -> str:
    """Returns ``dtype`` where it is floating, else torch's default dtype."""
    return dtype if DTYPES[dtype].is_floating_point else dtype_name(default_dtype())


def broadcast_shapes(trace: Trace, *shapes: Shape) -> Shape:
    """Returns the broadcast shape. Where sizes must be equal and their expressions do not prove it, that becomes a
    guard."""
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Any] = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            result[dim] = _broadcast_size(trace, result[dim], size, shapes)
    return tuple(result)


def _broadcast_size(trace: Trace, left: Any, right: Any, shapes: Sequence[Shape]) -> Any:
    if left == right or right == 1:
        return left
    if left == 1:
        return right
    here = trace.guards.hint(left), trace.guards.hint(right)
    if here[0] == here[1]:
        trace.guards.equal(left, right)
        return left if not isinstance(left, Expr) else right if not isinstance(right, Expr) else left
    if here[1] == 1:
        trace.guards.value(right)
        return left
    if here[0] == 1:
        trace.guards.value(left)
        return right
    concrete = [tuple(map(trace.guards.hint, shape)) for shape in shapes]
    raise ValueError(f"shapes {' and '.join(map(str, concrete))} do not broadcast: {here[0]} is not {here[1]}")


def expand(trace: Trace, node: Node, shape: Shape) -> Node:
    """Broadcasts ``node`` to ``shape``. Sizes that a guard makes equal become the expressions in ``shape``.

    What is repeated has the size 1 itself and no expression that a guard makes 1, as the size of ``x[1:]`` of two rows:
    gradients are summed along the sizes of 1, and views are moved through them.
    """
    if node.kind.is_number or node.shape == shape:
        return node
    for dim, wanted in enumerate(shape[len(shape) - len(node.shape) :]):
        if node.shape[dim] != 1 and trace.guards.hint(node.shape[dim]) == 1 != trace.guards.hint(wanted):
            ones = (*node.shape[:dim], 1, *node.shape[dim + 1 :])
            node = trace.make("view", (node,), node.dtype, ones, ("slice", dim, 0, 1))
    for _ in range(len(shape) - len(node.shape)):
        node = trace.make("view", (node,), node.dtype, (1, *node.shape), ("unsqueeze", 0))
    return node if node.shape == shape else trace.make("view", (node,), node.dtype, shape, ("expand",))


def filled(trace: Trace, node: Node, shape: Shape) -> Node:
    """Makes a tensor of ``shape``, every element of which is the 0-d ``node``. A number becomes a view too."""
    if node.kind.is_number:
        return trace.make("view", (node,), node.dtype, shape, ("expand",)) if shape else node
    return expand(trace, node, shape)


def operand(trace: Trace, value: Any, dtype: str) -> Node:
    """Converts a tensor or number to an operand of an operation in ``dtype``."""
    if isinstance(value, Node):
        if value.dtype in STORAGE_ONLY and dtype in STORAGE_ONLY:
            raise UnsupportedError(f"no arithmetic on {value.dtype}, as in torch; convert it first, with .float() say")
        return trace.cast(value, dtype)
    value = unwrap(value)
    if isinstance(value, Expr):
        if value.kind == "float" and not DTYPES[dtype].is_floating_point:
            return trace.cast(trace.builder.scalar(value, "float64"), dtype)
        if value.kind == "float" or not DTYPES[dtype].is_floating_point:
            return trace.builder.scalar(value, dtype)
        return trace.builder.scalar(symbols.mul(value, 1.0), dtype)
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"expected a tensor or a number, got {type(value).__name__}")
    if DTYPES[dtype].is_floating_point:
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ValueError(f"{value} is beyond what torch takes as an integer; make it a float")
        value = float(value)
    else:
        value = rounded(value, dtype)
    return trace.builder.const(value, dtype)


def element(trace: Trace, value: Any, dtype: str) -> Node:
    """Converts a tensor or number to elements of a ``dtype`` tensor; a number must be within the range."""
    if isinstance(value, Node) and value.dtype == dtype:
        return value  # of any dtype: it is stored, and nothing is computed of it
    require_range(trace, value, dtype)
    return as_stored(trace, value, dtype)


def require_range(trace: Trace, value: Any, dtype: str) -> None:
    """Refuses a number beyond the range of ``dtype``, as torch does wherever it converts one: as elements, bounds, and
    factors (``alpha``). Operands of arithmetic and comparisons are the exception; these wrap, in torch too."""
    if is_number(value) and not _fits(trace, unwrap(value), dtype):
        raise NumberRangeError(
            f"{trace.guards.hint(unwrap(value))} is beyond the range of {dtype}, as in torch; give a number within it, "
            "or a tensor of a wider dtype"
        )


def require_computable(trace: Trace, value: Any, dtype: str) -> None:
    """Refuses a number beyond the range of the dtype in which torch computes ``dtype``."""
    require_range(trace, value, compute_dtype(dtype))


def require_scalar_tensor(trace: Trace, value: Any, dtype: str) -> None:
    """Refuses a number beyond the range of a ``dtype`` tensor that torch makes of it; one of 16 bits may become
    infinite."""
    if dtype not in ("float16", "bfloat16"):
        require_range(trace, value, dtype)


def _fits(trace: Trace, value: Any, dtype: str) -> bool:
    """Returns whether ``dtype`` has a number that ``value`` is rounded to; for a symbolic one the answer becomes a
    guard."""
    if dtype == "bool":
        return True
    floating = DTYPES[dtype].is_floating_point
    info: Any = torch.finfo(DTYPES[dtype]) if floating else torch.iinfo(DTYPES[dtype])
    # A negative integer wraps in an unsigned dtype.
    least = info.min if info.min or symbols.kind_of(value) == "float" else -info.max
    number = trace.guards.hint(value)
    if number == number and abs(number) != math.inf:
        inside = (symbols.compare("ge", value, least), symbols.compare("le", value, info.max))
        return all(map(trace.guards.decide, inside))
    trace.guards.value(value)
    return floating and (dtype != "float8_e4m3fn" or number != number)


def pointwise(trace: Trace, op: str, *values: Any, dtype: str | None = None, result: str | None = None) -> Node:
    """Applies ``op`` to broadcast operands of ``dtype`` (torch's promotion if None), giving ``result`` (``dtype`` if
    None)."""
    dtype = dtype or result_dtype(*values)
    if dtype in STORAGE_ONLY:
        raise UnsupportedError(f"no arithmetic on {dtype}, as in torch; convert it first, with .float() say")
    if compute_dtype(dtype) not in OPS[op].domain:
        raise TypeError(f"not defined for {dtype} tensors")
    shape = broadcast_shapes(trace, *(value.shape for value in values if isinstance(value, Node)))
    operands = [expand(trace, operand(trace, value, dtype), shape) for value in values]
    return trace.make(op, operands, result or dtype, shape)


def compare(trace: Trace, op: str, left: Any, right: Any) -> Node:
    """Compares broadcast operands by ``op``, in torch's promotion of their dtypes; a bool."""
    return pointwise(trace, op, left, right, result="bool")


def rounded(value: bool | int | float, dtype: str) -> bool | int | float:
    """Returns the number that a ``dtype`` element has after ``value`` is stored in it: rounded, or wrapped.

    Raises:
        ValueError: ``value`` is an integer beyond int64 and uint64.
    """
    if not isinstance(value, float) and not -(2**63) <= value < 2**63:
        if not 0 <= value < 2**64:
            raise ValueError(f"{value} is beyond what torch takes as an integer; make it a float")
        value -= 2**64
    exact = torch.float64 if isinstance(value, float) else torch.int64
    return torch.tensor(value, dtype=exact).to(DTYPES[dtype]).item()


def is_constant(value: Any) -> bool:
    """Returns whether ``value`` is a number that is the same in every call, and not a symbolic one."""
    return isinstance(value, (bool, int, float)) and not isinstance(value, SymbolicNumber)


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, SymbolicNumber))


def is_float(node: Node) -> bool:
    return DTYPES[node.dtype].is_floating_point


def as_node(trace: Trace, value: Value) -> Node:
    """Converts ``value`` to a node; a number becomes the 0-d tensor that torch converts it to."""
    return value if isinstance(value, Node) else operand(trace, value, result_dtype(value))


def as_stored(trace: Trace, value: Value, dtype: str) -> Node:
    """Converts a tensor to an operand of ``dtype``, and rounds a number to it, where torch makes an element of it
    first: in comparisons (so bfloat16(0.1) == 0.1), remainders, and what sets elements."""
    if isinstance(value, Node) and value.dtype == dtype:
        return value
    if isinstance(value, Node) or not DTYPES[dtype].is_floating_point:
        return operand(trace, value, dtype)
    return trace.cast(operand(trace, value, "float64"), dtype)


def readable(trace: Trace, node: Node) -> Node:
    """Returns ``node`` itself, or the numbers of a float8, on which there is no arithmetic, in float32: for the few
    functions that torch defines for float8 too."""
    return trace.cast(node, "float32") if node.dtype in STORAGE_ONLY else node


def one_dtype(*values: Any) -> None:
    """Refuses tensors of different dtypes, for a function that does not promote; other values are passed over."""
    dtypes = dict.fromkeys(value.dtype for value in values if isinstance(value, Node))
    if len(dtypes) > 1:
        raise TypeError(f"the tensors must have one dtype, as in torch; they are {' and '.join(dtypes)}")


def require_float(dtype: str) -> None:
    """Refuses a dtype that is not floating, as torch does."""
    if not DTYPES[dtype].is_floating_point:
        raise TypeError(f"not defined for {dtype} tensors")


def require_own_device(trace: Trace, device: Any) -> None:
    """Refuses a device, where one is named, that is not that of the function's arguments."""
    if device is not None and torch.device(device).type != trace.device.type:
        raise UnsupportedError(
            f"a tensor on {device} in a function whose arguments are on {trace.device}; write device=x.device "
            "of an argument x"
        )


def require_shape(trace: Trace, node: Node, shape: Shape, what: str) -> None:
    """Refuses a tensor of another shape, where torch does not broadcast; that the sizes agree becomes a guard."""
    here, wanted = (tuple(map(trace.guards.hint, sizes)) for sizes in (node.shape, shape))
    if here != wanted:
        raise ValueError(f"{what} has shape {here}, expected {wanted}")
    for size, other in zip(node.shape, shape, strict=True):
        trace.guards.equal(size, other)


def floats_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the row of a function that torch defines for floating-point tensors only."""

    @functools.wraps(function)
    def checked(trace: Trace, input: Node, *arguments: Any, **keywords: Any) -> Any:
        require_float(input.dtype)
        return function(trace, input, *arguments, **keywords)

    return checked


def not_bool(input: Node) -> None:
    if input.dtype == "bool":
        raise TypeError("not defined for bool tensors")
