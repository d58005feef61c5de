"""Defines the rows of functions that make tensors or ask about them, and the tensor properties."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Node
from jitgen.spec import DTYPES, dtype_name
from jitgen.trace.guards import default_dtype
from jitgen.trace.indexing import cat, listed_numbers
from jitgen.trace.movement import listed, new_shape, to_shape
from jitgen.trace.numbers import SymbolicNumber, unwrap, wrap
from jitgen.trace.table import prop, row
from jitgen.trace.typing import (
    expand,
    filled,
    is_constant,
    operand,
    pointwise,
    require_own_device,
    require_range,
    require_scalar_tensor,
    result_dtype,
)

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace


# ------------------------------------------------------------------------------------------------------- factories


def _filled(trace: Trace, sizes: Any, value: Any, dtype: torch.dtype | None, device: Any = None) -> Node:
    require_own_device(trace, device)
    name = dtype_name(dtype or default_dtype())
    shape = new_shape(trace, (sizes,) if isinstance(sizes, (int, SymbolicNumber)) else sizes)
    require_range(trace, value, name)
    return filled(trace, number(trace, value, name), shape)


def number(trace: Trace, value: Any, dtype: str) -> Node:
    """Makes a 0-d tensor of ``dtype`` from a number, rounded to it as a tensor in memory would be: a float may be
    infinite."""
    if not DTYPES[dtype].is_floating_point:
        require_range(trace, value, dtype)
    if symbols.kind_of(unwrap(value)) != "float":
        return trace.cast(operand(trace, value, "int64"), dtype) if dtype != "bool" else operand(trace, value, dtype)
    return trace.cast(operand(trace, value, "float64"), dtype)


def _register_constant(value: int, *names: str) -> None:
    """Registers the functions that make a tensor of one number: of given sizes, and like another one."""

    @row(*names)
    def of_sizes(trace: Trace, *size: Any, dtype: Any = None, device: Any = None) -> Node:
        return _filled(trace, listed(size), value, dtype, device)

    @row(*(f"{name}_like" for name in names))
    def like(trace: Trace, input: Node, *, dtype: Any = None, device: Any = None) -> Node:
        return _filled(trace, input.shape, value, dtype or DTYPES[input.dtype], device)

    @row(*(f"new_{name}" for name in names))
    def new(trace: Trace, input: Node, *size: Any, dtype: Any = None, device: Any = None) -> Node:
        return _filled(trace, listed(size), value, dtype or DTYPES[input.dtype], device)


_register_constant(0, "zeros", "empty")
_register_constant(1, "ones")


@row("full")
def full(trace: Trace, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Node:
    return _filled(trace, size, fill_value, dtype or DTYPES[result_dtype(fill_value)], device)


@row("full_like")
def full_like(trace: Trace, input: Node, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Node:
    return _filled(trace, input.shape, fill_value, dtype or DTYPES[input.dtype], device)


@row("new_full")
def new_full(trace: Trace, input: Node, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Node:
    return _filled(trace, size, fill_value, dtype or DTYPES[input.dtype], device)


@row("scalar_tensor")
def scalar_tensor(trace: Trace, s: Any, *, dtype: Any = None, device: Any = None) -> Node:
    name = dtype_name(dtype or default_dtype())
    require_scalar_tensor(trace, s, name)
    return number(trace, s, name)


@row("tensor")
def tensor(trace: Trace, data: Any, *, dtype: Any = None, device: Any = None) -> Node:
    if isinstance(data, Node):
        return trace.cast(data, dtype_name(dtype)) if dtype else data
    if not isinstance(data, (list, tuple)):
        return number(trace, data, dtype_name(dtype) if dtype else result_dtype(data))
    numbers, shape = listed_numbers(data)
    name = dtype_name(dtype) if dtype else result_dtype(*numbers) if numbers else dtype_name(default_dtype())
    ones = [filled(trace, number(trace, value, name), (1,)) for value in numbers]
    return to_shape(trace, cat(trace, ones), shape) if ones else filled(trace, number(trace, 0, name), shape)


@row("as_tensor", "asarray", itself=True)
def as_tensor(trace: Trace, data: Any, dtype: Any = None, device: Any = None) -> Node:
    return tensor(trace, data, dtype=dtype, device=device)


@row("arange")
def arange(
    trace: Trace, *bounds: Any, start: Any = 0, end: Any = None, step: Any = 1, dtype: Any = None, device: Any = None
) -> Node:
    """Computes start + step * index. With integers and a step of 1 the length may be symbolic; otherwise it is
    guarded."""
    if len(bounds) == 1 and end is None:
        bounds = (start, *bounds)
    start, end, step = (*bounds, *(start, end, step)[len(bounds) :])
    floating = any(symbols.kind_of(unwrap(bound)) == "float" for bound in (start, end, step))
    if floating and dtype is torch.int64:  # torch counts elements of other integers by the fractions
        start, end, step, floating = int(start), int(end), int(step), False
    if step == 0 or (end < start if step > 0 else end > start):
        raise ValueError(f"arange: {end} is not reached from {start} in steps of {step}")
    if floating:
        length: Any = max(0, -int((float(start) - float(end)) // float(step)))
    elif isinstance(step, SymbolicNumber) or step != 1:
        length = max(0, -(-(int(end) - int(start)) // int(step)))
    else:
        length = symbols.sub(unwrap(end), unwrap(start))
    index = trace.make("iota", (), "int64", (length,), (0,))
    if floating and dtype is not None and not dtype.is_floating_point:
        start, step, floating = int(start), int(step), False
    default = default_dtype() if floating else torch.int64
    name = dtype_name(dtype or default)
    if name == "bool" or name.startswith("float8"):
        raise TypeError(f"arange of {name} is not defined, in torch neither; convert the result with .to()")
    for bound in filter(is_constant, (start, end, step)):
        require_range(trace, bound, compute_dtype(name) if DTYPES[name].is_floating_point else "int64")
    value = index
    if unwrap(step) != 1 or floating:
        value = pointwise(trace, "mul", value, step, dtype="float64" if floating else "int64")
    if unwrap(start) != 0:
        value = pointwise(trace, "add", value, start)
    return trace.cast(expand(trace, value, (length,)), name)


# ------------------------------------------------------------------------------------- what is known of a tensor


def _shape(trace: Trace, node: Node) -> torch.Size:
    """Returns the shape as a ``torch.Size``, which takes symbolic sizes for torch's own."""
    return torch.Size([wrap(size, trace.guards) for size in node.shape])


