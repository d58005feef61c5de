"""Decides which caller-owned outputs (``out=``) a plan accepts, and which of them its kernels write directly.

The results of a call with ``out=`` are those of the call without it. So where an output shares memory with a tensor
that the kernels still read, be it an argument or a captured tensor, the results are computed in memory of their own and
then copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen.errors import UnsupportedError
from jitgen.lowering import Lowered
from jitgen.runtime import overlap
from jitgen.runtime.guards import TensorFacts
from jitgen.trace.readable import why_unreadable


def outputs_of(out: Any) -> list[torch.Tensor]:
    """Returns ``out=`` as a list; empty for None.

    Raises:
        TypeError: it is neither a tensor nor a sequence of tensors.
        UnsupportedError: a tensor is nested.
    """
    outputs = [] if out is None else [out] if isinstance(out, torch.Tensor) else list(out)
    for tensor in outputs:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"out= is a tensor, or a tuple of tensors, not {type(tensor).__name__}")
        if tensor.is_nested:
            raise UnsupportedError("out= is a nested tensor; only strided ones are supported")
    return outputs


Described = tuple[tuple[int, ...], str]
"""The sizes of a result and its dtype, such as ``"float32"``."""


def described_results(name: str, lowered: Lowered) -> list[Described] | None:
    """Describes the results of ``lowered``, a call without ``out=``; None if its kernels cannot write to ``out``,
    because a result is a view of other memory or two results are the same memory.

    Raises:
        UnsupportedError: the function updates an argument.
    """
    program = lowered.program
    if program.mutated:
        raise UnsupportedError(
            f"{name}: out= with a function that updates an argument is not supported; call it without"
        )
    if list(program.outputs) != list(range(len(program.outputs))):
        return None
    first = len(program.inputs) + len(program.temporaries)
    sizes = [memory.view.sizes for memory in lowered.memories[first : first + len(program.outputs)]]
    return list(zip(sizes, (result.dtype for result in program.results), strict=False))


def check_outputs(name: str, described: Sequence[Described], device: torch.device, out: Sequence[torch.Tensor]) -> None:
    """Checks that ``out`` can receive results.

    Raises:
        ValueError: another number of tensors, shape, dtype or device; elements that share memory; a gradient required.
        UnsupportedError: a tensor without memory.
    """
    if len(described) != len(out):
        raise ValueError(f"{name} returns {len(described)} tensors; out= has {len(out)}")
    for tensor, (sizes, dtype) in zip(out, described, strict=True):
        if tuple(tensor.shape) != sizes or str(tensor.dtype) != f"torch.{dtype}" or tensor.device != device:
            raise ValueError(
                f"out= of {name} is {TensorFacts.from_tensor(tensor)}; the result is torch.{dtype} {sizes} on {device}"
                ". Pass such a tensor"
            )
        if overlap.is_repeated(tensor.shape, tensor.stride()):
            raise ValueError(
                f"out= of {name} has sizes {tuple(tensor.shape)} and strides {tensor.stride()}, so that several of its "
                "elements share memory; pass a tensor without repeated elements"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"out= of {name} requires grad; detach it")
        if (unreadable := why_unreadable(tensor)) is not None:
            raise UnsupportedError(f"out= of {name}: {unreadable}")


def check_distinct(name: str, out: Sequence[torch.Tensor]) -> None:
    """Checks that no two outputs share memory.

    Raises:
        ValueError: two of them do: one result would overwrite the other.
    """
    for left, right in itertools.combinations(out, 2):
        if overlap.share(left, right):
            raise ValueError(f"two tensors of out= of {name} share memory; pass memory of its own for each result")


def may_be_written(
    out: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], read_elsewhere: Sequence[frozenset[int]]
) -> bool:
    """Returns whether kernels may write to ``out`` while they read ``inputs``: memory may be shared only if each
    element is the same element of both, and is read before it is written.

    Args:
        inputs: arguments and captured tensors, in the order of the program's inputs.
        read_elsewhere: for each output the inputs for which that does not hold (``families/aliasing.py``).
    """
    return not any(
        overlap.share(tensor, input_) and (index in read or not overlap.is_same(tensor, input_))
        for tensor, read in zip(out, read_elsewhere, strict=True)
        for index, input_ in enumerate(inputs)
    )


def copy_results(name: str, results: Any, device: torch.device, out: Sequence[torch.Tensor]) -> None:
    """Copies what a call without ``out=`` returned to ``out``, which was checked."""
    tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    check_outputs(name, [(tuple(tensor.shape), str(tensor.dtype)[6:]) for tensor in tensors], device, out)
    copied = [tensor.clone() if any(overlap.share(tensor, target) for target in out) else tensor for tensor in tensors]
    for target, tensor in zip(out, copied, strict=True):
        target.copy_(tensor)
