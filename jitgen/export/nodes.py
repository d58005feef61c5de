"""Turns the nodes of an exported program that jitgen computes into programs of plain tensors.

``jitgen::call`` has its graph as text. ``jitgen::linear`` is traced as a decorated function is, with the tensors of its
weight in the layout that kernels read. Sizes of an exported program may depend on one symbol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from jitgen.call.eager_linear import quantized_linear
from jitgen.call.operator import Program, parsed
from jitgen.call.resolver import Resolver
from jitgen.call.routing import Routing
from jitgen.call.signature import Call
from jitgen.errors import UnsupportedError
from jitgen.export.table import Use
from jitgen.quant import weights
from jitgen.quant.storage import Stored
from jitgen.quant.token import Token, from_text

OPERATORS = ("jitgen::call", "jitgen::call_random", "jitgen::linear")
MAX_SIZES = 4096
"""The most values, of the size that an export left open, for which a package may be made."""


@dataclass(frozen=True)
class OpenSize:
    """Describes the size that an exported program leaves open.

    Attributes:
        symbol: torch's; None where all sizes are fixed.
        values: what it may be.
    """

    symbol: Any
    values: range

    def at(self, value: int, size: Any) -> int:
        """Returns ``size`` of the program if the open size is ``value``.

        Raises:
            UnsupportedError: it depends on another symbol, such as an integer that is an input.
        """
        expr = size.node.expr if isinstance(size, torch.SymInt) else size
        others: set[Any] = getattr(expr, "free_symbols", set()) - {self.symbol}
        if others:
            raise UnsupportedError(
                f"a package has tensors of sizes that sizes of its inputs give, and {expr} depends on "
                f"{', '.join(sorted(map(str, others)))}, which is none"
            )
        return int(expr.subs(self.symbol, value)) if self.symbol is not None and hasattr(expr, "subs") else int(expr)

    def tensor(self, value: int, like: torch.Tensor) -> torch.Tensor:
        """Makes a tensor without memory, with the sizes and strides of ``like``."""
        shape, strides = ([self.at(value, size) for size in sizes] for sizes in (like.shape, like.stride()))
        return torch.empty_strided(shape, strides, dtype=like.dtype, device="meta")


def open_size(program: torch.export.ExportedProgram) -> OpenSize:
    """Returns the size that ``program`` leaves open. It is at least 2: a graph in which a size may vary is not for 0
    and 1.

    Raises:
        UnsupportedError: there are several, or it has no greatest value, or too many.
    """
    symbols = {
        symbol
        for node in program.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    if not symbols:
        return OpenSize(None, range(1))
    if len(symbols) > 1:
        names = ", ".join(sorted(map(str, symbols)))
        raise UnsupportedError(f"a package may leave one size open, and this program leaves {names}; fix the others")
    symbol = symbols.pop()
    limits = program.range_constraints[symbol]
    least, most = max(int(limits.lower), 2), limits.upper
    if not most.is_Integer or int(most) - least >= MAX_SIZES:
        raise UnsupportedError(
            f"a package is made for each value of the size {symbol}, and there are {least} to {most}; export with "
            f"torch.export.Dim(..., min=, max=) of at most {MAX_SIZES} values"
        )
    return OpenSize(symbol, range(least, int(most) + 1))


def is_ours(node: fx.Node) -> bool:
    """Returns whether ``node`` calls an operator of jitgen's."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() in OPERATORS


@dataclass(frozen=True)
class ConvertedNode:
    """Describes one node as a program.

    Attributes:
        node: of the exported program.
        tensors: the nodes that it reads, in the order of the program's inputs.
        use: what it computes.
        weight: of a product with a quantised weight, that weight as the program has it and as kernels read it.
    """

    node: fx.Node
    tensors: tuple[fx.Node, ...]
    use: Use
    weight: tuple[Token, Token] | None = None

    @property
    def weight_nodes(self) -> tuple[fx.Node, ...]:
        """Returns the tensors of the quantised weight."""
        if self.weight is None:
            return ()
        return tuple(self.node.args[1])  # type: ignore[arg-type]


def convert(node: fx.Node, size: OpenSize) -> ConvertedNode:
    """Converts ``node``, which is ours, to a program.

    Raises:
        UnsupportedError: a package cannot hold it.
    """
    if node.target.name() == "jitgen::linear":  # type: ignore[union-attr]
        return _linear_in(node, size)
    tensors, integers, floats, text = node.args
    if not all(isinstance(number, (int, float)) for number in (*integers, *floats)):  # type: ignore[misc]
        raise UnsupportedError(f"{parsed(str(text)).graph.name}: a package takes no numbers that vary; pass a tensor")
    program = parsed(str(text))
    nodes: tuple[fx.Node, ...] = tuple(tensors)  # type: ignore[arg-type]
    numbers = tuple(program.numbers(integers, floats))  # type: ignore[arg-type]
    if not nodes:
        raise UnsupportedError(f"{program.graph.name}: an operator of a package reads at least one tensor")
    return ConvertedNode(node, nodes, Use(program, _described(nodes, size), numbers))


def _linear_in(node: fx.Node, size: OpenSize) -> ConvertedNode:
    x, stored, bias, text = node.args
    nodes = tuple(argument for argument in (x, *stored, bias) if isinstance(argument, fx.Node))  # type: ignore[misc]
    device = x.meta["val"].device  # type: ignore[union-attr]
    function = quantized_linear.plain if bias is None else quantized_linear.biased
    resolver = Resolver(function.__wrapped__, Routing("linear", None, None))
    route = resolver.routing.on_device(device)
    now = from_text(str(text), device)
    wanted = now.replace(layout=weights.layout_of(now, route.layouts))
    whole = tuple(torch.empty_like(tensor.meta["val"], device="meta") for tensor in stored)  # type: ignore
    converted = weights.converted(whole, now, wanted.layout)

    def tensors(value: int) -> list[torch.Tensor]:
        ends = [size.tensor(value, argument.meta["val"]) for argument in (x, bias) if isinstance(argument, fx.Node)]
        return [ends[0], *converted, *ends[1:]]

    first, *rest = tensors(size.values[-1])
    arguments = (first, Stored(converted, wanted), *rest[len(converted) :])
    leaves, tree = pytree.tree_flatten((arguments, {}))
    traced, _, _ = resolver.specialize(Call.unchecked(leaves, tree, device), route, runs=False)
    program = Program(traced.traced.graph, "", *resolver.routing.requested, resolver.routing.is_batch_invariant)
    return ConvertedNode(node, nodes, Use(program, tensors, ()), (now, wanted))


def _described(nodes: Sequence[fx.Node], size: OpenSize) -> Any:
    values = [node.meta["val"] for node in nodes]
    return lambda value: [size.tensor(value, item) for item in values]
