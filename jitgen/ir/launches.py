"""Defines what a launch of a user's kernel means: which of its operands it reads and writes, and what else it takes.

A ``launch`` node is one of the tensors that the kernel writes, as it is afterwards; the nodes of one launch differ in
``attrs.result`` alone. Its operands are all tensors of the call, those that are written as they were before. The kernel
reads memory that is row-major: of what lies otherwise, a copy is made.

A parameter of the kernel is passed as one of

- ``"tensor"``: the number of an operand; two parameters may have the same one;
- ``"int"``, ``"float"``, ``"double"``: a number, which may be symbolic; the source knows whether an integer is 1 or a
  multiple of 16;
- ``"unspecialized"``: an integer of which the source knows nothing;
- ``"constant"``: text in the kernel's language that is the same for every configuration;
- ``"config"``: a constant of the configuration that is launched.

A kernel in Triton chooses a block by its options. One in CUDA C++ is launched with a block and bytes of shared memory,
which follow the three sizes of its grid; one in C++ is a function that is called once.

Neighbours: ``trace/kernels/`` makes the nodes, ``families/launch/`` makes kernels of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jitgen.ir.graph import Builder, Node
from jitgen.ir.nodes import LAUNCH
from jitgen.ir.symbols import Scalar

TENSOR, INT, UNSPECIALIZED, FLOAT, CONSTANT, CONFIG = "tensor", "int", "unspecialized", "float", "constant", "config"
"""How a parameter is passed."""
DOUBLE = "double"
"""How a floating-point number is passed to a kernel in CUDA C++ or C++, whose parameter converts it."""
TRITON = "triton"


@dataclass(frozen=True)
class Config:
    """Describes one way to launch a kernel.

    Attributes:
        constants: text of the parameters that are passed as ``"config"``, by name.
        options: of the compiler, such as ``num_warps``.
        grid: in programs, or blocks; of a kernel in CUDA C++ followed by the block and the bytes of shared memory.
    """

    constants: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, int], ...]
    grid: tuple[Scalar, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in (*self.constants, *self.options)) or "as it is"


def results_of(node: Node, inputs: Iterable[Node], builder: Builder) -> list[Node]:
    """Returns the nodes of all tensors that the launch ``node`` writes, over ``inputs``, in the order of its
    operands."""
    operands: Any = tuple(inputs)
    return [
        builder.make(
            LAUNCH.name,
            operands,
            node.inputs[written].dtype,
            node.inputs[written].shape,
            tuple(node.attrs._replace(result=written)),
            node.location,
        )
        for written in node.attrs.written
    ]
