"""Shapes, strides and movements: every way memory can lie and every way a function can move it, against eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jitgen_cases import compiled, lowered
from shapes import (
    BROADCASTS,
    IN_PLACE,
    LENGTHS,
    MOVEMENTS,
    VIEW_ONLY,
    data,
    gated,
    interleaved,
    leaves,
    rope,
    strided_cases,
    twin,
)
from torch.utils import _pytree as pytree

import jitgen
from jitgen.errors import JitgenError, TraceError, UnsupportedError
from jitgen.families import registry
from jitgen.ir.views import Memory, Strided
from jitgen.kernel.operands import Call


def check(function: Callable[..., Any], *arguments: Any) -> Any:
    """A call gives what eager torch gives: structure, shapes, dtypes, values; and arguments end up alike."""
    theirs = [twin(argument) for argument in arguments]
    want = (function.reference if isinstance(function, jitgen.api.JitFunction) else function)(*theirs)
    got = (function if isinstance(function, jitgen.api.JitFunction) else jitgen.jit(function))(*arguments)
    assert type(got) is type(want)
    for left, right in zip(leaves(got), leaves(want), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-6, atol=1e-6, equal_nan=True)
    for left, right in zip(leaves(arguments), leaves(theirs), strict=True):
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right), "an argument was left in another state"
    return got


# ------------------------------------------------------------------------------------------------------ lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.quick(where=lambda dtype: dtype == torch.float32)
def test_ragged_lengths(dtype: torch.dtype) -> None:
    function = jitgen.jit(lambda x, y: (x * 2 + y, x[..., :1] + y))
    x = data(13000, dtype=dtype)
    for length in LENGTHS:
        check(function, x[:length], x[1 : length + 1])
        check(function, x[: 3 * length].view(3, length), x[:length])


def test_nothing_behind_the_end_is_written() -> None:
    for length in LENGTHS:
        poisoned = torch.full((length + 64,), 777.0)
        x = data(length)
        jitgen.jit(lambda x: x + 1)(x, out=poisoned[32 : 32 + length])
        assert torch.equal(poisoned[32 : 32 + length], x + 1)
        assert (poisoned[:32] == 777).all()
        assert (poisoned[32 + length :] == 777).all()


@pytest.mark.parametrize("rank", range(9))
@pytest.mark.quick(where=lambda rank: rank in (0, 1, 2, 4, 8))
def test_ranks(rank: int) -> None:
    shape = (2, 3, 2, 1, 2, 3, 1, 2)[:rank]
    x = data(*shape)
    y = data(*shape, seed=1).permute(tuple(reversed(range(rank))))
    check(lambda x, y: (x * 2, x + 1, y - x.permute(tuple(reversed(range(x.ndim))))), x, y)


def test_empty() -> None:
    function = jitgen.jit(lambda x: (x + 1, x.sin() * 2, x.t(), torch.cat([x, x], 1)))
    for shape in ((0, 3), (3, 0), (0, 0)):
        check(function, torch.empty(shape))
    check(lambda x, y: x + y, torch.empty(0, 1), torch.ones(1, 5))
    check(lambda x: torch.cat([x, torch.ones(2, 3)]), torch.empty(0, 3))
    check(lambda x: x.add_(1), torch.empty(0))


@pytest.mark.parametrize("dims", [(), 0, -1, (0,)])
def test_a_tensor_without_dimensions_is_flipped(dims: Any) -> None:
    x = torch.randn(())
    assert torch.equal(jitgen.jit(lambda x: x.flip(dims) + 1)(x), x + 1)


def test_an_empty_dimension_by_which_a_guard_divides() -> None:
    function = jitgen.jit(lambda x: x.roll(2, -1) + 1)
    for shape in ((4, 9), (3, 0), (4, 8), (0, 5), (0, 0), (2, 1)):
        x = torch.randn(shape)
        assert torch.equal(function(x), x.roll(2, -1) + 1)


def test_zero_dimensional() -> None:
    x, y = torch.tensor(3.0), data(4)
    check(lambda x, y: (x * 2, x + y, x[None] * y, x.reshape(1), x.unsqueeze(0), torch.stack([x, x])), x, y)
    check(lambda x: (x.sin(), x.expand(3)), x)
    check(lambda x, i: x * i, torch.tensor(2.5, dtype=torch.bfloat16), torch.tensor([1, 2], dtype=torch.float32))


# ----------------------------------------------------------------------------------------------- broadcast, strides


@pytest.mark.parametrize(("left", "right"), BROADCASTS)
@pytest.mark.quick(where=lambda left: len(left) in (0, 3, 4))
def test_broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    function = jitgen.jit(lambda x, y: (x + y, torch.where(x > y, x, y), x.lerp(y, 0.25)))
    check(function, data(*left), data(*right, seed=1))
    check(function, data(*right), data(*left, seed=1))


STRIDES = list(strided_cases())


def of_two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * 2 + y, x.t() - y.t(), (x + y).reshape(-1)


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.quick(where=lambda name: name in STRIDES[::3])
def test_every_kind_of_strides(name: str) -> None:
    cases = strided_cases()
    check(jitgen.jit(of_two), cases[name], cases["contiguous"])


@pytest.mark.parametrize(("name", "following"), list(zip(STRIDES, [*STRIDES[1:], STRIDES[0]], strict=True)))
@pytest.mark.quick(where=lambda name: name == "every other column")
def test_kinds_of_strides_together(name: str, following: str) -> None:
    function, cases = jitgen.jit(of_two), strided_cases()
    check(function, cases[name], cases[following])
    check(function, cases[following], cases[name])


def test_channels_last_keeps_its_order() -> None:
    x = data(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    y = check(lambda x: x * 2, x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    z = check(lambda x, b: x + b.view(1, -1, 1, 1), x, data(3))
    assert z.is_contiguous(memory_format=torch.channels_last)
    check(lambda x, y: x + y, x, data(2, 3, 4, 5))


def test_contiguous_is_row_major() -> None:
    for x in (
        data(6, 6).t(),
        data(4, 6).t(),
        data(4, 6),
        data(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ):
        assert check(lambda x: x.contiguous(), x).is_contiguous()
        assert check(lambda x: (x * 2).contiguous(), x).is_contiguous()
    assert check(lambda x: x.transpose(1, 2).contiguous().view(2, -1), data(2, 3, 3, 4)).shape == (2, 36)


def test_channels_last_is_asked_for() -> None:
    x = data(2, 3, 4, 5)
    there = x.contiguous(memory_format=torch.channels_last)
    for convert in (
        lambda x: (x * 2).contiguous(memory_format=torch.channels_last),
        lambda x: x.to(torch.bfloat16, memory_format=torch.channels_last),
        lambda x: x.clone(memory_format=torch.channels_last),
    ):
        assert [check(convert, y).stride() for y in (x, there)] == [there.stride()] * 2
    same = jitgen.jit(lambda x: x.float(memory_format=torch.channels_last))
    assert (same(x).data_ptr() == x.data_ptr(), same(there).data_ptr() == there.data_ptr()) == (False, True)
    with pytest.raises(TraceError, match="4 dimensions"):
        jitgen.jit(lambda x: x.contiguous(memory_format=torch.channels_last))(x[0])


# ------------------------------------------------------------------------------------------------------- movement


STRIDED = pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
MOVED = ("cat", "flip", "made", "pad", "repeat", "repeat_interleave", "roll", "stack", "through cat")
"""Movements that no view expresses: of inputs they are kernels too."""
INTERMEDIATE = ("slice", "chunk", "reshape of transposed", "permute", "expand", "flip", "pad", "stack")
"""One of each kind, which alone are made of intermediate values in `make test`: there every one is a kernel."""


@STRIDED
@pytest.mark.parametrize("name", MOVEMENTS)
@pytest.mark.quick(where=lambda name, strided: name not in MOVED or (not strided and name in ("cat", "made")))
def test_movement_of_inputs(name: str, strided: bool) -> None:
    """Applied to an argument itself, also where that is not contiguous."""
    function = jitgen.jit(MOVEMENTS[name])
    if not strided:
        check(function, data(4, 8))
    elif name not in VIEW_ONLY:
        check(function, data(8, 4).t())
        check(function, data(8, 16)[::2, ::2])


@STRIDED
@pytest.mark.parametrize("name", MOVEMENTS)
@pytest.mark.quick(where=lambda name, strided: not strided and name in INTERMEDIATE[::2])
def test_movement_of_intermediates(name: str, strided: bool) -> None:
    """Of a computed value, and computed with afterwards."""
    move = MOVEMENTS[name]

    def function(x: torch.Tensor) -> Any:
        moved = move(x * 2 + 1)
        return [part * 3 for part in moved] if isinstance(moved, tuple) else moved * 3

    if not strided or name not in VIEW_ONLY:
        check(function, data(4, 16)[:, ::2] if strided else data(4, 8))


def test_three_dimensional_transposes() -> None:
    check(lambda x: (x.mT, x.transpose(-1, 0), x.adjoint(), x.mT.contiguous() * 2), data(2, 3, 4))
    with pytest.raises(JitgenError, match="t"):
        jitgen.jit(lambda x: x.t())(data(2, 3, 4))


# ----------------------------------------------------------------------------------------- the shapes models have


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.quick(where=lambda dtype: dtype == torch.float32)
def test_rotary_embeddings(dtype: torch.dtype) -> None:
    q, k = data(2, 4, 7, 16, dtype=dtype), data(2, 7, 2, 16, dtype=dtype).transpose(1, 2)
    cos, sin = data(2, 7, 16, dtype=dtype), data(2, 7, 16, dtype=dtype, seed=3)
    check(rope, q, k, cos, sin)
    assert len(lowered(rope, q, k, cos, sin).program.kernels) == 1
    check(interleaved, q, cos[0, :, :8], sin[0, :, :8])
    assert len(lowered(interleaved, q, cos[0, :, :8], sin[0, :, :8]).program.kernels) == 1


def test_gated_mlp() -> None:
    check(gated, data(3, 34))
    assert len(lowered(gated, data(3, 34)).program.kernels) == 1


def test_attention_reshapes() -> None:
    def heads(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = qkv.view(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return q * 0.125, k.transpose(-1, -2), v.transpose(1, 2).reshape(2, 5, 32) + 1

    check(heads, data(2, 5, 96))


def test_copies_that_reshapes_need() -> None:
    """A reshape that strides cannot express reads a temporary; one that can, does not."""
    x = data(6, 8)
    assert lowered(lambda x, y: x.t().reshape(-1) + y.t().reshape(-1), x, data(4, 12)).program.temporaries != ()
    assert lowered(lambda x: x.reshape(-1) + 1, x).program.temporaries == ()
    function = jitgen.jit(lambda x: (x * 2).reshape(2, -1) + 1)
    check(function, x)
    check(function, x.t())  # the same trace, other strides: now a copy is needed
    check(function, x[:, ::2].t())
    check(function, x)
    viewed = jitgen.jit(lambda x: x.reshape(-1))
    check(viewed, x)
    check(viewed, x.t())


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: torch.cat([x, y], 2).expand(2, 3, 4), ((2, 3, 1), (2, 3, 0))),
        (lambda x, y: torch.cat([x[:1], y[1:]]) * torch.ones(3, 4), ((1, 4), (1, 4))),
        (lambda x, y: x + torch.cat([y[:0], y[1:]]), ((5, 4), (2, 4))),
        (lambda x, y: (x + torch.cat([y[:0], y[1:]]))[2:].T, ((5, 4), (2, 4))),
        (lambda x, y: torch.softmax(x + torch.cat([y[:, :0], y[:, 1:]], 1), -1), ((5, 4), (5, 2))),
        (lambda x, y: (F.pad(y, (1, 0)).sum(0, keepdim=True) + x).flip(1), ((5, 4), (3, 0))),
    ],
)
def test_a_concatenation_of_one_element_is_broadcast(function: Callable[..., Any], shapes: Any) -> None:
    """Its size is an expression, whose value is 1."""
    check(function, *(data(*shape) for shape in shapes))


def test_the_gradient_of_an_empty_slice_is_zeros() -> None:
    x = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)
    result = jitgen.jit(lambda x: x.sum((0, -1), keepdim=True)[..., 1:])(x)
    (gradient,) = torch.autograd.grad(result, x, torch.zeros_like(result))
    assert torch.equal(gradient, torch.zeros_like(x))


def test_chains_longer_than_pythons_stack() -> None:
    """Only lowered: a compiler would take long over it."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1100):
            x = x.sin()
        return x

    x = data(4, 6)
    lowered(lambda x: chain(x).t(), x)
    lowered(lambda x: torch.cat([chain(x), x], 1) * 2, x)
    lowered(lambda x: chain(torch.cat([x, x], 1))[:, 1:], x)
    lowered(lambda x: chain(torch.cat([x, x], 1).t().reshape(-1)), x)


