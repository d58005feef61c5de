"""Defines a program: the kernels of a call in launch order, over numbered buffers.

Buffers are numbered inputs first, then temporaries, then results. The results are the outputs that kernels write, and
the new values of inputs that are updated in place.

Neighbours: ``families/partition.py`` makes a program from a graph; ``lowering.py`` lays it out for one call.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from jitgen.ir.body import Body
from jitgen.ir.graph import Shape
from jitgen.ir.symbols import Expr
from jitgen.spec import BITS_OF, GROUPS


def plain(value: Any, written: Callable[[Expr], str] = str) -> Any:
    """Converts ``value`` to what JSON can hold, without the user's lines: dataclasses become lists, and expressions
    text.

    Args:
        written: the text of an expression.
    """
    if isinstance(value, Expr):
        return f"{value.kind} {written(value)}"
    kind: Any = type(value)
    if (names := _compared(kind)) is not None:
        return [kind.__name__, *(plain(getattr(value, name), written) for name in names)]
    if isinstance(value, dict):
        return {str(key): plain(item, written) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, written) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)


@functools.cache
def _compared(kind: type) -> tuple[str, ...] | None:
    """Returns the fields of a dataclass but for the user's line; None for another type."""
    return tuple(own.name for own in fields(kind) if own.name != "location") if is_dataclass(kind) else None


@dataclass(frozen=True)
class Kernel:
    """Represents one kernel: independent regions of one family, which share the run-time scalars.

    Attributes:
        name: the function's name, followed by a number where the function has several kernels.
        family: the name of the family that generates it.
        bodies: the regions, as instructions.
        scalars: the run-time scalars, each with the dtype that it is passed in.
    """

    name: str
    family: str
    bodies: tuple[Body, ...]
    scalars: tuple[tuple[Expr, str], ...]

    @functools.cached_property
    def digest(self) -> str:
        """Returns the sha256 of all that is computed, in hexadecimal: of everything but names and the user's lines."""
        return _sha256(plain((self.family, self.bodies, self.scalars)))

    @functools.cached_property
    def identity(self) -> str:
        """The digest of the kernel wherever it stands: with its buffers, and the symbols of sizes and arguments,
        numbered as it meets them. Kernels of one identity, layout and schedule have one source."""
        names: dict[str, str] = {}

        def written(value: Expr) -> str:
            return _SYMBOL.sub(lambda match: names.setdefault(match[0], f"v{len(names)}"), str(value))

        buffers = [operand.buffer for body in self.bodies for operand in body.operands]
        numbers = {buffer: number for number, buffer in enumerate(dict.fromkeys(buffers)) if buffer is not None}
        bodies = [
            replace(body, operands=tuple(replace(o, buffer=numbers.get(o.buffer)) for o in body.operands))  # type: ignore[arg-type]
            for body in self.bodies
        ]
        return _sha256(plain((self.family, bodies, self.scalars), written))

    @property
    def checked(self) -> tuple[tuple[str, ...], ...]:
        """Returns, for each region, the user's lines whose indices it checks; empty if no region has indices to
        check."""
        lines = [
            {i.location or "": None for i in instructions if i.op in ("gather", "scatter")}
            | {f"{i.location or ''}{GROUPS}": None for i in body.instructions if i.op == "contract" and body.is_grouped}
            for body in self.bodies
            for instructions in [[*body.instructions, *(i for contraction in body.contractions for i in contraction.w)]]
        ]
        return tuple(map(tuple, lines)) if any(lines) else ()

    @property
    def described_stages(self) -> list[str]:
        """Describes the stages of each region in words; in one line if all regions have the same."""
        described = ["; ".join(map(str, body.stages)) for body in self.bodies]
        if len(set(described)) == 1:
            return [f"stages{f' of each of {len(described)} regions' if len(described) > 1 else ''}: {described[0]}"]
        return [f"stages of region {number}: {stages}" for number, stages in enumerate(described)]


_SYMBOL = re.compile(r"\b(?:s\d+_\d+|a\d+)\b")
"""The name of a symbol in an expression's text (``ir/symbols.py``) that numbers the arguments of a function."""


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Decision:
    """Records a family's answer to one of its own questions about sizes (``Family.decide``), and the reason in words.

    Attributes:
        why: for users; the same answer may have other reasons at other sizes.
        lacks: whether the answer is no because this dialect has no such kernel, which another one may have.
    """

    fused: bool
    why: str = field(compare=False)
    lacks: bool = False


@dataclass(frozen=True)
class Buffer:
    """Describes a tensor that a program takes or allocates; ``contiguous`` if it must be row-major, and
    ``channels_last`` if its dimension 1 must be the innermost one."""

    dtype: str
    shape: Shape
    contiguous: bool = False
    channels_last: bool = False


@dataclass(frozen=True)
class Alias:
    """Describes an output that no kernel writes: the input or temporary with buffer number ``input``, or a view of
    it."""

    input: int
    movements: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """Represents the kernels and buffers of a call.

    Attributes:
        name: the function's name.
        inputs, temporaries, results: the buffers; buffer numbers count through all three in this order.
        outputs: for each output of the function, its index in ``results``, or an ``Alias``.
        mutated: (input index, index in ``results``) of each argument that is updated in place: the memory of that
            result is the argument's. Where other elements or results still need the argument's old value, the new one
            is computed into a temporary, and the last kernel copies it.
        kernels: in launch order.
        decisions: (family, question, answer) of every decision on sizes that the program depends on.
        rewrites: the names of the rewrites that were done before anything was claimed (``ir/patterns.py``).
        general: whether the program follows from the graph, its guards, ``decisions`` and ``lines``. False where it
            also depends on the strides of the call that it was made for.
        lines: (question, answer) of how matrices lie in memory that the program depends on.
    """

    name: str
    inputs: tuple[Buffer, ...]
    temporaries: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    outputs: tuple[int | Alias, ...]
    mutated: tuple[tuple[int, int], ...]
    kernels: tuple[Kernel, ...]
    decisions: tuple[tuple[str, Any, Decision], ...] = ()
    general: bool = True
    rewrites: tuple[str, ...] = ()
    lines: tuple[tuple[Any, Any], ...] = ()

    def __post_init__(self) -> None:
        """Checks that every kernel writes elements of the size that its buffers have."""
        buffers = self.buffers
        for kernel in self.kernels:
            for operand in (operand for body in kernel.bodies for operand in body.operands):
                if operand.kind == "store" and operand.buffer is not None:
                    wanted = buffers[operand.buffer].dtype
                    fits = operand.dtype in (wanted, BITS_OF.get(wanted))
                    assert fits, f"{kernel.name} stores {operand.dtype} in a buffer of {wanted}"

    @property
    def returns_temporaries(self) -> bool:
        """Returns whether an output is a temporary or a view of one; the caller cannot pass ``out=`` for such an
        output."""
        return any(isinstance(output, Alias) and output.input >= len(self.inputs) for output in self.outputs)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (*self.inputs, *self.temporaries, *self.results)
