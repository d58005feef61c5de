"""Defines the graph that a traced function becomes: frozen nodes over tensor inputs and host scalars.

A node is of a *kind*, which its ``op`` names: a row of the table in ``ir/nodes.py``, or an operation of ``ir/ops.py``.

``dtype`` is the name of the dtype in which the value is stored where it goes to memory: for the result of a torch
function the one that eager torch gives it, for values within one at least float32 (``trace/intermediates.py``). Nodes
of one compute dtype (``ir/body.py``) combine freely, and none but a ``cast`` rounds, and what ``ir/rounding.py`` names.
``shape`` holds ints and ``Expr``.

A ``Builder`` interns nodes, so equal subexpressions are one node and equality is identity. For error messages a node
carries the user's line that it came from; the line is in neither a graph's serialized form nor any key.

Neighbours: ``trace/`` builds graphs, ``families/partition.py`` divides them into kernels, and manifests
(``deploy/manifest.py``) hold them as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jitgen.ir import symbols
from jitgen.ir.nodes import DEQUANTIZE, GATHER, INPUT, KINDS, VIEW, Kind
from jitgen.ir.symbols import Expr, Scalar, Size
from jitgen.spec import SCHEMA

Shape = tuple[Size, ...]
Movement = tuple[tuple[Any, ...], Shape]
"""A view's attrs (``ir/views.py``) and the shape of its result."""
REDUCTIONS = ("sum", "prod", "max", "min", "argmax", "argmin", "any", "all")
"""What a ``reduce`` node computes; ``argmax`` and ``argmin`` give the first index, and NaN wins, as in torch."""


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """Represents one value of a graph. Compared by identity: a ``Builder`` makes equal nodes the same object.

    Attributes:
        op: the name of its kind.
        attrs: its attributes, by position and by name (``ir/attributes.py``).
        kinds: its own, and those of all nodes that it depends on.
    """

    op: str
    inputs: tuple[Node, ...]
    dtype: str
    shape: Shape
    attrs: Any = ()
    location: str | None = field(default=None, repr=False)
    kind: Kind = field(init=False, repr=False)
    kinds: frozenset[Kind] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kind = KINDS[self.op]
        least, most = kind.operands
        if not least <= len(self.inputs) <= most:
            raise AssertionError(f"{kind} of {len(self.inputs)} operands")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "attrs", kind.attributes(*self.attrs))
        kinds = kinds_of(self.inputs) | {kind}
        # A chain of nodes shares one set.
        shared = (child.kinds for child in self.inputs if len(child.kinds) == len(kinds))
        object.__setattr__(self, "kinds", next(shared, kinds))

    @property
    def under_views(self) -> Node:
        """Returns the node that this is a view of, through any number of views; itself where it is no view."""
        node = self
        while node.kind is VIEW:
            node = node.inputs[0]
        return node

    @property
    def movements(self) -> tuple[Movement, ...]:
        """Returns the movements that lead from the node that this is a view of (``under_views``) to this one."""
        chain, node = list[Movement](), self
        while node.kind is VIEW:
            chain.append((node.attrs, node.shape))
            node = node.inputs[0]
        return tuple(reversed(chain))

    @property
    def under_expand(self) -> Node:
        """Returns the node that this repeats along some dimensions; itself where it is no ``expand``."""
        return self.inputs[0] if self.kind is VIEW and self.attrs.kind == "expand" else self

    @property
    def is_in_memory(self) -> bool:
        """Returns whether it is a tensor input, or a view of one."""
        return self.under_views.kind is INPUT

    @property
    def is_weight(self) -> bool:
        """Returns whether it is a quantised weight, a view of one, or matrices chosen of one."""
        base = self.under_views
        return (base.inputs[0].under_views if base.kind is GATHER else base).kind is DEQUANTIZE


def kinds_of(nodes: Iterable[Node]) -> frozenset[Kind]:
    """Returns the kinds of ``nodes`` and of all nodes that they depend on."""
    return frozenset().union(*(node.kinds for node in nodes))


