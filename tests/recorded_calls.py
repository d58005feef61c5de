"""Stands for a CUDA graph on the CPU: records what a call computes, and does that again without the call's Python.

As a graph does, a replay reads and writes the memory that the call had: kernels get the same pointers, and torch's own
operators the same tensors. What was allocated within the call stays, and the call itself is undone: a capture makes no
call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jitgen.call.specialization import Specialization
from jitgen.models import graphs
from jitgen.runtime import launcher


class Recording(TorchDispatchMode):
    """Records the operators that torch runs within it, and the kernels of launches."""

    current: Recording | None = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []
        self.kept: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        results = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

        def again() -> None:
            with torch.inference_mode(any(tensor.is_inference() for tensor in results)):
                values = torch.utils._pytree.tree_leaves(function(*args, **kwargs))
                for kept, value in zip(results, (v for v in values if isinstance(v, torch.Tensor)), strict=True):
                    if value.data_ptr() != kept.data_ptr():
                        kept.copy_(value)

        if function.namespace != "jitgen" and "empty" not in str(function):  # jitgen's launches are noted themselves
            self.steps.append(again)
        self.kept.append(result)
        return result

    def replay(self) -> None:
        for step in self.steps:
            step()


class _Kernel:
    """Notes what a kernel is called with."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __call__(self, packed: bytes) -> int:
        if Recording.current is not None:
            Recording.current.steps.append(lambda: self.kernel(packed))
        status: int = self.kernel(packed)
        return status


def recorded(updated: Callable[[], Iterable[torch.Tensor]]) -> Callable[..., Any]:
    """Returns what stands for ``graphs.capture``.

    Args:
        updated: returns the tensors outside the call that it changes, which have what they had afterwards.
    """

    def capture(function: Callable[[], Any]) -> Any:
        before = [(tensor, tensor.clone()) for tensor in updated()]
        Recording.current = recording = Recording()
        try:
            with recording:
                result = function()
        finally:
            Recording.current = None
        for tensor, value in before:
            tensor.copy_(value)
        return recording.replay, result

    return capture


def install(monkeypatch: pytest.MonkeyPatch, updated: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
    """Has calls on the CPU captured. Launches that were bound before are not recorded."""
    step_of, allocator = Specialization._cpu_step, launcher._allocator

    def step(*args: Any) -> Any:
        made = step_of(*args)
        return dataclasses.replace(made, kernel=_Kernel(made.kernel))

    def allocate(device: torch.device) -> Any:
        empty = allocator(device)

        def kept(*args: Any) -> torch.Tensor:
            tensor = empty(*args)
            if Recording.current is not None:
                Recording.current.kept.append(tensor)
            return tensor

        return kept

    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(graphs, "capture", recorded(updated))
    monkeypatch.setattr(Specialization, "_cpu_step", step)
    monkeypatch.setattr(launcher, "_allocator", allocate)
