"""Defines the attributes of nodes, by name: a named tuple for each kind of node that has several.

``Node.attrs`` is such a tuple, so ``node.attrs.dims`` reads one attribute and ``kind, dims = node.attrs`` all of them.
It is equal to the plain tuple of its values, and has the same hash and the same canonical form. The rows of
``ir/nodes.py`` say which kind has which.

A ``cast`` and a ``gather`` have attributes that are no record: a cast has none or one of the marks below (or ``("copy",
number)``, which tells copies of one value apart), a gather has one coordinate for each dimension of its source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jitgen.ir.symbols import Expr, Scalar, Size

if TYPE_CHECKING:
    from jitgen.ir.graph import Shape

CONTIGUOUS = ("contiguous",)
CHANNELS_LAST = ("channels_last",)
"""Attributes of a ``cast`` that say in which order its elements are in memory where it is returned."""
ROUNDED = ("rounded",)
"""Attributes of a ``cast`` to the same dtype that rounds."""


class NothingAttrs(NamedTuple):
    """Stands for the attributes of a kind that has none."""


class InputAttrs(NamedTuple):
    number: int
    """The position of the tensor among the graph's inputs."""


class NumberAttrs(NamedTuple):
    value: bool | int | float | Expr
    """A Python number of a ``const``, an expression of a ``scalar``."""


class AlongAttrs(NamedTuple):
    dim: int


class ReduceAttrs(NamedTuple):
    kind: str
    dims: tuple[int, ...]
    """The dimensions that are reduced, in ascending order; they stay as sizes of 1."""


class ScanAttrs(NamedTuple):
    kind: str
    dim: int
    reverse: bool


class SortAttrs(NamedTuple):
    what: str
    dim: int
    descending: bool
    start: Scalar
    """The rank of the first result; there are as many as the node's shape has."""


class CountedAttrs(NamedTuple):
    what: str
    bound: Size
    """Elements are whole numbers below it."""


class LimitedAttrs(NamedTuple):
    groups: int
    """How many groups of neighbouring elements a row has."""
    kept: int
    terms: int
    """1 or 2: a group counts by its greatest element, or by the sum of its two greatest."""


class LargestAttrs(NamedTuple):
    run: int
    """How many neighbouring elements of a row one result is of, which divides the row."""


class BlockAttrs(NamedTuple):
    kind: str
    size: int
    """How many neighbours of a row are a block."""


class ContractAttrs(NamedTuple):
    equation: str
    accumulator: str
    """The dtype of the sum."""
    precision: str
    """``"ieee"`` or ``"tf32"``, of float32 operands; ``"fast"`` where products of 8-bit floats, or of what such are
    cast to, may be summed with the bits that tensor cores keep."""


class GroupedAttrs(NamedTuple):
    equation: str
    """``ROWS_OF_GROUPS`` or ``LENGTHS_OF_GROUPS`` of ``ir/equations.py``."""
    accumulator: str
    precision: str
    by: str
    """How the third operand divides rows, or K: by ``"offsets"``, the end of each group, or by ``"ids"``, the group of
    each row."""


class ConvolveAttrs(NamedTuple):
    """Holds how pixels and filters meet in each dimension of an image (``ir/convolutions.py``)."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    offset: tuple[int, ...]
    spread: tuple[int, ...]
    accumulator: str
    precision: str


class ScatterAttrs(NamedTuple):
    kind: str
    coordinates: tuple[int, ...]
    movements: tuple[tuple[tuple[Any, ...], Shape], ...]
    """The view of the base that is written: pairs of a view's attributes and its shape."""


class KernelText(NamedTuple):
    """Holds what a user's kernel is.

    Attributes:
        language: ``"triton"``, ``"cuda"`` or ``"cpp"``.
        entry: its name in the text; in C++ with namespaces and the arguments of its template.
        text: in Triton, of a module that defines it and all that it calls; in C++, of its file.
        headers: (name, text) of every header of the user's that the text includes, directly or not.
        flags: of the compiler.
    """

    language: str
    entry: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()


class LaunchAttrs(NamedTuple):
    """Holds a launch of a user's kernel (``ir/launches.py``)."""

    kernel: KernelText
    parameters: tuple[tuple[str, str, Any], ...]
    """For each parameter its name, how it is passed, and what."""
    configs: tuple[tuple[tuple[tuple[str, str], ...], tuple[tuple[str, int], ...], tuple[Scalar, ...]], ...]
    """The ways to launch it, of which one is chosen: constants (name, text), options (name, number), and the grid."""
    written: tuple[int, ...]
    """The operands that it writes, in ascending order."""
    unset: tuple[int, ...]
    """Those among them whose elements nobody has set before."""
    strides: tuple[tuple[Scalar, ...] | None, ...]
    """The strides of each operand that the kernel may be told; None where it is told none, and takes row-major ones."""
    result: int
    """The operand of which the node is the new value."""


def launch_attributes(kernel: tuple[Any, ...], *others: Any) -> LaunchAttrs:
    """Makes the attributes of a launch of plain values."""
    return LaunchAttrs(KernelText(*kernel), *others)


class OwnAttrs(NamedTuple):
    """Describes a pointwise function that a user spelled in each dialect."""

    name: str
    parameters: tuple[str, ...]
    """Their names in the texts."""
    texts: tuple[tuple[str, str], ...]
    """(dialect, expression) for each dialect that has it."""


class DequantizeAttrs(NamedTuple):
    format: str
    group_size: int | None
    layout: str
    activation: str | None = None
    """How products quantise what they multiply with the weight (``quant/activations.py``); None for not at all."""


# --------------------------------------------------------------------------------------------------------------- views


class PermuteAttrs(NamedTuple):
    kind: str
    order: tuple[int, ...]


class SliceAttrs(NamedTuple):
    kind: str
    dim: int
    start: Size
    step: int


class OneDimAttrs(NamedTuple):
    """Holds the attributes of ``unsqueeze`` and ``squeeze``."""

    kind: str
    dim: int


class ToShapeAttrs(NamedTuple):
    """Holds the attributes of ``expand`` and ``reshape``, which go to the node's shape, and of marks, which move
    nothing."""

    kind: str


MOVEMENTS: dict[str, Callable[..., Any]] = {
    "permute": PermuteAttrs,
    "slice": SliceAttrs,
    "unsqueeze": OneDimAttrs,
    "squeeze": OneDimAttrs,
    "expand": ToShapeAttrs,
    "reshape": ToShapeAttrs,
}
"""The attributes of a ``view`` by its kind, which is the first of them (``ir/views.py``)."""
MARKS = ("detach", "untracked_view", "untracked_contiguous", "saved", "shared", "product_of_all", "excluded")
"""Kinds of views that move nothing: marks for gradients (``ir/custom_gradients.py``)."""
VIEWS = MOVEMENTS | dict.fromkeys(MARKS, ToShapeAttrs)


def view(kind: str, *parameters: Any) -> Any:
    """Builds the attributes of a view, by name."""
    return VIEWS[kind](kind, *parameters)
