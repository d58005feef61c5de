"""Short rows of several tensors, and ranks of short rows with what is reduced before and behind, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitgen
from tests.numeric import mismatch
from tests.selections import FUNCTIONS, distinct
from tests.short_rows import appended, cache, copied, heads, in_two_passes, of_extremes, pairs, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def wrong(function: Callable[..., Any], arguments: list[torch.Tensor], updated: tuple[int, ...] = ()) -> list[str]:
    """What is wrong with results, and with arguments that are updated, beside eager torch in float64."""
    own, eager = ([tensor.clone() for tensor in arguments] for _ in range(2))
    exact = [tensor.double() if tensor.is_floating_point() else tensor for tensor in arguments]
    results = [jitgen.jit(function, backend="cuda")(*own), function(*exact), function(*eager)]
    got, wanted, plain = ([one] if isinstance(one, torch.Tensor) else list(one) for one in results)
    triples = [*zip(got, wanted, plain, strict=True), *((own[n], exact[n], eager[n]) for n in updated)]
    return [text for triple in triples if (text := mismatch(*triple, magnitude=4.0)) is not None]


@pytest.mark.parametrize("function", [heads, pairs, in_two_passes, of_extremes])
def test_rows_of_two_tensors(function: Callable[..., Any]) -> None:
    for batch, tokens, length, dtype in (
        (1, 1, 128, torch.bfloat16),
        (2, 333, 64, torch.float16),
        (1, 9, 256, torch.float32),
        (1, 70, 32, torch.bfloat16),
    ):
        arguments = [tensor.cuda() for tensor in tensors(batch, tokens, length, dtype, 32, 8)]
        assert wrong(function, arguments) == [], (batch, tokens, length, dtype)


@pytest.mark.parametrize("function", [appended, copied])
def test_what_is_appended(function: Callable[..., Any]) -> None:
    for batch, tokens, length, dtype in (
        (1, 1, 128, torch.bfloat16),
        (3, 1, 64, torch.float16),
        (1, 4, 128, torch.float32),
    ):
        start = [3, 0, 17][:batch] if function is appended else list(range(5, 5 + tokens))
        arguments = [*tensors(batch, tokens, length, dtype), *cache(batch, tokens, length, dtype, start)]
        assert wrong(function, [tensor.cuda() for tensor in arguments], updated=(7, 8)) == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_selected_ranks(function: Callable[..., Any]) -> None:
    for shape, k in (((1, 128), 8), ((777, 60), 4), ((5, 512), 30), ((2, 3, 7), 2)):
        logits = distinct(shape, torch.float32).cuda()
        got = jitgen.jit(lambda x, k=k: function(x, k), backend="cuda")(logits)
        exact, eager = function(logits.double(), k), function(logits, k)
        assert torch.equal(got[1], exact[1])
        assert mismatch(got[0], exact[0], eager[0], magnitude=4.0) is None, (shape, k)
