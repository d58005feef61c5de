"""Captures calls of a whole model as CUDA graphs: ``jitgen.compile(model, cuda_graph=True)``.

A call of a model launches hundreds of kernels, and Python makes each launch. A CUDA graph makes all of them at once,
but runs no Python; so a graph stands for a call only where nothing that Python would do differs: the same structure and
layouts of arguments, the same cache with all its layers preallocated, and the model as it was (``State.is_current``,
the addresses of its tensors). Such a call, as a step of decoding is, runs as ever twice; the third is captured, and
later ones copy their arguments and replay it. Code that asks whether a stream is captured, as masks of transformers do,
may make other calls then; their kernels are compiled between two attempts.

Neighbour: ``compile.py`` puts a ``GraphForward`` in place of the model's forward.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from jitgen import console
from jitgen.errors import CaptureMissError, FallbackWarning, UnsupportedError
from jitgen.models import caches
from jitgen.models.state import State
from jitgen.models.structure import Flattened, rebuilt
from jitgen.quant.qtensor import QTensor
from jitgen.runtime.capturing import capturing
from jitgen.trace import autocast
from jitgen.trace.guards import tracing

DEVICE = "cuda"
"""The type of device whose calls are captured."""
RUNS_BEFORE = 2
"""Calls of one form that run as ever before one is captured: the first compiles, the second binds what it needs."""
MOST_MISSES = 64
"""Calls of a captured one whose kernels are compiled because only captures make them; with more, it is not captured."""
MOST_FORMS = 32
"""Forms of calls with one cache, such as batches of several sizes; with more, none are captured."""


_CACHE = object()
"""Stands for the cache of a call in its result."""


@dataclass
class Form:
    """Holds calls that one graph stands for.

    Attributes:
        inputs: the leaves of their arguments, which the graph reads.
        runs: how many calls have run as ever.
        replay: launches the graph; None before it is captured.
        result: what the call that was captured returned, which each replay overwrites; ``_CACHE`` is in the place
            of the cache, which would otherwise never be released.
        reason: why calls are not captured.
    """

    inputs: list[Any]
    runs: int = 0
    replay: Callable[[], None] | None = None
    result: Any = None
    reason: str | None = None


@dataclass
class Forms:
    """Holds the forms of calls with one cache."""

    by_key: dict[Any, Form] = field(default_factory=dict)


class GraphForward:
    """Runs in place of the ``forward`` of a whole model.

    Attributes:
        inner: what runs otherwise: the model's own forward, or that of its only unit.
        reason: why the last call was no replay of a graph; None if it was.
        captured: how many graphs were captured.
    """

    def __init__(self, model: nn.Module, inner: Callable[..., Any]):
        self._model = model
        self.inner = inner
        self.reason: str | None = "not called yet"
        self.captured = 0
        self._state: State | None = None
        self._addresses: list[int] = []
        self._without_cache = Forms()
        self._with_cache: weakref.WeakKeyDictionary[Any, Forms] = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, type(model).forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or tracing.get() is not None:
            return self.inner(*args, **kwargs)
        try:
            flat = Flattened(args, kwargs)
            tensors = _checked(self._model, flat)
        except UnsupportedError as error:
            self.reason = str(error)
            return self.inner(*args, **kwargs)
        if not self._is_current():
            self._renew()
        if self._state is not None and self._state.problem is not None:
            self.reason = self._state.problem
            return self.inner(*args, **kwargs)
        form = self._form(flat, tensors)
        if form.reason is None and form.replay is None and form.runs >= RUNS_BEFORE:
            self._capture(form, flat)
        if form.replay is None:
            form.runs += 1
            before = [*map(_version, flat.leaves)] if form.reason is None else []
            result = self.inner(*args, **kwargs)
            if not all(map(_is_version, flat.leaves, before)):
                form.reason = "its forward updates an argument"
            self.reason = form.reason or f"call {form.runs} of its form runs as ever"
            return result
        self.reason = None
        for kept, leaf in zip(form.inputs, flat.leaves, strict=True):
            if isinstance(kept, torch.Tensor):
                _write(kept, leaf)
        form.replay()
        return pytree.tree_map(lambda leaf: _returned(leaf, flat.cache), form.result)

    def _is_current(self) -> bool:
        state = self._state
        return state is not None and state.is_current() and _addresses(state) == self._addresses

    def _renew(self) -> None:
        """Forgets all graphs, since the model has changed."""
        self._state = State(self._model)
        self._addresses = _addresses(self._state)
        self._without_cache = Forms()
        self._with_cache.clear()

    def _form(self, flat: Flattened, tensors: list[torch.Tensor]) -> Form:
        """Returns the form of a call.

        Args:
            tensors: of its cache.
        """
        forms = self._without_cache if flat.cache is None else self._with_cache.setdefault(flat.cache, Forms())
        key = (
            flat.key,
            tuple(map(_facts, flat.leaves)),
            tuple(tensor.data_ptr() for tensor in tensors),
            torch.is_inference_mode_enabled(),
            autocast.settings(),
        )
        form = forms.by_key.get(key)
        if form is None:
            if len(forms.by_key) >= MOST_FORMS:
                return Form([], reason=f"more than {MOST_FORMS} forms of calls")
            form = forms.by_key[key] = Form([])
        return form

    def _capture(self, form: Form, flat: Flattened) -> None:
        """Captures a call; it is not made."""
        form.inputs = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
        cache = flat.cache
        args, kwargs = (rebuilt(key, form.inputs, cache) for key in flat.key)
        try:
            replay, result = capture_resolved(lambda: self.inner(*args, **kwargs))
            kept = {id(cache): _CACHE}
            form.result = pytree.tree_map(lambda leaf: kept.get(id(leaf), leaf), result, is_leaf=lambda it: it is cache)
            form.replay = replay
            self.captured += 1
        except Exception as error:
            form.reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            form.inputs = []
            console.warn(f"calls of {type(self._model).__name__} are not captured: {form.reason}", FallbackWarning)


def capture_resolved(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Captures what ``function`` launches, as ``capture`` does, and again whenever kernels were missing that could be
    compiled since."""
    for _ in range(MOST_MISSES):
        try:
            return capture(function)
        except CaptureMissError as miss:
            if miss.resolve is None:
                raise
            miss.resolve()
    return capture(function)