@pytest.mark.parametrize("count", [12, 25, 150])
@pytest.mark.quick(where=lambda count: count == 12)
def test_many_results(count: int) -> None:
    check(lambda x: [x * i for i in range(count)], data(5))
    check(lambda *xs: sum(xs), *(data(7, seed=i) for i in range(count // 3)))
    check(lambda x: [x[i : i + 2] * i for i in range(count // 4)], data(50))


# ---------------------------------------------------------------------------------------------- results and memory


def test_results_of_many_shapes() -> None:
    check(lambda x, y: (x + 1, y * 2, x[:, 0], (x[0] * y, [y[:1], {"a": x}["a"] - 1])), data(3, 4), data(4))


def test_results_that_are_arguments_or_views_share_their_memory() -> None:
    x = data(4, 6)
    same, part, turned, shaped = jitgen.jit(lambda x: (x, x[1:], x.t(), x.view(-1)))(x)
    assert same is x
    for view, want in ((part, x[1:]), (turned, x.t()), (shaped, x.view(-1))):
        assert torch.equal(view, want)
        assert view.data_ptr() == want.data_ptr()
    part.fill_(9)
    assert (x[1:] == 9).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clone(),
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x.repeat(1, 1),
        lambda x: torch.cat([x]),
        lambda x: x + 0,
        lambda x: x.clone().t(),
        lambda x: torch.tensor(1.0) * x,
        lambda x: F.pad(x, (0, 0)),
    ],
)
def test_results_that_are_copies_do_not(function: Callable[..., Any]) -> None:
    x = data(4, 6)
    before = x.clone()
    check(function, x).fill_(9)
    assert torch.equal(x, before)


def test_equal_results_are_separate_tensors() -> None:
    first, second, third = jitgen.jit(lambda x: (x + 1, x + 1, x + 1))(data(3))
    assert len({first.data_ptr(), second.data_ptr(), third.data_ptr()}) == 3
    twice = jitgen.jit(lambda x: (lambda y: (y, y))(x * 2))(data(3))
    assert twice[0] is twice[1]


# -------------------------------------------------------------------------------------------------------- in place


@STRIDED
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.quick(where=lambda name, strided: list(IN_PLACE).index(name) % 2 == 0 if not strided else name == "swap")
def test_updates_of_arguments(name: str, strided: bool) -> None:
    function = jitgen.jit(IN_PLACE[name])
    if strided:
        check(function, data(6, 4).t(), data(4, 6, seed=1))
        check(function, data(8, 12)[::2, ::2], data(4, 12, seed=1)[:, 1::2])
    else:
        check(function, data(4, 6), data(4, 6, seed=1))
        check(function, data(5, 3), data(5, 3, seed=1))


def _selected_then_whole(x: Any, i: Any) -> Any:
    row = x[i]
    x.mul_(2)
    return row + 0, x + row.sum()


def _part_of_a_selected(x: Any, i: Any) -> Any:
    column = x[:, i]
    column[1:].add_(1)
    return x * 1


def _selected_part(x: Any, i: Any) -> Any:
    part = x[i, 1:]
    part.neg_()
    x.add_(1)
    return part * x[0, 1:]


def _selected_twice(x: Any, i: Any) -> Any:
    x[i][i].add_(5)
    return x + 0


def _copy_by_a_list(x: Any, i: Any) -> Any:
    chosen = x[i, [0, 1]]
    chosen.add_(5)
    return x + chosen.sum()


def _copy_by_an_embedding(x: Any, i: Any) -> Any:
    chosen = F.embedding(i % 3, x)
    chosen.add_(5)
    return x + chosen


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i].add_(x[i]),
        _selected_then_whole,
        _part_of_a_selected,
        _selected_part,
        _selected_twice,
        _copy_by_a_list,
        _copy_by_an_embedding,
    ],
)
@pytest.mark.parametrize("index", [1, -1])
@pytest.mark.covering(1)
def test_what_an_integer_tensor_without_dimensions_selects_is_a_view(function: Callable[..., Any], index: int) -> None:
    """An update of ``x[i]`` is one of ``x``, and of ``x`` one of it; beside a list and in an embedding it is a copy."""
    check(function, data(3, 3), torch.tensor(index))


def test_gradients_of_a_selected_view_that_is_updated() -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        copy = x * 1
        row = copy[i]
        copy.mul_(x)
        row.add_(x[0])
        return copy * x + row

    def gradient(of: Callable[..., Any]) -> torch.Tensor:
        x = data(3, 3).double().requires_grad_()
        of(x, torch.tensor(1)).sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(jitgen.jit(function)), gradient(function))


