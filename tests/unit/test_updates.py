"""Updates in place of several arguments: one kernel, nothing copied, and what each of them reads is what it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

import jitgen
from jitgen.errors import UnsupportedError
from jitgen.ir.body_builder import BodyBuilder
from jitgen.runtime.overlap import Ranges
from tests import cuda_on_host
from tests.interpreter import Interpreter
from tests.updates import CASES, adamw, failures, momentum, of_each

ON_HOST = (
    *("adamw of five", "transposed before", "returns what was", "momentum of slices"),
    *("pairs to a cache", "heads to caches", "momentum of all ranks", "adamw of forty, sliced"),
)

ONE_TEXT = {
    "adamw of fifty": 4,
    "adamw of forty, sliced": 3,
    "momentum of all ranks": 2,
    "foreach": 4,
    "in a ring of forty": 4,
}
"""Cases of one text for several tensors, and their kernels in Triton."""


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_updates") as process:
        yield process


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    assert not [wrong for wrong in failures(CASES[name], "cpp") if wrong]


@pytest.mark.parametrize("name", [name for name in CASES if "bfloat16" not in name])
@pytest.mark.quick(where=lambda name: name not in ("adamw of fifty", "foreach"))  # as those of forty, and in C++
def test_values_in_triton(name: str, interpreter: Interpreter) -> None:
    assert not interpreter[name]


@pytest.mark.parametrize("name", ON_HOST)
def test_values_in_cuda(name: str) -> None:
    assert not [wrong for wrong in failures(CASES[name], "cuda") if wrong]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("backend", "target"), [("cpp", "x86-64-v3"), ("cuda", "sm_90a"), ("triton", "gfx942")])
@pytest.mark.quick(
    where=lambda name, backend: (
        (name, backend) == ("heads to caches", "cuda")
        or (name in ONE_TEXT and backend == "triton")
        or list(CASES).index(name) % 3 == ("cpp", "cuda", "triton").index(backend)  # planning knows no dialect
    )
)
def test_kernels(name: str, backend: str, target: str) -> None:
    case = CASES[name]
    lowered = jitgen.jit(case.function).lower(*case.arguments(), backend=backend, target=target)
    are_lanes = (name, backend) == ("heads to caches", "cuda")  # which share short rows in a pointwise kernel
    of_one_text = name in ONE_TEXT and backend == "triton"  # which has up to 16 texts in a kernel
    assert len(lowered.kernels) == (ONE_TEXT[name] if of_one_text else case.kernels - are_lanes)


@pytest.mark.parametrize(("function", "transfers"), [(momentum, 5), (adamw, 7)])
def test_each_tensor_is_read_and_written_once(function: Any, transfers: int) -> None:
    lists = [[torch.rand(n, 32) for n in (1, 20, 300)] for _ in range(transfers // 2 + 1)]
    lowered = jitgen.jit(of_each(function)).lower(*lists, backend="cpp", target="x86-64-v3")._lowered
    assert not lowered.program.temporaries
    assert sum(lowered.work(0).moved for _ in lowered.program.kernels) == transfers * 4 * 32 * 321


def test_arguments_that_share_memory_are_refused() -> None:
    p, m = torch.rand(4, 4), torch.rand(4, 4)
    jitted = jitgen.jit(momentum)
    for arguments in ((p, m, m), (p, p, m), (p, m, p.t()), (p[:2], m[:2], p[1:3])):
        with pytest.raises(UnsupportedError, match="shares memory"):
            jitted(*arguments)
    jitted(p[:2], p[2:], m[:2])  # neighbours in one memory share no element


def test_many_arguments_that_share_memory_are_refused() -> None:
    """Address ranges of many arguments are compared in their order in memory."""
    memory = torch.rand(3, 20, 4)
    lists = [list(each) for each in memory]  # neighbours in one memory
    jitted = jitgen.jit(of_each(momentum))
    jitted(*lists)
    shared = torch.rand(20, 4)
    jitted(lists[0], [shared[0]] * 20, lists[2])  # what is only read may be the same
    for place, number in ((1, 0), (1, 19), (2, 7)):
        given = [list(each) for each in lists]
        given[place][number] = memory[0].view(-1)[number * 4 + 1 :][:4] if number < 19 else memory[2, 3]
        wanted = memory.clone()
        with pytest.raises(UnsupportedError, match="shares memory"):
            jitted(*given)
        torch.testing.assert_close(memory, wanted)


def test_arguments_that_are_only_read_are_not_compared() -> None:
    shared, updated = torch.rand(4), torch.rand(100, 4)
    tensors = [*updated, *[shared] * 100]
    ranges = Ranges("f", tuple((number, 16, number < 100) for number in range(200)), {})
    with patch("jitgen.runtime.overlap.refuse", side_effect=AssertionError):
        ranges.refuse([tensor.data_ptr() for tensor in tensors], tensors)
    for number in (0, 57, 99):
        given = [*tensors[:150], updated[number], *tensors[151:]]
        with pytest.raises(UnsupportedError, match="shares memory"):
            ranges.refuse([tensor.data_ptr() for tensor in given], given)


def test_planning_asks_for_each_region_twice() -> None:
    """Once to know whether it fits a kernel of others, and once in that kernel, whose scalars it shares."""

    def step(parameters: Any, gradients: Any, rate: float) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient * rate)

    specs = [[jitgen.TensorSpec((4,), torch.float32)] * 70 for _ in range(2)]
    with patch.object(BodyBuilder, "lower", autospec=True, side_effect=BodyBuilder.lower) as lowered:
        program = jitgen.jit(step).lower(*specs, 0.5, target="x86-64-v3").lowered.program
    assert [len(kernel.bodies) for kernel in program.kernels] == [70]
    assert lowered.call_count <= 2 * 70


def test_one_kernel_of_many_tensors_with_numbers() -> None:
    """Tensors with one rate share a text; a source has one for each rate, and an array of its tensors."""

    def step(parameters: Any, gradients: Any, rates: Any) -> None:
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.sub_(gradient * rates[number // 20])

    sizes = [(n % 7, 5) if n % 3 else (n,) for n in range(40)]
    parameters, gradients = ([torch.rand(size) for size in sizes] for _ in range(2))
    for rates in ((0.25, 0.25), (0.25, 0.5)):
        given = [parameter.clone() for parameter in parameters]
        wanted = [p - g * rates[number // 20] for number, (p, g) in enumerate(zip(given, gradients, strict=True))]
        lowered = jitgen.jit(step).lower(given, gradients, rates, target="sm_90a", backend="cuda")
        assert sum(kernel.source.count("struct Region") for kernel in lowered.kernels) <= 2
        cuda_on_host.run(step, given, gradients, list(rates))
        torch.testing.assert_close(given, wanted, rtol=1e-6, atol=1e-7)


def _with_gaps(outer: int, rows: int, columns: int) -> torch.Tensor:
    return torch.rand(outer, rows, 2 * columns)[..., :columns]


def _rows_apart(outer: int, rows: int, columns: int) -> torch.Tensor:
    return torch.rand(rows, outer, columns).transpose(0, 1)


def _columns_first(outer: int, rows: int, columns: int) -> torch.Tensor:
    return torch.rand(columns, rows, outer).permute(2, 1, 0)


def _of_rows(outer: int, rows: int, columns: int) -> torch.Tensor:
    return torch.rand(rows, outer, 1).transpose(0, 1).expand(outer, rows, columns)


@pytest.mark.parametrize(
    ("made", "sizes", "texts"),
    [
        ((torch.rand, _columns_first), [(1, 4, 8)], [2]),
        ((_with_gaps, _rows_apart, _columns_first, _of_rows), [(o, 3, n) for o in (1, 2) for n in (5, 6, 8)], [16, 6]),
    ],
)
def test_layouts_that_alternate(
    made: tuple[Callable[..., torch.Tensor], ...], sizes: list[tuple[int, int, int]], texts: list[int]
) -> None:
    """A kernel has one text for each layout, wherever its tensors are in the lists, and at most 16."""

    def step(parameters: Any, gradients: Any) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient * 0.25)

    of_each = [(size, of) for size in sizes for of in made]
    of_each *= -(-36 // len(of_each))
    gradients, parameters = [of(*size) for size, of in of_each], [torch.rand(size) for size, _ in of_each]
    wanted = [p.double() - g.double() * 0.25 for p, g in zip(parameters, gradients, strict=True)]
    lowered = jitgen.jit(step).lower(parameters, gradients, target="sm_90a", backend="cuda")
    assert [len(re.findall(r"void region\d+\(", kernel.source)) for kernel in lowered.kernels] == texts
    for update in (jitgen.jit(step, backend="cpp"), lambda *lists: cuda_on_host.run(step, *lists)):
        given = [parameter.clone() for parameter in parameters]
        update(given, gradients)
        torch.testing.assert_close([p.double() for p in given], wanted, rtol=0, atol=2.0**-23)


def test_new_sizes_and_strides() -> None:
    jitted = jitgen.jit(of_each(momentum))
    for made in (torch.clone, lambda x: x.t(), lambda x: x[::2]):
        for sizes in ((3, 4), (40, 5), (1, 1)):
            arguments = [[made(torch.rand(*sizes)) for _ in range(2)] for _ in range(3)]
            wanted = [[x.clone() for x in each] for each in arguments]
            jitted(*arguments)
            of_each(momentum)(*wanted)
            torch.testing.assert_close(arguments, wanted)


def _slice_then_update(q: Any, p: Any) -> None:
    q[1:3] = p[:2]
    p.mul_(2)


def _update_then_slice(q: Any, p: Any) -> None:
    p.mul_(2)
    q[1:3] = p[:2]


def _steps_beside_an_update(q: Any, p: Any) -> None:
    q[:, ::2] = p[:, ::2] * 3
    p.zero_()


def _rows_by_index_beside_an_update(q: Any, p: Any) -> None:
    p.add_(1)
    q[p[:, 0].long() % 4] = p


def _two_of_one_value(q: Any, p: Any) -> None:
    p.add_(1)
    q.copy_(p)


def _a_copy_of_which_elements_are_replaced(q: Any, p: Any) -> None:
    p[:, ::2] = q[:, ::2] * 3
    q.copy_(p)
    q[:2].mul_(5)


@pytest.mark.parametrize("function", [_two_of_one_value, _a_copy_of_which_elements_are_replaced])
def test_values_that_arguments_share(function: Any) -> None:
    arguments = torch.rand(4, 6), torch.rand(4, 6) + 1
    expected = [argument.clone() for argument in arguments]
    function(*expected)
    jitgen.jit(function)(*arguments)
    assert all(map(torch.equal, arguments, expected))


def test_a_guard_that_makes_a_size_a_number_leaves_an_order() -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        weights = torch.sigmoid(a).expand(6, 6).softmax(1)
        c.lerp_((weights + b[:1])[:, :1].expand(6, 6), 0.3)
        return weights + b[:, :1], c * 2

    arguments = [torch.rand(6, 6) for _ in range(3)]
    expected = [argument.clone() for argument in arguments]
    torch.testing.assert_close(jitgen.jit(function)(*arguments), function(*expected))
    torch.testing.assert_close(arguments, expected)


@pytest.mark.parametrize(
    "function", [_slice_then_update, _update_then_slice, _steps_beside_an_update, _rows_by_index_beside_an_update]
)
def test_elements_are_replaced_before_what_they_are_read_from_is_updated(function: Any) -> None:
    for rows in (4, 9):
        arguments = torch.rand(rows, 6), torch.rand(rows, 6) + 1
        expected = [argument.clone() for argument in arguments]
        function(*expected)
        jitgen.jit(function)(*arguments)
        assert all(map(torch.equal, arguments, expected))
