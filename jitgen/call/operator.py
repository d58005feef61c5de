"""Registers ``jitgen::call``, the operator that stands for a call where torch traces, exports or transforms it.

::

    jitgen::call(Tensor[] tensors, SymInt[] integers, float[] floats, str graph) -> Tensor[]
    jitgen::call_random(Tensor[] tensors, SymInt[] integers, float[] floats, str graph, *, Device? device) -> Tensor[]

The text has everything that a launch needs, so a graph of torch's with this operator may be stored, and run by another
process that has jitgen. Its results are new contiguous tensors, and it changes none of its arguments.
``jitgen::call_random`` is the same for graphs that draw random numbers, which torch must not call fewer times. It has
the device as an argument of its own, since torch looks for it there when it saves the state of the generator for an
operator that activation checkpointing calls a second time.

Neighbours: ``traced_call.py`` calls it where arguments have no memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jitgen.call.bound import BoundLaunch
from jitgen.call.resolver import Resolver, ResolverOfGraph, after_capture
from jitgen.call.routing import Routing
from jitgen.call.signature import check, environment_of, plan_key
from jitgen.call.table import LIMIT, Table
from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.graph import Graph, from_json, kinds_of, to_json
from jitgen.ir.nodes import PHILOX
from jitgen.spec import DTYPES
from jitgen.trace.traced import Traced

_ARGUMENTS = "Tensor[] tensors, SymInt[] integers, float[] floats, str graph"
NAMES = ("call", "call_random")
LIBRARY = torch.library.Library("jitgen", "FRAGMENT")
LIBRARY.define(f"call({_ARGUMENTS}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"call_random({_ARGUMENTS}, *, Device? device=None) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)


@dataclass(frozen=True)
class Program:
    """Describes what an operator's text says.

    Attributes:
        graph: its results are computed, none is an argument or a view of one; it updates none. It has marks where no
            gradient flows, for calls with gradients that torch makes of what it traced without.
        kinds: for each number that it takes ``"i"`` or ``"f"``.
        backend, compiler, batch_invariant: as the function asked for them.
    """

    graph: Graph
    kinds: str
    backend: str
    compiler: str | None
    batch_invariant: bool

    @property
    def routing(self) -> Routing:
        return Routing(self.graph.name, self.backend, self.compiler, self.batch_invariant)

    @property
    def is_random(self) -> bool:
        """Returns whether it draws random numbers."""
        return PHILOX in kinds_of(self.graph.outputs)

    @property
    def launched(self) -> Graph:
        """Returns ``graph`` without its marks where no gradient flows, which the autograd formula alone reads."""
        from jitgen.gradients.plan import launched  # where a program runs

        return launched(self.graph, self.graph.outputs, len(self.graph.outputs))[0]

    def text(self) -> str:
        facts = vars(self) | {"graph": to_json(self.graph)}
        return json.dumps(facts, separators=(",", ":"))

    def numbers(self, integers: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
        """Puts the numbers of a call in their order."""
        rest = {"i": iter(integers), "f": iter(floats)}
        return [next(rest[kind]) for kind in self.kinds]

    def divided(self, numbers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Divides the numbers of a call into integers and floats."""
        of_kinds = list(zip(self.kinds, numbers, strict=True))
        integers, floats = ([number for kind, number in of_kinds if kind == wanted] for wanted in "if")
        return integers, floats

    def check(self, environment: Mapping[str, Any]) -> None:
        """Checks that the graph is valid for these sizes and numbers; for symbolic ones torch makes guards.

        Raises:
            UnsupportedError: it is not.
        """
        for guard in self.graph.guards:
            value = symbols.evaluate(guard.expr, environment)
            if not (bool(value) is guard.value if isinstance(guard.value, bool) else bool(value == guard.value)):
                raise UnsupportedError(
                    f"{self.graph.name}: this graph is for calls where {guard}; compile or export the function for "
                    "others by themselves"
                )


@functools.lru_cache(maxsize=LIMIT)
def parsed(text: str) -> Program:
    """Parses what ``Program.text`` wrote."""
    facts = json.loads(text)
    return Program(**facts | {"graph": from_json(facts["graph"])})