@dataclass(frozen=True)
class InputSpec:
    """States what a graph may assume about a tensor input: its dtype and rank, and which of its sizes are 1."""

    dtype: str
    shape: Shape


def input_shape(index: int, sizes: Iterable[int]) -> Shape:
    """Returns the symbolic shape of input ``index``: a symbol for every size, except that sizes of 1 are static."""
    return tuple(1 if size == 1 else symbols.size_symbol(index, dim) for dim, size in enumerate(sizes))


@dataclass(frozen=True)
class Guard:
    """States a condition under which a graph is valid: ``expr``, a comparison or a number, has ``value``."""

    expr: Expr
    value: Any

    def holds(self, environment: dict[str, Any]) -> bool:
        try:
            value = symbols.evaluate(self.expr, environment)
        except ZeroDivisionError:  # of a size that the trace divides by, and did not find empty
            return False
        return value == self.value and type(value) is type(self.value)

    def __str__(self) -> str:
        if self.expr.kind == "bool":
            return str(self.expr) if self.value else f"not {self.expr}"
        return f"{self.expr} == {self.value!r}"


@dataclass(frozen=True)
class Graph:
    """Represents a traced function.

    Attributes:
        name: the function's name, for kernels and messages; part of the canonical form, as kernels carry it.
        inputs: the tensor inputs, captured tensors last.
        outputs: the values returned, flattened.
        guards: the conditions on sizes and numbers under which the graph computes the function.
        mutated: (input index, the value written to it), for functions that update an argument in place.
    """

    name: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[Node, ...]
    guards: tuple[Guard, ...] = ()
    mutated: tuple[tuple[int, Node], ...] = ()

    @property
    def results(self) -> tuple[Node, ...]:
        """Returns every value that some kernel writes: the outputs, then the new values of mutated inputs."""
        return (*self.outputs, *(node for _, node in self.mutated))

    def viewed_updates(self) -> dict[int, int]:
        """Maps each output that is a view of an updated input's new value to the index of that input.

        They share its memory: such a view is made of the input, once that has the value.
        """
        updated = {id(node): index for index, node in self.mutated}
        viewed = {}
        for position, output in enumerate(self.outputs):
            node = output
            while node.kind is VIEW and id(node) not in updated:
                node = node.inputs[0]
            if node is not output and id(node) in updated:
                viewed[position] = updated[id(node)]
        return viewed

    @property
    def inputs_used(self) -> frozenset[int]:
        """Returns the inputs that are read, returned or updated."""
        read = (node.attrs.number for node in topological(self.results) if node.kind is INPUT)
        return frozenset((*read, *(index for index, _ in self.mutated)))


