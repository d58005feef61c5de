"""The arguments of torch functions inside a decorated function: every spelling that torch accepts, and no other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jitgen_cases import lowered_graph
from torch.utils import _pytree as pytree

import jitgen
from jitgen.errors import TraceError, UnsupportedError
from jitgen.trace import table

X = torch.arange(6.0).reshape(2, 3)

ACCEPTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum keepdims": lambda x: x.sum(1, keepdims=True),
    "sum axis": lambda x: torch.sum(x, axis=0),
    "sum x": lambda x: torch.sum(x=x, axis=(0, 1)),
    "mean axis keepdims": lambda x: torch.mean(x, axis=0, keepdims=True),
    "max axis": lambda x: torch.max(x, axis=1),
    "max method axis": lambda x: x.max(axis=1, keepdims=True),
    "max other": lambda x: torch.max(x, other=x + 1),
    "argmax axis": lambda x: x.argmax(axis=1),
    "amax axis": lambda x: x.amax(axis=1),
    "std axis": lambda x: x.std(axis=1, keepdims=True),
    "var unbiased": lambda x: x.var(axis=0, unbiased=False),
    "all axis": lambda x: torch.all(x, axis=1),
    "count_nonzero axis": lambda x: x.count_nonzero(axis=1),
    "softmax axis": lambda x: torch.softmax(x, axis=1),
    "logsumexp axis": lambda x: x.logsumexp(axis=0),
    "cumsum axis": lambda x: x.cumsum(axis=1),
    "norm dim": lambda x: x.norm(dim=1),
    "vector_norm dim": lambda x: torch.linalg.vector_norm(x, dim=1),
    "cat axis": lambda x: torch.cat([x, x], axis=1),
    "stack axis": lambda x: torch.stack([x, x], axis=1),
    "unbind axis": lambda x: x.unbind(axis=0),
    "chunk chunks axis": lambda x: x.chunk(chunks=2, axis=0),
    "split split_size": lambda x: x.split(split_size=1),
    "view size": lambda x: x.view(size=(3, 2)),
    "reshape shape": lambda x: torch.reshape(x, shape=(3, 2)),
    "reshape method shape": lambda x: x.reshape(shape=(3, 2)),
    "permute dims": lambda x: x.permute(dims=(1, 0)),
    "repeat repeats": lambda x: x.repeat(repeats=(2, 1)),
    "repeat_interleave repeats axis": lambda x: torch.repeat_interleave(x, repeats=2, axis=1),
    "tile dims": lambda x: x.tile(dims=(2,)),
    "flip dims": lambda x: x.flip(dims=(0,)),
    "expand size": lambda x: x[:1].expand(size=(4, 3)),
    "unflatten dim sizes": lambda x: x.unflatten(dim=1, sizes=(3, 1)),
    "unsqueeze axis": lambda x: x.unsqueeze(axis=0),
    "squeeze axis": lambda x: x[:1].squeeze(axis=0),
    "swapaxes axis0 axis1": lambda x: x.swapaxes(axis0=0, axis1=1),
    "movedim source destination": lambda x: torch.movedim(x, source=0, destination=1),
    "narrow by name": lambda x: x.narrow(dim=0, start=0, length=1),
    "roll by name": lambda x: x.roll(shifts=1, dims=0),
    "add by name": lambda x: torch.add(input=x, other=x, alpha=2),
    "dot by name": lambda x: torch.dot(input=x[0], tensor=x[1]),
    "dot by name, the other first": lambda x: torch.dot(tensor=x[0], input=x[1]),
    "outer vec2": lambda x: torch.outer(x[0], vec2=x[1]),
    "randint_like high": lambda x: torch.randint_like(x, low=2, high=5),
    "hsplit sections": lambda x: torch.hsplit(x, sections=1),
    "clone memory_format": lambda x: x.clone(memory_format=torch.preserve_format),
    "to device dtype": lambda x: x.to("cpu", torch.float16),
    "to dtype flags": lambda x: x.to(torch.float64, False, True),
    "to by name": lambda x: x.to(dtype=torch.float64, non_blocking=True, copy=True),
    "zeros size": lambda x: torch.zeros(size=(2, 3)) + x,
    "new_zeros size": lambda x: x.new_zeros(size=(2, 3)) + x,
    "arange end": lambda x: torch.arange(end=3) + x,
    "arange start end": lambda x: torch.arange(1, end=4, step=1) + x,
    "tensor requires_grad": lambda x: torch.tensor(1.0, requires_grad=False) + x,
}

REJECTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "unknown keyword": lambda x: x.sum(1, nonsense=3),
    "unknown keyword of a cast": lambda x: x.float(nonsense=1),
    "unknown keyword of a Python method": lambda x: x.norm(dim=1, nonsense=1),
    "unknown keyword in place": lambda x: x.add_(1, nonsense=1),
    "one argument too many": lambda x: x.mul_(2, 3),
    "a number that is a string": lambda x: x.add(x, alpha="1"),
    "a dtype that is a number": lambda x: x.new_zeros((2, 3), dtype=3),
    "names of another function": lambda x: x.transpose(axis0=0, axis1=1),
    "clamp": lambda x: x.clamp(min=1, nonsense=2),
}

UNSUPPORTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "memory_format": lambda x: torch.zeros_like(x, memory_format=torch.channels_last),
    "requires_grad": lambda x: torch.zeros_like(x, requires_grad=True),
    "layout": lambda x: torch.zeros_like(x, layout=torch.sparse_coo),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_spellings_that_torch_accepts(name: str) -> None:
    want = [leaf for leaf in pytree.tree_leaves(ACCEPTED[name](X)) if isinstance(leaf, torch.Tensor)]
    found = jitgen.jit(ACCEPTED[name]).lower(X)._lowered.graph
    assert [output.dtype for output in found.outputs] == [str(leaf.dtype).removeprefix("torch.") for leaf in want]
    sizes = {f"s0_{dim}": size for dim, size in enumerate(X.shape)}
    shapes = [tuple(jitgen.ir.symbols.evaluate(size, sizes) for size in output.shape) for output in found.outputs]
    assert shapes == [tuple(leaf.shape) for leaf in want]


@pytest.mark.parametrize("name", REJECTED)
def test_what_torch_does_not_parse_is_rejected_in_its_words(name: str) -> None:
    with pytest.raises(TypeError) as eager:
        REJECTED[name](X.clone())
    with pytest.raises(TraceError) as ours:
        lowered_graph(REJECTED[name], X)
    assert str(eager.value).splitlines()[0] in str(ours.value)
    assert __file__ in str(ours.value)


@pytest.mark.parametrize("name", ["sum", "softmax", "mean", "unbind", "argmax", "size"])
def test_no_dimension_is_a_string(name: str) -> None:
    """Torch 2.11 takes it for the name of a dimension."""
    with pytest.raises(TraceError, match=rf"Tensor\.{name}: .*(str|'1')"):
        lowered_graph(lambda x: getattr(x, name)("1"), X)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_parameters_that_no_row_has_are_refused(name: str) -> None:
    UNSUPPORTED[name](X[None, None])
    with pytest.raises(UnsupportedError, match=rf"{name}="):
        lowered_graph(UNSUPPORTED[name], X[None, None])


def test_no_row_takes_any_keyword() -> None:
    for name, row in table.rows().items():
        kinds = [parameter.kind for parameter in inspect.signature(row.function).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds, name


def test_functions_are_parsed_by_torch_itself() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        lowered_graph(lambda x: F.softmax(x, dim=1, nonsense=2), X)
