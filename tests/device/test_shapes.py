"""On a GPU, in both dialects: movements, updates and strides, 0-d CPU tensors as numbers, more tensors than one kernel.

Every function is compared with eager torch on copies of its arguments on the CPU. Rows, lengths, graphs and streams are
in ``test_elementwise.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shapes import BROADCASTS, IN_PLACE, MOVEMENTS, VIEW_ONLY, data, interleaved, leaves, strided_cases, twin

import jitgen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = "cuda"
BACKENDS = ("cuda", "triton")


def check(function: Any, *arguments: Any) -> Any:
    """A call on the GPU gives what eager torch gives on the CPU; and arguments end up alike."""
    ours, theirs = twin(list(arguments), DEVICE), twin(list(arguments))
    want, got = function.reference(*theirs), function(*ours)
    for left, right in zip(leaves((got, ours)), leaves((want, theirs)), strict=True):
        if not isinstance(right, torch.Tensor):
            assert left == right
            continue
        assert left.device.type == DEVICE
        torch.testing.assert_close(left.cpu(), right, rtol=2e-6, atol=1e-6, equal_nan=True)
    return got


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MOVEMENTS)
@pytest.mark.quick(
    where=lambda backend, name: backend == "cuda" or name in ("slice", "reshape of transposed", "cat", "roll", "made")
)
def test_movements(backend: str, name: str) -> None:
    """Of arguments, and of computed values that are computed with afterwards."""
    move = MOVEMENTS[name]

    def both(x: torch.Tensor) -> Any:
        moved = move(x * 2 + 1)
        return move(x), [part * 3 for part in moved] if isinstance(moved, tuple) else moved * 3

    function = jitgen.jit(backend=backend)(both)
    check(function, data(4, 8))
    if name not in VIEW_ONLY:
        check(function, data(8, 4).t())
        check(function, data(8, 16)[::2, ::2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.quick(
    where=lambda backend, name: backend == "cuda" or name in ("several", "swap", "reads itself backward")
)
def test_updates(backend: str, name: str) -> None:
    function = jitgen.jit(backend=backend)(IN_PLACE[name])
    check(function, data(4, 6), data(4, 6, seed=1))
    check(function, data(333, 65), data(333, 65, seed=1))
    check(function, data(6, 4).t(), data(4, 6, seed=1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kind_of_strides(backend: str) -> None:
    function = jitgen.jit(lambda x, y: (x * 2 + y, x.t() - y.t(), (x + y).reshape(-1)), backend=backend)
    cases = strided_cases()
    names = list(cases)
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        check(function, cases[name], cases["contiguous"])
        check(function, cases[name], cases[following])


@pytest.mark.parametrize("backend", BACKENDS)
def test_broadcast_ranks_and_empty(backend: str) -> None:
    function = jitgen.jit(lambda x, y: (x + y, torch.where(x > y, x, y), [x.lerp(y, 0.25), y * 2]), backend=backend)
    for left, right in BROADCASTS:
        check(function, data(*left), data(*right, seed=1))
    shape = (2, 3, 2, 1, 2, 3, 1, 2)
    for rank in range(9):
        check(function, data(*shape[:rank]), data(*shape[:rank][::-1], seed=1).permute(tuple(reversed(range(rank)))))
    for empty in ((0,), (0, 3), (3, 0)):
        check(function, torch.empty(empty), torch.empty(empty))


@pytest.mark.parametrize("backend", BACKENDS)
def test_interleaved_rotary_embedding(backend: str) -> None:
    cos, sin = data(7, 8), data(7, 8, seed=3)
    check(jitgen.jit(interleaved, backend=backend), data(4, 7, 16), cos, sin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_0d_cpu_tensors_are_numbers(backend: str, dtype: torch.dtype) -> None:
    def combine(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * s, s + x, torch.where(x > s, x, s)

    function: Callable[..., Any] = jitgen.jit(combine, backend=backend)
    for x in (torch.arange(300, device=DEVICE), torch.randn(300, device=DEVICE)):
        for value in (1.0, 2.75, 0.0):
            scalar = torch.tensor(value).to(dtype)
            for got, want in zip(function(x, scalar), combine(x, scalar), strict=True):
                torch.testing.assert_close(got, want)
    with pytest.raises(jitgen.UnsupportedError, match=r"\.to\(device\)"):
        function(torch.ones(2, device=DEVICE), torch.ones(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_tensors_than_one_kernel_reads(backend: str) -> None:
    xs = list(torch.randn(200, 1003, dtype=torch.float64))
    check(jitgen.jit(lambda *xs: sum(xs), backend=backend), *xs)
    check(jitgen.jit(lambda *xs: torch.cat(xs), backend=backend), *(x[: i + 1] for i, x in enumerate(xs[:40])))
