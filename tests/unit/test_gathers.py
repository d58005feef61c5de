"""Reading and writing at computed indices: on the CPU, in Triton's interpreter, in range and out of it, prewarmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import JitgenError, TraceError, UnsupportedError
from tests import cuda_on_host, gathers, triton_gathers
from tests.interpreter import Interpreter


def lookup(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, table) * 2


def accumulated(x: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return x.index_add(0, at, values)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_gathers") as process:
        yield process


CHECKS = {
    **{size: lambda size=size: gathers.read_failures("cpp", size) for size in gathers.READ_SIZES},
    "nothing": lambda: gathers.empty_failures("cpp"),
    **{f"writes of {n}": lambda n=n: gathers.write_failures("cpp", sizes=[n]) for n in range(len(gathers.WRITE_SIZES))},
    "integers": lambda: gathers.integer_failures("cpp"),
    "assignments": lambda: gathers.assignment_failures("cpp"),
    "updates": lambda: gathers.update_failures("cpp"),
    "a search": lambda: gathers.search_failures("cpp", sizes=gathers.SEARCHED[:1], dtypes=gathers.SEARCHED_DTYPES[:1]),
    "searches": lambda: gathers.search_failures("cpp"),
    "histograms": lambda: gathers.histogram_failures("cpp"),
}
QUICK = ("small", "writes of 0", "assignments", "a search")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.quick(where=lambda check: check in QUICK)
def test_results(check: str) -> None:
    assert [failure for failure in CHECKS[check]() if failure] == []


@pytest.mark.parametrize("check", triton_gathers.CHECKS)
@pytest.mark.quick(where=lambda check: check in ("reads of nothing", "by element"))
def test_triton(check: str, interpreter: Interpreter) -> None:
    assert interpreter[check] == []


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_call_gives_the_same_bits_whatever_threads_do(threads: int) -> None:
    x, at, values = torch.randn(5, 3000), torch.randint(0, 5, (400,)), torch.randn(400, 3000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = jitgen.jit(accumulated)(x, at, values)
        torch.set_num_threads(threads)
        assert all(torch.equal(jitgen.jit(accumulated)(x, at, values), want) for _ in range(3))
    finally:
        torch.set_num_threads(before)


OUTSIDE: dict[str, tuple[Any, ...]] = {
    "embedding": (lambda i, x: F.embedding(i, x), 0, -1),
    "embedding_bag": (lambda i, x: F.embedding_bag(i[None], x), 0, -1),
    "index_select": (lambda i, x: x.index_select(1, i), 1, -1),
    "gather": (lambda i, x: x.gather(1, i[:, None].expand(-1, 2)), 1, -1),
    "take": (lambda i, x: x.take(i), None, None),
    "a vector": (lambda i, x: x[i] + 1, 0, None),
    "index_add": (lambda i, x: x.index_add(0, i, x[: i.shape[0]]), 0, -1),
    "scatter": (lambda i, x: x.scatter(1, i[:, None].expand(-1, 2), 1.0), 1, -1),
    "index_put": (lambda i, x: x.index_put((i,), x[: i.shape[0]]), 0, None),
    "one_hot": (lambda i, x: F.one_hot(i, 6), None, -1),
    "take_along_dim of all": (lambda i, x: torch.take_along_dim(x, i), None, -1),
    "nll_loss": (lambda i, x: F.nll_loss(x[: i.shape[0]], i), 1, -1),
}
"""A function of indices and a tensor (6, 6), and what is out of range at the end and, if anything, before zero."""


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.quick(where=lambda name: name in ("embedding", "gather", "index_add", "scatter"))
def test_out_of_range_is_an_error(name: str) -> None:
    function, _, negative = OUTSIDE[name]
    x, jitted = torch.randn(6, 6), jitgen.jit(function)
    jitted(torch.tensor([0, 5]), x)
    for wrong in (36, 2**40, -37, *([] if negative is None else [negative])):
        with pytest.raises(IndexError, match=r"out of range at .*test_gathers\.py"):
            jitted(torch.tensor([0, wrong]), x)
    with pytest.raises((IndexError, RuntimeError)):
        function(torch.tensor([0, 36]), x)


def test_nothing_is_written_out_of_bounds() -> None:
    memory = torch.zeros(40)
    inside = memory[10:30].view(4, 5)
    with pytest.raises(IndexError):
        jitgen.jit(lambda x, i: x.index_fill_(0, i, 1.0))(inside, torch.tensor([1, 4, 9, -5]))
    assert memory.nonzero().flatten().tolist() == [15, 16, 17, 18, 19]


def test_an_empty_dimension_is_indexed_only_by_nothing() -> None:
    jitted = jitgen.jit(lambda x, i: x[i])
    nothing = torch.randn(0, 3)
    assert jitted(nothing, torch.zeros(0, dtype=torch.int64)).shape == (0, 3)
    with pytest.raises(TraceError, match="no elements"):
        jitted(nothing, torch.zeros(2, dtype=torch.int64))


def test_only_what_is_assigned_is_written_where_the_argument_is_updated() -> None:
    cache, at, new = torch.randn(2, 9, 4), torch.tensor([3, 4]), torch.randn(2, 2, 4)
    (kernel,) = jitgen.jit(_update).lower(cache, at, new).kernels
    assert "scatter" in kernel.template


def _update(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> None:
    cache.index_copy_(1, at, new)


def test_a_gpu_refuses_what_would_take_long() -> None:
    x, at, values = torch.zeros(2**20), torch.zeros(2**18, dtype=torch.int64), torch.zeros(2**18)
    add = jitgen.jit(lambda x, i, v: x.scatter_add(0, i, v))
    for backend in ("cuda", "triton"):
        with pytest.raises(UnsupportedError, match="262144 values"):
            add.lower(x, at, values, target="sm_90a", backend=backend)
        few = add.lower(x[:100], at, values, target="sm_90a", backend=backend)
        assert all("scatter" not in kernel.template for kernel in few.kernels)


def through_a_slice(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:4] += 1
    return x * 2


def from_one_row_to_another(x: torch.Tensor) -> torch.Tensor:
    x[0] = x[1]
    x[2] = x[0] + 1
    return x[2]


def seen_by_views(x: torch.Tensor) -> torch.Tensor:
    row, turned = x[0], x.t()
    x.mul_(2)
    row.add_(5)
    turned[0] = 7
    return x[:2] + row


def of_a_new_tensor(x: torch.Tensor) -> torch.Tensor:
    new = x * 2
    new[1] = new[0]
    new[:, 2:] *= 3
    return new


@pytest.mark.parametrize("function", [through_a_slice, from_one_row_to_another, seen_by_views, of_a_new_tensor])
@pytest.mark.quick(where=lambda function: function in (through_a_slice, of_a_new_tensor))
def test_an_update_of_a_view_is_one_of_its_tensor(function: Any) -> None:
    x, y = torch.randn(4, 6), torch.empty(4, 6)
    y.copy_(x)
    assert torch.equal(jitgen.jit(function)(x), function(y))
    assert torch.equal(x, y)


def test_a_captured_tensor_is_updated_through_a_view() -> None:
    captured = torch.zeros(3, 4)
    jitted = jitgen.jit(lambda x: captured[0].add_(x))
    for count in (1, 2):
        torch.testing.assert_close(jitted(torch.ones(4)), torch.full((4,), float(count)))
        torch.testing.assert_close(captured.sum(1), torch.tensor([4.0 * count, 0, 0]))


REFUSED = {
    "a mask that is read": (lambda x, m: x[m > 0], "depends on data"),
    "a vector through a mask": (lambda x, m: x.__setitem__(m > 0, m.flatten()), "depends on"),
    "two masks": (lambda x, m: x.__setitem__((m[:, 0] > 0, m[0] > 0), 0), "one mask of all"),
    "one_hot of all there are": (lambda x, m: F.one_hot(m.long()), "num_classes"),
    "a nested list": (lambda x, m: x[[[0, 1]]], "tuple of lists"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_data_is_refused(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=words):
        jitgen.jit(function)(torch.randn(4, 5), torch.ones(4, 5))


def _vector(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


WRITES: dict[str, Any] = {
    "index_add": lambda x, i, s: x.index_add(0, i, s),
    "index_copy": lambda x, i, s: x.index_copy(0, i, s),
    "index_reduce": lambda x, i, s: x.index_reduce(0, i, s, "amax"),
    "scatter": lambda x, i, s: x.scatter(0, i, s),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i, s),
    "index_fill": lambda x, i, s: x.index_fill(0, i, s),
}
TARGETS = {"number": torch.tensor(2.5), "vector": _vector(1, 2, 3), "rows": torch.arange(6.0).reshape(2, 3)}
SOURCES = {"number": torch.tensor(7.0), "one": _vector(7), "three": _vector(7, 8, 9)}
INDICES: dict[str, Any] = {"number": 0, "one": [0], "three": [0, 0, 0], "none": []}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.covering(2)
def test_tensors_without_dimensions_are_written_as_torch_does(write: str, target: str, source: str, index: str) -> None:
    """And are refused where torch refuses them."""
    function = WRITES[write]
    arguments = TARGETS[target], torch.tensor(INDICES[index], dtype=torch.long), SOURCES[source]
    try:
        want = function(*arguments)
    except (RuntimeError, IndexError):
        with pytest.raises(JitgenError):
            jitgen.jit(function)(*arguments)
    else:
        got = jitgen.jit(function)(*arguments)
        assert got.shape == want.shape
        assert torch.equal(got, want)


def test_a_fill_at_equal_indices_has_its_gradient_once() -> None:
    for shape, dim in (((4,), 0), ((3, 4), 1)):
        found = []
        for called in (torch.Tensor.index_fill, jitgen.jit(lambda x, d, i, v: x.index_fill(d, i, v))):
            x, value = torch.ones(shape, requires_grad=True), torch.tensor(2.0, requires_grad=True)
            result = called(x, dim, torch.tensor([0, 2, 0, 0]), value)
            weights = torch.arange(1.0, result.numel() + 1).reshape(shape)
            found.append(torch.autograd.grad(result, (x, value), weights))
        assert all(map(torch.equal, *found))


def test_prewarmed_calls_run_in_strict_mode(tmp_path: Path) -> None:
    ids, table = torch.randint(0, 9, (3, 4)), torch.randn(9, 5)
    at, values = torch.tensor([8, 0, 8]), torch.randn(3, 5)
    with jitgen.record(tmp_path / "specs.json"):
        want = jitgen.jit(lookup)(ids, table), jitgen.jit(accumulated)(table, at, values)
    jitgen.prewarm(tmp_path / "specs.json", targets=["cpu"])
    with jitgen.strict():
        again = jitgen.jit(lookup)(ids, table), jitgen.jit(accumulated)(table, at, values)
    assert all(map(torch.equal, again, want))


def test_results_may_be_given_and_may_be_arguments() -> None:
    """With ``out=`` the memory of an input, which a gather reads elsewhere and a scatter keeps."""
    x, order = torch.randn(7, 3), torch.tensor([6, 5, 4, 3, 2, 1, 0])
    for function in (lambda x, i: x[i], lambda x, i: x.index_add(0, i, x)):
        got, want = x.clone(), function(x, order)
        jitgen.jit(function)(got, order, out=got)
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("target", "rows", "words"),
    [
        ("x86-64-v3", 100, "threads walk its values in order"),
        ("sm_90a", 8, "each element is compared with every index"),
        ("sm_90a", 10**5, "threads walk its values in order"),
    ],
)
def test_how_a_scatter_is_computed_is_explained(target: str, rows: int, words: str) -> None:
    specs = [jitgen.TensorSpec(shape, dtype) for shape, dtype in (((rows, 64), torch.float32), ((300,), torch.int64))]
    low = jitgen.jit(accumulated).lower(*specs, jitgen.TensorSpec((300, 64), torch.float32), target=target)
    assert words in low.explain()


def test_no_rows_of_what_an_index_of_one_row_chooses() -> None:
    """A gather that is the same along a dimension is computed once along it, unless the dimension has no elements."""
    function = jitgen.jit(lambda x: x.min(0, keepdim=True).values[1:] * 2)
    x = torch.randn(3, 5, 1, requires_grad=True)
    result = function(x)
    assert result.shape == (0, 5, 1)
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
    assert torch.equal(gradient, torch.zeros_like(x))


def test_a_gather_beside_what_is_computed_before_a_reshape() -> None:
    """The comparison needs no copy in the shape before its reshape; the gather has no such shape."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = (x > 0).reshape((102,))
        return chosen, torch.arange(6.0).reshape(3, 2)[chosen.long()].max(1)[0] * 2

    x = torch.randn(17, 2, 3).permute(2, 1, 0).requires_grad_()
    for mine, theirs in zip(jitgen.jit(function)(x), function(x), strict=True):
        assert torch.equal(mine, theirs)


