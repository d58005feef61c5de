"""Caller-owned outputs (``out=``): which a plan accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.lowering import Lowered
from jitgen.runtime.guards import TensorFacts
from jitgen.trace.readable import why_unreadable


def outputs_of(out: Any) -> list[torch.Tensor]:
    """``out=`` as a list; empty for None.

    Raises:
        TypeError: it is neither a tensor nor a sequence of tensors.
    """
    outputs = [] if out is None else [out] if isinstance(out, torch.Tensor) else list(out)
    for tensor in outputs:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"out= is a tensor, or a tuple of tensors, not {type(tensor).__name__}")
    return outputs


def check_outputs(name: str, lowered: Lowered, device: torch.device, out: Sequence[torch.Tensor]) -> None:
    """Check that ``out`` can receive the results of ``lowered``, a call without ``out=``.

    Raises:
        ValueError: another number of tensors, shape, dtype or device; elements that share memory; a gradient required.
        UnsupportedError: the function returns views of its arguments or updates one.
    """
    program = lowered.program
    if any(not isinstance(output, int) for output in program.outputs) or program.mutated:
        raise UnsupportedError(
            f"{name}: out= with a function that returns a view of an argument or updates one is not supported"
        )
    if list(program.outputs) != list(range(len(out))):
        raise ValueError(f"{name} returns {len(program.outputs)} tensors; out= has {len(out)}")
    first = len(program.inputs) + len(program.temporaries)
    for position, tensor in enumerate(out):
        sizes = lowered.memories[first + position].view.sizes
        dtype = program.results[position].dtype
        if tuple(tensor.shape) != sizes or str(tensor.dtype) != f"torch.{dtype}" or tensor.device != device:
            raise ValueError(
                f"out= of {name} is {TensorFacts.of(tensor)}; the result is torch.{dtype} {sizes} on {device}. "
                "Pass such a tensor"
            )
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"out= of {name} is an expanded tensor: several of its elements share memory")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"out= of {name} requires grad; detach it")
        if (unreadable := why_unreadable(tensor)) is not None:
            raise UnsupportedError(f"out= of {name}: {unreadable}")


def check_memory(
    name: str,
    out: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    read_while_written: Sequence[frozenset[int]],
) -> None:
    """Check that no output is written where an element is still to be read.

    Args:
        read_while_written: for each output the inputs that kernels still read when elements of it are written.

    Raises:
        ValueError: an output overlaps another tensor in part, or is such an input.
    """
    for tensor in out:
        if any(_overlaps_in_part(tensor, other) for other in [*inputs, *(o for o in out if o is not tensor)]):
            raise ValueError(
                f"out= of {name} overlaps another tensor in part: "
                "elements would be read after they were written; pass memory of its own"
            )
    for tensor, read in zip(out, read_while_written, strict=True):
        index = next((i for i in sorted(read) if i < len(inputs) and _share_memory(tensor, inputs[i])), None)
        if index is not None:
            raise ValueError(
                f"out= of {name} lies where its input {index} does, which a matrix product or a "
                "later kernel still reads once the result is being written; pass memory of its own"
            )


def _overlaps_in_part(written: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two share memory and are not the same elements, each of which is read before it is written."""
    alike = written.stride() == other.stride() and written.shape == other.shape and written.dtype == other.dtype
    return not (alike and written.data_ptr() == other.data_ptr()) and _share_memory(written, other)


def _share_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    left_address, right_address = left.data_ptr(), right.data_ptr()
    return (
        left_address < right_address + TensorFacts.of(right).extent
        and right_address < left_address + TensorFacts.of(left).extent
    )
