"""The sample calls of torch's operators: which there are, and a seeded choice of them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

SAMPLES = 16
"""Samples of one operator and dtype at most: a few operators have more than a thousand, of one kind."""

VARIANTS = ("function", "method", "inplace")
FALLBACKS = (torch.int64, torch.bool, torch.float64, torch.complex64)
"""Dtypes for operators that float32 is not defined for, in this order."""


@dataclass(frozen=True)
class Sample:
    """One call of an operator.

    Attributes:
        operator: torch's name for it, and its variant in ``op_db`` after a dot.
        label: which sample it is: variant, dtype and number.
        function: what is called.
        leaves, tree: ``(args, kwargs)``, flattened.
        symbolic: whether numbers are arguments of the decorated function; otherwise they stand in it as constants.
    """

    operator: str
    label: str
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    symbolic: bool

    def arguments(self) -> list[Any]:
        """Copies of the leaves that vary from call to call."""
        return [_copied(self.leaves[position]) for position in self._varying()]

    def callable(self) -> Callable[..., Any]:
        """A function of ``arguments()``."""
        varying, function, tree = self._varying(), self.function, self.tree
        constants = [None if position in varying else leaf for position, leaf in enumerate(self.leaves)]

        def call(*values: Any) -> Any:
            leaves = list(constants)
            for position, value in zip(varying, values, strict=True):
                leaves[position] = value
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            return function(*args, **kwargs)

        return call

    def on(self, device: str) -> Sample:
        """The call of tensors on ``device``."""

        def moved(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                return _copied(leaf, device)
            return torch.device(device) if isinstance(leaf, torch.device) or leaf == "cpu" else leaf

        return replace(self, leaves=tuple(map(moved, self.leaves)))

    def widened(self) -> Sample:
        """The call with float64 for every floating dtype that it names."""
        wide = [torch.float64 if _is_floating(leaf) else leaf for leaf in self.leaves]
        return replace(self, leaves=tuple(wide))

    def _varying(self) -> tuple[int, ...]:
        numbers = (int, float) if self.symbolic else ()
        return tuple(
            position
            for position, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) or (isinstance(leaf, numbers) and not isinstance(leaf, bool))
        )

    def __str__(self) -> str:
        return f"{self.operator} [{self.label}]"


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.dtype) and leaf.is_floating_point


def _copied(value: Any, device: str | None = None) -> Any:
    """A copy with the same strides, on ``device`` if that is given; an expanded tensor stays one."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    storage = value.untyped_storage().clone() if device is None else value.untyped_storage().to(device=device)
    copy = torch.empty(0, dtype=value.dtype, device=storage.device)
    copy.set_(storage, value.storage_offset(), value.shape, value.stride())
    return copy.conj() if value.is_conj() else torch._neg_view(copy) if value.is_neg() else copy


@cache
def operators() -> dict[str, Any]:
    """torch's descriptions of its operators (``OpInfo``), by name."""
    # The import forbids the whole process to set flags of torch.backends, which other tests do.
    with warnings.catch_warnings(), torch.backends.__allow_nonbracketed_mutation():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as invocations
        from torch.testing._internal import common_utils
        from torch.testing._internal.opinfo import core
    invocations.wrapper_set_seed = _unseeded
    # Each sample looks for a unittest.TestCase among all frames of the stack, in 0.1 s.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    return {_name(op): op for op in invocations.op_db}


def _unseeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of torch's wrapper of random operators, with which every call gives the same numbers."""
    return _called(function)(*args, **kwargs)


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as a user calls it: ``torch.Tensor.add`` as a method of its first argument."""
    if type(function).__name__ not in ("method_descriptor", "wrapper_descriptor"):
        return function
    name = function.__name__
    return lambda input, *args, **kwargs: getattr(input, name)(*args, **kwargs)


def main_dtype(op: Any) -> torch.dtype | None:
    """float32 where the operator has it, else the first of ``FALLBACKS`` that it has."""
    supported = op.supported_dtypes("cpu")
    return next((dtype for dtype in (torch.float32, *FALLBACKS) if dtype in supported), None)


def dtypes(name: str) -> list[torch.dtype]:
    """Every dtype that an operator has on a CPU, but complex ones."""
    return sorted((each for each in operators()[name].supported_dtypes("cpu") if not each.is_complex), key=str)


def samples(
    name: str,
    dtype: torch.dtype | None = None,
    variants: Sequence[str] = ("function",),
    count: int = SAMPLES,
    seed: int = 0,
) -> Iterator[Sample]:
    """``count`` samples of each variant of an operator at most; the same ones for equal arguments.

    Args:
        dtype: that of the samples, where the operator has it; None for its main one.
    """
    op = operators()[name]
    dtype = main_dtype(op) if dtype is None else dtype if dtype in op.supported_dtypes("cpu") else None
    if dtype is None:
        return
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = list(op.sample_inputs("cpu", dtype))
        except (IndexError, RuntimeError):  # samples for a GPU's libraries only
            return
    generator = random.Random(f"{seed} {name} {dtype}")
    chosen = sorted(generator.sample(range(len(found)), min(count, len(found))))
    for variant in variants:
        function = {"function": op.op, "method": op.method_variant, "inplace": op.inplace_variant}[variant]
        for number in chosen if function is not None else ():
            given = found[number]
            if variant == "inplace" and given.broadcasts_input:
                continue
            leaves, tree = pytree.tree_flatten(((given.input, *given.args), given.kwargs))
            leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            label = f"{variant} {str(dtype).removeprefix('torch.')} {number}"
            yield Sample(name, label, _called(function), tuple(leaves), tree, symbolic=bool(number % 2))
