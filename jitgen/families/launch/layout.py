"""Lays out a launch: what the source knows of addresses and integers, and the numbers of a call.

A source is told, as Triton's own launcher tells it, which integers are 1 and which are multiples of 16, and which
addresses are multiples of 16 bytes. The integer parameters ``n0`` ... are the sizes and strides that the kernel gets,
``m0`` ... those of rules: sizes of the tensor that is loaded or stored, with neighbouring dimensions merged where all
of a rule's operands allow it, strides of the operands along these, and first values of indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.triton import MULTIPLE
from jitgen.device import Device
from jitgen.families.launch.body import Launched, Rule, at_the_call
from jitgen.ir import symbols
from jitgen.ir.attributes import LaunchAttrs
from jitgen.ir.body import Body, Instruction
from jitgen.ir.launches import INT, TENSOR, TRITON, UNSPECIALIZED
from jitgen.ir.program import Kernel
from jitgen.ir.symbols import Expr
from jitgen.ir.views import Strided, contiguous_strides
from jitgen.kernel import launch
from jitgen.kernel.geometry import Geometry, touched_of
from jitgen.kernel.launch import Work
from jitgen.kernel.layout import reaches_wide, views_of
from jitgen.kernel.operands import Call, item_size, merged_dimensions, pointwise_flops
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared
from jitgen.kernel.printed import sum_of

NARROW = 2**31
"""From here on an integer needs 64 bits."""


@dataclass(frozen=True)
class RuleLayout:
    """Says how the operands of a rule lie.

    Attributes:
        sizes: for each dimension after the first the integer ``m<number>``.
        is_matrix: whether the dimensions may be the row and the column of a hook, in C++, with products in 64 bits.
        strides: for each operand of the rule and each dimension the number 0 or 1, or -1 - the integer's number.
        flat: the operands that lie as the tensor does.
        first: for each operand, the integer that an index begins with; None for tensors.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    flat: tuple[bool, ...]
    first: tuple[int | None, ...]
    is_matrix: bool = False

    def accesses(self, rule: Rule, integer: Callable[[int], str]) -> Iterator[tuple[int, Instruction, str, str | None]]:
        """Yields the instructions of ``rule`` that take or give an element, with their positions; of a load or an index
        also the offset of its element, where the tensor's is ``at`` and coordinates are ``i0``, ..., and what the index
        begins with. ``integer`` prints an integer by its number."""
        for position, instruction in enumerate(rule.instructions):
            if instruction.op in ("launch", "store"):
                yield position, instruction, "", None
            elif instruction.op in ("load", "iota"):
                operand = rule.operands.index(instruction.attr)
                strides = [str(stride) if stride >= 0 else integer(-1 - stride) for stride in self.strides[operand]]
                offset = sum_of([], strides, [f"i{dim}" for dim in range(len(strides))])
                first = self.first[operand]
                begin = None if first is None else integer(first)
                yield position, instruction, "at" if self.flat[operand] else offset, begin


@dataclass(frozen=True)
class Layout:
    """Says what decides the source of a launch.

    Attributes:
        alignments: what the address of each operand in memory is a multiple of, in bytes: 16, or 1.
        known: for each size or stride that is passed, 1 where it is 1, 16 where it is a multiple of that, else 0.
        wide: whether one of them, or an index of a rule's operand, needs 64 bits.
        rules: of the rules before operands, and then of those behind results.
        multiples: for each integer of the rules, whether it is a multiple of 16.
    """

    alignments: tuple[int, ...]
    known: tuple[int, ...]
    wide: bool
    rules: tuple[RuleLayout, ...] = ()
    multiples: tuple[bool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchGeometry(Geometry):
    """Holds the numbers of a launch.

    Attributes:
        numbers: the sizes and strides that are passed.
        ruled: those of the rules.
        grids: of each configuration, in CUDA C++ with its block and shared memory.
        elements: of all that is written.
    """

    numbers: tuple[int, ...]
    ruled: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]
    elements: int


def launched(body: Body) -> Launched:
    """Returns the launch that ``body`` is."""
    launch_: Launched = body.instructions[0].attr
    return launch_


def attrs_of(body: Body) -> LaunchAttrs:
    """Returns the attributes of the launch that ``body`` is."""
    return launched(body).attrs


def parameter_of(attrs: LaunchAttrs, number: int) -> str:
    """Returns the first parameter that gets operand ``number``."""
    return next(name for name, how, value in attrs.parameters if how == TENSOR and value == number)


def passed_integers(attrs: LaunchAttrs) -> Iterator[tuple[str, Expr, bool]]:
    """Yields name, value and whether the source may know it, of each parameter that is an expression of sizes."""
    for name, how, value in attrs.parameters:
        if how in (INT, UNSPECIALIZED) and isinstance(value, Expr) and at_the_call(how, value) is None:
            yield name, value, how == INT


