"""Presents a kernel's parameters to its templates: names, types and expressions in a dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jitgen.codegen import triton
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Printed
from jitgen.ir.body import Body, compute_dtype
from jitgen.ir.graph import Shape
from jitgen.ir.program import Kernel
from jitgen.kernel.parameters import KernelParameters, OperandParameters


@dataclass(frozen=True)
class PrintedOperand:
    """Holds the names and expressions of an operand, as they are printed.

    Attributes:
        index: among the region's operands.
        role: the kind that the body gives it, such as ``"load"``, ``"iota"`` or ``"store"``.
        kind: of its strides, from the layout.
        dtype, storage, type: its dtype, that in memory in the dialect, and that of its value.
        value: the name of its element's value, or of the row's; empty where no line reads it.
        strides: expressions, one for each axis: parameters, or "0" and "1".
        pointer: the parameter; None for an iota, whose first value is the parameter ``offset``.
        gathered: (size, stride) of each dimension that an index chooses along: parameters, or 1.
    """

    index: int
    role: str
    kind: str
    dtype: str
    storage: str
    type: str
    value: str
    strides: tuple[str, ...]
    pointer: str | None
    offset: str
    gathered: tuple[tuple[str, str], ...]

    @property
    def inner(self) -> str:
        """Returns the stride along the last axis."""
        return self.strides[-1]

    @property
    def outer_strides(self) -> tuple[str, ...]:
        return self.strides[:-1]

    @property
    def pointer_type(self) -> str:
        """Returns the type of ``pointer`` in C++."""
        return f"{'' if self.role == 'store' else 'const '}{self.storage}*"

    def element(self, at: str) -> str:
        """Returns its element at offset ``at`` in C++; of an index, that number."""
        return f"jitgen::load({self.pointer}[{at}])" if self.pointer else at

    def neighbour(self, first: str, step: str) -> str:
        """Returns the same ``step`` elements behind the variable ``first``, which is an address or an index."""
        return f"jitgen::load({first}[{step}])" if self.pointer else f"{first} + {step}"

    def begin(self, name: str, at: str) -> str:
        """Returns the definition in C++ of ``name``, the address at offset ``at``, or that index."""
        if self.pointer is None:
            return f"const int64_t {name} = {at}"
        return f"{self.pointer_type} const {name} = {self.pointer} + {at}"

    def along(self, index: str) -> str:
        """Returns the offset of the element at ``index`` of the last axis from that at 0."""
        return {"0": "0", "1": index}.get(self.inner, f"{index} * {self.inner}")


Operand = TypeVar("Operand", bound=PrintedOperand)


def sum_of(first: Sequence[str], strides: Sequence[str], indices: Sequence[str]) -> str:
    """Returns the sum of the terms ``first`` and of the products of indices and strides."""
    terms = [*first]
    for index, stride in zip(indices, strides, strict=True):
        terms.append("" if stride == "0" else index if stride == "1" else f"{index} * {stride}")
    return " + ".join(term for term in terms if term) or "0"


def indices(sizes: Sequence[str], number: str, name: str, divide: str) -> list[tuple[str, str]]:
    """Returns (name, expression) of the index of ``number`` in each dimension; ``divide`` is the dialect's operator."""
    expressions = []
    for dim in range(len(sizes)):
        inner = " * ".join(sizes[dim + 1 :])
        index = f"{number} {divide} ({inner})" if inner else number
        expressions.append((f"{name}{dim}", f"{index} % {sizes[dim]}" if dim else index))
    return expressions


def printed_attributes(parameters: OperandParameters, kind: str, value: str, dialect: Dialect) -> dict[str, Any]:
    """Returns the attributes of a ``PrintedOperand``."""
    operand = parameters.operand
    return {
        "index": parameters.number,
        "role": operand.kind,
        "kind": kind,
        "dtype": operand.dtype,
        "storage": dialect.storage_types[operand.dtype],
        "type": dialect.types[compute_dtype(operand.dtype)],
        "value": value,
        "strides": parameters.strides,
        "pointer": parameters.pointer,
        "offset": parameters.offset,
        "gathered": parameters.gathered,
    }