def capture(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Captures what ``function`` launches; returns what launches it again, and what the function has returned."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    try:
        with capturing(graph):
            result = function()
    except BaseException:
        # A capture that something has invalidated never ends for torch's generator, which would draw nothing any more.
        generator.graphsafe_set_state(state)
        raise
    return graph.replay, result


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the strides and the alignment of ``tensor``, for which launches are bound already."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr() % 16 // tensor.element_size()
    memory = tensor.new_empty(begin + max(extent, 0))
    copy = memory.as_strided(tensor.shape, tensor.stride(), begin)
    _write(copy, tensor)
    return copy


def _write(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Writes the elements of ``tensor`` to ``copy``, those that are in several places once."""
    for dim, stride in enumerate(copy.stride()):
        if stride == 0 and copy.shape[dim] > 1:
            copy, tensor = copy.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    copy.copy_(tensor)


def _returned(leaf: Any, cache: Any) -> Any:
    """Returns what a replay returns in the place of ``leaf`` of the captured result."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return cache if leaf is _CACHE else leaf


def _addresses(state: State) -> list[int]:
    """Returns the addresses of all memory of the model: a quantised weight consists of several tensors."""
    stored = (tensor.tensors if isinstance(tensor, QTensor) else (tensor,) for tensor in state.tensors())
    return [tensor.data_ptr() for tensor in itertools.chain.from_iterable(stored)]


def _version(leaf: Any) -> Any:
    """Returns what tells whether a tensor was updated: its version, or a copy where torch counts none."""
    if not isinstance(leaf, torch.Tensor):
        return None
    return leaf.clone() if leaf.is_inference() else leaf._version


def _is_version(leaf: Any, before: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return bool(((leaf == before) | ((leaf != leaf) & (before != before))).all())
    return before is None or leaf._version == before


def _facts(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), tuple(leaf.stride()), leaf.device, leaf.data_ptr() % 16
    return type(leaf), leaf


def _checked(model: nn.Module, flat: Flattened) -> list[torch.Tensor]:
    """Returns the tensors of a call's cache.

    Raises:
        UnsupportedError: a graph cannot stand for such calls.
    """
    tensors = [leaf for leaf in flat.leaves if isinstance(leaf, torch.Tensor)]
    if not tensors or any(tensor.device.type != DEVICE for tensor in tensors):
        raise UnsupportedError("its arguments are not on a GPU")
    if torch.is_grad_enabled():
        raise UnsupportedError("gradients are enabled")
    if model.training:
        raise UnsupportedError("the model is in training mode")
    return [] if flat.cache is None else caches.preallocated(flat.cache)