def layout(kernel: Kernel, call: Call) -> tuple[tuple[Layout, ...], tuple[LaunchGeometry, ...]]:
    """Computes layout and geometry of the kernel's one body."""
    (body,), environment = kernel.bodies, call.environment
    attrs, views = attrs_of(body), views_of(body, call)
    is_triton = attrs.kernel.language == TRITON
    numbers = [int(symbols.evaluate(value, environment)) for _, value, _ in passed_integers(attrs)]
    specialized = [is_known for _, _, is_known in passed_integers(attrs)]
    known = tuple(_known(number) if use else 0 for number, use in zip(numbers, specialized, strict=True))
    alignments = []
    for operand, view in zip(body.operands, views, strict=True):
        if operand.buffer is None:
            continue
        first = view.offset * item_size(operand.dtype)
        is_aligned = call.buffers[operand.buffer].alignment % MULTIPLE == 0 and first % MULTIPLE == 0
        alignments.append(MULTIPLE if is_triton and is_aligned else 1)
    sizes = [math.prod(view.sizes) for view in views]
    ruled: list[int] = []
    own = launched(body)
    rules = tuple(_rule_layout(rule, body, views, environment, ruled, is_triton) for rule in (*own.loads, *own.stores))
    geometry = LaunchGeometry(
        strides=((),) * len(views),
        offsets=tuple(view.offset for view in views),
        touched=touched_of(body, (zip(view.sizes, view.strides, strict=True) for view in views)),
        numbers=tuple(numbers),
        ruled=tuple(ruled),
        grids=tuple(tuple(int(symbols.evaluate(size, environment)) for size in grid) for _, _, grid in attrs.configs),
        elements=sum(sizes[number] for number in body.stores),
    )
    wide = any(not -NARROW <= number < NARROW for number in (*numbers, *ruled))
    wide |= any(_reaches_wide(rule, body, views, environment) for rule in (*own.loads, *own.stores))
    multiples = tuple(is_triton and number % MULTIPLE == 0 for number in ruled)
    return (Layout(tuple(alignments), known, wide, rules, multiples),), (geometry,)


def _rule_layout(
    rule: Rule, body: Body, views: Sequence[Strided], environment: Mapping[str, Any], ruled: list[int], is_triton: bool
) -> RuleLayout:
    """Lays out the operands of ``rule``; the integers that it takes are added to ``ruled``."""
    operands = rule.operands
    sizes, own, strides = _walked(rule, body, views, environment)
    merged = merged_dimensions(sizes, [own, *strides], range(len(sizes))) or [(1, (1, *(0 for _ in operands)))]

    def integer(number: int) -> int:
        ruled.append(number)
        return len(ruled) - 1

    listed = tuple(integer(size) for size, _ in merged[1:])
    along = []
    for position in range(len(operands)):
        steps = [step[1 + position] for _, step in merged]
        along.append(tuple(step if step in (0, 1) else -1 - integer(step) for step in steps))
    flat = tuple(
        all(size == 1 or stride == row for size, stride, row in zip(sizes, steps, own, strict=True))
        for steps in strides
    )
    first = tuple(integer(views[o].offset) if body.operands[o].buffer is None else None for o in operands)
    columns = int(symbols.evaluate(rule.columns, environment))
    is_matrix = not is_triton and len(merged) == 2 and merged[1][0] == columns < NARROW
    return RuleLayout(listed, tuple(along), flat, first, is_matrix)


def _walked(
    rule: Rule, body: Body, views: Sequence[Strided], environment: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]:
    """Returns the sizes of the tensor of ``rule``, its strides, and those of each operand along its dimensions."""
    sizes = tuple(int(symbols.evaluate(size, environment)) for size in rule.shape)
    own = contiguous_strides(sizes)
    return sizes, own, [own if body.operands[o].kind == "store" else views[o].strides for o in rule.operands]


def _reaches_wide(rule: Rule, body: Body, views: Sequence[Strided], environment: Mapping[str, Any]) -> bool:
    """Returns whether an index of an operand of ``rule``, the value of one that counts, or an index of the tensor, to
    which all operands of the rule may be broadcast, needs 64 bits."""
    sizes, own, strides = _walked(rule, body, views, environment)
    walked = [list(zip(sizes, steps, strict=True)) for steps in strides]
    for pairs, number in zip(walked, rule.operands, strict=True):
        if body.operands[number].buffer is None:
            pairs.append((2, views[number].offset))  # the first value
    return reaches_wide([*walked, list(zip(sizes, own, strict=True))])


def _known(number: int) -> int:
    return 1 if number == 1 else MULTIPLE if number % MULTIPLE == 0 else 0


def parameters(kernel: Kernel, layouts: Sequence[Layout], device: Device) -> KernelParameters:
    """Declares the parameters: the operands, and the integers that are not 1."""
    (layout_,), (body,) = layouts, kernel.bodies
    operands = tuple(declared(operand, number, ())._replace(offset="") for number, operand in enumerate(body.operands))
    integers = [Integer(f"n{i}", "numbers", dim=i) for i, known in enumerate(layout_.known) if known != 1]
    integers += [Integer(f"m{i}", "ruled", dim=i) for i in range(len(layout_.multiples))]
    return KernelParameters((RegionParameters(tuple(integers), operands),), layout_.wide)


def work(kernel: Kernel, geometries: Sequence[LaunchGeometry], schedule: Any) -> Work:
    """Counts the bytes of all operands, and the operations of rules; what a user's kernel computes nobody knows."""
    (body,), (geometry,) = kernel.bodies, geometries
    own = launched(body)
    flops = sum(pointwise_flops(rule.instructions, geometry.elements) for rule in (*own.loads, *own.stores))
    return launch.work(kernel, geometries, schedule, flops=flops)