def struct_members(
    operands: Iterable[Operand], integers: Callable[[Operand], Iterable[str]], scalars: Iterable[tuple[str, str]]
) -> tuple[list[str], list[str]]:
    """Returns (fields, names): the fields of a struct in C++ with these operands and run-time scalars (name, type), and
    the kernel's parameters that initialise them.

    Args:
        integers: strides and offsets of an operand, of which parameters are fields.
    """
    fields, names = list[str](), list[str]()
    for operand in operands:
        if operand.pointer is not None:
            fields.append(f"{operand.pointer_type} {operand.pointer}")
            names.append(operand.pointer)
        parameters = [name for name in integers(operand) if name and not name.isdigit()]
        fields += [f"int64_t {name}" for name in parameters]
        names += parameters
    for name, kind in scalars:
        fields.append(f"{kind} {name}")
        names.append(name)
    return fields, names


@dataclass(frozen=True)
class KernelContext:
    """Presents the parameters of a kernel to the templates of all dialects.

    Attributes:
        titles: what the head of the source says in words.
        operands: those of all regions, in order.
        integers: the names of the integer parameters.
        scalars: (name, type) of the run-time scalars, and ``scalar_dtypes`` their dtypes.
        name: what sources call a parameter.
    """

    titles: tuple[str, ...]
    operands: tuple[Any, ...]
    integers: tuple[str, ...]
    scalars: tuple[tuple[str, str], ...]
    scalar_dtypes: tuple[str, ...]
    name: Callable[[str], str]

    @property
    def memory(self) -> tuple[Any, ...]:
        """Returns the operands that have a pointer."""
        return tuple(operand for operand in self.operands if operand.pointer)

    @property
    def triton_parameters(self) -> list[str]:
        """Returns the parameters of a kernel in Triton."""
        return [*(o.pointer for o in self.memory), *self.integers, *(name for name, _ in self.scalars)]

    def triton_options(
        self,
        wide: bool,
        warps: int,
        alignments: Sequence[int] = (),
        units: Mapping[str, int] | None = None,
        **others: int,
    ) -> dict[str, Any]:
        """Returns the options of a source in Triton.

        Args:
            alignments: what the addresses in ``memory`` are multiples of, in bytes; by default nothing is known.
            units: what integer parameters that decide the width of an access are multiples of, by name.
            others: options of the compiler.
        """
        units = units or {}
        signature = [f"*{triton.SIGNATURE_TYPES[operand.dtype]}" for operand in self.memory]
        signature += ["i64" if wide else "i32"] * len(self.integers)
        signature += [triton.SIGNATURE_TYPES[dtype] for dtype in self.scalar_dtypes]
        multiples = list(alignments) or [1] * len(self.memory)
        multiples += [min(units.get(name, 1), triton.MULTIPLE) for name in self.integers]
        multiples += [1] * len(self.scalars)
        options = {"signature": signature, "multiples": multiples, "num_warps": warps}
        return {**options, **others, "enable_fp_fusion": False}


@dataclass(frozen=True)
class BodyContext(KernelContext):
    """Presents a kernel of one body, whose instructions are printed one after another.

    Attributes:
        text: the printed lines of the body.
    """

    text: Printed


def context_attributes(
    kernel: Kernel,
    parameters: KernelParameters,
    operands: Sequence[PrintedOperand],
    dialect: Dialect,
    titles: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the attributes of a ``KernelContext``."""
    return {
        "titles": tuple(titles),
        "operands": tuple(operands),
        "integers": parameters.names,
        "scalars": tuple(
            (dialect.scalar.format(index), dialect.types[dtype]) for index, (_, dtype) in enumerate(kernel.scalars)
        ),
        "scalar_dtypes": tuple(dtype for _, dtype in kernel.scalars),
        "name": parameters.name,
    }


def title_of(body: Body, kinds: Sequence[str], walk: str = "") -> str:
    """Describes a region in words: its shape, how it is walked, and the kinds of its operands."""
    words = (f"{o.kind} {o.dtype} {kind}".rstrip() for o, kind in zip(body.operands, kinds, strict=True))
    return f"({', '.join(_lengths(body.shape))}){walk}: {', '.join(words)}"


def _lengths(shape: Shape) -> list[str]:
    """Returns ``shape`` in words: a number is itself, and a size that a launch passes a name of its own.

    Symbols of a trace number a function's arguments; a source is that of the same kernel in any function.
    """
    passed = list(dict.fromkeys(size for size in shape if not isinstance(size, int)))
    return [str(size) if isinstance(size, int) else f"N{passed.index(size)}" for size in shape]
