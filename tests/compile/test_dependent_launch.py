"""Kernels that may be launched before the one ahead of them has ended wait for it before they touch memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.families.rows.reduction.forms import Prefetch

PREFETCH = "cp.async.bulk.prefetch.L2.global"
GLOBAL_ACCESS = re.compile(
    r"^\s*(?:@\S+\s+)?(?!cp\.async\.bulk\.prefetch)(?:ld|st|atom|red|cp)\.\S*global", re.MULTILINE
)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * weight


def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * weight).sum(-1)


def column_softmax(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.softmax(x * weight, 0)


FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
    "elementwise": (gated, (4096, 5000)),
    "short rows": (norm, (8192, 100)),
    "rows of a block": (norm, (8192, 8192)),
    "rows of a cluster": (norm, (8192, 151936)),
    "few rows of a cluster": (norm, (64, 151936)),
    "rows read again": (norm, (8192, 400000)),
    "one pass": (scaled, (64, 4096)),
    "columns": (column_softmax, (1000, 512)),
}


def ptx(function: Callable[..., object], shape: tuple[int, ...], target: str, backend: str) -> str:
    specs = TensorSpec(shape, torch.bfloat16), TensorSpec(shape[-1:], torch.bfloat16)
    text = jitgen.jit(function).lower(*specs, target=target, backend=backend).compile().asm["ptx"]
    return text if isinstance(text, str) else text.decode()


def assert_waits_first(entry: str) -> None:
    access = GLOBAL_ACCESS.search(entry)
    assert access is not None
    assert entry.index("griddepcontrol.wait") < access.start()


WAITS = (
    *(("elementwise", backend) for backend in ("cuda", "triton")),
    *((name, "cuda") for name in ("rows of a block", "columns")),
)


@pytest.mark.parametrize(("name", "backend"), list(product(FUNCTIONS, ("cuda", "triton"))))
@pytest.mark.quick(where=lambda name, backend: (name, backend) in WAITS)
def test_memory_is_touched_after_the_wait(name: str, backend: str) -> None:
    text = ptx(*FUNCTIONS[name], "sm_90a", backend)
    (entry,) = text.split(".entry")[1:]
    assert entry.count("griddepcontrol.wait") == 1
    assert_waits_first(entry)
    # Of its many small blocks each would have to say that the next kernel may start; see the template.
    assert ("griddepcontrol.launch_dependents" in entry) == (name != "elementwise")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.quick(where=lambda name: name in ("rows of a block", "few rows of a cluster", "columns"))
def test_kept_rows_are_prefetched_before_the_wait(name: str) -> None:
    """And of what all rows read and a later pass needs every block asks for a share, where that are few blocks and rows
    are not long."""
    before, after = ptx(*FUNCTIONS[name], "sm_90a", "cuda").split("griddepcontrol.wait")
    kept = name in ("rows of a block", "rows of a cluster", "few rows of a cluster")
    shares = name == "rows of a block"
    assert before.count(PREFETCH) == kept + shares
    assert ("%nctaid.x" in before) == shares
    assert PREFETCH not in after


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_of_few_rows_in_clusters_only_the_first_are_prefetched(dtype: torch.dtype) -> None:
    """As many as make the same number of bytes, whatever their elements and however many are added up."""

    def prefetched(function: Callable[..., object], rows: int, operands: int = 1) -> tuple[Prefetch | None, str]:
        specs = [TensorSpec((rows, 151936), dtype)] * operands
        low = jitgen.jit(function).lower(*specs, target="sm_90a", backend="cuda")
        (schedule,), (kernel,) = low._lowered.schedules, low.kernels
        return schedule.prefetch, kernel.source

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    few = 24 * 2 // dtype.itemsize
    found, source = prefetched(softmax, 64)
    assert found == Prefetch((0,), few)
    assert source.count(f"row < {few}) jitgen::prefetch") == 1
    both = (0, 1) if dtype == torch.bfloat16 else (0,)
    found, source = prefetched(lambda x, y: F.rms_norm(x + y, x.shape[-1:]), 64, 2)
    assert found == Prefetch(both, few // 2)
    assert source.count(f"row < {few // 2}) jitgen::prefetch") == len(both)
    # Of many rows the first few make no difference.
    assert prefetched(softmax, 8192)[0] == (Prefetch((0,)) if dtype == torch.bfloat16 else None)
    if dtype == torch.bfloat16:  # a block of 1024 threads for each half of a row
        found, source = prefetched(lambda x: F.rms_norm(x, x.shape[-1:]), 64)
        assert found == Prefetch((0,), every_nth=4)
        assert "row % 4 == 0) jitgen::prefetch(" in source
        assert prefetched(lambda x: F.rms_norm(x, x.shape[-1:]), 48)[0] == Prefetch((0,), every_nth=3)


def test_what_all_rows_share_is_not_prefetched_where_the_first_pass_needs_it() -> None:

    def scaled_softmax(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.softmax(x * weight, -1)

    assert ptx(scaled_softmax, (8192, 8192), "sm_90a", "cuda").count(PREFETCH) == 1


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(1, 4096), (1, 4104), (4, 4104), (16, 4096), (512, 4096)])
@pytest.mark.quick(where=lambda rows, length, turned: length == 4096 and turned == (rows == 16))
def test_dense_weights_are_read_after_the_wait(rows: int, length: int, turned: bool) -> None:
    """The kernel ahead may write them too. Of the read-only path nothing says that it stays behind the wait."""

    def product_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight if turned else x @ weight.T

    weight = TensorSpec((length, 4096) if turned else (4096, length), torch.bfloat16)
    low = jitgen.jit(product_of).lower(
        TensorSpec((rows, length), torch.bfloat16), weight, target="sm_90a", backend="cuda"
    )
    entries = low.compile().asm["ptx"].split(".entry")[1:]
    assert entries
    for entry in entries:
        assert_waits_first(entry)
        assert "ld.global.nc" not in entry


def test_weights_are_copied_while_activations_are_quantised() -> None:
    weight = TensorSpec((4096, 4096), torch.bfloat16, format="int4", activation="int8")
    x = TensorSpec((100, 4096), torch.bfloat16)
    low = jitgen.jit(F.linear).lower(x, weight, target="sm_90a", backend="cuda")
    *before, _ = low.compile().asm["ptx"].split(".entry")[-1].split("griddepcontrol.wait")
    assert any("cp.async.bulk.tensor" in text for text in before)


@pytest.mark.parametrize("format", ["int8", None])
def test_few_rows_of_codes_meet_weights_in_the_cache_or_in_registers(format: str | None) -> None:
    """No kernel writes a quantised weight, so that it is read before the wait. Other codes are prefetched."""

    def product_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) if format else torch._int_mm(x, weight.T)

    shape, rows = (4096, 4096), (7, 4096)
    specs = (
        (TensorSpec(rows, torch.bfloat16), TensorSpec(shape, torch.bfloat16, format=format, activation="int8"))
        if format
        else (TensorSpec(rows, torch.int8), TensorSpec(shape, torch.int8))
    )
    low = jitgen.jit(product_of).lower(*specs, target="sm_90a", backend="cuda")
    before, _ = low.compile().asm["ptx"].split(".entry")[-1].split("griddepcontrol.wait")
    assert (GLOBAL_ACCESS.search(before) is not None) == (format is not None)
    assert (PREFETCH in before) == (format is None)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_there_is_no_wait_where_launches_do_not_overlap(backend: str) -> None:
    text = ptx(*FUNCTIONS["rows of a block"], "sm_80", backend)
    assert "griddepcontrol" not in text
    assert PREFETCH not in text
