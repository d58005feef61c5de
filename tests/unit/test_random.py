"""Random numbers and dropout: their distribution, their dependence on torch's generator, and where they are refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from tests import philox
from tests.cuda_on_host import DRAWN, run
from tests.distributions import (
    chi_square,
    exponential_cdf,
    kolmogorov_smirnov,
    normal_cdf,
    uncorrelated,
    uniform_cdf,
)

Function = Callable[..., Any]
SHAPE = 200, 500


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        yield


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.linspace(-3, 3, 100_000).reshape(SHAPE)


def uniform_of(dtype: torch.dtype, seed: int, offset: int, count: int) -> torch.Tensor:
    digits = {torch.float64: 53, torch.float32: 24}[dtype]
    numbers = [philox.bits(index, seed, offset) % 2**digits for index in range(count)]
    return torch.tensor([number / 2**digits for number in numbers], dtype=dtype)


def test_the_reference_has_the_published_numbers() -> None:
    """The known answers of the authors' Random123."""
    assert philox.words((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox.words((2**32 - 1,) * 4, (2**32 - 1,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (-3, 2**33 + 8), (2**62 + 11, 4)])
def test_bits(seed: int, offset: int) -> None:
    """A tensor's numbers follow from seed, offset and the elements' indices; the second has the next offset."""
    with patch("jitgen.runtime.random._seed_of_cpu", lambda: (seed, offset)):
        function = jitgen.jit(lambda x: (torch.rand_like(x), torch.rand(7, 11, dtype=torch.float64).t()))
        first, second = function(torch.zeros(5, 13))
    assert torch.equal(first.flatten(), uniform_of(torch.float32, seed, offset, 65))
    assert torch.equal(second.t().flatten(), uniform_of(torch.float64, seed, offset + 4, 77))


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_cuda_has_the_same_bits() -> None:
    (found,) = run(lambda x: torch.rand_like(x), torch.zeros(5, 13))
    assert torch.equal(found.flatten(), uniform_of(torch.float32, *DRAWN, 65))


CONTINUOUS: dict[str, tuple[Function, Function]] = {
    "rand_like": (lambda x: torch.rand_like(x), uniform_cdf),
    "rand": (lambda x: torch.rand(SHAPE, dtype=torch.float64), uniform_cdf),
    "randn_like": (lambda x: torch.randn_like(x), normal_cdf),
    "randn": (lambda x: torch.randn(SHAPE, dtype=torch.float64), normal_cdf),
    "uniform_": (lambda x: (torch.empty_like(x).uniform_(-2, 3) + 2) / 5, uniform_cdf),
    "normal_": (lambda x: (torch.empty_like(x).normal_(5, 2) - 5) / 2, normal_cdf),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(3.0) * 3, exponential_cdf),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(2.0, 0.5).log().sub(2) * 2, normal_cdf),
    "cauchy_": (lambda x: torch.empty_like(x).cauchy_(3.0, 2.0), lambda c: torch.atan((c - 3) / 2) / math.pi + 0.5),
    "normal of tensors": (lambda x: (torch.normal(x, x.abs() + 1) - x) / (x.abs() + 1), normal_cdf),
    "normal of a size": (lambda x: (torch.normal(2.0, 3.0, SHAPE) - 2) / 3, normal_cdf),
    "rrelu": (lambda x: (F.rrelu(-torch.ones_like(x), 0.25, 0.75, True) + 0.25) * -2, uniform_cdf),
    "Gumbel noise": (lambda x: -torch.log(torch.empty_like(x).exponential_()), lambda g: torch.exp(-torch.exp(-g))),
}


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.quick(where=lambda name: list(CONTINUOUS).index(name) % 2 == 0)
def test_continuous_distributions(name: str, x: torch.Tensor) -> None:
    function, cdf = CONTINUOUS[name]
    first, second = (jitgen.jit(function)(x) for _ in range(2))
    assert first.dtype == function(x).dtype
    assert kolmogorov_smirnov(first, cdf)
    assert uncorrelated(first, second)
    assert uncorrelated(first[:-1], first[1:])
    assert uncorrelated(first[:, :-1], first[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_uniform_numbers_of_16_bits(dtype: torch.dtype) -> None:
    """Every multiple of 2**-11 or of 2**-8 in [0, 1), as torch has them."""
    cells = {torch.float16: 2048, torch.bfloat16: 256}[dtype]
    found = jitgen.jit(lambda: torch.rand(100_000, dtype=dtype))().double() * cells
    assert torch.equal(found, found.floor())
    assert chi_square(torch.bincount(found.long(), minlength=cells), torch.full((cells,), 1 / cells))


DISCRETE: dict[str, tuple[Function, list[float]]] = {
    "randint": (lambda x: torch.randint(-3, 9, SHAPE) + 3, 12 * [1 / 12]),
    "randint_like": (lambda x: torch.randint_like(x, 5), 5 * [1 / 5]),
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), [0.7, 0.3]),
    "bernoulli of a number": (lambda x: x.bernoulli(0.01), [0.99, 0.01]),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.6), [0.4, 0.6]),
    "dropout": (lambda x: F.dropout(torch.ones_like(x), 0.2) > 0, [0.2, 0.8]),
    "alpha_dropout": (lambda x: F.alpha_dropout(torch.ones_like(x), 0.2, True) > 0, [0.2, 0.8]),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.5).clamp(max=4) - 1, [1 / 2, 1 / 4, 1 / 8, 1 / 8]),
    "multinomial": (lambda x: torch.multinomial(torch.tensor([1.0, 5, 0, 2]), 9000, True) % 3, [3 / 8, 5 / 8]),
    "multinomial of one": (lambda x: torch.multinomial(x[:, :3].abs() * 0 + 1, 1), 3 * [1 / 3]),
    "multinomial without replacement": (lambda x: torch.multinomial(x[:, :2].abs() * 0 + 1, 2), 2 * [1 / 2]),
}


