"""Each message of a refusal says what to do: a table of refusals and remedies, and a look at every message there is."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import TraceError, UnsupportedError
from jitgen.trace.remedies import REMEDIES

X = torch.arange(12.0).reshape(4, 3)
_TREE = Path(jitgen.__file__).parent
_INNER = {"not in a product", "a call of another kind than the graph is for"}
"""Messages that no user meets."""


def _messages() -> Iterator[tuple[str, str]]:
    """(file:line, constant text) of every refusal that user code can meet in a trace or a call."""
    for path in sorted([*_TREE.glob("trace/**/*.py"), *_TREE.glob("call/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("UnsupportedError", "TraceError")
            ):
                parts = (each for each in ast.walk(node) if isinstance(each, ast.Constant))
                text = "".join(part.value for part in parts if isinstance(part.value, str))
                if any(character.isalpha() for character in text):
                    yield f"{path.relative_to(_TREE)}:{node.lineno}", text


_FROM_ELSEWHERE = ("out= of : ", "argument  of the plan of : ", "the return", ": : Tensor.: ", ": Tensor.: ")
"""Texts before a message that another function has made, with its remedy."""


def test_every_message_has_a_remedy() -> None:
    """A remedy follows a semicolon, a colon or a new line."""
    lacking = [
        f"{where}: {text}"
        for where, text in _messages()
        if text not in _FROM_ELSEWHERE
        and not any(inner in text for inner in _INNER)
        and not any(mark in text for mark in ("; ", "\n", "can be compiled here but not run", "strict mode allows no"))
    ]
    assert not lacking, "\n".join(lacking)


Case = tuple[Callable[..., Any], Callable[..., Any]]
REMEDIED: dict[str, Case] = {
    "where with one argument": (
        lambda x: torch.where(x > 3)[0] + 1,
        lambda x: torch.where(x > 3, x, 0) + 1,
    ),
    "mask": (lambda x: x[x > 3] * 2, lambda x: torch.where(x > 3, x, 0) * 2),
    "repeat_interleave": (
        lambda x: x.repeat_interleave(torch.ones_like(x[:, 0]).long(), 0),
        lambda x: x.repeat_interleave(2, 0),
    ),
    "tensor_split": (
        lambda x: x.tensor_split(torch.ones_like(x[0, :2]).long())[0],
        lambda x: x.tensor_split([1, 2])[0],
    ),
    "view(dtype)": (lambda x: x.view(torch.int32), lambda x: x.view(torch.int32).clone()),
    "view(dtype) of another size": (
        lambda x: x.view(torch.float64),
        lambda x: x[:, :2].clone().view(torch.float64) * 2,
    ),
    "view(dtype) of an unsigned dtype": (
        lambda x: x.view(torch.uint32).float(),
        lambda x: x.view(torch.int32).float(),
    ),
    "nested list": (lambda x: x[[[0, 1], [2, 1]]], lambda x: x[([0, 1], [2, 1])]),
    "nested list as a tensor": (lambda x: x[[[0, 1], [2, 1]]], lambda x: x[torch.tensor([[0, 1], [2, 1]])]),
    "logspace of integers": (
        lambda x: x + torch.logspace(0, 2, 3, dtype=torch.int64),
        lambda x: x + torch.logspace(0, 2, 3).to(torch.int64),
    ),
    "max_norm": (
        lambda x: F.embedding_bag(torch.zeros_like(x[:2, :2]).long(), x, max_norm=1.0),
        lambda x: F.embedding_bag(torch.zeros_like(x[:2, :2]).long(), x),
    ),
    "shift of floats": (lambda x: x & 1, lambda x: x.long() & 1),
    "len of a 0-d tensor": (lambda x: x * len(x.sum()), lambda x: x * x.sum().numel()),
}


@pytest.mark.parametrize("name", REMEDIED)
def test_refusals_and_their_remedies(name: str) -> None:
    refused, remedy = REMEDIED[name]
    with pytest.raises((UnsupportedError, TraceError)) as error:
        jitgen.jit(refused)(X)
    message = str(error.value)
    assert f"{__file__}:" in message, "the user's line"
    assert "; " in message or message.count("\n  ") > 2, "a remedy"
    torch.testing.assert_close(jitgen.jit(remedy)(X), remedy(X))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonzero", "outside"),
        ("argwhere", REMEDIES["argwhere"]),
        ("unique", REMEDIES["unique"]),
        ("masked_select", "outside"),
        ("item", "outside"),
        ("tolist", "outside"),
        ("numpy", "outside"),
    ],
)
def test_sizes_and_values_that_depend_on_data(name: str, words: str) -> None:
    def function(x: torch.Tensor) -> Any:
        arguments = (x > 1,) if name == "masked_select" else ()
        return getattr(x.sum() if name == "item" else x, name)(*arguments)

    with pytest.raises((UnsupportedError, TraceError)) as error:
        jitgen.jit(function)(X)
    assert f"{__file__}:" in str(error.value)
    assert words in str(error.value)


INDICES: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: x[[0, 2]],
    "list of columns": lambda x: x[:, [1, 0]],
    "negative numbers": lambda x: x[[-1, 0], 1:],
    "two lists": lambda x: x[[0, 1], [2, 0]],
    "tuple of lists": lambda x: x[([0, 1], [2, 0])],
    "list in a tuple": lambda x: x[:, [[0, 1], [2, 1]]],
    "bools": lambda x: x[[True, False, True, False]],
    "bools of columns": lambda x: x[1:, [True, False, True]],
    "empty": lambda x: x[[]],
    "range": lambda x: x[range(2)],
    "True": lambda x: x[True],
    "False": lambda x: x[False],
    "None and a list": lambda x: x[None, [0, 1]],
    "ellipsis and a list": lambda x: x[..., [0]],
}


@pytest.mark.parametrize("name", INDICES)
def test_lists_as_indices(name: str) -> None:
    function = INDICES[name]
    torch.testing.assert_close(jitgen.jit(function)(X), function(X))


def test_lists_as_indices_of_assignments_and_gradients() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[[0, 2]] = 0
        y[:, [True, False, True]] += 1
        y[[1, 3], [1, 2]] = x[:2, 0]
        return y[[3, 0, 0]] * 2

    ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    got, want = jitgen.jit(function)(ours), function(theirs)
    torch.testing.assert_close(got, want)
    got.pow(2).sum().backward(), want.pow(2).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_list_of_bools_of_another_length_is_an_index_error() -> None:
    with pytest.raises(TraceError, match="a list of 2 bools indexes a dimension of size 4"):
        jitgen.jit(lambda x: x[[True, False]])(X)


def test_cond() -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: (x * 2, x.sum()), lambda x: (x - 1, x.max()), (x,))

    for x in (X, -X):
        torch.testing.assert_close(
            jitgen.jit(function)(x), tuple((x * 2, x.sum()) if x.sum() > 0 else (x - 1, x.max()))
        )


def test_remedies_for_quantised_weights() -> None:
    weight = jitgen.quantize(torch.ones(4, 64), "int4", group_size=32)
    with pytest.raises(UnsupportedError, match=r"use w\.dequantize\(\)"):
        torch.exp(weight)
    with pytest.raises(UnsupportedError, match=r"quantise the new ones, w\.copy_\(jitgen\.quantize"):
        weight.mul_(2)
