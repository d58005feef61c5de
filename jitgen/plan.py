"""``LaunchPlan``: one bound signature, without the look-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError

if TYPE_CHECKING:
    from jitgen.function import JitFunction


class LaunchPlan:
    """The launch plan of one signature: ``plan(*args, out=None)``.

    Arguments must have the shapes, strides, dtypes and device the plan was bound with; a tensor that differs is a
    ValueError, never a wrong launch. Numbers may differ where the trace did not need their value.
    """

    def __init__(
        self, function: JitFunction, leaves: Sequence[Any], tree: Any, out: torch.Tensor | Sequence[Any] | None = None
    ):
        self._function = function
        self._tree = tree
        self._leaves = tuple(leaves)
        self._tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._numbers = [i for i, leaf in enumerate(leaves) if type(leaf) in (int, float)]
        self._facts = [self._facts_of(leaves[index]) for index in self._tensors]
        self._entry: Any = None
        self._out_entries: dict[Any, Any] = {}
        if out is None:
            self._entry, _ = function._resolve(leaves, tree)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Keys of the compiled kernels this plan launches, in order."""
        entry = self._entry
        built = entry.specialization.kernels[entry.lowered.key]
        return tuple(kernel.artifact.key for kernel in built)

    def __call__(self, *leaves: Any, out: Any = None) -> Any:
        if len(leaves) != len(self._leaves):
            raise TypeError(f"this plan takes {len(self._leaves)} arguments, got {len(leaves)}")
        tensors = [leaves[index] for index in self._tensors]
        for position, (tensor, facts) in enumerate(zip(tensors, self._facts, strict=True)):
            shape, stride, dtype, device, mask, address = facts
            if (
                tensor.shape != shape
                or tensor.stride() != stride
                or tensor.dtype is not dtype
                or tensor.device != device
                or tensor.data_ptr() & mask != address
            ):
                self._refuse(position, tensor, facts)
        entry = self._entry if out is None else self._with_out(leaves, tensors, out)
        captured = entry.captured_tensors()
        if captured is None:
            entry, captured = self._function._resolve(leaves, self._tree, self._outputs(out))
        everything = [*tensors, *captured]
        numbers = [leaves[index] for index in self._numbers]
        given = [] if out is None else self._outputs(out)
        result = entry.launch(*everything, *[tensor.data_ptr() for tensor in everything], *numbers, *given)
        return out if out is not None else result

    @staticmethod
    def _facts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
        mask = 0 if tensor.device.type == "cpu" else 15
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, mask, tensor.data_ptr() & mask

    def _refuse(self, position: int, tensor: torch.Tensor, facts: tuple[Any, ...]) -> None:
        raise ValueError(
            f"tensor argument {position} of the plan of {self._function.name} is {tensor.dtype} {tuple(tensor.shape)} "
            f"with strides {tensor.stride()} on {tensor.device}; the plan was bound for {facts[2]} {tuple(facts[0])} "
            f"with strides {facts[1]} on {facts[3]}" + ("" if not facts[4] else " and the same alignment to 16 bytes")
            + ". Bind again for such arguments, or call the function itself"
        )

    @staticmethod
    def _outputs(out: Any) -> list[torch.Tensor]:
        return [] if out is None else [out] if isinstance(out, torch.Tensor) else list(out)

    def _with_out(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor], out: Any) -> Any:
        """The entry that writes into tensors laid out as ``out``, which must not overlap an input in part."""
        given = self._outputs(out)
        key = tuple(self._facts_of(tensor) for tensor in given)
        entry = self._out_entries.get(key)
        if entry is None:
            for tensor in given:
                if not isinstance(tensor, torch.Tensor):
                    raise TypeError(f"out is a tensor, or a tuple of tensors, not {type(tensor).__name__}")
            self._check_out(leaves, given)
            entry, _ = self._function._resolve(leaves, self._tree, given)
            self._out_entries[key] = entry
        for tensor in given:
            for source in tensors:
                if _overlaps_in_part(tensor, source):
                    raise ValueError(
                        f"out= of {self._function.name} overlaps an input in part: it would be read after it was written"
                    )
        return entry

    def _check_out(self, leaves: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
        entry = self._entry or self._function._resolve(leaves, self._tree)[0]
        program, lowered = entry.lowered.program, entry.lowered
        name = self._function.name
        if any(not isinstance(output, int) for output in program.outputs) or program.mutated:
            raise UnsupportedError(
                f"{name}: out= with a function that returns a view of an argument or updates one is not supported"
            )
        if list(program.outputs) != list(range(len(given))):
            raise ValueError(f"{name} returns {len(program.outputs)} tensors; out= has {len(given)}")
        first = len(program.inputs) + len(program.temporaries)
        device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
        for position, tensor in enumerate(given):
            sizes = lowered.memories[first + position].view.sizes
            dtype = program.results[position].dtype
            if tuple(tensor.shape) != sizes or str(tensor.dtype) != f"torch.{dtype}" or tensor.device != device:
                raise ValueError(
                    f"out= of {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; the result is "
                    f"torch.{dtype} {sizes} on {device}. Pass such a tensor"
                )
            if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ValueError(f"out= of {name} is an expanded tensor: several of its elements share memory")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"out= of {name} requires grad")


def _overlaps_in_part(written: torch.Tensor, read: torch.Tensor) -> bool:
    """Whether the two share memory without being laid out alike (an element updated in its own place is fine)."""
    start, other = written.data_ptr(), read.data_ptr()
    if start == other and written.stride() == read.stride() and written.shape == read.shape:
        return False
    return start < other + _extent(read) and other < start + _extent(written)


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
