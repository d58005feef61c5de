"""Mixes real tensors with fake ones: weights and captured tensors of a call under torch's ``FakeTensorMode``, and tells
which tensors have numbers.

Such a mode refuses real tensors unless it was made with ``allow_non_fake_inputs``. A call under it asks for shapes and
dtypes alone, and the tensors that a function closes over, or a quantised weight consists of, are real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

_KEYS = torch._C._TorchDispatchModeKey


def with_fakes(values: Sequence[Any]) -> list[Any]:
    """Returns ``values`` with a fake tensor for each real one if a mode demands that, else unchanged.

    Whoever records (``make_fx``, AOTAutograd) has real tensors as constants, so nothing changes there.
    """
    mode = _mode(values)
    if mode is None or mode.allow_non_fake_inputs:
        return list(values)
    return [mode.from_tensor(value) if type(value) in (torch.Tensor, torch.nn.Parameter) else value for value in values]


@contextmanager
def real(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Enters a context in which operations on real ``tensors`` are done and have real results: what is converted in
    place outlives the mode, and the transform of ``torch.func``, which would wrap it."""
    is_real = type(tensors[0]) in (torch.Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(tensors[0])
    if is_real and not is_recorded():
        with unset_fake_temporarily(), torch._C._DisableFuncTorch():
            yield
    else:
        yield


def with_numbers() -> AbstractContextManager[Any]:
    """Enters a context in which what is computed of numbers alone has values, also under a mode of fake tensors or one
    that records a graph."""
    return _disable_current_modes() if is_recorded() else unset_fake_temporarily()


def is_recorded() -> bool:
    """Returns whether operations are recorded into a graph (``make_fx``, AOTAutograd)."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in (_KEYS.PROXY, _KEYS.FUNCTIONAL))


def is_symbolic(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` stands for one that a graph will have, or for a batch of them. Torch 2.11 runs
    what it traces outside of ``is_compiling``."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def is_traced(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` stands for one that torch will have when it runs what it traces, or for a batch of
    tensors, which may have numbers (``torch.func``)."""
    return is_functorch_wrapped_tensor(tensor) or is_symbolic(tensor)


def have_numbers(*tensors: torch.Tensor) -> bool:
    """Returns whether all of ``tensors`` have numbers that may be looked at: not where torch traces or records, nor
    where one is on ``meta``."""
    if torch.compiler.is_compiling() or is_recorded() or _mode(tensors) is not None:
        return False
    return not any(tensor.is_meta or is_traced(tensor) or is_fake(tensor) for tensor in tensors)


def _mode(values: Sequence[Any]) -> FakeTensorMode | None:
    """Returns the mode that is active, or that made a fake tensor among ``values``; None where a recorder is active."""
    if is_recorded():
        return None
    active: FakeTensorMode | None = torch._C._get_dispatch_mode(_KEYS.FAKE)
    return active or next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
