"""Views of which the strides of an argument decide, and tensors whose sizes change in place, against eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jitgen
from jitgen.errors import UnsupportedError


def row_major() -> Tensor:
    return torch.arange(24.0).reshape(4, 6)


def transposed() -> Tensor:
    return torch.arange(24.0).reshape(6, 4).t()


def behind_others() -> Tensor:
    return torch.arange(48.0).reshape(8, 6)[4:]


def check(function: Callable[[Tensor], Any], make: Callable[[], Tensor]) -> None:
    x, expected_x = make(), make()
    found, expected = jitgen.jit(function)(x), function(expected_x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(x, expected_x, rtol=0, atol=0)


def cleared(x: Tensor) -> Tensor:
    y = torch.zeros(4, 6)
    y.add_(x)
    y.t_()
    y.add_(1)
    return y


def row_before(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    row = y[0]
    y.t_()
    row.add_(1)
    y[1].mul_(2)
    return y, row


def of_a_view(x: Tensor) -> Tensor:
    y = x[1:]
    y.transpose_(0, 1)
    x.mul_(2)
    y[0].add_(1)
    return y


def squeezed(x: Tensor) -> Tensor:
    y = (x * 2).unsqueeze_(1)
    y.squeeze_(1).swapaxes_(0, 1)[0] = 3
    return y


def test_an_empty_slice_at_the_end_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def function(x: torch.Tensor) -> Any:
        return x[..., x[..., 1:].long() % 2], x.transpose(0, -1) * 1

    x = torch.randn(10).as_strided((2, 5, 1), (5, 1, 10))
    got, want = jitgen.jit(function, backend="triton")(x), function(x)
    assert got[0].shape == want[0].shape
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("function", [cleared, row_before, of_a_view, squeezed], ids=lambda f: f.__name__)
def test_sizes_change_in_place(function: Callable[[Tensor], Any]) -> None:
    check(function, row_major)


def test_a_new_tensor_that_was_transposed_is_row_major_no_more() -> None:
    def function(x: Tensor) -> Tensor:
        y = cleared(x)
        y.flatten().add_(1)  # a copy in torch
        return y

    with pytest.raises(UnsupportedError, match="what may be a view of it or a copy"):
        jitgen.jit(function)(row_major())


@pytest.mark.parametrize("name", ["t_", "unsqueeze_", "squeeze_", "transpose_"])
def test_arguments_keep_their_sizes(name: str) -> None:
    arguments = {"unsqueeze_": (0,), "transpose_": (0, 1)}.get(name, ())
    with pytest.raises(UnsupportedError, match=f"{name} changes the sizes or strides of an argument itself"):
        jitgen.jit(lambda x: getattr(x, name)(*arguments) + 1)(row_major())


def flattened(x: Tensor) -> Tensor:
    x.flatten()[::3].neg_()
    return x + 1


def reshaped_before(x: Tensor) -> Tensor:
    rows = x[1:].reshape(-1)
    x.add_(1)
    rows[2:5] = 0
    return rows


@pytest.mark.parametrize("function", [flattened, reshaped_before], ids=lambda f: f.__name__)
def test_reshapes_of_row_major_arguments_are_views(function: Callable[[Tensor], Any]) -> None:
    check(function, row_major)
    check(function, behind_others)
    with pytest.raises(UnsupportedError, match="what may be a view of it or a copy"):
        jitgen.jit(function)(transposed())


STRIDED: dict[str, Callable[[Tensor], Any]] = {
    "windows": lambda x: x.as_strided((3, 3), (1, 1)),
    "spread": lambda x: torch.as_strided(x, (2, 3), (6, 2)),
    "a run": lambda x: x.as_strided((2, 4), (4, 1)) + 1,
    "of a row": lambda x: x[1].as_strided((2,), (2,)),
    "by sizes": lambda x: x.as_strided((x.shape[0], 2), (x.shape[1], 1)),
    "one": lambda x: x.as_strided((), ()),
    "none": lambda x: x.as_strided((0, 3), (6, 2)),
    "after an update": lambda x: x.add_(1).as_strided((2, 3), (6, 2)),
    "updated": lambda x: (x.as_strided((2, 4), (4, 1)).add_(1), x + 0)[1],
    "of a new tensor": lambda x: torch.empty(24).copy_(x.reshape(-1)).as_strided((4, 3), (6, 2), 1),
}


@pytest.mark.parametrize("name", STRIDED)
def test_as_strided(name: str) -> None:
    check(STRIDED[name], row_major)
    check(STRIDED[name], behind_others)


def test_an_offset_is_that_of_the_storage() -> None:
    function = jitgen.jit(lambda x: x.as_strided((2, 3), (6, 2), 1))
    assert torch.equal(function(row_major()), row_major().as_strided((2, 3), (6, 2), 1))
    with pytest.raises(UnsupportedError, match="not among its own"):
        function(behind_others())


@pytest.mark.parametrize(
    ("function", "make", "words"),
    [
        (STRIDED["windows"], transposed, "not contiguous"),
        (lambda x: x.as_strided((30,), (1,)), row_major, "not among its own"),
        (lambda x: (x * 2).as_strided((3,), (1,)), row_major, "what the function computes"),
        (lambda x: x.as_strided((2, 3), (1, 1)).add_(1), row_major, "as_strided are"),
        (lambda x: x[1].as_strided((2,), (1,), 6), row_major, "leave it out"),
    ],
    ids=["transposed", "beyond", "computed", "updated", "offset of a view"],
)
def test_what_as_strided_has_not(function: Callable[[Tensor], Any], make: Callable[[], Tensor], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        jitgen.jit(function)(make())


def updated_through_contiguous(x: Tensor) -> Any:
    y = x.contiguous()
    z = y[1:]
    z.add_(1)
    x.mul_(2)
    return y + 0, z + 0, x + 0


def one_row() -> Tensor:
    return torch.randn(4, 1).as_strided((1, 4), (7, 1))


@pytest.mark.parametrize("first", [row_major, transposed, one_row], ids=lambda f: f.__name__)
def test_what_contiguous_makes_of_an_argument_is_it_or_a_copy_by_its_strides(first: Callable[[], Tensor]) -> None:
    function = jitgen.jit(updated_through_contiguous)
    for made in (first, row_major, transposed, one_row):
        ours = made()
        theirs = torch.empty_strided(ours.shape, ours.stride()).copy_(ours)
        for got, want in zip(function(ours), updated_through_contiguous(theirs), strict=True):
            assert torch.equal(got, want)
        assert torch.equal(ours, theirs)


def test_a_view_of_what_contiguous_copies_has_its_gradient() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.t().contiguous()
        y.add_(1)
        return y[1:].square()

    ours, theirs = (torch.arange(12.0).reshape(4, 3).requires_grad_() for _ in range(2))
    jitgen.jit(function)(ours).sum().backward()
    function(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def _cloned(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, 5)


@pytest.mark.parametrize("make", [_contiguous, _cloned, _zeros])
def test_an_updated_tensor_keeps_its_strides(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A tensor that is contiguous stays so under updates, whatever the strides of what is written."""

    def updated(x: torch.Tensor) -> torch.Tensor:
        y = make(x)
        y.add_(x * 2)
        return y

    for x in (torch.randn(5, 4).t(), torch.randn(4, 10)[:, ::2]):
        result, expected = jitgen.jit(updated)(x), updated(x.clone())
        assert result.stride() == (5, 1)
        torch.testing.assert_close(result, expected)
