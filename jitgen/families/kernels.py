"""Turns regions into kernels: regions of one family share a kernel if the family allows it (``Family.joins``), up to
``MAX_REGIONS`` regions, ``MAX_OPERANDS`` operands and the length ``LONGEST``. Regions that do the same to several
tensors, as an optimiser's step does, are bodies of one text, and share a kernel up to ``MOST_BYTES`` of parameters; the
strides of a call may divide it again (``elementwise/texts.py``). An update in place shares one with the regions right
before it alone, so that it stays behind those that read what it changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from jitgen.families import registry
from jitgen.families.lengths import LONGEST, length_of
from jitgen.ir.body import Body
from jitgen.ir.graph import Graph, Shape, topological
from jitgen.ir.nodes import BLOCKS, DEQUANTIZE, INPUT
from jitgen.ir.program import Alias, Buffer, Kernel
from jitgen.ir.regions import MAX_REGIONS, Region
from jitgen.ir.symbols import Expr

MAX_OPERANDS = 128
"""The most operands of a kernel with several regions, so that its parameters stay within CUDA's limit of 4 KiB."""
MOST_BYTES = 30000
"""Bytes of parameters of a kernel whose regions do the same; of a launch, 32,764 (``kernel/printed_entry.py``)."""
OF_ONE_TEXT = ("cuda", "cpp")
"""Dialects in which regions that do the same are one text. A block in Triton would choose among all parameters of a
kernel. AdamW over 50 tensors took 4.50 ms so, and 0.19 ms in four kernels (H200, 26 million elements); why was not
looked into."""
VALUE_BYTES = 8
"""Bytes of a pointer or an integer among them, at most."""


def kernels_of(
    regions: Sequence[Region], numbers: Sequence[int], shapes: Sequence[Shape], name: str, before: int, dialect: str
) -> list[Kernel]:
    """Returns the kernels that compute ``regions``.

    Args:
        numbers: for each result that the regions store, the number of its buffer.
        shapes: the shape of every buffer.
        name: the traced function's name, from which the kernels are named.
        before: how many kernels the function has already.
        dialect: of the kernels.
    """
    groups: list[_Group] = []
    for region in regions:
        lowered = _Lowered(region, numbers, shapes)
        group = next((g for g in (groups[-1:] if region.is_update else groups) if g.takes(lowered)), None)
        if group is None:
            groups.append(group := _Group(lowered, dialect in OF_ONE_TEXT))
        group.add(lowered)
    names = (name if number == 0 else f"{name}_{number}" for number in itertools.count(before))
    return [
        Kernel(name, group.family.name, tuple(group.bodies), tuple(group.scalars))
        for name, group in zip(names, groups, strict=False)
    ]


class _Lowered:
    """Holds a region with the body that it is in a kernel of its own, which says whether it may share one."""

    def __init__(self, region: Region, numbers: Sequence[int], shapes: Sequence[Shape]) -> None:
        self._arguments = region, numbers, shapes
        self.family = registry.named(region.family)
        self.scalars: list[tuple[Expr, str]] = []
        self.body = self.family.body(*self._arguments, self.scalars)
        self.length = sum(length_of(instruction.op) for instruction in self.body.instructions)

    def within(self, scalars: list[tuple[Expr, str]]) -> Body:
        """Returns the body in a kernel that has ``scalars``, to which its own are added."""
        return self.family.body(*self._arguments, scalars) if self.scalars else self.body

    def does_what(self, other: _Lowered) -> bool:
        """Returns whether both do the same to several tensors, with the same run-time scalars."""
        computed = self.body.computed
        return computed is not None and computed == other.body.computed and self.scalars == other.scalars


