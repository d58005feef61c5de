"""Matches patterns of nodes, written as the formulas that they match, and rewrites what matches by named rules.

A pattern is a value. Names in it are *wildcards*: each matches any node, and the same node wherever it stands::

    x, y = wildcards("x y")
    Rewrite("exp(x) / exp(y) is exp(x - y)", exp(x) / exp(y), exponential_of_difference)
    Rewrite("a factor of 1", x * y.where(is_one), x)

``x * y`` and ``x + y`` match their operands in either order, ``a | b`` matches what one of them does. ``where`` adds a
condition on one node (its dtype, shape or attrs), and ``Rewrite.condition`` one on all that was matched.

A pattern is a finite tree, and a match looks at no more nodes than it has, however deep the graph is: a pattern with k
sums and products makes at most 2**k attempts. Only ``Through`` follows a chain, and only downwards. Alternatives are
tried in the order in which they are written, so the same graph gives the same match.

The technique is that of tinygrad's ``UPat`` and ``PatternMatcher`` (``tinygrad/uop/ops.py``).

Neighbours: nodes are ``ir/graph.py``'s; ``ir/exponentials.py`` and the families have lists of rewrites.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.ir.analysis import rewritten
from jitgen.ir.graph import Node
from jitgen.ir.nodes import KINDS, VIEW
from jitgen.ir.views import Mover

Bindings = Mapping[str, Node]
"""The node that each name of a pattern stands for."""


@dataclass(frozen=True)
class Pattern:
    """Matches any node as a wildcard, and has what all patterns have in common.

    Attributes:
        name: of the node that it matches; empty where none is needed.
        tests: conditions on that node.
    """

    name: str = ""
    tests: tuple[Callable[[Node], bool], ...] = ()

    @functools.cached_property
    def operations(self) -> frozenset[str] | None:
        """Returns the operations of nodes that may match; None for any."""
        return None

    @property
    def inner_patterns(self) -> tuple[Pattern, ...]:
        """Returns the patterns that this one is made of."""
        return ()

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Returns the names of nodes that a match may bind."""
        own = frozenset((self.name,)) if self.name else frozenset()
        return own.union(*(inner.names for inner in self.inner_patterns))

    def named(self, name: str) -> Pattern:
        """Returns this pattern with its node called ``name``."""
        return replace(self, name=name)

    def where(self, test: Callable[[Node], bool]) -> Pattern:
        """Restricts this pattern to nodes for which ``test`` holds."""
        return replace(self, tests=(*self.tests, test))

    def matches(self, node: Node, bindings: Bindings) -> Iterator[Bindings]:
        """Yields the ways in which ``node`` matches, each as ``bindings`` with the pattern's names added."""
        if self.operations is not None and node.op not in self.operations:
            return
        if self.name and bindings.get(self.name, node) is not node:
            return
        if all(test(node) for test in self.tests):
            yield from self._inside(node, {**bindings, self.name: node} if self.name else bindings)

    def match(self, node: Node) -> Bindings | None:
        """Returns the first way in which ``node`` matches; None if it does not."""
        return next(self.matches(node, {}), None)

    def _inside(self, node: Node, bindings: Bindings) -> Iterator[Bindings]:
        yield bindings

    def __add__(self, other: Pattern) -> Pattern:
        return Operation(op="add", operands=(self, other), commutes=True)

    def __sub__(self, other: Pattern) -> Pattern:
        return operation("sub", self, other)

    def __mul__(self, other: Pattern) -> Pattern:
        return Operation(op="mul", operands=(self, other), commutes=True)

    def __truediv__(self, other: Pattern) -> Pattern:
        return operation("div", self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return Either(alternatives=(self, other))


@dataclass(frozen=True)
class Operation(Pattern):
    """Matches a node of operation ``op`` whose inputs match ``operands``; None means any inputs.

    Attributes:
        commutes: whether two operands match in either order; the one in which they are written is tried first.
    """

    op: str = ""
    operands: tuple[Pattern, ...] | None = None
    commutes: bool = False

    def __post_init__(self) -> None:
        least, most = KINDS[self.op].operands
        if self.operands is not None and not least <= len(self.operands) <= most:
            raise AssertionError(f"a pattern of {self.op} with {len(self.operands)} operands matches no node")

    @functools.cached_property
    def operations(self) -> frozenset[str]:
        return frozenset((self.op,))

    @property
    def inner_patterns(self) -> tuple[Pattern, ...]:
        return self.operands or ()

    def _inside(self, node: Node, bindings: Bindings) -> Iterator[Bindings]:
        if self.operands is None:
            yield bindings
            return
        if len(node.inputs) != len(self.operands):
            return
        yield from _all_match(self.operands, node.inputs, bindings)
        if self.commutes and node.inputs[0] is not node.inputs[1]:
            yield from _all_match(self.operands, node.inputs[::-1], bindings)


def _all_match(patterns: Sequence[Pattern], nodes: Sequence[Node], bindings: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bindings
        return
    for first in patterns[0].matches(nodes[0], bindings):
        yield from _all_match(patterns[1:], nodes[1:], first)


@dataclass(frozen=True)
class Either(Pattern):
    """Matches what one of ``alternatives`` does, trying them in order."""

    alternatives: tuple[Pattern, ...] = ()

    @property
    def inner_patterns(self) -> tuple[Pattern, ...]:
        return self.alternatives

    @functools.cached_property
    def operations(self) -> frozenset[str] | None:
        operations = [alternative.operations for alternative in self.alternatives]
        return None if None in operations else frozenset().union(*(names for names in operations if names is not None))

    def _inside(self, node: Node, bindings: Bindings) -> Iterator[Bindings]:
        for alternative in self.alternatives:
            yield from alternative.matches(node, bindings)


@dataclass(frozen=True)
class Through(Pattern):
    """Matches what ``inner`` does after taking off nodes of one input for which ``skip`` holds.

    Attributes:
        most: how many of them at most; None for all there are.
    """

    inner: Pattern = Pattern()
    skip: Callable[[Node], bool] = bool
    most: int | None = None

    @property
    def inner_patterns(self) -> tuple[Pattern, ...]:
        return (self.inner,)

    def _inside(self, node: Node, bindings: Bindings) -> Iterator[Bindings]:
        taken = 0
        while taken != self.most and self.skip(node):
            (node,) = node.inputs
            taken += 1
        yield from self.inner.matches(node, bindings)


# ---------------------------------------------------------------------------------------------------- words of formulas


def wildcards(names: str) -> list[Pattern]:
    """Makes a wildcard for each of ``names``, which are separated by spaces."""
    return [Pattern(name) for name in names.split()]


def operation(op: str, *operands: Pattern) -> Pattern:
    """Matches the operation ``op`` of ``operands`` in their order."""
    return Operation(op=op, operands=operands)


cast = functools.partial(operation, "cast")
contract = functools.partial(operation, "contract")
exp = functools.partial(operation, "exp")
exp2 = functools.partial(operation, "exp2")
log = functools.partial(operation, "log")
reciprocal = functools.partial(operation, "reciprocal")
select = functools.partial(operation, "where")
"""``torch.where``; ``Pattern.where`` is a condition."""


def view(x: Pattern, kind: str = "") -> Pattern:
    """Matches a view of ``x``, of ``kind`` if that is named."""
    return operation("view", x).where(lambda node: kind in ("", node.attrs.kind))


def maybe_view(x: Pattern, kind: str = "") -> Pattern:
    """Matches ``x`` or such a view of it."""
    return Through(inner=x, skip=lambda node: node.kind is VIEW and kind in ("", node.attrs.kind), most=1)


def spread(x: Pattern) -> Pattern:
    """Matches ``x``, values of rows, or these repeated along the rows."""
    return maybe_view(x, "expand")


def row_reduction(x: Pattern, kind: str = "") -> Pattern:
    """Matches a reduction of ``x`` over its last dimension alone, of ``kind`` if that is named."""
    return operation("reduce", x).where(
        lambda node: node.attrs.dims == (len(node.shape) - 1,) and kind in ("", node.attrs.kind)
    )


def row_max(x: Pattern) -> Pattern:
    return row_reduction(x, "max")


def row_sum(x: Pattern) -> Pattern:
    return row_reduction(x, "sum")


def number(test: Callable[[Any], bool]) -> Pattern:
    """Matches an immediate for which ``test`` holds."""
    return Operation(op="const").where(lambda node: test(node.attrs.value))


ZERO = number(lambda value: value == 0)


# ------------------------------------------------------------------------------------------------------------- rewrites


@dataclass(frozen=True)
class Rewrite:
    """Replaces a node that matches ``pattern``.

    Attributes:
        name: what it does, in a few words, for ``explain``.
        result: the wildcard whose node is the replacement, or a function that makes one (None: there is none). Its
            first argument is the context that the list is applied in; the others are ``node``, the node that matches,
            and nodes that the pattern names, as far as it has parameters of these names.
        condition: a condition with arguments in the same manner.
    """

    name: str
    pattern: Pattern
    result: Pattern | Callable[..., Node | None]
    condition: Callable[..., bool] | None = None

    def __post_init__(self) -> None:
        functions = [function for function in (self.result, self.condition) if inspect.isroutine(function)]
        wanted = {name for function in functions for name in _parameters(function)}
        if isinstance(self.result, Pattern):
            wanted.add(self.result.name)
        if unbound := wanted - self.pattern.names - {"node"}:
            raise AssertionError(f"{self.name!r} asks for nodes that its pattern does not name: {sorted(unbound)}")

    def apply(self, node: Node, context: Any) -> Node | None:
        """Returns the replacement of ``node``, by the first match that has one; None without one."""
        for bindings in self.pattern.matches(node, {}):
            nodes = {**bindings, "node": node}
            if self.condition is not None and not _called(self.condition, context, nodes):
                continue
            result = self.result
            replacement = nodes[result.name] if isinstance(result, Pattern) else _called(result, context, nodes)
            if replacement is not None:
                return replacement
        return None


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the parameters of ``function`` after the first one."""
    return tuple(inspect.signature(function).parameters)[1:]


def _called(function: Callable[..., Any], context: Any, nodes: Bindings) -> Any:
    return function(context, *(nodes[name] for name in _parameters(function)))


class Rewrites:
    """Lists rewrites, of which the first that applies to a node is done."""

    def __init__(self, *rewrites: Rewrite):
        self.names = tuple(rewrite.name for rewrite in rewrites)
        self._rewrites = rewrites
        self._by_operation: dict[str, list[Rewrite]] = {}

    def apply(self, node: Node, context: Any = None) -> tuple[str, Node] | None:
        """Returns the name of the first rewrite that applies to ``node``, and the replacement; None if none applies."""
        if node.op not in self._by_operation:
            some = (rewrite for rewrite in self._rewrites if node.op in (rewrite.pattern.operations or (node.op,)))
            self._by_operation[node.op] = list(some)
        for rewrite in self._by_operation[node.op]:
            replacement = rewrite.apply(node, context)
            if replacement is not None:
                return rewrite.name, replacement
        return None

    def result(self, node: Node, context: Any = None) -> Node | None:
        """Returns the replacement without the name."""
        applied = self.apply(node, context)
        return None if applied is None else applied[1]


class Rewriter:
    """Rewrites values by a list, inputs first, each node once. Rewrites get it as their context, and call ``step`` or
    ``again`` where their result is to be rewritten too.

    Attributes:
        mover: moves views toward inputs and builds nodes; its ``fired`` has the names of rewrites that were done.
    """

    def __init__(self, rewrites: Rewrites, mover: Mover):
        self.rewrites, self.mover = rewrites, mover
        self._images: dict[int, Node] = {}
        self.make, self.like, self.number = mover.builder.make, mover.builder.like, mover.builder.const

    def step(self, node: Node, is_new: bool = True) -> Node:
        """Returns ``node`` after the first rewrite that applies to it. A new view of which none does is moved over what
        its operand has become; one that was there stays, as a rewrite may have left it."""
        applied = self.rewrites.apply(node, self)
        if applied is not None and applied[1] is not node:
            self.mover.fired[applied[0]] = None
            return applied[1]
        return self.moved(node) if node.kind is VIEW and is_new else node

    def moved(self, view: Node) -> Node:
        """Returns ``view`` pushed toward the inputs."""
        return self.mover.move(view.inputs[0], view.attrs, view.shape)

    def change(self, node: Node, rebuilt: Node) -> Node:
        """Returns the node that takes the place of ``node``, which over rewritten operands is ``rebuilt``."""
        return self.step(rebuilt, rebuilt is not node)

    def again(self, root: Node) -> Node:
        """Rewrites ``root`` and all that it is computed from."""
        return rewritten(root, self.mover, self.change, self._images)

    def images(self, values: Sequence[Node]) -> Mapping[int, Node]:
        """Maps the ids of ``values``, and of every node behind them, to what takes their place."""
        for value in values:
            self.again(value)
        return self._images
