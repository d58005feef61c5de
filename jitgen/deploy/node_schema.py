"""Checks the nodes of a manifest's graph: a check for each kind of node in ``ir/nodes.py``.

``CHECKS`` tests a node's attributes, dtype and shape against its operands, with the sizes of the recorded call; the
kind's row says how many operands there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.codegen.own_functions import DIALECTS
from jitgen.deploy import expression_schema as expressions
from jitgen.deploy import launch_schema
from jitgen.errors import FormatError
from jitgen.fields import Field, shown
from jitgen.ir import symbols
from jitgen.ir.body import FACTORS, accumulator_dtype, compute_dtype
from jitgen.ir.equations import LENGTHS_OF_GROUPS, ROWS_OF_GROUPS, equation
from jitgen.ir.graph import REDUCTIONS
from jitgen.ir.nodes import (
    BITS,
    CAST,
    CAT,
    CONST,
    CONTRACT,
    CONVOLVE,
    DEQUANTIZE,
    GATHER,
    GROUPED,
    INPUT,
    IOTA,
    KINDS,
    LAUNCH,
    OWN,
    REDUCE,
    SCALAR,
    SCAN,
    SCATTER,
    SORT,
    VIEW,
    Kind,
)
from jitgen.ir.ops import INTS, OPS
from jitgen.ir.scans import PLACES, SCANS
from jitgen.ir.scatters import SCATTERS
from jitgen.ir.sorts import SORTS
from jitgen.quant import weights
from jitgen.quant.activations import check_activation
from jitgen.quant.formats import FORMATS, check_group_size, find
from jitgen.quant.layouts import LAYOUTS
from jitgen.spec import BITS_OF, DTYPES, dtype_name

OPERAND_LIMIT = 4096
"""Operands of one node."""


@dataclass(frozen=True)
class Value:
    """Represents a node that has been checked; ``shape`` is that of the recorded call.

    ``index``: of an input. ``weight``: a quantised weight, or a view of one, which only products read.
    """

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    index: int | None = None
    weight: bool = False


@dataclass(frozen=True)
class Node:
    """Represents a node that is being checked.

    ``inputs`` are the graph's: dtype, and the symbolic shape as it stands in the file.
    """

    field: Field
    kind: Kind
    operands: tuple[Value, ...]
    dtype: str
    shape: tuple[int, ...]
    attrs: Field
    environment: Mapping[str, Any]
    inputs: Sequence[tuple[str, Any]]

    def attributes(self, count: int) -> list[Field]:
        return self.attrs.items(count, count)

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.field.refuse(f"{self.kind}: {problem}")

    def has_shape(self, sizes: Sequence[int]) -> None:
        if self.shape != tuple(sizes):
            self.field.refuse(f"{self.kind}: its shape is {list(self.shape)} in the recorded call, not {list(sizes)}")

    def has_dtype(self, *names: str) -> None:
        if self.dtype not in names:
            self.field.refuse(f"{self.kind}: its dtype is {self.dtype}, not {' or '.join(names)}")

    def is_computed_as(self, dtype: str) -> None:
        """Checks that the node has the compute dtype of ``dtype``: it may be stored wider than its operands are, or
        narrower."""
        if compute_dtype(self.dtype) != compute_dtype(dtype):
            self.field.refuse(f"{self.kind}: its dtype is {self.dtype}, not {dtype} or one that is computed as it is")


# ----------------------------------------------------------------------------------------------------------- leaves


def _input(node: Node) -> None:
    (index,) = node.attributes(1)
    dtype, shape = node.inputs[index.integer(0, len(node.inputs))]
    node.has_dtype(dtype)
    node.require(node.field.value["shape"] == shape, f"its shape is not that of input {index.value}")


def _const(node: Node) -> None:
    (attr,) = node.attributes(1)
    value = expressions.number(attr)
    node.has_shape(())
    dtype = DTYPES[node.dtype]
    kind = float if dtype.is_floating_point else bool if node.dtype == "bool" else int
    node.require(type(value) is kind, f"{shown(attr.value)} is not a number of {node.dtype}")
    if kind is int:
        bits = 8 * dtype.itemsize
        low = 0 if node.dtype == "uint8" else -(2 ** (bits - 1))
        node.require(low <= value < low + 2**bits, f"{shown(value)} is out of the range of {node.dtype}")


def _scalar(node: Node) -> None:
    (attr,) = node.attributes(1)
    if not expressions.is_expression(attr):
        attr.refuse(f"{shown(attr.value)} is not an expression; a number is a const")
    expressions.scalar(attr, dict.fromkeys(symbols.DRAWN, 0) | dict(node.environment))
    node.has_shape(())


def _iota(node: Node) -> None:
    (dim,) = node.attributes(1)
    dim.integer(0, len(node.shape))
    node.has_dtype(*INTS)


# --------------------------------------------------------------------------------------------------------- movement


def _permute(node: Node, attrs: list[Field], sizes: tuple[int, ...]) -> None:
    order = [dim.integer(0, len(sizes)) for dim in attrs[0].items(len(sizes), len(sizes))]
    if len(set(order)) != len(order):
        attrs[0].refuse("names a dimension twice")
    node.has_shape([sizes[dim] for dim in order])


def _slice(node: Node, attrs: list[Field], sizes: tuple[int, ...]) -> None:
    dim, step = attrs[0].integer(0, len(sizes)), attrs[2].integer(-(2**31), 2**31)
    if not step:
        attrs[2].refuse("a step of 0")
    start = expressions.scalar(attrs[1], node.environment)
    node.require(len(node.shape) == len(sizes), f"its rank is {len(node.shape)}, its operand's {len(sizes)}")
    length, size = node.shape[dim], sizes[dim]
    node.has_shape((*sizes[:dim], length, *sizes[dim + 1 :]))
    if type(start) is not int or not -1 <= start <= size:
        attrs[1].refuse(f"is {shown(start)}, which is outside of a dimension of {size}")
    if length:
        last = start + (length - 1) * step
        node.require(0 <= start < size and 0 <= last < size, f"reaches from {start} to {last} of {size} elements")


def _expand(node: Node, attrs: list[Field], sizes: tuple[int, ...]) -> None:
    fits = not sizes or len(sizes) == len(node.shape)
    fits = fits and all(old in (1, new) for old, new in zip(sizes, node.shape, strict=False))
    node.require(fits, f"{list(sizes)} does not expand to {list(node.shape)}")


def _unsqueeze(node: Node, attrs: list[Field], sizes: tuple[int, ...]) -> None:
    dim = attrs[0].integer(0, len(sizes) + 1)
    node.has_shape((*sizes[:dim], 1, *sizes[dim:]))


def _squeeze(node: Node, attrs: list[Field], sizes: tuple[int, ...]) -> None:
    dim = attrs[0].integer(0, len(sizes))
    node.require(sizes[dim] == 1, f"dimension {dim} has {sizes[dim]} elements, not 1")
    node.has_shape((*sizes[:dim], *sizes[dim + 1 :]))


def _reshape(node: Node, attrs: list[Field], sizes: tuple[int, ...]) -> None:
    count = expressions.elements(node.field, sizes)
    same = expressions.elements(node.field, node.shape) == count
    node.require(same, f"{list(sizes)} and {list(node.shape)} have different numbers of elements")


VIEWS: dict[str, tuple[int, Callable[[Node, list[Field], tuple[int, ...]], None]]] = {
    "permute": (1, _permute),
    "slice": (3, _slice),
    "expand": (0, _expand),
    "unsqueeze": (1, _unsqueeze),
    "squeeze": (1, _squeeze),
    "reshape": (0, _reshape),
}
"""Kinds of ``ir/views.py``: how many parameters each has, and what they must be."""


def _view(node: Node) -> None:
    kind = node.attrs.items(4, 1)[0].one_of(VIEWS)
    parameters, check = VIEWS[kind]
    _, *attrs = node.attributes(1 + parameters)
    (operand,) = node.operands
    node.has_dtype(operand.dtype)
    check(node, attrs, operand.shape)


def _cat(node: Node) -> None:
    (attr,) = node.attributes(1)
    dim = attr.integer(0, len(node.shape))
    for operand in node.operands:
        node.has_dtype(operand.dtype)
        fits = len(operand.shape) == len(node.shape)
        fits = fits and (*node.shape[:dim], operand.shape[dim], *node.shape[dim + 1 :]) == operand.shape
        node.require(fits, f"{list(operand.shape)} does not fit beside the others along dimension {dim}")
    total = sum(operand.shape[dim] for operand in node.operands)
    node.require(total == node.shape[dim], f"its operands have {total} elements along dimension {dim}")


# ------------------------------------------------------------------------------------------------------- arithmetic


def _reduce(node: Node) -> None:
    kind, dims = node.attributes(2)
    kind.one_of(REDUCTIONS)
    (operand,) = node.operands
    reduced = [dim.integer(0, len(operand.shape)) for dim in dims.items(expressions.RANK_LIMIT, 1)]
    if reduced != sorted(set(reduced)):
        dims.refuse("is not in ascending order, each dimension once")
    node.has_shape([1 if dim in reduced else size for dim, size in enumerate(operand.shape)])
    if kind.value in ("any", "all"):
        node.require(operand.dtype == "bool", f"{kind.value} of {operand.dtype}")
    node.is_computed_as("int64" if kind.value in ("argmax", "argmin") else operand.dtype)


def _gather(node: Node) -> None:
    source, *indices = node.operands
    coordinates = _coordinates(node, node.attributes(len(source.shape)), indices, node.shape)
    node.has_dtype(source.dtype)
    for coordinate, size in zip(coordinates, source.shape, strict=True):
        elements = coordinate >= 0 or size > 0 or 0 in node.shape
        node.require(elements, "a dimension without elements is indexed")
        node.require(
            coordinate < 0 or node.shape[coordinate] == size, f"coordinate {coordinate} goes along {size} elements"
        )


def _coordinates(node: Node, fields: Sequence[Field], indices: Sequence[Value], shape: Sequence[int]) -> list[int]:
    """Returns the coordinates of a tensor that is read or written at ``indices``, one for each element of ``shape``."""
    coordinates = [field.integer(-len(indices), len(shape)) for field in fields]
    chosen = sorted(coordinate for coordinate in coordinates if coordinate < 0)
    node.require(chosen == list(range(-len(indices), 0)), "each of its indices belongs to one dimension")
    node.require(len(set(coordinates)) == len(coordinates), "two dimensions are read at one coordinate")
    for index in indices:
        node.require(index.dtype == "int64", f"an index is {index.dtype}")
        node.require(index.kind.is_number or index.shape == tuple(shape), f"an index is {list(index.shape)}")
    return coordinates


def _scatter(node: Node) -> None:
    base, value, *indices = node.operands
    kind, coordinates, movements = node.attributes(3)
    kind.one_of(SCATTERS)
    node.has_shape(base.shape)
    node.has_dtype(base.dtype)
    node.require(value.dtype == base.dtype, f"its value is {value.dtype}")
    sizes = base.shape
    for movement in movements.items(OPERAND_LIMIT):
        attrs, shape = movement.items(2, 2)
        name = attrs.items(4, 1)[0].one_of(VIEWS)
        count, check = VIEWS[name]
        node.require(name not in ("expand", "reshape"), f"it changes a view by {name}")
        shape_ = expressions.shape(shape, node.environment)
        check(replace(node, shape=shape_), attrs.items(1 + count, 1 + count)[1:], sizes)
        sizes = shape_
    node.require(not value.kind.is_number, "its value is a number")
    chosen = _coordinates(node, coordinates.items(len(sizes), len(sizes)), indices, value.shape)
    for coordinate, size in zip(chosen, sizes, strict=True):
        node.require(
            coordinate < 0 or value.shape[coordinate] <= size, f"coordinate {coordinate} goes along {size} elements"
        )


def _scan(node: Node) -> None:
    kind, dim, reverse = node.attributes(3)
    kind.one_of(SCANS)
    (operand,) = node.operands
    dim.integer(0, len(operand.shape))
    node.require(type(reverse.value) is bool, "whether it runs in reverse is true or false")
    node.has_shape(operand.shape)
    node.is_computed_as("int64" if kind.value in PLACES else operand.dtype)


def _sort(node: Node) -> None:
    what, dim, descending, start = node.attributes(4)
    what.one_of(SORTS)
    (operand,) = node.operands
    along = dim.integer(0, len(operand.shape))
    node.require(type(descending.value) is bool, "whether it is descending is true or false")
    node.require(len(node.shape) == len(operand.shape), f"its rank is {len(node.shape)}, its operand's otherwise")
    node.has_shape((*operand.shape[:along], node.shape[along], *operand.shape[along + 1 :]))
    first = expressions.scalar(start, node.environment)
    fits = type(first) is int and first >= 0 and first + node.shape[along] <= operand.shape[along]
    node.require(fits, f"{shown(first)} and {node.shape[along]} are no ranks of {operand.shape[along]} elements")
    node.has_dtype("int64" if what.value == "indices" else operand.dtype)


def _contract(node: Node) -> None:
    named, accumulator, precision = node.attributes(3)
    precision.one_of(("ieee", "tf32", "fast"))
    x, weight = node.operands
    node.require(not x.weight, "its activation is a quantised weight")
    batch, rank = len(weight.shape) - 2, len(x.shape)
    node.require(0 <= batch <= rank - 1, "it is of (batch..., ..., K) and (batch..., N, K)")
    node.require(not (weight.weight and batch), "a quantised weight is a matrix")
    try:
        expected = equation(batch, rank - 1 - batch)
    except ValueError as problem:
        node.field.refuse(str(problem))
    named.one_of((expected,))
    accumulator.one_of((accumulator_dtype(x.dtype),))
    node.require(x.shape[:batch] == weight.shape[:batch], "its operands have other batches")
    node.require(x.shape[-1] == weight.shape[-1], f"K is {x.shape[-1]} and {weight.shape[-1]}")
    node.require(x.dtype in FACTORS, f"its activation is {x.dtype}, none of {', '.join(FACTORS)}")
    node.require(weight.weight or weight.dtype == x.dtype, f"of {x.dtype} and {weight.dtype}")
    wider = weight.weight and x.dtype in ("float16", "bfloat16") and node.dtype == "float32"  # codes that were decoded
    if not (wider or (x.dtype, node.dtype) == ("int8", "int32")):
        node.has_dtype(x.dtype)
    node.has_shape((*x.shape[:-1], weight.shape[-2]))


def _grouped(node: Node) -> None:
    named, accumulator, precision, by = node.attributes(4)
    precision.one_of(("ieee", "tf32"))
    named.one_of((ROWS_OF_GROUPS, LENGTHS_OF_GROUPS))
    x, weight, groups = node.operands
    of_lengths = named.value == LENGTHS_OF_GROUPS
    by.one_of(("offsets",) if of_lengths else ("offsets", "ids"))
    node.require(not x.weight and len(x.shape) == 2, "its activation is no matrix of numbers")
    node.require(len(weight.shape) == 3 - of_lengths, f"its weight has {len(weight.shape)} dimensions")
    node.require(not (weight.weight and of_lengths), "a quantised weight has no groups along K")
    node.require(x.shape[-1] == weight.shape[-1], f"K is {x.shape[-1]} of x and {weight.shape[-1]} of the weight")
    node.require(groups.dtype in ("int32", "int64") and len(groups.shape) == 1, "its groups are no vector of integers")
    node.require(x.dtype in FACTORS, f"a product of {x.dtype} is not computed")
    if not weight.weight:
        node.require(x.dtype == weight.dtype, f"of {x.dtype} and {weight.dtype}")
    accumulator.one_of((accumulator_dtype(x.dtype), "float32"))
    if of_lengths:
        node.has_shape((groups.shape[0], x.shape[0], weight.shape[0]))
    else:
        node.require(groups.shape[0] == (x if by.value == "ids" else weight).shape[0], "its groups are others")
        node.has_shape((x.shape[0], weight.shape[1]))


def _convolve(node: Node) -> None:
    *windows, accumulator, precision = node.attributes(6)
    precision.one_of(("ieee", "tf32"))
    images, filters = node.operands
    rank = len(images.shape) - 3
    node.require(1 <= rank <= 3 and len(filters.shape) == rank + 3, "it is of images and filters of 1 to 3 dimensions")
    node.require(images.dtype in FACTORS, f"its images are {images.dtype}, none of {', '.join(FACTORS)}")
    node.require(filters.dtype == images.dtype, f"of {images.dtype} and {filters.dtype}")
    node.require(not (images.weight or filters.weight), "an operand is a quantised weight")
    accumulator.one_of((accumulator_dtype(images.dtype),))
    for numbers, least in zip(windows, (1, -(2**31), -(2**31), 1), strict=True):
        for number in numbers.items(rank, rank):
            number.integer(least, 2**31)
    groups, outputs, channels = filters.shape[:3]
    node.require(images.shape[1:3] == (groups, channels), "its operands have other groups or channels")
    node.has_dtype(images.dtype)
    node.require(len(node.shape) == rank + 3, f"its rank is {len(node.shape)}")
    node.has_shape((images.shape[0], groups, outputs, *node.shape[3:]))


def _dequantize(node: Node) -> None:
    format, group, layout, activation = node.attributes(4)
    layout.one_of(LAYOUTS)
    node.require(DTYPES[node.dtype].is_floating_point, f"a weight of {node.dtype}")
    sizes = node.field.value["shape"]
    node.require(len(sizes) == 2 and all(type(size) is int for size in sizes), "its shape is not (N, K) in numbers")
    try:
        row = find(format.value)
    except FormatError:
        format.one_of(FORMATS)
    try:
        node.require(row.name == format.value, f"{shown(format.value)} is spelled {row.name}")
        node.require(check_group_size(group.value, row) == group.value, f"{row.name} has another group size")
        check_activation(activation.value, row, group.value, sizes[1])
        tensors = weights.described_tensors(format.value, group.value, (sizes[0], sizes[1]), layout.value)
    except (FormatError, RuntimeError) as error:  # torch's, where sizes are too large
        node.field.refuse(f"dequantize: {shown(str(error))}")
    node.require(len(node.operands) == len(tensors), f"a weight of {format.value} has {len(tensors)} tensors")
    for operand, tensor in zip(node.operands, tensors, strict=True):
        expected = dtype_name(tensor.dtype), tuple(tensor.shape)
        node.require(operand.kind is INPUT, f"its tensors are inputs, not a {operand.kind}")
        node.require(
            (operand.dtype, operand.shape) == expected,
            f"a tensor is {operand.dtype} {list(operand.shape)}, not {expected[0]} {list(expected[1])}",
        )


def _cast(node: Node) -> None:
    (operand,) = node.operands
    node.has_shape(operand.shape)
    attrs = node.attrs.items(2)
    if not attrs:
        return
    node.has_dtype(operand.dtype)
    kind = attrs[0].one_of(("contiguous", "channels_last", "copy", "rounded"))
    *_, last = node.attributes(2 if kind == "copy" else 1)
    if kind == "copy":
        last.integer(0, 2**31)


def _pointwise(node: Node) -> None:
    op = OPS[node.kind.name]
    node.attributes(0)
    for operand in node.operands:
        immediate = operand.kind.is_number
        node.require(immediate or operand.shape == node.shape, f"an operand is {list(operand.shape)}")
    dtypes = [operand.dtype for operand in node.operands]
    if op.name == "where":
        node.require(dtypes.pop(0) == "bool", "its condition is not bool")
    computed = set(map(compute_dtype, dtypes))
    node.require(len(computed) == 1, f"its operands are {', '.join(dtypes)}, not computed in one dtype")
    node.require(computed <= set(op.domain), f"not defined for {dtypes[0]}")
    node.is_computed_as("bool" if op.predicate else dtypes[0])


def _bits(node: Node) -> None:
    (operand,) = node.operands
    node.attributes(0)
    node.has_shape(operand.shape)
    pair = operand.dtype, node.dtype
    node.require(BITS_OF.get(pair[0]) == pair[1] or BITS_OF.get(pair[1]) == pair[0], f"bits of {pair[0]} as {pair[1]}")


def _own(node: Node) -> None:
    name, parameters, texts = node.attributes(3)
    names = [parameter.value for parameter in parameters.items(len(node.operands), len(node.operands))]
    node.require(all(isinstance(n, str) and n.isidentifier() for n in [name.value, *names]), "a name is no identifier")
    for operand in node.operands:
        node.require(operand.kind.is_number or operand.shape == node.shape, f"an operand is {list(operand.shape)}")
    for spelled in texts.items(len(DIALECTS), 1):
        dialect, text = spelled.items(2, 2)
        dialect.one_of(DIALECTS)
        why = launch_schema.expression_refusal(text.value, str(dialect.value), names)
        if why is not None:
            text.refuse(f"is no expression of a pointwise function: {why}")


CHECKS: dict[Kind, Callable[[Node], None]] = {
    INPUT: _input,
    CONST: _const,
    SCALAR: _scalar,
    IOTA: _iota,
    VIEW: _view,
    CAT: _cat,
    REDUCE: _reduce,
    GATHER: _gather,
    SCATTER: _scatter,
    LAUNCH: launch_schema.check,
    OWN: _own,
    BITS: _bits,
    SCAN: _scan,
    SORT: _sort,
    CONTRACT: _contract,
    GROUPED: _grouped,
    CONVOLVE: _convolve,
    DEQUANTIZE: _dequantize,
    CAST: _cast,
    **{KINDS[name]: _pointwise for name in OPS},
}
"""The kinds that a manifest's graph may hold, which are all but those that only gradients or plans need."""
_MEMBERS = ("op", "inputs", "dtype", "shape", "attrs")


