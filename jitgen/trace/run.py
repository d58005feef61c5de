"""``trace``: one run of a function on proxies, from its flattened arguments to its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen.errors import TraceError
from jitgen.ir.graph import Graph, Node
from jitgen.quant import weights
from jitgen.trace import escapes
from jitgen.trace.captured import Captured, default_dtype_guard, matmul_precision_guard
from jitgen.trace.guards import Guards, tracing
from jitgen.trace.host_scalars import SymbolicScalar
from jitgen.trace.location import quote, raised_at
from jitgen.trace.look_ups import reported_to
from jitgen.trace.numbers import unwrap, wrap
from jitgen.trace.proxy import TensorProxy, proxies_are_tensors
from jitgen.trace.traced import Output, Sizes, Traced
from jitgen.trace.tracer import InterceptFunctions, Trace
from jitgen.trace.transforms import transforms_are_refused


def trace(
    function: Callable[..., Any],
    name: str,
    leaves: Sequence[Any],
    tree: pytree.TreeSpec,
    guards: Guards,
    device: torch.device,
    layout: str = "portable",
    objects: Sequence[Captured] = (),
    runs: bool = True,
    differentiable: bool = False,
) -> Traced:
    """Trace ``function``.

    Args:
        leaves: the flattened ``(args, kwargs)``. Tensors and ``SymbolicScalar`` become proxies; ``SymbolicNumber`` and
            everything else are passed unchanged.
        tree: the structure of ``(args, kwargs)``.
        guards: has a hint for every symbol; collects the decisions of the trace.
        device: the device of the tensors.
        layout: the layout in which kernels read quantised weights that the function closes over.
        objects: the leaves that are neither tensors, numbers nor static; they are followed as captured objects are.
        runs: whether a call follows; see ``Trace``.
        differentiable: whether gradients are computed of the graph; see ``Trace``.

    Raises:
        TraceError: the function cannot be expressed as a graph. The message names the user's line.
        UnsupportedError: it uses an operation that jitgen has no row for. The message names it and the user's line.
    """
    state = Trace(function, name, guards, device, layout, objects, runs, differentiable)
    guards.given.clear()  # of the caller's own numbers
    traced = _run(state, leaves, tree)
    state.forget_tensors()
    others = [leaf.value for leaf in traced.leaves if leaf.index is None]
    escapes.check(name, function, guards.given, others, state.captures.codes)
    return traced


@contextmanager
def _as_in_eager_torch(state: Trace) -> Iterator[None]:
    """A context in which user code meets proxies as tensors, and what it looks up is captured."""
    with proxies_are_tensors(), transforms_are_refused(), reported_to(state.captures):
        yield


def _run(state: Trace, leaves: Sequence[Any], tree: pytree.TreeSpec) -> Traced:
    """Run the function of ``state``; see ``trace``."""
    guards = state.guards
    arguments, keywords = pytree.tree_unflatten(
        [
            state.input(leaf)
            if isinstance(leaf, torch.Tensor)
            else state.host_scalar(leaf)
            if isinstance(leaf, SymbolicScalar)
            else wrap(unwrap(leaf), guards)  # of its own, which must not outlive the trace
            for leaf in leaves
        ],
        tree,
    )
    arguments, keywords = pytree.tree_map(
        lambda leaf: state.quantized.argument(leaf) if weights.is_unpacked(leaf) else leaf,
        (arguments, keywords),
        is_leaf=weights.is_unpacked,
    )
    token = tracing.set(guards)
    try:
        with _as_in_eager_torch(state), InterceptFunctions(state):
            result = state.function(*arguments, **keywords)
    except (TypeError, RuntimeError) as error:
        # What torch's own C functions say of a proxy: most name its type, the jiterator says that it is no Tensor.
        if TensorProxy.__name__ not in str(error) and "tuple is not a Tensor" not in str(error):
            raise
        why = str(error).replace(TensorProxy.__name__, "Tensor")
        raise TraceError(
            f"{state.name}: a function that a trace cannot follow was called with a tensor: {why}"
            f"{quote(raised_at(error))}\n"
            "  call a function of torch or a method of the tensor (x.add(y), not torch.Tensor.add(x, y)), or call it "
            "outside the decorated function"
        ) from error
    finally:
        tracing.reset(token)
    # pytree takes a torch.Size for a tuple.
    flat, result_tree = pytree.tree_flatten(result, is_leaf=lambda value: isinstance(value, torch.Size))
    outputs: list[Node] = []
    returned: list[Output] = []
    for leaf in flat:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, TensorProxy):
            leaf = TensorProxy(state.captured_tensor(leaf), state)
        if isinstance(leaf, TensorProxy):
            returned.append(Output(len(outputs)))
            outputs.append(state.returned(leaf))
        else:
            value = Sizes(map(unwrap, leaf)) if isinstance(leaf, torch.Size) else unwrap(leaf)
            returned.append(Output(None, value))
    graph = Graph(state.name, tuple(state.inputs), tuple(outputs), tuple(guards), tuple(sorted(state.mutated.items())))
    state.captures.settle()
    captured_guards = list(state.captures.guards)
    if guards.default_dtype is not None:
        captured_guards.append(default_dtype_guard(guards.default_dtype))
    if guards.matmul_precision is not None:
        captured_guards.append(matmul_precision_guard(guards.matmul_precision))
    # The trace has refused each that is used while gradients are enabled.
    needs_grad = [index for index, found in enumerate(state.captured) if found.value.requires_grad]
    under_no_grad = frozenset(needs_grad if torch.is_grad_enabled() else ())
    return Traced(graph, tuple(returned), result_tree, tuple(state.captured), tuple(captured_guards), under_no_grad)