@functools.lru_cache(maxsize=LIMIT)
def operator_of(program: Program) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns the operator with ``program`` as its text, as a function of tensors and then numbers."""
    text, count = program.text(), len(program.graph.inputs)

    def call(*leaves: Any) -> tuple[torch.Tensor, ...]:
        return tuple(call_operator(list(leaves[:count]), *program.divided(leaves[count:]), text))

    return call


def call_operator(
    tensors: list[torch.Tensor], integers: Sequence[Any], floats: Sequence[Any], text: str
) -> list[torch.Tensor]:
    """Calls the operator whose program ``text`` is."""
    if not _draws(text):
        return torch.ops.jitgen.call.default(tensors, integers, floats, text)
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.ops.jitgen.call_random.default(tensors, integers, floats, text, device=device)


class _Launches:
    """Runs one program, on tensors with memory."""

    def __init__(self, program: Program):
        self.resolver: Resolver = ResolverOfGraph(Traced.from_graph(program.launched), program.routing)
        self.table: Table[Any, BoundLaunch] = Table()

    def __call__(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> Sequence[torch.Tensor]:
        leaves = [*tensors, *numbers]
        bound = self.table.get(self._key(leaves))
        if bound is None:
            bound = after_capture(functools.partial(self._resolved, leaves))
        return bound.launch(*tensors, *(tensor.data_ptr() for tensor in tensors), *numbers)

    def _key(self, leaves: Sequence[Any]) -> Any:
        return plan_key(leaves, None, self.resolver.static_numbers), torch.get_num_threads()

    def _resolved(self, leaves: Sequence[Any]) -> BoundLaunch:
        """Resolves a new call, and remembers how it is launched."""
        bound = self.resolver.resolve(check(self.resolver.name, leaves))[0]
        self.table.put(self._key(leaves), bound)  # by a key that may differ now, since numbers may have become static
        return bound


@functools.lru_cache(maxsize=LIMIT)
def _launches(text: str) -> _Launches:
    return _Launches(parsed(text))


def _run(
    tensors: Sequence[torch.Tensor],
    integers: Sequence[Any],
    floats: Sequence[float],
    graph: str,
    *,
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    program = parsed(graph)
    plain = [tensor.detach() if type(tensor) is not torch.Tensor else tensor for tensor in tensors]
    numbers = program.numbers(integers, floats)
    program.check(environment_of(plain, numbers))
    with torch.no_grad():
        return [result.contiguous() for result in _launches(graph)(plain, numbers)]


def _shapes(
    tensors: Sequence[torch.Tensor],
    integers: Sequence[Any],
    floats: Sequence[float],
    graph: str,
    *,
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Computes the results without memory, which torch needs for fake tensors."""
    program = parsed(graph)
    environment = environment_of(tensors, program.numbers(integers, floats))
    program.check(environment)
    return empty_results(program, environment, tensors[0].device if tensors else torch.device("cpu"))


def empty_results(program: Program, environment: Mapping[str, Any], device: torch.device) -> list[torch.Tensor]:
    """Returns tensors of the results' dtypes and sizes, whose elements are not set."""
    return [
        torch.empty(
            [symbols.evaluate(size, environment) for size in node.shape], dtype=DTYPES[node.dtype], device=device
        )
        for node in program.graph.outputs
    ]


@functools.lru_cache(maxsize=LIMIT)
def _draws(text: str) -> bool:
    return parsed(text).is_random


@functools.lru_cache(maxsize=LIMIT)
def _text_over_batch(text: str, is_batched: tuple[bool, ...], single: bool) -> tuple[str, tuple[bool, ...]] | None:
    """Returns the text of the graph over a batch (``ir/batched.py``), and which of its results have one; None if a node
    has no rule."""
    from jitgen.ir.batched import batched

    program = parsed(text)
    over_batch = batched(program.graph, is_batched, single)
    return None if over_batch is None else (replace(program, graph=over_batch[0]).text(), over_batch[1])


def _batched(
    info: Any,
    in_dims: tuple[Any, ...],
    tensors: Sequence[torch.Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    graph: str,
    **of_random: Any,
) -> Any:
    """Implements ``torch.func.vmap``: one call of the graph over the batch (``ir/batched.py``).

    Random numbers are drawn as torch's own operators draw them: not at all unless ``vmap`` says which it wants.

    Raises:
        RuntimeError: the function draws random numbers and ``vmap`` has no ``randomness=``.
    """
    program, is_random = parsed(graph), _draws(graph)
    if is_random and info.randomness == "error":
        raise RuntimeError(
            f"{program.graph.name} draws random numbers under vmap; pass randomness='different' or 'same' to vmap"
        )
    dims = in_dims[0]
    over_batch = None
    if not (is_random and info.randomness == "different"):
        over_batch = _text_over_batch(graph, tuple(dim is not None for dim in dims), info.batch_size == 1)
    if over_batch is not None:
        text, has_batch = over_batch
        moved = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)]
        results = call_operator(moved, integers, floats, text)
        return results, [0 if batched else None for batched in has_batch]
    if not info.batch_size:
        raise UnsupportedError(f"{program.graph.name}: vmap over a batch of 0 elements; call the function's .reference")
    rows = [
        [t if dim is None else t.select(dim, index) for t, dim in zip(tensors, dims, strict=True)]
        for index in range(info.batch_size)
    ]
    calls = [call_operator(row, integers, floats, graph) for row in rows]
    return [torch.stack(column) for column in zip(*calls, strict=True)], [0] * len(program.graph.outputs)


for _name in NAMES:
    # Not the keys of devices: a function may make tensors of none.
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jitgen::{_name}", _shapes, lib=LIBRARY)
    torch.library.register_vmap(f"jitgen::{_name}", _batched, lib=LIBRARY)