def node(field: Field, before: Sequence[Value], environment: Mapping[str, Any], inputs: Sequence[Any]) -> Value:
    """Checks one node of a graph.

    Args:
        before: the nodes before it, which alone can be its operands.
        environment: a value for every symbol.
        inputs: of the graph: dtype and symbolic shape.
    """
    op, operands, dtype, shape, attrs = field.members(*_MEMBERS)
    kind = KINDS.get(op.value) if isinstance(op.value, str) else None
    if kind not in CHECKS:
        op.refuse(f"{shown(op.value)} is no node operation")
    values, (least, most) = [], kind.operands
    for item in operands.items(min(most, OPERAND_LIMIT), least):
        operand = before[item.integer(0, len(before))]
        if operand.weight and not kind.takes_weights:
            item.refuse(f"{kind} of a quantised weight; only products and views read one")
        values.append(operand)
    dtype.one_of(DTYPES)
    sizes = expressions.shape(shape, environment)
    CHECKS[kind](Node(field, kind, tuple(values), dtype.value, sizes, attrs, environment, inputs))
    index = attrs.value[0] if kind is INPUT else None
    weight = kind is DEQUANTIZE or (kind is VIEW and values[0].weight)
    return Value(kind, dtype.value, sizes, index, weight)


def weight_tensors(nodes: Sequence[Field]) -> frozenset[int]:
    """Returns the inputs, by the numbers of their nodes, that quantised weights consist of.

    Nothing else may read one that is in the portable layout: such a weight is laid out anew for every backend, so that
    its tensors get other shapes.
    """
    tensors: set[int] = set()
    portable: set[int] = set()
    for field in nodes:
        if field.value["op"] != DEQUANTIZE.name:
            continue
        members = dict(zip(_MEMBERS, field.members(*_MEMBERS), strict=True))
        moved = members["attrs"].value[2:3] == ["portable"]
        for operand in members["inputs"].items(OPERAND_LIMIT):
            if operand.value in tensors:
                operand.refuse("is a tensor of another weight already")
            tensors.add(operand.value)
            if moved:
                portable.add(operand.value)
    for field in nodes:
        if portable and field.value["op"] != DEQUANTIZE.name:
            for operand in field.members(*_MEMBERS)[1].items(OPERAND_LIMIT):
                if operand.value in portable:
                    operand.refuse("is a tensor of a quantised weight, which only the weight reads")
    return frozenset(tensors)
