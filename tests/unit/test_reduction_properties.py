"""Random compositions of reductions and pointwise work, against float64 torch."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jitgen

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "2"))
PROFILE = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

Step = Callable[[torch.Tensor, int], torch.Tensor]

# Each maps a tensor to one of the same shape, with values of moderate size, so that errors do not grow without bound.
STEPS: dict[str, Step] = {
    "softmax": lambda x, d: F.softmax(x, d),
    "log_softmax": lambda x, d: F.log_softmax(x, d) / 8,
    "center": lambda x, d: x - x.mean(d, keepdim=True),
    "standardize": lambda x, d: (x - x.mean(d, keepdim=True)) * (x.var(d, correction=0, keepdim=True) + 1).rsqrt(),
    "scale": lambda x, d: x / (x.abs().amax(d, keepdim=True) + 1),
    "length": lambda x, d: x / (x.norm(dim=d, keepdim=True) + 1),
    "spread": lambda x, d: x.amax(d, keepdim=True).expand(x.shape) - x,
    "sigmoid": lambda x, d: torch.sigmoid(x * 2 - 1),
    "tanh": lambda x, d: torch.tanh(x) + x * 0.5,
    "flip": lambda x, d: x.flip(d) + x,
    "joined": lambda x, d: torch.cat([x, x.cos()], d).narrow(d, x.shape[d] // 2, x.shape[d]),
    "turned": lambda x, d: x.transpose(0, -1).contiguous().transpose(0, -1) * 0.75,
}
ENDS: dict[str, Step] = {
    "itself": lambda x, d: x,
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "max": lambda x, d: x.amax(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "whole": lambda x, d: x.mean(),
    "any": lambda x, d: (x > 0.3).float().sum(d),
}

plans = st.tuples(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from([-1, -1, 0])), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(sorted(ENDS)), st.sampled_from([-1, -1, 0])), min_size=1, max_size=3),
)
shapes = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 70)),
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 40)),
    st.tuples(st.integers(1, 3), st.sampled_from([255, 256, 257, 1023, 1025, 4097])),
)


@given(plan=plans, shape=shapes, seed=st.integers(0, 2**16))
@PROFILE
def test_compositions(plan, shape: tuple[int, ...], seed: int) -> None:
    steps, ends = plan

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for name, dim in steps:
            x = STEPS[name](x, dim)
        return tuple(ENDS[name](x, dim) for name, dim in ends)

    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    got = jitgen.jit(function)(x)
    wanted, eager = function(x.double()), function(x)
    for (name, _), ours, exact, theirs in zip(ends, got, wanted, eager, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        if name == "any":  # a threshold: a value next to it may fall on either side
            assert (ours.double() - exact).abs().max() <= 2
            continue
        # Each step rounds a few times and divides by sums: as close as eager torch, up to a small factor, is what a
        # fused kernel owes.
        theirs_off = (theirs.double() - exact).abs().max().item()
        bound = 8 * theirs_off + 64 * torch.finfo(torch.float32).eps * max(1.0, exact.abs().max().item()) * 4
        assert (ours.double() - exact).abs().max().item() <= bound


# Of rows, with operands that all rows share: what several steps or results need at different passes.
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SHARING: dict[str, Callable[[torch.Tensor, Row], torch.Tensor]] = {
    "layer_norm": lambda x, o: F.layer_norm(x, x.shape[-1:], o[1], o[2]),
    "rms_norm": lambda x, o: F.rms_norm(x, x.shape[-1:], o[1], 1e-5),
    "weighted": lambda x, o: x * o[1],
    "biased": lambda x, o: x + o[2],
    "gated": lambda x, o: x * torch.sigmoid(o[3]),
    "residual": lambda x, o: x + o[0],
    "softmax": lambda x, o: F.softmax(x, -1),
    "scaled": lambda x, o: x / (x.abs().amax(-1, keepdim=True) + 1),
}
sharing_plans = st.tuples(
    st.lists(st.sampled_from(sorted(SHARING)), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["itself", "sum", "max", "logsumexp"])), min_size=1, max_size=3
    ),
)


def sharing(steps: list[str], ends: list[tuple[int, str]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function that returns what some of its steps came to."""

    def function(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [operands[0]]
        for name in steps:
            values.append(SHARING[name](values[-1], operands))
        return tuple(ENDS[end](values[-1 - place % len(values)], -1) for place, end in ends)

    return function


@given(plan=sharing_plans, rows=st.integers(1, 9), length=st.sampled_from([1, 15, 16, 100, 255, 257, 1025, 4097]))
@PROFILE
def test_compositions_that_share_operands(plan, rows: int, length: int) -> None:
    function = sharing(*plan)
    x, weight, bias, gate = (torch.randn(shape) for shape in ((rows, length), length, length, (rows, length)))
    operands = x, weight, bias, gate
    got = jitgen.jit(function)(*operands)
    wanted, eager = function(*(o.double() for o in operands)), function(*operands)
    for ours, exact, theirs in zip(got, wanted, eager, strict=True):
        theirs_off = (theirs.double() - exact).abs().max().item()
        bound = 8 * theirs_off + 256 * torch.finfo(torch.float32).eps * max(1.0, exact.abs().max().item())
        assert (ours.double() - exact).abs().max().item() <= bound


@given(
    plan=sharing_plans,
    shape=st.sampled_from([(37, 7), (300, 100), (70, 1000), (33, 4097), (3, 20_000), (140, 9000), (64, 151_936)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    target=st.sampled_from(["sm_80", "sm_90a"]),
)
@PROFILE
def test_compositions_that_share_operands_compile_for_gpus(plan, shape, dtype: torch.dtype, target: str) -> None:
    specs = [jitgen.TensorSpec(size, dtype) for size in (shape, shape[1:], shape[1:], shape)]
    jitgen.jit(sharing(*plan)).lower(*specs, target=target, backend="cuda").compile()


@pytest.mark.parametrize("count", [1, 63, 64, 65])
@pytest.mark.parametrize("length", [2**18 - 1, 2**18, 2**18 + 1])
@pytest.mark.quick(where=lambda count, length: count in (1, 65) and length % 2 == 1)
def test_few_long_rows(count: int, length: int) -> None:
    """Around the sizes from which a GPU reduces rows in chunks."""
    x = torch.randn(count, length, generator=torch.Generator().manual_seed(length))
    function = jitgen.jit(lambda x: (x.sum(-1), x.amax(-1), (x > 5.2).any(-1)))
    total, top, above = function(x)
    assert torch.equal(top, x.amax(-1))
    assert torch.equal(above, (x > 5.2).any(-1))
    exact = x.double().sum(-1)
    bound = 32 * torch.finfo(torch.float32).eps * x.double().abs().sum(-1)
    assert ((total.double() - exact).abs() <= bound).all()
