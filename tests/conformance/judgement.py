"""One sample call through jitgen and in eager torch: right, refused, wrong or a crash."""

from __future__ import annotations

import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import jitgen
from jitgen.errors import TraceError, UnsupportedError
from jitgen.ir import symbols
from tests.conformance import randomness, tolerance
from tests.conformance.references import reference
from tests.conformance.samples import Sample

VERDICTS = ("right", "refused", "wrong", "crash", "skipped")
UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
"""Operators whose results are memory that nobody wrote: only dtypes and shapes are compared."""
INDEX_OF_ANY = ("topk", "kthvalue", "mode")
"""Operators that name an element by its index, where torch gives that of any of equal elements."""
SECONDS = 300
"""A sample that takes longer is a crash; compiling a kernel takes about one second, on a busy machine ten."""


class Late(BaseException):
    """A sample takes longer; no code on the way takes this for an error of its own."""


@dataclass(frozen=True)
class Verdict:
    """What became of a sample: one of ``VERDICTS``, and why it is not right."""

    operator: str
    label: str
    verdict: str
    reason: str = ""


def judge(sample: Sample, backend: str | None = None) -> Verdict:
    """Call ``sample`` in both ways, with the kernels of ``backend`` or of the one that jitgen chooses.

    A call that eager torch rejects must be refused. ``skipped`` are calls that eager torch has no answer to (it fails
    otherwise, or its result is memory that nobody wrote).
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            with _limit(SECONDS):
                verdict, reason = _judge(sample, backend)
        except Late:
            verdict, reason = "crash", f"no answer within {SECONDS} seconds"
    return Verdict(sample.operator, sample.label, verdict, reason)


def judge_types(sample: Sample) -> Verdict:
    """Compare the dtypes and shapes of the results alone, for which nothing is compiled."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            with _limit(SECONDS):
                verdict, reason = _judge_types(sample)
        except Late:
            verdict, reason = "crash", f"no answer within {SECONDS} seconds"
    return Verdict(sample.operator, sample.label, verdict, reason)


def _judge_types(sample: Sample) -> tuple[str, str]:
    call, arguments = sample.callable(), sample.arguments()
    try:
        eager, rejection = call(*sample.arguments()), None
    except Exception as error:
        eager, rejection = None, error
    try:
        graph = jitgen.jit(call).lower(*arguments).lowered.graph
    except (TraceError, UnsupportedError) as error:
        return ("right", "") if rejection else ("refused", _first_line(error))
    except Exception as error:
        return ("right", "") if type(error) is type(rejection) else ("crash", _where(error))
    if rejection is not None:
        # An element may be what it rejects (an index, a divisor), which is known to a kernel alone.
        by_element = isinstance(rejection, IndexError) or "ZeroDivision" in str(rejection)
        return ("skipped", "") if by_element else ("wrong", f"eager torch rejects it: {_first_line(rejection)}")
    environment = _environment(arguments)
    got = [f"{n.dtype}{tuple(symbols.evaluate(s, environment) for s in n.shape)}" for n in graph.outputs]
    want = [_described(leaf) for leaf in pytree.tree_leaves(eager) if isinstance(leaf, torch.Tensor)]
    return ("right", "") if got == want else ("wrong", f"the result is {', '.join(got)}, not {', '.join(want)}")


def _judge(sample: Sample, backend: str | None) -> tuple[str, str]:
    call = sample.callable()
    eager_arguments, arguments = sample.arguments(), sample.arguments()
    try:
        eager, rejection = call(*eager_arguments), None
    except Exception as error:
        eager, rejection = None, error
    jitted = jitgen.jit(call) if backend is None else jitgen.jit(call, backend=backend)
    try:
        got = jitted(*arguments)
    except (TraceError, UnsupportedError) as error:
        return ("right", "") if rejection else ("refused", _first_line(error))
    except Exception as error:
        # Python, and torch's parser of arguments, reject a call before jitgen sees it.
        return ("right", "") if type(error) is type(rejection) else ("crash", _where(error))
    if rejection is not None:
        return "wrong", f"eager torch rejects it: {_first_line(rejection)}"
    return _compared(sample, call, jitted, (got, arguments), (eager, eager_arguments))


def _compared(sample: Sample, call: Callable[..., Any], jitted: Any, ours: Any, eagers: Any) -> tuple[str, str]:
    """Whether the results agree, and what is left in the arguments."""
    got, got_tree = pytree.tree_flatten(ours)
    eager, eager_tree = pytree.tree_flatten(eagers)
    if got_tree != eager_tree:
        return "wrong", " ".join(f"the result is {got_tree}, not {eager_tree}".split())
    for ours_leaf, eager_leaf in zip(got, eager, strict=True):
        described = _described(ours_leaf), _described(eager_leaf)
        if described[0] != described[1]:
            return "wrong", f"the result is {described[0]}, not {described[1]}"
    if sample.operator in UNWRITTEN:
        return "right", ""
    if randomness.draws_numbers(lambda: call(*sample.arguments())):
        found = randomness.mismatch(
            lambda: _evaluated(jitted, sample.arguments()),
            lambda: _evaluated(call, sample.arguments()),
            _roundings(jitted, sample.arguments()),
        )
        return ("wrong", found) if found is not None else ("right", "")
    found = _mismatch(sample, jitted, got, eager, tolerance.DRAWS)
    # Few random directions may leave out the one in which an element of thousands moves.
    if found is not None and (found := _mismatch(sample, jitted, got, eager, tolerance.MANY_DRAWS)) is not None:
        return "wrong", found
    return "right", ""