def test_an_assignment_of_nothing_keeps_the_history_of_what_was_there() -> None:
    def assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        new = torch.zeros_like(x)
        new[0] = x[0] * 3
        new[2:2] = y[:0]
        return new.scatter(0, torch.zeros(0, dtype=torch.long), y[:0, 0])

    found = []
    for called in (assigned, jitgen.jit(assigned)):
        x, y = (torch.ones(3, 2, requires_grad=True) for _ in range(2))
        found.append(torch.autograd.grad(called(x, y).sum(), (x, y)))
    assert all(map(torch.equal, *found))


def test_rows_that_an_index_chooses_are_read_by_whole_accesses() -> None:
    """In CUDA C++: where the rows' addresses allow it; along a row of several indices, and at the end of a row too."""

    def moved(x: Any, apart: Any, at: Any, of: Any) -> Any:
        return x[at], x[at[of]] * 2, x[-1 - at] + x[0], apart[at], x[:, at]

    def summed(rows: Any, weights: Any, order: Any) -> Any:
        return (rows * weights[:, None])[order].view(-1, 4, rows.shape[1]).sum(1)

    x, at = torch.randn(9, 1032), torch.randint(0, 9, (5,))
    for dtype in (torch.float32, torch.bfloat16):
        args = (x.to(dtype), torch.randn(9, 1033).to(dtype)[:, 1:], at, torch.randint(0, 5, (3,)))
        for got, want in zip(cuda_on_host.run(moved, *args), moved(*args), strict=True):
            assert torch.equal(got, want)
        source = jitgen.jit(moved).lower(*args, backend="cuda", target="sm_90a").source
        regions = [text for text in source.split("template <bool whole>")[1:] if "jitgen::within" in text]
        assert ["jitgen::load(row_" in text for text in regions] == [True, True, False, False]
    for tokens in (1, 3):
        rows, weights = torch.randn(4 * tokens, 1004).bfloat16(), torch.rand(4 * tokens).bfloat16()
        order = torch.randperm(4 * tokens)
        (got,) = cuda_on_host.run(summed, rows, weights, order)
        want = summed(rows.double(), weights.double(), order)
        most = summed(rows.double().abs(), weights.double(), order)
        assert ((got.double() - want).abs() <= 2.1 * 2.0**-8 * most).all()  # each product is rounded, and the sum
