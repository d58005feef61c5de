"""Runs a function once on proxies, from its flattened arguments to its graph (``trace``)."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen.errors import TraceError
from jitgen.trace import escapes, journal, keeping, modes
from jitgen.trace.boundary import entered, graph_of, returned, settings_guards
from jitgen.trace.captured import MISSING, Captured, call_leaves, same_value
from jitgen.trace.checkpoints import checkpoints_are_calls
from jitgen.trace.guards import tracing
from jitgen.trace.imports import ImportsDynamo, dynamo_is_imported_before, import_dynamo
from jitgen.trace.journal import Change
from jitgen.trace.kernels import launches
from jitgen.trace.location import quote, raised_at
from jitgen.trace.look_ups import reported_to
from jitgen.trace.mentions import line_of_change
from jitgen.trace.proxy import proxies_are_tensors, untraceable
from jitgen.trace.request import TraceRequest
from jitgen.trace.stand_ins import stand_ins
from jitgen.trace.traced import Output, Traced
from jitgen.trace.tracer import InterceptFunctions, Trace
from jitgen.trace.transforms import transforms_are_refused


def trace(function: Callable[..., Any], name: str, request: TraceRequest) -> Traced:
    """Traces ``function`` for one call.

    Raises:
        TraceError: the function cannot be expressed as a graph. The message names the user's line.
        UnsupportedError: it uses an operation that jitgen has no row for. The message names it and the user's line.
    """
    guards, runs = request.guards, request.runs
    guards.asks_identity = False
    state, traced, changed, described, kept = _run_once(function, name, request)
    if guards.asks_identity and not state.captures.asks_identity:  # found only while it ran: once more, for that
        journal.undo(changed)
        state, traced, changed, described, kept = _run_once(function, name, request)
    stay = runs and journal.may_stay() and not kept and not escapes.kept(guards.handed_out)
    if stay:
        _set_context_variables(changed)
    else:
        journal.undo(changed)
    changed = described  # without tensors of the trace, which are to be gone
    others = [leaf.value for leaf in traced.leaves if leaf.index is None]
    try:
        escapes.check(
            name,
            function,
            guards.handed_out,
            others,
            state.captures.codes,
            changed,
            state.captures.journal.caches,
            _contexts(traced.tree),
        )
    except TraceError:
        if stay:
            journal.undo(changed)
        raise
    if not changed:
        return traced
    changes = journal.changes_of(changed, stay, kept)
    # A trace that changed something is for one call alone: the next has to run the function, too.
    never = Captured(changes.path, lambda: MISSING, None)
    return replace(traced, guards=(*traced.guards, never), changes=changes)


def _contexts(tree: pytree.TreeSpec) -> list[Any]:
    """Lists what a structure has beside its leaves: the keys of dicts."""
    contexts, waiting = list[Any](), [tree]
    for spec in waiting:
        contexts.append(spec.context)
        waiting += spec.children()
    return contexts


def _run_once(
    function: Callable[..., Any], name: str, request: TraceRequest
) -> tuple[Trace, Traced, list[Change], list[Change], list[Output]]:
    """Runs a function once. Returns also what it changed, as it is and as ``keeping.described`` describes it; all is
    taken back if the function raises.

    It runs in a copy of the context, since a context variable that had no value cannot lose one that it gets.
    """
    triton_was_known = launches.knows_triton()
    try:
        return contextvars.copy_context().run(_run_in_context, function, name, request)
    except ImportsDynamo:
        import_dynamo()
    except Exception:
        if triton_was_known or not launches.knows_triton():
            raise
        # The function has imported Triton, and launched a kernel before its launches were traced.
    return contextvars.copy_context().run(_run_in_context, function, name, request)


def _run_in_context(
    function: Callable[..., Any], name: str, request: TraceRequest
) -> tuple[Trace, Traced, list[Change], list[Change], list[Output]]:
    state = Trace(
        function,
        name,
        request.guards,
        request.device,
        request.layouts,
        request.objects,
        request.runs,
        request.differentiable,
    )
    request.guards.handed_out.clear()  # of the caller's own numbers
    try:
        run = _run(state, request.leaves, request.tree)
    except BaseException:
        journal.undo(state.captures.journal.changed())
        raise
    state.forget_tensors()
    return state, *run


def _set_context_variables(changes: Sequence[Change]) -> None:
    """Gives context variables the values that a function has given them in a context of its own."""
    for change in changes:
        if isinstance(change.place.owner, contextvars.ContextVar):
            change.place.write(change.new)


@contextmanager
def _as_in_eager_torch(state: Trace) -> Iterator[None]:
    """Makes user code meet proxies as tensors, and captures what it looks up, within this context."""
    with (
        proxies_are_tensors(),
        transforms_are_refused(),
        stand_ins(),
        checkpoints_are_calls(),
        launches.launches_are_traced(state),
        dynamo_is_imported_before(),
        reported_to(state.captures),
    ):
        yield


def _autograd_function_of(error: BaseException) -> str | None:
    """Returns the name of the ``torch.autograd.Function`` whose ``apply`` raised ``error``; None if none did."""
    apply: Any = torch.autograd.Function.apply
    entry = error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code is apply.__func__.__code__:
            return str(entry.tb_frame.f_locals["cls"].__name__)
        entry = entry.tb_next
    return None


def _run(
    state: Trace, leaves: Sequence[Any], tree: pytree.TreeSpec
) -> tuple[Traced, list[Change], list[Change], list[Output]]:
    """Runs the function of ``state``; see ``trace`` and ``_run_once``."""
    guards = state.guards
    known = (
        {id(captured.value): captured.value for captured in state.captures.tensors} if _asks_identity(state) else None
    )
    arguments, keywords = entered(state, leaves, tree, known)
    before = pytree.tree_flatten((arguments, keywords))
    token = tracing.set(guards)
    try:
        with modes.kept(state.name, state.captures.mentioned), _as_in_eager_torch(state), InterceptFunctions(state):
            result = state.function(*arguments, **keywords)
    except (TypeError, RuntimeError) as error:
        why = untraceable(error)
        if why is None:
            raise
        autograd_function = _autograd_function_of(error)
        if autograd_function is not None:
            raise TraceError(
                f"{state.name}: {autograd_function}, a torch.autograd.Function, within a decorated function is not "
                f"supported: a trace does not follow its backward{quote(raised_at(error))}\n"
                "  call it outside of the decorated function, or write its forward with torch functions, of which "
                "jitgen derives the gradients"
            ) from error
        raise TraceError(
            f"{state.name}: a function that a trace cannot follow was called with a tensor: {why}"
            f"{quote(raised_at(error))}\n"
            "  call a function of torch or a method of the tensor (x.add(y), not torch.Tensor.add(x, y)), or call it "
            "outside the decorated function"
        ) from error
    finally:
        tracing.reset(token)
    _refuse_changed_arguments(state, (arguments, keywords), *before)
    left = returned(state, result)
    changes = state.captures.journal.changed()
    described, kept = keeping.described(state, changes, (arguments, keywords), left.outputs, left.positions)
    graph = graph_of(state, left.outputs)
    state.captures.settle()
    captured_guards = list(state.captures.guards)
    if known is not None:
        captured_guards.append(_identities([captured.read for captured in state.captures.tensors]))
    captured_guards += settings_guards(guards)
    # The trace has refused each that is used while gradients are enabled.
    needs_grad = [index for index, captured in enumerate(state.captured) if captured.value.requires_grad]
    under_no_grad = frozenset(needs_grad if torch.is_grad_enabled() else ())
    traced = Traced(
        graph,
        tuple(left.leaves),
        left.tree,
        tuple(state.captured),
        tuple(captured_guards),
        under_no_grad,
        follows_arguments=known is not None or state.captures.follows_arguments,
    )
    return traced, changes, described, kept


def _asks_identity(state: Trace) -> bool:
    return state.captures.asks_identity or state.guards.asks_identity


def _identities(captured: Sequence[Callable[[], Any]]) -> Captured:
    """Guards which arguments and captured tensors are one object."""

    def read() -> tuple[int, ...]:
        tensors = [leaf for leaf in call_leaves.get() if isinstance(leaf, torch.Tensor)]
        ids = [*map(id, tensors), *(id(read()) for read in captured)]
        return tuple(map(ids.index, ids))

    return Captured("which tensors are one", read, read())


def _refuse_changed_arguments(state: Trace, arguments: tuple[Any, Any], leaves: list[Any], tree: Any) -> None:
    """Raises TraceError if the function has changed a list, dict or other container among its arguments.

    Args:
        arguments: copies of the call's containers, as the function has left them.
        leaves, tree: what they were.
    """
    now, structure = pytree.tree_flatten(arguments)
    if structure == tree and all(map(same_value, now, leaves)):
        return
    positional, named = pytree.tree_unflatten(leaves, tree)
    names = [*inspect.signature(state.function).parameters]
    names += [f"number {index}" for index in range(len(names), len(positional))]
    old = [*zip(names, positional, strict=False), *named.items()]
    new = [*arguments[0], *arguments[1].values()]
    name, value = next(
        (name, value) for (name, value), other in zip(old, new, strict=True) if not _is_same(value, other)
    )
    kind = type(value).__name__
    raise TraceError(
        f"{state.name} changes its argument {name}, {'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}: later calls "
        f"launch kernels without running the function, and would change nothing"
        f"{quote(line_of_change(state.captures.codes, name))}\n"
        "  return what is new, and change the argument after the call"
    )


def _is_same(value: Any, other: Any) -> bool:
    leaves, tree = pytree.tree_flatten(value)
    now, structure = pytree.tree_flatten(other)
    return structure == tree and all(map(same_value, now, leaves))
