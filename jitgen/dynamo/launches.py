"""Makes launches of users' Triton kernels in Dynamo's graphs calls of the kernels themselves.

Dynamo names a kernel, and those of its arguments that are no tensors or numbers, by numbers of a table of torch's,
which ``torch._dynamo.reset`` empties. A call here holds the kernel: so equal launches are known to be equal, and a
program may be imported again later. Where jitgen does not take it, torch launches the kernel as it would have.

Neighbours: ``trace/kernels/launches.py`` makes the nodes; ``updates.py`` asks what a launch writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from jitgen.errors import JitgenError
from jitgen.trace.importing import import_in_progress
from jitgen.trace.kernels.launches import launched, written_by

_OPERATOR = "triton_kernel_wrapper_mutation"


@dataclass(frozen=True)
class LaunchedKernel:
    """Launches a kernel: ``call(grid, tensors and numbers by name)``.

    Attributes:
        kernel: the function under ``@triton.jit``, perhaps with an autotuner or heuristics.
        constants: the other arguments by name.
        operator: torch's operator, and what it takes besides: the numbers of ``kernel`` and ``constants`` in its table.
    """

    kernel: Any
    constants: tuple[tuple[str, Any], ...]
    operator: Any
    numbers: tuple[int, int]

    @property
    def __name__(self) -> str:
        return f"the kernel {self.kernel_name}"

    @property
    def kernel_name(self) -> str:
        kernel = self.kernel
        while not hasattr(kernel, "__name__"):
            kernel = kernel.fn
        return str(kernel.__name__)

    def __hash__(self) -> int:
        return hash((id(self.kernel), self.constants))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LaunchedKernel):
            return False
        return self.kernel is other.kernel and repr(self.constants) == repr(other.constants)

    def __call__(self, grid: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        trace = import_in_progress()
        if trace is not None:
            launched(trace, self.kernel, list(grid), {**arguments, **dict(self.constants)})
            return
        kernel, constants = self.numbers
        self.operator(
            kernel_idx=kernel,
            constant_args_idx=constants,
            grid=list(grid),
            tma_descriptor_metadata={},
            kwargs=dict(arguments),
        )

    def written(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Returns those of the arguments that the kernel may write; all where nobody can tell."""
        try:
            names = written_by(self.kernel)
        except JitgenError:
            return list(arguments.values())
        return [value for name, value in arguments.items() if name in names]


def bind(graph: fx.Graph) -> None:
    """Replaces torch's operator in ``graph`` by calls of kernels; not where descriptors of tensors are passed."""
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") != _OPERATOR or node.kwargs.get("tma_descriptor_metadata"):
            continue
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        numbers = node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"]
        constants = tuple(sorted(kernel_side_table.get_constant_args(numbers[1]).items()))
        node.target = LaunchedKernel(kernel_side_table.get_kernel(numbers[0]), constants, node.target, numbers)
        node.args, node.kwargs = (node.kwargs["grid"], node.kwargs["kwargs"]), {}
