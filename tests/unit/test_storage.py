"""What several kernels need is stored once or computed again, whichever costs less (``families/storage.py``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import host
from jitgen.device import Device
from jitgen.inspect import Lowered
from jitgen.schedule.cost import Effort
from jitgen.spec import Target

half, single = torch.bfloat16, torch.float32
CPU, GPU = "x86-64-v3", "sm_90a"


def scaled_product(x: Any, w: Any) -> Any:
    y = (x @ w).float() * 2
    return F.softmax(y, -1), F.softmax(y, 0)


def long_epilogue(x: Any, w: Any) -> Any:
    y = (x @ w).float().tanh().exp()
    return F.softmax(y, -1), F.softmax(y, 0)


def columns_in_common(x: Any, w: Any) -> Any:
    y = x @ w
    return y[:, :520].relu(), y[:, 500:].tanh()


def two_orders(x: Any, w: Any) -> Any:
    y = x @ w
    return y.relu(), y.T.contiguous()


def two_slices_of_a_scan(x: Any) -> Any:
    left, right = x.cumsum(0).chunk(2, 1)
    return left.relu(), right * 2


def many_slices_of_a_scan(x: Any) -> Any:
    return tuple(piece.relu() for piece in x.cumsum(0).chunk(16, 1))


def softmax_in_two_orders(x: Any) -> Any:
    p = torch.softmax(x, -1)
    return p, p.T.contiguous()


PRODUCT = ((256, 64), (64, 512))
WIDE = ((1024, 1024), (1024, 1020))
CASES = [
    (scaled_product, PRODUCT, half, CPU, False, 3),
    (scaled_product, PRODUCT, half, GPU, False, 3),
    (long_epilogue, PRODUCT, half, CPU, True, 3),
    (long_epilogue, PRODUCT, half, GPU, False, 3),
    (columns_in_common, WIDE, half, CPU, True, 2),
    (columns_in_common, WIDE, half, GPU, False, 2),  # its slices of the weight are copied, both in one kernel
    (two_orders, WIDE, half, CPU, True, 2),
    (two_orders, WIDE, half, GPU, True, 2),
    (two_slices_of_a_scan, ((1024, 1024),), single, CPU, False, 1),
    (two_slices_of_a_scan, ((1024, 1024),), single, GPU, False, 1),
    (many_slices_of_a_scan, ((1024, 1024),), single, CPU, False, 4),
    (many_slices_of_a_scan, ((1024, 1024),), single, GPU, True, 2),
    (softmax_in_two_orders, ((1024, 1024),), half, CPU, True, 2),
]
"""A function, the shapes and dtype of its arguments, a target, whether the value is stored, and the kernels."""


def lowered(function: Callable[..., Any], shapes: Any, dtype: torch.dtype, target: str, **options: Any) -> Lowered:
    return jitgen.jit(function, **options).lower(*(TensorSpec(shape, dtype) for shape in shapes), target=target)


def decisions(low: Lowered) -> list[tuple[str, float, float]]:
    """What ``explain`` says of values that are stored or computed again: placement, and what both cost."""
    costs = r"(\S+) us to store it once, (\S+) us to compute it again"
    said = rf"^  \[.*\] \w+ of \w+ at \S+: (stored|computed again): {costs}$"
    return [(word, float(a), float(b)) for word, a, b in re.findall(said, low.explain(), re.MULTILINE)]


@pytest.mark.parametrize(("function", "shapes", "dtype", "target", "stored", "kernels"), CASES)
def test_the_cheaper_of_two_is_planned_and_explained(
    function: Callable[..., Any], shapes: Any, dtype: torch.dtype, target: str, stored: bool, kernels: int
) -> None:
    low = lowered(function, shapes, dtype, target)
    ((placement, once, again),) = decisions(low)
    assert placement == ("stored" if stored else "computed again")
    assert (once <= again) is stored
    assert low.balance.kernels == kernels


def test_rows_of_one_batch_do_not_depend_on_what_is_cheap() -> None:
    low = lowered(columns_in_common, WIDE, half, GPU, batch_invariant=True)
    assert not decisions(low)
    assert low.balance.operations_ratio == pytest.approx(1, abs=1e-3)


def test_an_effort_takes_the_time_of_its_parts() -> None:
    device = Device(Target("cuda", GPU), "cuda")
    rates = device.rates
    assert Effort(moved=3e6).microseconds(device) == pytest.approx(3e12 / rates.memory)
    assert Effort(operations=3e6).microseconds(device) == pytest.approx(3e12 / rates.vector)
    by_units = Effort(products=3e6, dtype="bfloat16").microseconds(device)
    assert by_units < Effort(products=3e6, dtype="float64").microseconds(device)
    assert Effort(launches=2).microseconds(device) == pytest.approx(2e6 * rates.launch)
    assert Effort(1e6, 1e6, 1e6, "float16", 1).microseconds(device) == pytest.approx(
        sum(
            e.microseconds(device)
            for e in (Effort(1e6), Effort(0, 1e6), Effort(0, 0, 1e6, "float16"), Effort(launches=1))
        )
    )


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_another_size_may_have_the_other_plan() -> None:
    function = jitgen.jit(many_slices_of_a_scan)
    for shape in ((64, 64), (1024, 512), (64, 64), (64, 128)):
        x = torch.randn(shape, dtype=torch.float64)
        for ours, theirs in zip(function(x), many_slices_of_a_scan(x), strict=True):
            torch.testing.assert_close(ours, theirs)
