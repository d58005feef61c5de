"""What a call does: kernels to launch in order, over numbered buffers. ``ir/cut.py`` makes it from a graph.

Buffers are numbered inputs first, then temporaries, then results (the outputs and the written-back inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jitgen.ir.body import WHOLE, Body
from jitgen.ir.contractions import Decision, Prologue
from jitgen.ir.graph import Shape
from jitgen.ir.symbols import Expr


@dataclass(frozen=True)
class Kernel:
    """One kernel: regions that run side by side and share the run-time scalars (pointwise ones, or products of one
    activation), or one region of rows."""

    name: str
    bodies: tuple[Body, ...]
    scalars: tuple[tuple[Expr, str], ...]

    @property
    def family(self) -> str:
        """The kernel family that makes it."""
        if self.bodies[0].contractions:
            return "gemm"
        return "reduction" if self.bodies[0].row_rank else "elementwise"


@dataclass(frozen=True)
class Buffer:
    """A tensor a program allocates or is given; ``contiguous`` where it must be allocated row-major."""

    dtype: str
    shape: Shape
    contiguous: bool = False


@dataclass(frozen=True)
class Alias:
    """An output that is an input or a temporary (buffer ``input``), or a view of one: returned without a kernel."""

    input: int
    movements: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """What a call does.

    Attributes:
        name: the function's.
        inputs, temporaries, results: the buffers, numbered through in this order.
        outputs: for each output of the function, the result buffer's position among ``results``, or an ``Alias``.
        mutated: (input index, position among ``results``) of arguments updated in place: that result's buffer is
            the argument. Where other elements or results still need its old value, the new one is computed into a
            temporary first and copied last.
        kernels: to launch in order.
        prologues: computed activations of products, and what was decided of each.
        general: whether it follows from the graph and its guards alone, and from no stride or size of one call.
    """

    name: str
    inputs: tuple[Buffer, ...]
    temporaries: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    outputs: tuple[int | Alias, ...]
    mutated: tuple[tuple[int, int], ...]
    kernels: tuple[Kernel, ...]
    prologues: tuple[tuple[Prologue, Decision], ...] = ()
    general: bool = True

    def read_beside(self, result: int) -> frozenset[int]:
        """Inputs that are still read, at other elements than the one just written, once result ``result`` is.

        A product reads all of its activation and its weight for every tile, and a later kernel may read anything; so
        the result must not be written over these. Every other input is read where it is written, or before.
        """
        buffer = len(self.inputs) + len(self.temporaries) + result
        found: set[int] = set()
        written = False
        for kernel in self.kernels:
            operands = [operand for body in kernel.bodies for operand in body.operands if operand.buffer is not None]
            found |= {o.buffer for o in operands if written and o.kind != "store" and o.buffer is not None}
            if any(operand.kind == "store" and operand.buffer == buffer for operand in operands):
                written = True
                found |= {o.buffer for o in operands if o.kind in WHOLE and o.buffer is not None}
        return frozenset(index for index in found if index < len(self.inputs))

    def decides_alike(self, prologue: Callable[[Prologue], Decision], environment: Mapping[str, Any]) -> bool:
        """Whether the same would be decided of its prologues at other sizes."""
        return all(prologue(computed.at(environment)) == decision for computed, decision in self.prologues)

    @property
    def returns_temporaries(self) -> bool:
        """Whether an output is a temporary, which no memory of the caller's can stand for."""
        return any(isinstance(output, Alias) and output.input >= len(self.inputs) for output in self.outputs)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (*self.inputs, *self.temporaries, *self.results)