class Builder:
    """Makes nodes; a second node equal to an earlier one is the earlier one."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Any, ...], Node] = {}

    def make(
        self,
        op: str,
        inputs: Iterable[Node],
        dtype: str,
        shape: Iterable[Size],
        attrs: tuple[Any, ...] = (),
        location: str | None = None,
    ) -> Node:
        inputs, shape = tuple(inputs), tuple(shape)
        key = (op, tuple(map(id, inputs)), dtype, shape, _typed(attrs))
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(op, inputs, dtype, shape, attrs, location)
        return node

    def const(self, value: bool | int | float, dtype: str) -> Node:
        return self.make("const", (), dtype, (), (value,))

    def scalar(self, value: Scalar, dtype: str) -> Node:
        """Returns ``value`` as a 0-d node: an immediate for a number, a run-time scalar for an ``Expr``."""
        return self.make("scalar" if isinstance(value, Expr) else "const", (), dtype, (), (value,))

    def like(
        self,
        node: Node,
        inputs: Iterable[Node],
        shape: Iterable[Size] | None = None,
        attrs: tuple[Any, ...] | None = None,
    ) -> Node:
        """Rebuilds ``node`` over other ``inputs``, with its own shape and attributes unless there are others."""
        shape, attrs = node.shape if shape is None else shape, node.attrs if attrs is None else attrs
        return self.make(node.op, inputs, node.dtype, shape, attrs, node.location)

    def rebuilt(self, node: Node, inputs: Sequence[Node]) -> Node:
        """Rebuilds ``node`` over ``inputs``; returns itself where these are its own."""
        return node if all(a is b for a, b in zip(inputs, node.inputs, strict=True)) else self.like(node, inputs)


def _typed(value: Any) -> Any:
    """Returns ``value`` as a dict key that tells 1, 1.0 and True from one another, and 0.0 from -0.0."""
    if isinstance(value, tuple):
        return tuple(map(_typed, value))
    if isinstance(value, float):
        return float, value.hex()
    return type(value), value


def topological(roots: Iterable[Node], leaves: Collection[Kind] = (), known: Container[int] = ()) -> list[Node]:
    """Returns ``roots`` and every node that they depend on, inputs before users, in a deterministic order.

    Args:
        leaves: the kinds of nodes whose inputs are not followed.
        known: the ids of nodes whose inputs are not followed.
    """
    if not leaves and not known:
        return [*postorder(roots, lambda node: node.inputs)]
    return [*postorder(roots, lambda node: () if node.kind in leaves or id(node) in known else node.inputs)]


Item = TypeVar("Item", bound=Hashable)


def postorder(roots: Iterable[Item], below: Callable[[Item], Sequence[Item]]) -> Iterator[Item]:
    """Yields ``roots``, and the nodes that ``below`` leads to; each once, and after those that it leads to.

    A loop rather than a recursion, since a chain of operations may be longer than Python's stack is deep.
    """
    seen: set[Item] = set()
    stack: list[Item | None] = [*reversed(list(roots))]
    while stack:
        node = stack.pop()
        if node is None:  # all that the node below it leads to was yielded
            yield stack.pop()  # type: ignore[misc]
        elif node not in seen:
            seen.add(node)
            if following := below(node):
                stack += (node, None)
                stack.extend([other for other in reversed(following) if other not in seen])
            else:
                yield node


def walked(roots: Iterable[Item], below: Callable[[Item], Iterable[Item]]) -> Iterator[Item]:
    """Yields ``roots``, and the nodes that ``below`` leads to from what has been yielded; each once, and the last of
    several first. Anything hashable serves as a node, such as the position of an instruction."""
    stack, seen = list(roots), set[Item]()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(below(node))


# --------------------------------------------------------------------------------------------------- canonical form


def _attr_to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_attr_to_json(item) for item in value]
    return symbols.to_json(value)


def _attr_from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_attr_from_json(item) for item in value)
    return symbols.from_json(value)


def to_json(graph: Graph) -> dict[str, Any]:
    """Returns the canonical form of ``graph``, for request keys and manifests; without the nodes' locations."""
    order = topological(graph.results)
    number = {id(node): position for position, node in enumerate(order)}
    nodes = [
        {
            "op": node.op,
            "inputs": [number[id(child)] for child in node.inputs],
            "dtype": node.dtype,
            "shape": _attr_to_json(node.shape),
            "attrs": _attr_to_json(node.attrs),
        }
        for node in order
    ]
    return {
        "schema": SCHEMA,
        "name": graph.name,
        "inputs": [{"dtype": spec.dtype, "shape": _attr_to_json(spec.shape)} for spec in graph.inputs],
        "nodes": nodes,
        "outputs": [number[id(node)] for node in graph.outputs],
        "guards": [[symbols.to_json(guard.expr), symbols.to_json(guard.value)] for guard in graph.guards],
        "mutated": [[index, number[id(node)]] for index, node in graph.mutated],
    }


def from_json(data: dict[str, Any]) -> Graph:
    """Builds the graph that ``to_json`` wrote."""
    builder = Builder()
    nodes: list[Node] = []
    for item in data["nodes"]:
        inputs = [nodes[position] for position in item["inputs"]]
        shape, attrs = _attr_from_json(item["shape"]), _attr_from_json(item["attrs"])
        nodes.append(builder.make(item["op"], inputs, item["dtype"], shape, attrs))
    return Graph(
        name=data["name"],
        inputs=tuple(InputSpec(spec["dtype"], _attr_from_json(spec["shape"])) for spec in data["inputs"]),
        outputs=tuple(nodes[position] for position in data["outputs"]),
        guards=tuple(Guard(symbols.from_json(e), symbols.from_json(v)) for e, v in data["guards"]),
        mutated=tuple((index, nodes[position]) for index, position in data["mutated"]),
    )


