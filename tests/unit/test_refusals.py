"""What jitgen cannot compute is refused with an error of its own that names the user's line, never with another one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import JitgenError, TraceError, UnsupportedError
from jitgen.families.claims import Claims

X = torch.randn(3, 4)


class Config(dict):
    __getattr__ = dict.__getitem__


class Loud:
    """An object that refuses unknown attributes with an exception of its own."""

    scale = 2.0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


CONFIG, LOUD = Config(scale=2.0), Loud()


@pytest.mark.parametrize("function", [lambda x: x * CONFIG.scale, lambda x: x * LOUD.scale])
def test_objects_that_answer_or_refuse_any_attribute(function: Callable[..., Any]) -> None:
    torch.testing.assert_close(jitgen.jit(function)(X), X * 2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.Tensor.add(x, x), r"'add' for .* objects doesn't apply to a 'Tensor'"),
        (lambda x: divmod(x, x), "a function that a trace cannot follow"),
        (lambda x: torch.arange(x), r"does not take the arguments \(float32\[3, 4\]\)"),
        (lambda x: x.sum(x), "Tensor.sum"),
        (lambda x: x @ 2, "operator matmul"),
        (lambda x: x[1.5], "not 1.5"),
        (lambda x: x["rows"], "not 'rows'"),
        (lambda x: x[1.0:], "not 1.0"),
        (lambda x: x.chunk(0), "Tensor.chunk"),
        (lambda x: torch.stack([]), "torch.stack"),
        (lambda x: x.roll("rows"), "Tensor.roll"),
        (lambda x: x.long() + 2**64, "beyond what torch takes"),
        (lambda x: x + 2**64, "beyond what torch takes"),
    ],
)
def test_arguments_that_no_row_takes(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(JitgenError, match=message) as caught:
        jitgen.jit(function)(X)
    text, _, where = str(caught.value).partition("\n  at ")
    assert where.startswith(__file__)
    for internal in ("Node", "Proxy", "Expr", "Symbolic", "index out of range"):
        assert internal not in text


def test_a_number_beyond_int64_at_a_call() -> None:
    add = jitgen.jit(lambda x, number: x + number)
    torch.testing.assert_close(add(X, 2**63), X + 2**63)
    integers = torch.arange(4)
    for _ in range(2):
        torch.testing.assert_close(add(integers, 2), integers + 2)
        with pytest.raises(UnsupportedError, match="9223372036854775808"):
            add(integers, 2**63)


def test_a_0d_tensor_fills_a_tensor() -> None:
    def filled(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return x.fill_(value)

    value = torch.tensor(3.0)
    torch.testing.assert_close(jitgen.jit(filled)(torch.zeros(3, 4), value), torch.full((3, 4), 3.0))
    full = jitgen.jit(lambda x, value: torch.full_like(x, value) + x)
    torch.testing.assert_close(full(X, value), 3.0 + X)


def test_a_copy_in_a_trace() -> None:
    torch.testing.assert_close(jitgen.jit(lambda x: copy.deepcopy(x) * 2)(X), X * 2)

    def updated_through_a_copy(x: torch.Tensor) -> torch.Tensor:
        copy.copy(x).add_(1)
        return x

    x = X.clone()
    assert jitgen.jit(updated_through_a_copy)(x) is x
    assert torch.equal(x, X + 1)


# ------------------------------------------------------------------------------------------- tensors without memory


def _freed() -> torch.Tensor:
    tensor = torch.randn(3, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])


UNREADABLE = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": _nested,
    "zero": lambda: torch._efficientzerotensor((3, 4)),
    "freed": _freed,
    "subclass": lambda: torch.randn(3, 4).as_subclass(type("Own", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_tensors_that_no_kernel_reads(kind: str) -> None:
    tensor = UNREADABLE[kind]()
    twice = jitgen.jit(lambda x: x * 2)
    with pytest.raises(UnsupportedError):
        twice(tensor)
    twice(X)
    if kind != "nested":  # torch's own TensorGuards, which compares layouts, ends the process
        with pytest.raises(UnsupportedError):
            twice(tensor)
    with pytest.raises(UnsupportedError, match="tensor"):
        twice.bind(X)(tensor) if kind in ("zero", "freed") else twice.bind(tensor)
    with pytest.raises(UnsupportedError, match=f"(?s)tensor.*{__file__}"):
        jitgen.jit(lambda x: x + tensor)(X)


def test_a_result_without_memory() -> None:
    twice = jitgen.jit(lambda x: x * 2)
    out = torch.empty(3, 4)
    twice(X, out=out)
    out.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match=r"out= .*without memory"):
        twice(X, out=out)


def test_a_captured_tensor_that_loses_its_memory() -> None:
    weight = torch.randn(3, 4)
    add = jitgen.jit(lambda x: x + weight)
    torch.testing.assert_close(add(X), X + weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match="weight: a tensor without memory"):
        add(X)


def test_transforms_of_torch_func() -> None:
    twice = jitgen.jit(lambda x: x * 2)
    torch.testing.assert_close(torch.vmap(twice)(X), X * 2)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.vmap(twice.bind(X[0]))(X)
    twice(X)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.vmap(lambda row: jitgen.jit(lambda x: x * row)(X[0]))(X)


def test_an_empty_tensor_has_an_address_of_0() -> None:
    twice = jitgen.jit(lambda x: x * 2)
    for _ in range(2):
        assert twice(torch.empty(0, 4)).shape == (0, 4)


def test_out_of_a_function_without_tensor_arguments() -> None:
    weight, out = torch.randn(3), torch.empty(3)
    for function, numbers in [(lambda: torch.ones(3) * 2, ()), (lambda: weight * 2, ()), (lambda n: weight * n, (3,))]:
        jitted = jitgen.jit(function)
        for _ in range(2):
            out.fill_(torch.nan)
            assert jitted(*numbers, out=out) is out
            torch.testing.assert_close(out, function(*numbers))
        torch.testing.assert_close(jitted.bind(*numbers)(*numbers, out=out), function(*numbers))


# ------------------------------------------------------------------------------------------------ a partition's end


def test_a_partition_that_would_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = Claims.regions

    def asks_for_itself(self: Any, results: Any, *others: Any) -> Any:
        return regions(self, [self.materialize(node) for node in results], *others)

    def asks_for_ever_more(self: Any, results: Any, *others: Any) -> Any:
        def negative(node: Any) -> Any:
            return self.mover.builder.make("neg", (node,), node.dtype, node.shape, (), node.location or f"{__file__}:1")

        return regions(self, [self.materialize(negative(node)) for node in results], *others)

    for ask in (asks_for_itself, asks_for_ever_more):
        monkeypatch.setattr(Claims, "regions", ask)
        with pytest.raises(UnsupportedError, match=f"(?s)no order.*{__file__}"):
            jitgen.jit(lambda x: F.relu(x) + 1)(X)


def test_every_error_of_a_row_is_a_trace_error() -> None:
    with pytest.raises(TraceError, match=r"F\.pad"):
        jitgen.jit(lambda x: F.pad(x, (1, 1, 1, 1, 1, 1, 1, 1, 1, 1)))(X)