class _Group:
    """Holds the regions of one kernel, lowered to bodies.

    Attributes:
        bodies: of the regions.
        scalars: run-time scalars of all bodies.
        operands: how many all bodies have.
        length: of the texts of all bodies.
        bytes: of the parameters of all bodies, at most.
        is_alike: whether all do the same to several tensors, and a dialect knows one text for them.
    """

    def __init__(self, first: _Lowered, is_alike: bool) -> None:
        self.family = first.family
        self.scalars: list[tuple[Expr, str]] = []
        self.bodies: list[Body] = []
        self.operands = self.bytes = self.length = 0
        self._first, self.is_alike = first, is_alike

    def takes(self, lowered: _Lowered) -> bool:
        """Returns whether the kernel may compute this too."""
        if lowered.family is not self.family or not self.family.joins(self.bodies, lowered.body):
            return False
        if self.is_alike and lowered.does_what(self._first):
            return self.bytes + _bytes_of(lowered.body) <= MOST_BYTES
        if self.length + lowered.length > LONGEST:
            return False
        return len(self.bodies) < MAX_REGIONS and self.operands + len(lowered.body.operands) <= MAX_OPERANDS

    def add(self, lowered: _Lowered) -> None:
        """Computes this in the kernel."""
        self.bodies.append(body := lowered.within(self.scalars))
        self.operands += len(body.operands)
        self.length += lowered.length
        self.bytes += _bytes_of(body)
        self.is_alike = self.is_alike and lowered.does_what(self._first)


def _bytes_of(body: Body) -> int:
    """Returns the bytes of parameters that a region takes at most: each operand's address and strides, and sizes."""
    rank = len(body.shape)
    return VALUE_BYTES * (len(body.operands) * (1 + rank) + rank + 1)


def with_coarse(
    kernels: Sequence[Kernel], buffers: Sequence[Buffer], temporaries: range, outputs: Sequence[int | Alias]
) -> tuple[Kernel, ...]:
    """Marks bodies of ``kernels`` as ``coarse`` if nobody can see the last bits of their results.

    A body is coarse if each of its results is a float of 16 bits or fewer, or a temporary that is not returned and that
    only coarse bodies read. Kernels are in execution order, so that going backwards every reader of a temporary comes
    before its writer.
    """
    exact = {output.input for output in outputs if isinstance(output, Alias)}
    marked: list[Kernel] = []
    for kernel in reversed(kernels):
        bodies = []
        for body in kernel.bodies:
            written = [body.operands[index].buffer for index in body.stores]
            coarse = all(
                _is_narrow(buffers[b].dtype) or (b in temporaries and b not in exact) for b in written if b is not None
            )
            bodies.append(replace(body, coarse=coarse))
        for body in bodies:
            read = {operand.buffer for operand in body.operands if operand.kind != "store"}
            exact |= set() if body.coarse else {buffer for buffer in read if buffer is not None}
        marked.append(replace(kernel, bodies=tuple(bodies)))
    return tuple(reversed(marked))


def with_constant_weights(kernels: Sequence[Kernel], graph: Graph) -> tuple[Kernel, ...]:
    """Marks products of ``kernels`` as ``constant`` whose weights are codes of quantised weights of ``graph``. Codes
    with scales of blocks may be tensors of a user's own, which kernels write."""
    changed = {number for number, _ in graph.mutated}
    weights = (node for node in topological(graph.results) if node.kind is DEQUANTIZE and node.attrs.layout != BLOCKS)
    tensors = (tensor.under_views for weight in weights for tensor in weight.inputs)
    codes = {tensor.attrs.number for tensor in tensors if tensor.kind is INPUT} - changed
    if not codes:
        return tuple(kernels)

    def marked(body: Body) -> Body:
        products = (
            replace(product, constant=all(body.operands[index].buffer in codes for index in product.weight))
            for product in body.contractions
        )
        return replace(body, contractions=tuple(products))

    return tuple(replace(kernel, bodies=tuple(map(marked, kernel.bodies))) for kernel in kernels)


def _is_narrow(dtype: str) -> bool:
    """Returns whether ``dtype`` is a float of 16 bits or fewer."""
    return dtype.startswith("float8") or dtype in ("float16", "bfloat16")