@pytest.mark.parametrize("name", DISCRETE)
@pytest.mark.quick(where=lambda name: list(DISCRETE).index(name) % 2 == 0)
def test_discrete_distributions(name: str, x: torch.Tensor) -> None:
    function, probabilities = DISCRETE[name]
    first, second = (jitgen.jit(function)(x) for _ in range(2))
    assert first.dtype == function(x).dtype
    counts = torch.bincount(first.long().flatten(), minlength=len(probabilities))
    assert chi_square(counts, torch.tensor(probabilities))
    assert uncorrelated(first, second)


def test_the_generator_decides(x: torch.Tensor) -> None:
    function = jitgen.jit(lambda x: (torch.rand_like(x), torch.rand_like(x)))
    plan = function.bind(x)
    torch.manual_seed(7)
    calls = [function(x), function(x), plan(x)]
    after = torch.rand(3)
    torch.manual_seed(7)
    again = [function(x), function(x), plan(x)]
    assert torch.equal(after, torch.rand(3))
    assert all(torch.equal(a, b) for one, two in zip(calls, again, strict=True) for a, b in zip(one, two, strict=True))
    numbers = [tensor for call in calls for tensor in call]
    assert all(uncorrelated(a, b) for place, a in enumerate(numbers) for b in numbers[:place])
    torch.manual_seed(7)
    assert not torch.equal(after, torch.rand(3))  # the calls have moved the generator on
    torch.manual_seed(7)
    with_gradients = function(x.clone().requires_grad_())
    assert all(torch.equal(a, b) for a, b in zip(with_gradients, calls[0], strict=True))


