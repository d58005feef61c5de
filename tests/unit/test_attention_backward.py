"""Gradients of attention on the CPU: kernels that compute the scores again, against float64 torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.ir.body_builder import BodyBuilder
from tests import attention_backward as functions
from tests.attention import MASKS, formula, operands, sample
from tests.attention_backward import compared, partitioned


def check(function: Callable[..., Any], *args: torch.Tensor, fused: bool = True) -> None:
    assert [found for found in compared(function, *args, backend="cpp", fused=fused) if found] == []


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "causal": lambda: (functions.causal, *operands((1, 2), 70, 75, 24, 20)),
    "causal-bfloat16": lambda: (functions.causal, *operands((1, 2), 70, 75, 16, 16, torch.bfloat16)),
    "cap-window": lambda: (formula(["cap"], ["window"]), *operands((1, 2), 70, 80, 17, 16)),
    "float64": lambda: (formula(["distance"], ["prefix"]), *operands((1, 2), 33, 40, 9, 5, torch.float64)),
    "grouped": lambda: (functions.grouped, sample((2, 4, 40, 16), seed=1), *operands((2, 2), 40, 70, 16, 16)[1:]),
    "repeated": lambda: (functions.repeated, sample((2, 4, 40, 16), seed=1), *operands((2, 2), 40, 70, 16, 24)[1:]),
    "sinks": lambda: (functions.sunk, *operands((2, 3), 40, 50, 16, 16), sample((3,))),
    "no-keys": lambda: (functions.sdpa, *operands((1, 2), 20, 0, 16, 16)),
    "no-rows": lambda: (functions.sdpa, *operands((1, 2), 0, 9, 16, 16)),
    "one-row": lambda: (functions.sdpa, *operands((3, 2), 1, 9, 16, 16)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(where=lambda case: case in ("causal", "grouped"))
def test_gradients_of_attention(case: str) -> None:
    check(*CASES[case]())


def test_attentions_of_the_same_operands_have_their_own_masks() -> None:
    def both(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k, v, is_causal=True)

    check(both, *operands((1, 2), 40, 50, 16, 16), fused=False)


def test_products_of_one_row_and_one_key_are_of_one_dtype() -> None:
    """There a row's sum is a factor of its key, which values take: what remains is rounded as the weights were."""
    args = [t.requires_grad_() for t in operands((1, 3), 1, 1, 64, 64, torch.bfloat16)]
    with partitioned() as programs:
        jitgen.jit(functions.sdpa, backend="cpp")(*args)
    bodies = [body for program, _ in programs for kernel in program.kernels for body in kernel.bodies]
    products = [(c.dtype, body.operands[c.weight[0]].dtype) for body in bodies for c in body.contractions]
    assert set(products) == {("bfloat16", "bfloat16")}