def test_update_returns_the_argument_itself() -> None:
    x = data(3)
    assert jitgen.jit(lambda x: x.add_(1))(x) is x


def test_updates_keep_the_dtype() -> None:
    check(lambda x, y: x.add_(y), data(5).to(torch.bfloat16), data(5, seed=1))
    check(lambda x: x.mul_(2), torch.arange(5, dtype=torch.int8))
    with pytest.raises(TraceError, match="int64"):
        jitgen.jit(lambda x: x.add_(1.5))(torch.arange(3))


@pytest.mark.parametrize(
    "function", [lambda x: (x.t(), x.add_(1)), lambda x: x[0].add_(1), lambda x: (x.__setitem__(0, 1), x[:, 1:])]
)
def test_an_update_is_seen_in_every_view(function: Callable[[torch.Tensor], Any]) -> None:
    ours, theirs = data(4, 6), data(4, 6)
    got, want = jitgen.jit(function)(ours), function(theirs)
    assert torch.equal(ours, theirs)
    for mine, eager in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert (mine is None) == (eager is None)
        assert mine is None or torch.equal(mine, eager)


def test_updates_that_cannot_be_expressed() -> None:
    x = data(4, 6)
    with pytest.raises(TraceError, match="shape"):
        jitgen.jit(lambda x: x[0].clone().add_(x))(x)
    with pytest.raises(UnsupportedError, match="share memory"):
        jitgen.jit(lambda x: x.add_(1))(x[:1].expand(4, 6))
    captured = data(3)
    repeated = captured[:1].expand(3)
    with pytest.raises(UnsupportedError, match="share memory"):
        jitgen.jit(lambda x: repeated.add_(x))(data(3))
    with pytest.raises(UnsupportedError, match="shares memory with another"):
        jitgen.jit(lambda x: captured.add_(x))(captured[:])
    assert torch.equal(captured, data(3))


