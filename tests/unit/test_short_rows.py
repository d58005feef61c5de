"""Short rows of several tensors are one kernel in CUDA, whose lanes of a warp share a row: norms of heads, their
rotation, and what is appended to a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests.cuda_on_host import run
from tests.joined_rows import normal, rotated
from tests.numeric import mismatch
from tests.short_rows import appended, cache, copied, heads, in_two_passes, of_extremes, pairs, tensors

Tensor = torch.Tensor
Function = Callable[..., Any]


def wide(arguments: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in arguments]


def wrong(function: Function, arguments: Sequence[Tensor], updated: Sequence[int] = ()) -> list[str]:
    """What is wrong with results, and with arguments that are updated, beside eager torch in float64."""
    exact, eager, own = wide(arguments), [t.clone() for t in arguments], [t.clone() for t in arguments]
    wanted, plain, got = function(*exact), function(*eager), run(function, *own)
    wanted, plain = ((one,) if isinstance(one, Tensor) else one for one in (wanted, plain))
    triples = [*zip(got, wanted, plain, strict=True), *((own[n], exact[n], eager[n]) for n in updated)]
    return [text for triple in triples if (text := mismatch(*triple, magnitude=4.0)) is not None]


def families(function: Function, arguments: Sequence[Any], **route: str) -> list[tuple[str, int]]:
    kernels = jitgen.jit(function).lower(*arguments, **{"backend": "cuda", "target": "sm_90a"} | route).lowered.program
    return [(kernel.family, len(kernel.bodies)) for kernel in kernels.kernels]


@pytest.mark.parametrize(
    ("batch", "tokens", "length", "dtype"),
    [
        *((1, 1, 128, torch.bfloat16), (2, 5, 64, torch.float16)),
        *((1, 9, 256, torch.float32), (1, 3, 32, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("function", [heads, pairs, in_two_passes, of_extremes])
@pytest.mark.covering(1)
def test_rows_of_two_tensors_are_one_kernel(
    function: Function, batch: int, tokens: int, length: int, dtype: torch.dtype
) -> None:
    arguments = tensors(batch, tokens, length, dtype)
    assert families(function, arguments) == [("elementwise", 2)]
    assert wrong(function, arguments) == []


def test_rows_that_no_access_reads_as_a_whole() -> None:
    q, k, *others = tensors(1, 5, 66, torch.bfloat16)
    arguments = [q[..., 1:65], k[..., 2:], *(tensor[..., 1:65] for tensor in others)]
    assert families(heads, arguments) == [("elementwise", 2)]
    assert wrong(heads, arguments) == []
    q, k, *_ = tensors(1, 64, 4, torch.float32, 4, 4)
    arguments = [q.transpose(1, 3), k.transpose(1, 3), *tensors(1, 4, 64, torch.float32)[2:]]
    assert wrong(in_two_passes, arguments) == []


@pytest.mark.parametrize("function", [appended, copied])
def test_what_is_appended_shares_the_kernel(function: Function) -> None:
    for batch, tokens, length, dtype in (
        (1, 1, 128, torch.bfloat16),
        (3, 1, 64, torch.float16),
        (1, 4, 128, torch.float32),
    ):
        start = [3, 0, 17][:batch] if function is appended else list(range(5, 5 + tokens))
        arguments = [*tensors(batch, tokens, length, dtype), *cache(batch, tokens, length, dtype, start)]
        *before, last = [family for family, _ in families(function, arguments)]
        # Which of several positions is the last of equal ones is a reduction of these.
        assert (last, before) == ("elementwise", ["reduction"] * (function is copied and tokens > 1))
        assert wrong(function, arguments, updated=(7, 8)) == [], (batch, tokens, length, dtype)


def test_what_is_appended_out_of_range_is_left_out() -> None:
    arguments = [*tensors(2, 1, 64, torch.float32), *cache(2, 1, 64, torch.float32, [18, 19])]
    keys = arguments[7].clone()
    run(appended, *arguments)
    assert torch.equal(arguments[7][1], keys[1])
    assert torch.equal(arguments[7][0, :, :18], keys[0, :, :18])
    assert not torch.equal(arguments[7][0, :, 18], keys[0, :, 18])


def test_what_is_joined_with_a_cache_shares_the_kernel() -> None:
    def joined(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, cos: Tensor, sin: Tensor, keys: Tensor) -> Any:
        k = rotated(normal(k, of_k), cos, sin).transpose(1, 2)
        return rotated(normal(q, of_q), cos, sin), torch.cat([keys, k], 2)

    for tokens, length in ((1, 128), (3, 32)):
        arguments = [*tensors(2, tokens, length, torch.bfloat16), torch.randn(2, 2, 9, length).bfloat16()]
        assert families(joined, arguments) == [("elementwise", 4)]
        assert wrong(joined, arguments) == []
    arguments = [*tensors(2, 1, 96, torch.bfloat16), torch.randn(2, 2, 9, 96).bfloat16()]
    assert {name for name, _ in families(joined, arguments)} == {"reduction", "elementwise"}
    assert wrong(joined, arguments) == []

    def along_the_row(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, F.rms_norm(y, (64,))], -1)

    def computed(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.exp(), F.rms_norm(y, (64,))], 0)

    x, y = torch.randn(2, 5, 64)
    for function in (along_the_row, computed):
        assert wrong(function, [x, y]) == []


def test_columns_stay_kernels_of_reductions() -> None:
    def columns(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(one.mT / one.mT.abs().sum(-1, keepdim=True) for one in (x, y))  # type: ignore[return-value]

    assert {name for name, _ in families(columns, (torch.randn(64, 5), torch.randn(64, 9)))} == {"reduction"}


def test_other_rows_stay_kernels_of_reductions() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, -1), x - x.mean(-1, keepdim=True)

    reads_the_same = [torch.randn(4, 128)]
    assert families(both, reads_the_same) == [("reduction", 1)]
    for length in (1024, 96):
        assert {name for name, _ in families(heads, tensors(1, 3, length, torch.bfloat16))} == {"reduction"}
    assert {name for name, _ in families(heads, tensors(1, 3, 64, torch.float64))} == {"reduction"}
    alone = tensors(1, 3, 128, torch.bfloat16)
    assert families(normal, (alone[0], alone[2])) == [("reduction", 1)]
    for route in ({"backend": "triton"}, {"backend": "cpp", "target": "x86-64-v3"}):
        assert {name for name, _ in families(heads, alone, **route)} == {"reduction"}
    arguments = [*tensors(1, 1, 96, torch.bfloat16), *cache(1, 1, 96, torch.bfloat16, [3])]
    assert {"reduction", "elementwise"} == {name for name, _ in families(appended, arguments)}
    assert wrong(appended, arguments, updated=(7, 8)) == []


def test_the_same_program_serves_other_lengths_or_is_made_anew() -> None:
    """What a call is does not depend on the calls before it."""
    function = jitgen.jit(heads)
    kinds = []
    for length in (128, 96, 64, 1024, 128):
        lowered = function.lower(*tensors(1, 3, length, torch.bfloat16), backend="cuda", target="sm_90a")
        kinds.append({kernel.family for kernel in lowered.lowered.program.kernels})
    short, long = {"elementwise"}, {"reduction"}
    assert kinds == [short, long, short, long, short]


def test_explained() -> None:
    text = jitgen.jit(heads).lower(*tensors(1, 3, 128, torch.bfloat16), backend="cuda", target="sm_90a").explain()
    assert "8 lanes of a warp reduce a row" in text
    assert "beside others in a kernel: 8 lanes of a warp share a row" in text