def test_gradients_of_a_chain_of_layers_are_claimed_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many layers are twice as much work for claims and for kernels, and not four times as much."""
    match = importlib.import_module("jitgen.families.attention.backward.match")
    matched, lower = match.matched, BodyBuilder.lower
    looked_at: list[Any] = []
    lowered: list[Any] = []
    monkeypatch.setattr(match, "matched", lambda *args: looked_at.append(args) or matched(*args))
    monkeypatch.setattr(BodyBuilder, "lower", lambda *args: lowered.append(args) or lower(*args))

    def layers(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            q = (x @ weight).unflatten(-1, (2, 8)).transpose(0, 1)
            x = x + F.scaled_dot_product_attention(q, q * 2, q + 1).transpose(0, 1).flatten(1)
        return x

    counts = []
    for number in (3, 6):
        looked_at.clear()
        lowered.clear()
        weights = [sample((16, 16), seed=seed).requires_grad_() for seed in range(number)]
        low = jitgen.jit(layers, backend="cpp").lower(sample((20, 16)), weights)
        assert low.backward is not None
        assert low.backward.explain().count("attention_backward") == 2 * number
        counts.append((len(looked_at), len(lowered)))
    (few_looks, few_bodies), (looks, bodies) = counts
    assert looks <= 2.2 * few_looks
    assert bodies <= 2.2 * few_bodies


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask: str) -> None:
    check(formula(["scale"], [mask]), *operands((1, 2), 130, 200, 16, 16))


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (130, 64), (64, 256), (256, 250)])
def test_widths(depth: int, width: int) -> None:
    check(functions.sdpa, *operands((1, 2), 35, 50, depth, width))


@pytest.mark.slow
def test_wider_heads_go_by_products() -> None:
    q, k, v = (t.requires_grad_() for t in operands((1, 1), 8, 9, 300, 16))
    with partitioned() as programs:
        jitgen.jit(functions.sdpa)(q, k, v).sum().backward()
    families = [kernel.family for program, _ in programs for kernel in program.kernels]
    assert "attention_backward" not in families


@pytest.mark.slow
def test_rows_without_keys() -> None:
    """Both conventions: zeros of scaled_dot_product_attention, and NaN of the plain formula."""
    shown = sample((20, 50)) > 0
    shown[3] = False
    check(functions.shown, *operands((2, 3), 20, 50, 16, 16), shown)

    def plain(q: Any, k: Any, v: Any, shown: Any) -> Any:
        s = (q @ k.transpose(-1, -2)).masked_fill(~shown, -torch.inf)
        return torch.softmax(s, -1) @ v

    check(plain, *operands((2, 3), 20, 50, 16, 16), shown)


@pytest.mark.slow
def test_operands_of_the_rule() -> None:
    q, k, v = operands((2, 3), 40, 50, 16, 16)
    check(functions.sloped, q, k, v, sample((3,)).abs(), fused=False)
    check(functions.biased, q, k, v, sample((3, 40, 50)), fused=False)


def test_numbers_of_a_row_are_saved_in_the_dtype_of_16_bit_scores() -> None:
    check(functions.sunk, *operands((2, 3), 40, 50, 16, 16, torch.bfloat16), sample((3,), torch.bfloat16))


@pytest.mark.slow
def test_what_a_user_writes() -> None:
    """By hand with a maximum, its logarithm of the sum beside it, and without a division."""

    def by_hand(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.transpose(-1, -2) * 0.3
        top = s.amax(-1, keepdim=True)
        e = torch.exp(s - top)
        total = e.sum(-1, keepdim=True)
        return (e @ v) / total + top + torch.log(total)

    def not_divided(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.transpose(-1, -2) * 0.3
        return torch.exp(s - s.amax(-1, keepdim=True)) @ v

    for function in (by_hand, not_divided):
        args = [t.double().requires_grad_() for t in operands((1, 2), 5, 7, 4, 4)]
        assert torch.autograd.gradcheck(jitgen.jit(function), args, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("function", [functions.causal, functions.sunk])
def test_gradcheck_and_gradgradcheck(function: Callable[..., Any]) -> None:
    args = [t.double().requires_grad_() for t in operands((1, 2), 5, 6, 4, 3)]
    if function is functions.sunk:
        args.append(sample((2,)).double().requires_grad_())
    compiled = jitgen.jit(function)
    assert torch.autograd.gradcheck(compiled, args, fast_mode=True)
    assert torch.autograd.gradgradcheck(compiled, args, fast_mode=True)


@pytest.mark.slow
def test_a_training_step_is_recorded_prewarmed_and_served_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> list[torch.Tensor]:
        function = jitgen.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        args = [t.requires_grad_() for t in operands((1, 2), 20, 20, 8, 8)]
        function(*args).sum().backward()
        return [t.grad for t in args if t.grad is not None]

    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "development"))
    with jitgen.record(tmp_path / "step.json"):
        wanted = step()
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "deployment"))
    jitgen.prewarm(tmp_path / "step.json", targets=["cpu"], jobs=1)
    with jitgen.strict():
        assert all(map(torch.equal, step(), wanted))


@pytest.mark.slow
def test_a_recorded_training_step_with_a_bias_stands_for_one_row_and_one_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = jitgen.jit(lambda q, k, v, bias: torch.softmax(q @ k.mT * 0.3 + bias, -1) @ v)

    def step(batch: int, rows: int) -> None:
        shapes = (batch, 3, rows, 8), (batch, 3, 50, 8), (batch, 3, 50, 8), (3, 1, 50)
        function(*(torch.randn(shape, requires_grad=True) for shape in shapes)).sum().backward()

    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "development"))
    with jitgen.record(tmp_path / "step.json"):
        step(2, 40)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "deployment"))
    assert not jitgen.prewarm(tmp_path / "step.json", targets=["cpu"], jobs=2).count("failed")
    with jitgen.strict():
        for batch, rows in ((2, 40), (1, 40), (2, 1), (1, 1)):
            step(batch, rows)


@pytest.mark.slow
def test_equal_calls_give_equal_bits_and_write_all_of_poisoned_results() -> None:
    args = [t.requires_grad_() for t in operands((1, 2), 70, 75, 16, 16)]
    function = jitgen.jit(functions.causal)
    torch.full((1 << 16,), float("nan"))  # freed memory that results may be made of
    first, second = (torch.autograd.grad(function(*args).sum(), args) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert not any(each.isnan().any() for each in first)
