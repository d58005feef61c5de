"""``torch.func.vmap`` over decorated functions: one call over the batch, equal to eager's for every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import pipeline
from jitgen.call import operator
from jitgen.ir import batched

OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "pointwise": (lambda x, y: F.gelu(x) * y + 2, ((3, 5), (3, 5))),
    "broadcast": (lambda x, y: x * y[:, None] + x.shape[0], ((3, 5), (3,))),
    "reductions": (lambda x, y: (F.softmax(x, -1) + y.amax(0), y.argmax(), x.sum(0)), ((3, 5), (3, 5))),
    "norm": (lambda x, y: F.layer_norm(x, (5,), y), ((3, 5), (5,))),
    "product": (lambda x, y: torch.relu(x @ y.mT) + 1, ((3, 5), (4, 5))),
    "batched product": (lambda x, y: torch.einsum("bik,bkj->bij", x, y), ((2, 3, 5), (2, 5, 4))),
    "views": (lambda x, y: (x.flip(1)[1:, ::2].t().reshape(-1), y.reshape(5, 3).unsqueeze(1)), ((3, 5), (3, 5))),
    "cat": (lambda x, y: torch.cat((x, y * 2, x.new_zeros(1, 5))), ((3, 5), (2, 5))),
    "scans": (lambda x, y: x.cumsum(0) + y.cumsum(1), ((3, 5), (3, 5))),
    "sorts": (lambda x, y: (x.sort(-1, descending=True)[0], y.topk(2, 0)[1]), ((3, 5), (3, 5))),
    "gathers": (lambda x, y: x[y[:, 0].abs().long() % 3] + x.gather(1, y.abs().long() % 5), ((3, 5), (3, 5))),
    "scatters": (lambda x, y: x.index_add(0, y[:, 0].abs().long() % 3, y), ((3, 5), (3, 5))),
    "slices": (lambda x, y: x.slice_scatter(y[:1] * 2, 0, 1, 2), ((3, 5), (3, 5))),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x, y, y * 2, is_causal=True), ((2, 3, 5), (2, 4, 5))),
}


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


QUICK = {("reductions", (0, 0)), ("product", (None, 0)), ("gathers", (1, None)), ("scatters", (0, 0))}


@pytest.mark.quick(where=lambda name, in_dims: (name, in_dims) in QUICK)
@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 0)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_one_call_over_the_batch(name: str, in_dims: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes = OPERATIONS[name]
    torch.manual_seed(len(name))
    calls: list[str] = []
    run = operator._launches
    monkeypatch.setattr(operator, "_launches", lambda text: (calls.append(text), run(text))[1])
    args = [
        sample(*shape) if dim is None else sample(7, *shape).movedim(0, dim).contiguous()
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    found = torch.vmap(jitgen.jit(function), in_dims)(*args)
    assert len(calls) == 1
    torch.testing.assert_close(found, torch.vmap(function, in_dims)(*args))


def test_a_graph_is_batched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    fetched: list[tuple[Any, ...]] = []
    run, fetch = batched.batched, pipeline.fetch
    monkeypatch.setattr(batched, "batched", lambda *args: (made.append(args), run(*args))[1])
    monkeypatch.setattr(pipeline, "fetch", lambda *args: (fetched.append(args), fetch(*args))[1])
    compiled = jitgen.jit(lambda x, y: torch.tanh(x * 3 + y))
    for _ in range(2):
        for x, y, in_dims in (
            (sample(4, 3, 5), sample(4, 3, 5), (0, 0)),
            (sample(6, 3, 5), sample(3, 5), (0, None)),
            (sample(1, 3, 5), sample(1, 3, 5), (0, 0)),
        ):
            torch.testing.assert_close(torch.vmap(compiled, in_dims)(x, y), torch.tanh(x * 3 + y))
    assert len(made) == len(fetched) == 3


@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_none_and_one(batch: int) -> None:
    for name in ("reductions", "product", "views"):
        function, shapes = OPERATIONS[name]
        args = [sample(batch, *shape) for shape in shapes]
        torch.testing.assert_close(torch.vmap(jitgen.jit(function))(*args), torch.vmap(function)(*args))


def test_nested_and_with_out_dims() -> None:
    def function(x: Any, y: Any) -> Any:
        return torch.softmax(x @ y, -1)

    compiled, x, y = jitgen.jit(function), sample(2, 3, 4, 5), sample(3, 5, 6)

    def both(called: Callable[..., Any]) -> Any:
        return torch.vmap(torch.vmap(called, out_dims=1), (0, None), out_dims=2)(x, y)

    torch.testing.assert_close(both(compiled), both(function))


def test_random_numbers_are_drawn_as_vmap_says() -> None:
    compiled, x = jitgen.jit(lambda x: F.dropout(x + 1, 0.5)), torch.zeros(4, 300)
    with pytest.raises(RuntimeError, match="randomness="):
        torch.vmap(compiled)(x)
    same = torch.vmap(compiled, randomness="same")(x)
    different = torch.vmap(compiled, randomness="different")(x)
    assert (same == same[0]).all()
    assert not (different == different[0]).all()
    assert set(same.unique().tolist()) == set(different.unique().tolist()) == {0.0, 2.0}


def test_batched_gradients_are_refused_with_a_remedy() -> None:
    x = sample(3).requires_grad_()
    y = jitgen.jit(lambda x: torch.tanh(x))(x)
    with pytest.raises(jitgen.UnsupportedError, match=r"batch of gradients.*vectorize=False"):
        torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)


@pytest.mark.parametrize("level", ["int8", "int4"])
def test_a_layer_that_is_first_called_within_vmap_after_another_was_called_outside(level: str) -> None:
    """The types of its arguments are known from the other layer, its token is not."""
    other, layer, x = torch.nn.Linear(64, 32), torch.nn.Linear(128, 48), torch.randn(3, 5, 128)
    jitgen.quantize_(other, "int8")
    jitgen.quantize_(layer, level)
    other(torch.randn(3, 64))
    torch.testing.assert_close(torch.vmap(layer, in_dims=1)(x), layer(x).movedim(1, 0))