def _bytes(node: Node) -> Any:
    return symbols.mul(symbols.product(node.shape), DTYPES[node.dtype].itemsize)


prop("shape")(_shape)
prop("dtype")(lambda trace, node: DTYPES[node.dtype])
prop("device")(lambda trace, node: trace.device)
prop("ndim")(lambda trace, node: len(node.shape))
prop("is_cuda")(lambda trace, node: trace.device.type == "cuda")
prop("is_cpu")(lambda trace, node: trace.device.type == "cpu")
prop("is_quantized", "is_sparse", "is_nested", "is_meta", "is_mps", "is_xpu")(lambda trace, node: False)
prop("layout")(lambda trace, node: torch.strided)
prop("itemsize")(lambda trace, node: DTYPES[node.dtype].itemsize)
prop("nbytes")(lambda trace, node: wrap(_bytes(node), trace.guards))
prop("data")(lambda trace, node: trace.detached(node))
prop("real")(lambda trace, node: node)


@row("size", weights=True)
def size(trace: Trace, input: Node, dim: int | None = None) -> Any:
    return _shape(trace, input) if dim is None else wrap(input.shape[operator.index(dim)], trace.guards)


row("dim", "ndimension", weights=True)(lambda trace, input: len(input.shape))
row("numel", "nelement", weights=True)(lambda trace, input: wrap(symbols.product(input.shape), trace.guards))
row("element_size", weights=True)(lambda trace, input: DTYPES[input.dtype].itemsize)
row("is_floating_point", weights=True)(lambda trace, input: DTYPES[input.dtype].is_floating_point)
row("is_complex", "is_conj", "is_neg", weights=True)(lambda trace, input: False)
row("is_signed", weights=True)(lambda trace, input: input.dtype not in ("uint8", "bool"))
row("get_device", weights=True)(lambda trace, input: -1 if trace.device.index is None else trace.device.index)
row("is_tensor")(lambda trace, obj: isinstance(obj, Node))
row("result_type")(lambda trace, tensor, other: DTYPES[result_dtype(tensor, other)])
row("promote_types")(lambda trace, type1, type2: torch.promote_types(type1, type2))
row("torch.device")(lambda trace, type, index=None: torch.device(type) if index is None else torch.device(type, index))


@row("is_grad_enabled", "is_autocast_enabled", "is_inference_mode_enabled", "get_default_dtype")
def not_a_tensor_function(trace: Trace, *arguments: Any) -> Any:
    raise UnsupportedError("this query of torch's state is not supported in a decorated function; make it outside")