def test_readers_of_one_tensor_see_the_same_numbers(x: torch.Tensor) -> None:
    """In a kernel that reduces, in a transposed one, and through a slice."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = torch.rand_like(x)
        return noise, noise.t() * 1, noise.sum(0), noise[3:7, ::2] + 0, noise @ x.t()

    noise, transposed, total, part, product = jitgen.jit(function)(x)
    assert torch.equal(noise.t(), transposed)
    assert torch.allclose(noise.sum(0), total)
    assert torch.equal(noise[3:7, ::2], part)
    assert torch.allclose(noise @ x.t(), product, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_dropout_scales_what_it_keeps(x: torch.Tensor, dtype: torch.dtype) -> None:
    x = x.to(dtype)
    found = jitgen.jit(lambda x, p: F.dropout(x, p))(x, 0.25)
    kept = found != 0
    assert found.dtype == dtype
    assert torch.allclose(found[kept].double(), x[kept].double() / 0.75, rtol=torch.finfo(dtype).eps)
    for p, training, want in ((1.0, True, torch.zeros_like(x)), (0.0, True, x), (0.5, False, x)):
        got = jitgen.jit(lambda x, p=p, training=training: F.dropout(x, p, training))(x)
        assert torch.equal(got, want)
    channels = jitgen.jit(lambda x: F.dropout2d(x, 0.5))(torch.ones(4, 50, 3, 5)).flatten(2)
    assert ((channels == 0).all(-1) | (channels == 2).all(-1)).all()
    assert 40 < (channels[..., 0] == 0).sum() < 160


def test_a_module_is_trained_and_evaluated(x: torch.Tensor) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(500, 20), torch.nn.Dropout(0.5)).requires_grad_(False)
    function = jitgen.jit(lambda x: layers(x))
    assert 0.4 < (function(x) == 0).double().mean() < 0.6
    layers.eval()
    assert torch.allclose(function(x), layers(x), atol=1e-5)
    layers.train()
    assert 0.4 < (function(x) == 0).double().mean() < 0.6


REFUSED: dict[str, Function] = {
    "a generator": lambda x: torch.rand(3, generator=torch.Generator()) + x[0, :3],
    "a probability above 1": lambda x: x.bernoulli(1.5),
    "a dropout below 0": lambda x: F.dropout(x, -0.5),
    "integers": lambda x: torch.rand_like(x.int()),
    "no integers": lambda x: torch.randint(5, 5, (3,)),
    "dropout of integers": lambda x: F.dropout(x.int()),
    "a geometric p of 1": lambda x: torch.empty_like(x).geometric_(1.0),
    "a cauchy sigma of 0": lambda x: torch.empty_like(x).cauchy_(0.0, 0.0),
    "a negative deviation": lambda x: torch.normal(x, -1.0),
    "an alpha dropout above 1": lambda x: F.alpha_dropout(x, 1.5, True),
    "more samples than categories": lambda x: torch.multinomial(x[0, :3].abs(), 4),
    "samples of integers": lambda x: torch.multinomial(x[0].int(), 4),
    "a negative rate": lambda x: torch.empty_like(x).exponential_(-1.0),
}


@pytest.mark.parametrize("channels", [False, True])
def test_alpha_dropout_keeps_mean_and_variance(channels: bool) -> None:
    dropout = F.feature_alpha_dropout if channels else F.alpha_dropout
    x = (torch.rand(500, 40, 5) * 2 - 1) * math.sqrt(3)  # above what is put in place of elements
    dropped = jitgen.jit(lambda x: dropout(x, 0.3, True))(x)
    assert abs(float(dropped.mean())) < 0.03
    assert abs(float(dropped.var()) - 1) < 0.06
    lost = dropped == dropped.min()
    assert 0.28 < float(lost.double().mean()) < 0.32
    assert bool((lost.all(-1) == lost.any(-1)).all()) == channels


IMPOSSIBLE = {
    "nothing": (torch.zeros(3), 1),
    "too few": (torch.tensor([1.0, 0.0, 0.0]), 2),
    "negative": (torch.tensor([-1.0, -2.0]), 1),
    "no numbers": (torch.tensor([math.nan, math.nan]), 1),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_drawn_is_an_error(name: str) -> None:
    weights, count = IMPOSSIBLE[name]
    with pytest.raises(IndexError):
        jitgen.jit(lambda weights: torch.multinomial(weights, count))(weights)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, x: torch.Tensor) -> None:
    with pytest.raises((jitgen.TraceError, jitgen.UnsupportedError), match=r"test_random\.py"):
        jitgen.jit(REFUSED[case])(x)


PROGRAM = """
import torch, torch.nn.functional as F, jitgen

@jitgen.jit
def sampled(logits, p):
    values, indices = torch.topk(F.dropout(logits, p), 5)
    return values.softmax(-1), indices, torch.median(logits, 1).values

compiled = []
jitgen.on_compile(compiled.append)
torch.manual_seed(3)
print([t.sum().item() for t in sampled(torch.linspace(0, 1, 400).reshape(4, 100).sin(), 0.3)], len(compiled))
"""


@pytest.mark.slow
@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_a_strict_process_runs_what_was_recorded(tmp_path: Path) -> None:
    def program(store: str, **environment: str) -> str:
        settings = dict(os.environ) | {"JITGEN_CACHE_DIR": str(tmp_path / store)} | environment
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=settings)
        assert done.returncode == 0, done.stderr
        return done.stdout

    manifest = tmp_path / "specs.json"
    first, compiled = program("first", JITGEN_RECORD=str(manifest)).rsplit(" ", 1)
    assert int(compiled)
    assert json.loads(manifest.read_text())["entries"]
    with patch.dict(os.environ, JITGEN_CACHE_DIR=str(tmp_path / "second")):
        jitgen.prewarm(str(manifest), targets=["cpu"])
    assert program("second", JITGEN_STRICT="1").rsplit(" ", 1) == [first, "0\n"]


def test_permutations() -> None:
    permuted = jitgen.jit(
        lambda x: (torch.randperm(x.shape[0]), torch.randperm(5, dtype=torch.int32), torch.randperm(0))
    )
    for count in (1, 7, 300):
        order, five, none = permuted(torch.ones(count))
        assert (order.dtype, five.dtype, none.shape) == (torch.int64, torch.int32, (0,))
        assert torch.equal(order.sort().values, torch.arange(count))
        assert torch.equal(five.sort().values, torch.arange(5, dtype=torch.int32))
    torch.manual_seed(0)
    three = jitgen.jit(lambda x: torch.randperm(3) + x)
    codes = torch.stack([three(torch.zeros(3, dtype=torch.int64)) for _ in range(1200)]) @ torch.tensor([9, 3, 1])
    counts = torch.unique(codes, return_counts=True)[1]
    assert len(counts) == 6
    assert chi_square(counts, torch.full((6,), 1 / 6))
