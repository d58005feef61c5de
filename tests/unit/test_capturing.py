"""What a capture does to Python, without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from jitgen.runtime.capturing import capturing


def test_no_garbage_is_collected_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    @contextmanager
    def graph(_: Any, capture_error_mode: str) -> Iterator[None]:
        modes.append(capture_error_mode)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    any_graph: Any = None
    with capturing(any_graph):
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), capturing(any_graph):
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with capturing(any_graph):
            pass
        assert not gc.isenabled()  # as its user has it
    finally:
        gc.enable()
    assert modes == ["thread_local"] * 3