def _mismatch(sample: Sample, jitted: Any, got: list[Any], eager: list[Any], draws: int) -> str | None:
    """How a result differs from float64 by more than ``draws`` directions of the operands explain, or None."""
    try:
        exact, spreads = _exact(sample, jitted, eager, draws)
    except Exception:  # not defined for float64, or for operands that move
        right = reference(sample)
        exact, spreads = eager if right is None else [right, *eager[1:]], [None] * len(eager)
    for number, (ours_leaf, eager_leaf) in enumerate(zip(got, eager, strict=True)):
        if not isinstance(eager_leaf, torch.Tensor):
            continue
        names = sample.operator in INDEX_OF_ANY and number == 1
        if names and _name_the_values(ours_leaf, got[0], sample.arguments()[0]):
            continue
        difference = _difference(ours_leaf, exact[number], eager_leaf, spreads[number])
        if difference is not None:
            return difference
    return None


def _name_the_values(index: torch.Tensor, values: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the indices name elements with these values, each once. The dimension along which they do is in the
    result, or one index was taken of each row."""
    for dim in range(source.dim()):
        if index.dim() < source.dim():
            at, found = index.unsqueeze(dim), values.unsqueeze(dim)
        else:
            at, found = index, values
        others = [d for d in range(source.dim()) if d != dim]
        if all(at.shape[d] == source.shape[d] for d in others):
            once = bool((at.sort(dim).values.diff(dim=dim) > 0).all())
            if once and torch.equal(source.gather(dim, at), found):
                return True
    return False


def _difference(got: torch.Tensor, exact: Any, eager: torch.Tensor, spread: Any) -> str | None:
    if spread is None and got.is_floating_point():
        spread = 4 * torch.finfo(got.dtype).eps * eager.double().abs()
    wide = exact.double() if got.is_floating_point() else exact
    return tolerance.mismatch(got, wide, eager, spread)


def _exact(sample: Sample, jitted: Any, eager: list[Any], draws: int) -> tuple[list[Any], list[Any]]:
    """The results in float64, and how far from them an element may be."""
    wide = sample.widened().callable()

    def results(*values: Any) -> Any:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return _evaluated(wide, list(values))
        finally:
            torch.set_default_dtype(default)

    values = tolerance.widened(sample.arguments())
    exact = pytree.tree_leaves(results(*tolerance.widened(sample.arguments())))
    if [_shape(leaf) for leaf in exact] != [_shape(leaf) for leaf in eager]:
        raise ValueError("another shape in float64")
    floating = [leaf.dtype for leaf in eager if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    unit = max(map(tolerance.compute_unit, floating), default=0.0)
    count = _roundings(jitted, values)
    moved = tolerance.sensitivities(results, values, exact, unit, draws)
    narrow, narrow_unit = tolerance.narrow_roundings(jitted.specializations[-1].traced.graph)
    if narrow:
        further = tolerance.sensitivities(results, values, exact, narrow_unit, draws)
        moved = [None if m is None else m + narrow / count * f for m, f in zip(moved, further, strict=True)]
    right = reference(sample)
    exact = exact if right is None else [right, *exact[1:]]
    spreads = [None if m is None else count * (m + unit * e.abs()) for m, e in zip(moved, exact, strict=True)]
    return exact, spreads


def _roundings(jitted: Any, values: list[Any]) -> float:
    """The roundings of the graph that the latest call of ``jitted``, with ``values``, was traced to."""
    return tolerance.roundings(jitted.specializations[-1].traced.graph, _environment(values))


def _environment(values: list[Any]) -> dict[str, Any]:
    """The value of every symbol of the graph of a call."""
    sizes = {f"s{i}_{d}": n for i, t in enumerate(_tensors(values)) for d, n in enumerate(t.shape)}
    return sizes | {f"a{i}": v for i, v in enumerate(v for v in values if isinstance(v, (int, float)))}


def _evaluated(call: Callable[..., Any], arguments: list[Any]) -> Any:
    return call(*arguments), arguments


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _shape(leaf: Any) -> Any:
    return leaf.shape if isinstance(leaf, torch.Tensor) else None


def _described(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{tuple(leaf.shape)}"
    return repr(leaf) if leaf == leaf else "nan"


def _first_line(error: Exception) -> str:
    """The message without the function's name and without the lines that tell where and what to do."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return text.removeprefix("call: ")


def _where(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/jitgen/" in frame.filename]
    place = f" ({frames[-1].filename.rpartition('/jitgen/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_first_line(error)}{place}"


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def expire(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
