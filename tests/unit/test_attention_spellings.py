"""Attention as models write it: each form is one kernel that walks the keys, equal to the same function in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from tests.attention import INF, failure, operands, sample

BATCH, HEADS, ROWS, KEYS, DEPTH = 2, 4, 21, 37, 16


def _rows_and_keys() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(ROWS)[:, None], torch.arange(KEYS)


def relative_to_the_maximum_with_sinks(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    scores = q @ k.mT * 0.25
    both = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(BATCH, -1, ROWS, -1)], -1)
    both = both - both.max(dim=-1, keepdim=True).values
    return torch.softmax(both, -1)[..., :-1] @ v


def exponentials_and_their_sum(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT * 0.25
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return ((powers @ v) / powers.sum(-1, keepdim=True)).transpose(1, 2)


def powers_of_two(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT * 0.36
    powers = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return powers @ v / powers.sum(-1, keepdim=True)


def log_softmax(q: Any, k: Any, v: Any) -> Any:
    return torch.log_softmax(q @ k.mT * 0.25, -1).exp() @ v


def without_nan(q: Any, k: Any, v: Any) -> Any:
    i, j = _rows_and_keys()
    scores = (q @ k.mT).masked_fill(j > i - 3, -INF)
    return torch.nan_to_num(torch.softmax(scores, -1)) @ v


def factors_of_keys(q: Any, k: Any, v: Any, factors: Any) -> Any:
    return (torch.softmax(q @ k.mT * 0.25, -1) * factors[:, None, None, :]) @ v


def keys_masked_afterwards(q: Any, k: Any, v: Any, factors: Any) -> Any:
    weights = torch.softmax(q @ k.mT * 0.25, -1)
    return weights.masked_fill(factors[:, None, None, :] < 0, 0.0) / (1 + factors[:, None, None, :].abs()) @ v


def keys_masked(q: Any, k: Any, v: Any, factors: Any) -> Any:
    return torch.softmax(q @ k.mT * 0.25, -1).masked_fill(factors[:, None, None, :] < 0, 0.0) @ v


def one_query(q: Any, k: Any, v: Any) -> Any:
    weights = torch.softmax(torch.einsum("bhd,bhnd->bhn", q[:, :, 0], k) * 0.25, -1)
    return torch.einsum("bhn,bhne->bhe", weights, v)


def batch_and_heads_together(q: Any, k: Any, v: Any, bias: Any) -> Any:
    flat = [x.reshape(BATCH * HEADS, -1, x.shape[-1]) for x in (q, k, v)]
    scores = torch.bmm(flat[0], flat[1].mT).view(BATCH, HEADS, ROWS, KEYS) * 0.25 + bias
    weights = torch.softmax(scores, -1).view(BATCH * HEADS, ROWS, KEYS)
    return torch.bmm(weights, flat[2])


def windows(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = (q @ k.mT).view(BATCH // 2, 2, HEADS, ROWS, KEYS) + mask[:, None]
    return torch.softmax(scores.view(-1, HEADS, ROWS, KEYS), -1) @ v


FORMS: dict[Callable[..., Any], tuple[int, ...] | None] = {
    relative_to_the_maximum_with_sinks: (HEADS,),
    exponentials_and_their_sum: None,
    powers_of_two: None,
    log_softmax: None,
    without_nan: None,
    factors_of_keys: (BATCH, KEYS),
    one_query: None,
    batch_and_heads_together: (BATCH, HEADS, 1, KEYS),
    windows: (2, ROWS, KEYS),
}
"""Functions, and the shapes of what they take beside queries, keys and values."""


@pytest.mark.parametrize("function", ["product", "cap", "bias"])
def test_powers_of_two_of_one_key(function: str) -> None:
    """Its scores are their own maximum, which is not spread over them."""

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        s = q @ k.mT
        s = torch.tanh(s) if function == "cap" else s + bias if function == "bias" else s
        return torch.exp2(s - s.amax(-1, keepdim=True)) @ v

    args = (*operands((BATCH, HEADS), ROWS, 1, DEPTH, 24), sample((ROWS, 1)))
    torch.testing.assert_close(jitgen.jit(attend)(*args), attend(*args), rtol=0, atol=0)


@pytest.mark.quick(where=lambda form: form in (relative_to_the_maximum_with_sinks, factors_of_keys, one_query))
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms(form: Callable[..., Any]) -> None:
    shape = FORMS[form]
    args = (*operands((BATCH, HEADS), ROWS, KEYS, DEPTH, 24), *([] if shape is None else [sample(shape)]))
    compiled = jitgen.jit(form)
    low = compiled.lower(*args)
    assert len(low.kernels) == 1, low.explain()
    assert "keys of a row walked once" in low.explain()
    found, wanted = compiled(*args), form(*(arg.double() for arg in args))
    # Factors of keys are at most 4 here, and each has a rounding of its own.
    assert failure(found, wanted, args[0], args[1], 4 * args[2]) is None


@pytest.mark.parametrize("form", [keys_masked_afterwards, keys_masked], ids=lambda form: form.__name__)
def test_keys_that_are_selected_after_a_softmax_are_products(form: Callable[..., Any]) -> None:
    """A row without scores is NaN, which a selection of its keys hides and values that are 0 do not."""
    args = (*operands((BATCH, HEADS), ROWS, KEYS, DEPTH, 24), sample((BATCH, KEYS)))
    compiled = jitgen.jit(form)
    assert len(compiled.lower(*args).kernels) == 3
    found, wanted = compiled(*args), form(*(arg.double() for arg in args))
    assert failure(found, wanted, args[0], args[1], args[2]) is None


def test_one_query_before_a_product() -> None:
    def projected(q: Any, k: Any, v: Any, weight: Any) -> Any:
        return one_query(q, k, v) @ weight

    args = (*operands((BATCH, HEADS), ROWS, KEYS, DEPTH, 24), sample((24, 8)))
    compiled = jitgen.jit(projected)
    assert "keys of a row walked once" in compiled.lower(*args).explain()
    torch.testing.assert_close(compiled(*args), projected(*args), rtol=1e-4, atol=1e-4)


def test_sinks_relative_to_the_maximum_in_bfloat16() -> None:
    args = (*operands((BATCH, HEADS), ROWS, KEYS, DEPTH, 24, torch.bfloat16), sample((HEADS,), torch.bfloat16))
    compiled = jitgen.jit(relative_to_the_maximum_with_sinks)
    assert len(compiled.lower(*args).kernels) == 1
    wanted = relative_to_the_maximum_with_sinks(*(arg.double() for arg in args))
    assert failure(compiled(*args), wanted, *args[:3]) is None


def test_codes_whose_scales_multiply_scores_and_weights() -> None:
    def attend(q: Any, k: Any, v: Any, of_k: Any, of_v: Any) -> Any:
        scores = (q @ k.to(q.dtype).mT) * of_k[:, :, None, :] * DEPTH**-0.5
        return (torch.softmax(scores, -1) * of_v[:, :, None, :]) @ v.to(q.dtype)

    q = sample((BATCH, HEADS, 1, DEPTH))
    k, v = (torch.randint(-127, 128, (BATCH, HEADS, KEYS, DEPTH), dtype=torch.int8) for _ in range(2))
    scales = sample((BATCH, HEADS, KEYS)).abs() * 0.02
    compiled = jitgen.jit(attend)
    assert len(compiled.lower(q, k, v, scales, scales).kernels) == 1
    wanted = attend(q.double(), k, v, scales.double(), scales.double())
    values = v * scales[..., None]
    assert failure(compiled(q, k, v, scales, scales), wanted, q, k * scales[..., None], values) is None


def test_powers_by_a_logarithm_of_ones_own_do_not_overflow() -> None:
    def attend(q: Any, k: Any, v: Any, of_sums: Any) -> Any:
        return torch.exp(q @ k.mT - torch.log(of_sums)) @ v

    def again(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.mT
        return torch.exp(scores - torch.log(torch.exp(scores).double().sum(-1, keepdim=True)).to(q.dtype)) @ v

    q, k, v = operands((BATCH, HEADS), ROWS, KEYS, DEPTH, 24)
    k = k * (88 / (q @ k.mT).amax())
    for multiple in (1.0, 1.05, 2.0):  # scores of 88, where exp is finite, to 176, where it is not
        scaled, sums = k * multiple, torch.full((BATCH, HEADS, ROWS, 1), 1e38)
        found, wanted = jitgen.jit(attend)(q, scaled, v, sums), attend(*(x.double() for x in (q, scaled, v, sums)))
        normal = wanted.abs().amax(-1) < 1e37
        # An exponent of up to 176 has roundings of 2^-17, and its product as many as the depth.
        bound = 2.0**-15 * attend(*(x.double() for x in (q, scaled, v.abs(), sums))) + 1e-37
        assert normal.any()
        assert bool(((found - wanted).abs() <= bound)[normal].all())
    found, wanted = jitgen.jit(again)(q, k, v), again(q.double(), k.double(), v.double())
    torch.testing.assert_close(found.double(), wanted, atol=1e-3, rtol=1e-3)


def test_log_softmax_with_sinks_and_large_scores() -> None:
    def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        both = torch.cat([q @ k.mT, sinks.reshape(1, -1, 1, 1).expand(BATCH, -1, ROWS, -1)], -1)
        return torch.log_softmax(both, -1)[..., :-1].exp() @ v

    args = (*operands((BATCH, HEADS), ROWS, KEYS, DEPTH, 24), 100 + sample((HEADS,)))
    args = (args[0] * 20, *args[1:])
    found, wanted = jitgen.jit(attend)(*args), attend(*(arg.double() for arg in args))
    assert failure(found, wanted, *args[:3]) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_that_overflow_a_value_stay_on_the_weights(dtype: torch.dtype) -> None:
    args = (*operands((BATCH, HEADS), ROWS, KEYS, DEPTH, 24, dtype), torch.full((BATCH, KEYS), 300.0, dtype=dtype))
    low = jitgen.jit(factors_of_keys).lower(*args, backend="cuda", target="sm_90a")
    assert ("keys of a row walked once" in low.explain()) == (dtype == torch.bfloat16), low.explain()
    args = (*args[:2], 300 * args[2].sign(), args[3])
    found = jitgen.jit(factors_of_keys)(*args)
    wanted = factors_of_keys(*(arg.double() for arg in args))
    is_finite = wanted.abs() < torch.finfo(dtype).max / 1.01
    assert bool(found[is_finite].isfinite().all())


def test_a_sum_that_another_kernel_needs_is_not_one_kernel() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.mT
        powers = torch.exp(scores - scores.amax(-1, keepdim=True))
        total = powers.sum(-1, keepdim=True)
        return powers @ v / total, torch.cumsum(total, 2)

    args = operands((1, 2), ROWS, KEYS, DEPTH, DEPTH)
    compiled = jitgen.jit(attend)
    found, wanted = compiled(*args), attend(*(arg.double() for arg in args))
    for each, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(each.double(), reference, atol=1e-4, rtol=1e-5)
    assert "used by another kernel" in compiled.lower(*args).explain()


def test_explain_names_the_rewrites_that_were_done() -> None:
    args = operands((BATCH, HEADS), ROWS, KEYS, DEPTH, 24)
    words = jitgen.jit(powers_of_two).lower(*args).explain()
    assert "  rewritten: exp2(x - max(x)) is exp(ln2 x - max(ln2 x))\n" in words
    assert "rewritten: " not in jitgen.jit(lambda q, k, v: q + 1).lower(*args).explain()


def test_a_chain_of_layers_is_claimed_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many layers ask twice as many questions, and not four times as many."""
    forward = importlib.import_module("jitgen.families.attention.forward.claim")
    asked: list[Any] = []
    question = forward.fusion_of
    monkeypatch.setattr(forward, "fusion_of", lambda *args: asked.append(args) or question(*args))

    def layers(x: Any, weights: Any) -> Any:
        for weight in weights:
            q = x @ weight
            x = x + torch.softmax(q @ x.mT, -1) @ x
        return x

    counts = []
    for number in (6, 12):
        asked.clear()
        low = jitgen.jit(layers).lower(sample((ROWS, DEPTH)), [sample((DEPTH, DEPTH)) for _ in range(number)])
        assert low.explain().count("keys of a row walked once") >= number
        counts.append(len(asked))
    assert counts[1] <= 2.2 * counts[0]


@pytest.mark.parametrize("rows", [1, 2, 20])
def test_keys_that_are_selected_after_a_softmax_hide_the_nan_of_a_row_without_scores(rows: int) -> None:
    """ESPnet masks both scores and probabilities, so that a padded entry of a batch is 0."""

    def attend(q: Any, k: Any, v: Any, hidden: Any) -> Any:
        scores = (q @ k.mT).masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, -1).masked_fill(hidden, 0.0) @ v

    args = [arg.requires_grad_() for arg in operands((BATCH, HEADS), rows, KEYS, DEPTH, 24)]
    hidden = sample((BATCH, 1, 1, KEYS)) < 0
    hidden[0] = True
    doubles = [arg.detach().double().requires_grad_() for arg in args]
    found, wanted = jitgen.jit(attend)(*args, hidden), attend(*doubles, hidden)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    found.sum().backward()
    wanted.sum().backward()
    for arg, double in zip(args, doubles, strict=True):
        assert arg.grad is not None
        assert double.grad is not None
        assert torch.equal(arg.grad.isnan(), double.grad.isnan())
