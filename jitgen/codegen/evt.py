"""Represents an epilogue as an epilogue visitor tree (EVT), as CUTLASS calls the fused epilogues of its kernels: a
graph whose leaves are the accumulator and the tensors that are read, and whose nodes compute.

Every value of such a graph is float32; truth values are 0 and 1. A node applies a functor to what its arguments are:
one of CUTLASS's (``FUNCTORS``), or a structure with a function ``of`` one element, which is printed from the row of the
operation in CUDA C++, so that results are those of the other kernels.

Neighbours: ``families/gemm/cutlass_epilogue.py`` makes the graph of a region; ``jitgen/cutlass.cuh`` has ``Elements``,
which makes functors of fragments of these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jitgen.codegen.cuda import CUDA
from jitgen.ir.body import Instruction
from jitgen.ir.ops import OPS

FUNCTORS = {"add": "plus", "sub": "minus", "mul": "multiplies", "div": "divides"}
"""The functors of CUTLASS that are the same operation, to the last bit; they take no constants."""

ELEMENTS = {
    "float32": "float",
    "float16": "cutlass::half_t",
    "bfloat16": "cutlass::bfloat16_t",
    "float8_e4m3fn": "cutlass::float_e4m3_t",
    "float8_e5m2": "cutlass::float_e5m2_t",
}
"""CUTLASS's types of the dtypes that leaves and results of a graph may have."""
OPERANDS = ELEMENTS | {"int8": "int8_t"}
"""The same of the operands of a product."""

_IN_FLOAT32 = ("float32", "bool")


@dataclass(frozen=True)
class Node:
    """Describes the node of one instruction.

    Attributes:
        functor: of CUTLASS; empty where ``expression`` is the function.
        expression: over the arguments ``x0``, ``x1`` and so on.
        arguments: the positions of the instructions that are its arguments; constants are part of the expression.
    """

    functor: str
    expression: str
    arguments: tuple[int, ...]


def is_accumulator_cast(position: int, instructions: Sequence[Instruction]) -> bool:
    """Returns whether instruction ``position`` casts the accumulator of an integer product to float32, which every node
    does with its arguments anyway."""
    instruction = instructions[position]
    cast = instruction.op == "cast" and instruction.dtype == "float32"
    return cast and instructions[instruction.args[0]].op == "contract"


def lack(instruction: Instruction, dtypes: Sequence[str]) -> str | None:
    """Returns why ``instruction``, which computes from values of ``dtypes``, has no node; None if it has one."""
    op = instruction.op
    if op not in OPS and op not in ("const", "cast", "round_to"):
        return f"{op} is no pointwise operation of float32"
    others = [dtype for dtype in (*dtypes, instruction.dtype) if dtype not in _IN_FLOAT32]
    return f"{op} has a value of {others[0]}, and an EVT computes in float32" if others else None


def node_of(position: int, instructions: Sequence[Instruction]) -> Node:
    """Returns the node of instruction number ``position``, which ``lack`` has none of."""
    instruction = instructions[position]
    arguments = tuple(dict.fromkeys(a for a in instruction.args if instructions[a].op != "const"))
    repeated = len(arguments) < len(instruction.args)
    if instruction.op in FUNCTORS and not repeated:
        return Node(f"cutlass::{FUNCTORS[instruction.op]}", "", arguments)
    dtypes = {a: instructions[a].dtype for a in instruction.args}
    names = {a: _named(number, dtypes[a]) for number, a in enumerate(arguments)}
    constants = {a: CUDA.constant(instructions[a].attr, dtypes[a]) for a in instruction.args if a not in names}
    return Node("", CUDA.expression(instruction, _grouped(names | constants), dtypes), arguments)


def _named(number: int, dtype: str) -> str:
    """Returns argument ``number``; a truth value is not 0."""
    return f"x{number} != 0.0f" if dtype == "bool" else f"x{number}"


def _grouped(names: Mapping[int, str]) -> dict[int, str]:
    return {position: f"({name})" if " " in name or name.startswith("-") else name for position, name in names.items()}