def described_inputs(graph: Graph, sizes: Mapping[str, Any]) -> list[str]:
    """Describes the inputs in words, such as ``bfloat16[s0_0, 4096]``; the tensors of a quantised weight are one input,
    such as ``int4 g128[14336, 4096]``.

    Args:
        sizes: known values of symbolic sizes, by name.
    """

    def shape(spec: Shape) -> str:
        return ", ".join(str(sizes.get(str(size), size)) for size in spec)

    words: dict[int, str] = {i: f"{spec.dtype}[{shape(spec.shape)}]" for i, spec in enumerate(graph.inputs)}
    for node in topological(graph.results):
        if node.kind is DEQUANTIZE:
            first, *others = (tensor.attrs.number for tensor in node.inputs)
            format, group_size, *_ = node.attrs
            words[first] = f"{format} g{group_size or 'K'}[{shape(node.shape)}]"
            for other in others:
                words.pop(other, None)
    return list(words.values())


def equal_sizes(guards: Iterable[Guard], numbers: Collection[str] = ()) -> dict[str, Size]:
    """Maps each size that some guard states to be equal to another one to its representative.

    With every size replaced by its representative, shapes that the guards make equal compare equal.

    Args:
        numbers: the sizes that a number replaces, where a guard states that they are equal to it.
    """
    parents: dict[str, Size] = {}

    def representative(name: str) -> Size | None:
        """Returns what ``name`` is equal to, with shorter paths to it from then on; None if that is nothing else."""
        path, size = [], parents.get(name)
        while isinstance(size, Expr) and size.args[0] in parents:
            path.append(name)
            name, size = size.args[0], parents[size.args[0]]
        parents.update((before, size) for before in path if size is not None)
        return size

    def represented(size: Any) -> Any:
        known = {name: representative(name) for name in symbols.symbols_of(size)}
        return symbols.substitute(size, {name: size for name, size in known.items() if size is not None})

    for guard in guards:
        if guard.expr.op == "eq" and guard.value is True:
            # A number represents its class, or else the first symbol by name.
            sizes = map(represented, guard.expr.args)
            first, second = sorted(sizes, key=lambda size: (isinstance(size, Expr), str(size)))
            if not isinstance(second, Expr) or second.op != "symbol" or first == second:
                continue
            if second.args[0] in numbers if type(first) is int else isinstance(first, Expr) and first.op == "symbol":
                parents[second.args[0]] = first
    return {name: size for name in [*parents] if (size := representative(name)) is not None}


def reduced_dims(kind: str, dims: Sequence[int], shape: Shape) -> tuple[int, ...]:
    """Returns the dimensions over which a graph reduces if a program does so over ``dims``: size 1 has nothing to
    combine, unless it is the only one."""
    if len(dims) < 2 or kind in ("argmax", "argmin"):
        return tuple(dims)
    return tuple(dim for dim in dims if shape[dim] != 1)


def one_along(shape: Iterable[Size], dims: Container[int]) -> Shape:
    """Returns ``shape`` with a size of 1 in ``dims``."""
    return tuple(1 if dim in dims else size for dim, size in enumerate(shape))


def keeps_all_elements(node: Node) -> bool:
    """Returns whether ``node`` is a pointwise operation, or a view that neither repeats nor leaves out elements."""
    whole = ("permute", "reshape", "unsqueeze", "squeeze", "detach", "untracked_view")
    return node.kind.is_pointwise or (node.kind is VIEW and node.attrs.kind in whole)


def size_one_pattern(shape: Iterable[Any]) -> tuple[bool, ...]:
    """Returns which sizes are 1. A trace is specialised on this, because broadcasting depends on it."""
    return tuple(type(size) is int and size == 1 for size in shape)