@pytest.mark.parametrize(
    "update",
    [
        lambda kept, x: kept.add_(x),
        lambda kept, x: (kept[1:].mul_(x[1:]), kept, kept * 1, kept),
        lambda kept, x: (kept.view(-1)[1:].mul_(2), kept + x),
        lambda kept, x: (kept[:2] * 1, kept.sub_(x), kept[:2], x.add_(kept)),
        lambda kept, x: (kept, x * 2),
    ],
)
def test_updates_of_a_captured_tensor(update: Callable[..., Any]) -> None:
    """Every call updates it, and returns it where the function does, not a copy."""
    ours, theirs = data(3), data(3)
    function = jitgen.jit(lambda x: update(ours, x))
    for seed in range(1, 4):
        x, y = data(3, seed=seed), data(3, seed=seed)
        found, expected = pytree.tree_leaves(function(x)), pytree.tree_leaves(update(theirs, y))
        for got, want in zip([*found, ours, x], [*expected, theirs, y], strict=True):
            torch.testing.assert_close(got, want)
        assert [got is ours for got in found] == [want is theirs for want in expected]


def test_an_updated_captured_tensor_has_gradients() -> None:
    ours, theirs, x, y = data(3), data(3), data(3, seed=1).requires_grad_(), data(3, seed=1).requires_grad_()
    found, expected = jitgen.jit(lambda x: ours.mul_(x))(x), theirs.mul_(y)
    assert found is ours
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("turn", [lambda x: x, lambda x: x.t(), lambda x: x[::2]])
def test_an_updated_argument_that_overlaps_another(turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What eager torch gives, or an error; never something else."""
    function = jitgen.jit(lambda x, y: (x.add_(1), x * y)[1])
    function(data(6, 6), data(6, 6))
    x = data(6, 6)
    ours, theirs = x.clone(), x.clone()
    want = function.reference(turn(theirs), turn(theirs))
    try:
        got = function(turn(ours), turn(ours))
    except JitgenError:
        assert torch.equal(ours, x)
    else:
        torch.testing.assert_close(got, want)


def test_parts_of_one_buffer_may_be_updated_together() -> None:
    buffer = data(4, 12)
    function = jitgen.jit(lambda q, k: (q.mul_(2), k.add_(q))[1])
    check(function, buffer[:, :6], buffer[:, 6:].clone())
    want = buffer.clone()
    function.reference(want[:, :6], want[:, 6:])
    function(buffer[:, :6], buffer[:, 6:])
    torch.testing.assert_close(buffer, want)


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + x[:, :3],
        lambda x: x.reshape(5, 5),
        lambda x: x.view(-1, 5),
        lambda x: x[4],
        lambda x: x[0, 0, 0],
        lambda x: x.unsqueeze(5),
        lambda x: x.permute(0, 0),
        lambda x: torch.cat([x, x[:, :2]]),
        lambda x: torch.cat([x, x[0]]),
        lambda x: x.expand(3, 8),
        lambda x: x.narrow(0, 2, 5),
        lambda x: x.split([1, 2]),
        lambda x: x.transpose(0, 2),
        lambda x: x.unflatten(1, (3, 3)),
        lambda x: x[::-1],
        lambda x: x.repeat(2),
        lambda x: F.glu(x[:, :3]),
        lambda x: torch.stack([x, x[0]]),
    ],
)
def test_what_torch_refuses_is_refused(function: Callable[..., Any]) -> None:
    x = data(4, 8)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        function(x)
    with pytest.raises(JitgenError, match=r"test_shapes\.py:\d+"):
        jitgen.jit(function)(x)


# ------------------------------------------------------------------------------------------------- beyond 2**31


@pytest.mark.parametrize(("backend", "wide_word"), [("cpp", "int64_t"), ("cuda", "int64_t"), ("triton", "int64")])
def test_indices_are_64_bit_where_a_tensor_is_that_large(backend: str, wide_word: str) -> None:
    target = {"cpp": "x86-64-v3"}.get(backend, "sm_90a")
    function = jitgen.jit(lambda x, y: x + y)
    small = function.lower(*(jitgen.TensorSpec((1024, 64)),) * 2, target=target, backend=backend)
    large = function.lower(*(jitgen.TensorSpec((2**20, 2**12)),) * 2, target=target, backend=backend)
    assert not small._lowered.layouts[0][0].wide
    assert large._lowered.layouts[0][0].wide
    assert wide_word in large.source
    assert small.key != large.key


def test_a_far_reaching_stride_counts_as_large() -> None:
    """Few elements, far apart: the index of the last one needs 64 bits."""
    program = lowered(lambda x: x + 1, data(3, 5)).program
    sizes = {"s0_0": 3, "s0_1": 5}
    out = Memory(Strided((3, 5), (5, 1)))
    for stride, wide in ((5, False), (2**29, False), (2**30, True), (2**40, True), (-(2**40), True)):
        kernel = program.kernels[0]
        call = Call(sizes, [Memory(Strided((3, 5), (stride, 1))), out], False)
        layouts, geometries = registry.family_of(kernel).layout(kernel, call)
        assert layouts[0].wide is wide
        assert geometries[0].elements == 15


# -------------------------------------------------------------------------------------------------- one trace, many


def test_one_kernel_serves_all_sizes() -> None:
    function = jitgen.jit(lambda x, y: torch.cat([x.chunk(2, 1)[1] * 2, y], 1).reshape(-1) + 1)
    check(function, data(3, 8), data(3, 5))
    with compiled() as events:
        for rows, left, right in ((4, 8, 5), (2, 6, 7), (9, 12, 31), (40, 4, 3)):
            check(function, data(rows, left), data(rows, right))
    assert events == []
    assert len(function.specializations) == 1
