"""Decides which arguments jitgen takes, and what of them is compared with earlier calls.

A leaf of the arguments is a tensor; a number, whose value a kernel takes at the launch; *static*: a value that the
trace has seen and that every later call must have again; or another *object*, which is followed and guarded as the
objects that a function closes over are. Three comparisons follow, from the widest to the narrowest: ``trace_key``
(which calls may share a trace), ``plan_key`` (which calls share a plan), and the layout checks of warm calls
(``runtime/guards.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.errors import RequiresGrad, UnsupportedError
from jitgen.ir.graph import Graph, size_one_pattern
from jitgen.ir.symbols import Expr
from jitgen.runtime.guards import TensorFacts
from jitgen.spec import dtype_name
from jitgen.trace.host_scalars import HOST_SCALARS, base, common_device, is_host_scalar
from jitgen.trace.readable import TENSORS, why_unreadable

NUMBERS = frozenset((int, float, *HOST_SCALARS.values()))
"""The types of numbers; a number of a subclass is an object."""
STATIC = (bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_object(kind: type) -> bool:
    """Returns whether an argument of this type is followed by the trace, as captured objects are
    (``trace/captures.py``): it is neither a tensor, nor a number, nor static."""
    return kind not in NUMBERS and not issubclass(kind, (torch.Tensor, *STATIC))


@dataclass(frozen=True, eq=False)
class Call:
    """Holds the arguments of one call, as everything that resolves it takes them.

    Attributes:
        leaves, tree: the arguments (``call/arguments.py``).
        tensors: those leaves.
        numbers: those leaves, as plain integers and floats.
        device: where its kernels run.
    """

    leaves: Sequence[Any]
    tree: Any
    tensors: Sequence[torch.Tensor]
    numbers: Sequence[Any]
    device: torch.device

    @classmethod
    def unchecked(cls, leaves: Sequence[Any], tree: Any, device: torch.device | None = None) -> Call:
        """Makes the call of these arguments without checks; ``device`` is that of its tensors by default."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        numbers = [base(type(leaf))(leaf) for leaf in leaves if type(leaf) in NUMBERS]
        device = device or (common_device(tensors) if tensors else torch.device("cpu"))
        return cls(leaves, tree, tensors, numbers, device)


def check(
    name: str, leaves: Sequence[Any], tree: Any = None, host_scalars: bool = False, gradients: bool = False
) -> Call:
    """Makes the call of these arguments, after all checks that need no trace. Every way to a launch that is new passes
    here once.

    Args:
        name: the function's, for messages.
        leaves, tree: the arguments (``call/arguments.py``).
        host_scalars: whether 0-d CPU tensors may be among CUDA tensors.
        gradients: whether the call computes gradients.

    Raises:
        UnsupportedError: tensors that cannot be arguments of one kernel; RequiresGrad where one requires grad.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            unreadable = why_unreadable(leaf)
            if unreadable is not None:
                raise UnsupportedError(f"{name}: {unreadable}")
        elif isinstance(leaf, torch.fx.Proxy):
            raise UnsupportedError(
                f"{name}: torch.fx.symbolic_trace follows no kernels; use torch.export.export or make_fx, or declare "
                "the function a leaf with torch.fx.wrap"
            )
    call = Call.unchecked(leaves, tree)
    for tensor in call.tensors:
        if tensor.device != call.device and not (host_scalars and is_host_scalar(tensor, call.device)):
            raise UnsupportedError(
                f"{name}: arguments on {call.device} and {tensor.device}; move them to one device, with .to(device)"
            )
        if tensor.requires_grad and torch.is_grad_enabled() and not gradients:
            raise RequiresGrad(
                f"{name}: an argument requires grad, and neither a plan nor a call with out= computes gradients; "
                "call the function itself, or this under torch.no_grad()"
            )
        dtype_name(tensor.dtype)
    if call.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{name}: tensors on {call.device}; jitgen runs on cpu and cuda")
    return call


def trace_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns what the calls of one trace have in common: dtypes, ranks, sizes of 1, types of numbers, static
    values."""
    return tuple(map(_trace_fact, leaves))


def _trace_fact(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, size_one_pattern(leaf.shape)
    if type(leaf) in NUMBERS:
        return type(leaf)
    return type(leaf), None if is_object(type(leaf)) else leaf


def plan_key(leaves: Sequence[Any], tree: Any, static_numbers: Collection[int]) -> tuple[Any, ...]:
    """Returns what the calls of one plan have in common; numbers are compared by value if the trace depends on one."""
    key = [tree]
    for leaf in leaves:
        kind = type(leaf)
        if kind in TENSORS:
            key.append(TensorFacts.from_tensor(leaf))
        elif kind in NUMBERS and static_numbers:
            key.append((kind, leaf.hex() if kind is float else leaf))
        else:
            key.append((kind, leaf) if kind in STATIC else kind)
    return tuple(key)


def same_trace_fact(spec: Any, tensor: Any) -> bool:
    """Returns whether a captured tensor still fits ``spec``, its input of the graph."""
    return (
        type(tensor) in TENSORS
        and not tensor.is_neg()
        and dtype_name(tensor.dtype) == spec.dtype
        and size_one_pattern(tensor.shape) == size_one_pattern(spec.shape)
    )


def sizes_of_one(graph: Graph, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Lists the size symbols of ``graph`` that are 1 in ``tensors``."""
    ones = [size_one_pattern(tensor.shape) for tensor in tensors]
    return tuple(
        f"s{index}_{dim}"
        for index, (spec, pattern) in enumerate(zip(graph.inputs, ones, strict=False))
        for dim, (size, is_one) in enumerate(zip(spec.shape, pattern, strict=False))
        if is_one and isinstance(size, Expr)
    )


def at_sizes_of_one(graph: Graph, tensors: Sequence[torch.Tensor]) -> Graph | None:
    """Rewrites ``graph`` for ``tensors`` whose symbolic sizes may be 1; None if a guard rules that out."""
    ones = sizes_of_one(graph, tensors)
    if not ones:
        return graph
    from jitgen.ir.fixed import with_sizes  # for programs that torch exported

    return with_sizes(graph, dict.fromkeys(ones, 1))


def size_symbols(tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """Returns a value for every size symbol (``ir/symbols.py``): ``s0_1`` is dimension 1 of tensor 0."""
    return {f"s{index}_{dim}": size for index, tensor in enumerate(tensors) for dim, size in enumerate(tensor.shape)}


def environment_of(tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> dict[str, Any]:
    """Returns a value for every symbol of a call."""
    return size_symbols(tensors) | number_symbols(numbers)


def number_symbols(numbers: Sequence[Any]) -> dict[str, Any]:
    """Returns a value for every symbol of a numeric argument: ``a0`` is the first."""
    return {f"a{index}": number for index, number in enumerate(numbers)}
