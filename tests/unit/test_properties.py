"""Random functions of random tensors: expression trees, shapes, strides and movements, against torch in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numeric import widened

import jitgen

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "4"))
settings.register_profile(
    "jitgen",
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("jitgen")

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Tree:
    """A function of the tensors, and how it reads."""

    text: str
    evaluate: Callable[[Tensors], torch.Tensor]

    def __repr__(self) -> str:
        return self.text


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "abs": torch.abs,
    "neg": torch.neg,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "half": lambda x: x * 0.5,
    "plus one": lambda x: 1 + x,
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, 0),
    "turn": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "halves": lambda x: torch.cat([x[..., x.shape[-1] // 2 :], -x[..., : x.shape[-1] // 2]], -1),
    "cut": lambda x: torch.cat([x[:1] * 2, x[1:]], 0),
    "through 64 bits": lambda x: x.double().exp2().to(x.dtype),
    "reshape": lambda x: x.reshape(-1).reshape(x.shape),
    "stack": lambda x: torch.stack([x, x * 3], -1)[..., 1],
    "pad": lambda x: torch.nn.functional.pad(x, (1, 1))[..., 1:-1],
    "masked": lambda x: x.masked_fill(x > 0.75, -1.0),
    "first row": lambda x: x[:1].expand_as(x),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "lerp": lambda x, y: x.lerp(y, 0.25),
    "div": lambda x, y: x / (y.abs() + 1),
    "atan2": lambda x, y: torch.atan2(x, y.abs() + 1),
    "joined": lambda x, y: torch.cat([x, y], -1)[..., : x.shape[-1]] + torch.cat([y, x], -1)[..., : x.shape[-1]],
    "broadcast": lambda x, y: x + y[..., :1],
}


def leaf(index: int) -> Tree:
    return Tree(f"t{index}", lambda tensors: tensors[index])


def unary(name: str, child: Tree) -> Tree:
    return Tree(f"{name}({child})", lambda tensors: UNARY[name](child.evaluate(tensors)))


def binary(name: str, left: Tree, right: Tree) -> Tree:
    return Tree(
        f"{name}({left}, {right})", lambda tensors: BINARY[name](left.evaluate(tensors), right.evaluate(tensors))
    )


def trees(depth: int) -> st.SearchStrategy[Tree]:
    leaves = st.builds(leaf, st.integers(0, 2))
    if depth == 0:
        return leaves
    smaller = trees(depth - 1)
    return st.one_of(
        leaves,
        st.builds(unary, st.sampled_from(sorted(UNARY)), smaller),
        st.builds(binary, st.sampled_from(sorted(BINARY)), smaller, smaller),
    )


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype) -> Tensors:
    """Three tensors of one shape, each lying in memory in its own way."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    found = []
    for _ in range(3):
        order = draw(st.permutations(range(3)))
        steps = draw(st.tuples(*[st.integers(1, 2)] * 3))
        begin = draw(st.integers(0, 2))
        sizes = [shape[dim] * step + begin for dim, step in zip(order, steps, strict=True)]
        base = torch.rand(sizes, generator=generator).mul(2).sub(1).to(dtype)
        index = tuple(slice(begin, None, step) for step in steps)
        found.append(base[index].permute([order.index(dim) for dim in range(3)]))
        if draw(st.integers(0, 5)) == 0:
            found[-1] = found[-1][:, :, :1].expand(shape)
    return found


def spread(tree: Tree, given_tensors: Tensors, dtype: torch.dtype) -> float:
    """The roundings of five functions, most of which grow an earlier error little and none more than fourfold."""
    want = tree.evaluate([widened(tensor) for tensor in given_tensors])
    compute = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    storage = torch.finfo(dtype).eps
    return float(want.abs().max().clamp(min=1)) * (4**3 * 16 * compute + storage)


def agrees(tree: Tree, given_tensors: Tensors) -> None:
    dtype = given_tensors[0].dtype
    function = jitgen.jit(lambda *parts: tree.evaluate(list(parts)))
    got = function(*given_tensors)
    eager = function.reference(*given_tensors)
    assert (got.dtype, got.shape) == (eager.dtype, eager.shape)
    exact = tree.evaluate([widened(tensor) for tensor in given_tensors])
    wrong = (got.double() - exact).abs() > spread(tree, given_tensors, dtype)
    # A comparison of nearly equal values may go either way; so does eager torch's.
    assert int(wrong.sum()) <= int((eager.double() - exact).abs().gt(spread(tree, given_tensors, dtype)).sum())


@given(data=st.data(), tree=trees(5))
def test_random_functions(data: st.DataObject, tree: Tree) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    agrees(tree, data.draw(tensors(dtype)))


@given(data=st.data(), tree=trees(4))
@settings(max_examples=EXAMPLES // 3)
def test_one_trace_fits_other_sizes(data: st.DataObject, tree: Tree) -> None:
    """The same function again on other shapes and strides: guards let a trace be used only where it is right."""
    function = jitgen.jit(lambda *parts: tree.evaluate(list(parts)))
    for _ in range(3):
        parts = data.draw(tensors(torch.float64))
        torch.testing.assert_close(function(*parts), function.reference(*parts), rtol=1e-12, atol=1e-12)


INTEGER: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "and": torch.bitwise_and,
    "xor": torch.bitwise_xor,
    "shift": lambda x, y: x << (y & 7),
    "floor": lambda x, y: x // (y.abs() % 7 + 1),
    "modulo": lambda x, y: x % (y.abs() % 5 + 1),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y),
    "narrow": lambda x, y: x.to(torch.int8).to(x.dtype) + y,
}


@given(
    data=st.data(),
    names=st.lists(st.sampled_from(sorted(INTEGER)), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]),
)
@settings(max_examples=EXAMPLES // 2)
def test_random_integer_chains(data: st.DataObject, names: list[str], dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    numbers = st.lists(st.integers(limits.min, limits.max), min_size=4, max_size=4)
    x, y = (torch.tensor(data.draw(numbers), dtype=dtype) for _ in range(2))

    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for name in names:
            x, y = INTEGER[name](x, y), x
        return x

    function = jitgen.jit(chain)
    assert torch.equal(function(x, y), chain(x, y))
