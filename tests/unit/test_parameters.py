"""The parameters of kernels as data: order and values follow from axes and operands, in every family and dialect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.codegen.cpp import CPP
from jitgen.families import registry
from jitgen.families.family import Question
from jitgen.ir import symbols
from jitgen.ir.body import Body, Operand
from jitgen.ir.program import Kernel
from jitgen.kernel.geometry import Geometry, Touched, touched_of
from jitgen.kernel.launch import work
from jitgen.kernel.parameters import LAUNCH, Integer, KernelParameters, RegionParameters, declared
from jitgen.kernel.printed_entry import ON_CPU, map_names, params_of
from jitgen.spec import KernelSource


@dataclass(frozen=True, kw_only=True)
class Numbers(Geometry):
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Settled:
    ends: tuple[int, ...]


TENSOR = Operand("load", 3, "float32", (4, 5))
INDEX = Operand("iota", None, "int64", (4, 5), dim=1)
CHOSEN = Operand("store", 7, "bfloat16", (4, 5), gathered=1)
PARAMETERS = KernelParameters(
    (
        RegionParameters(
            (Integer("n0", "sizes", dim=0),),
            (
                declared(TENSOR, 0, ["", "1", "b0"]),
                declared(INDEX, 1, ["0", "r1"]),
                declared(CHOSEN, 2, ["", ""], gathered=(("size", "1"),)),
            ),
            (Integer("end", "ends", dim=1, region=LAUNCH),),
        ),
        RegionParameters((Integer("m0", "sizes", dim=1, region=1),), (declared(TENSOR, 0, ["0", "0"], "1_0"),)),
    ),
    wide=True,
)
FIRST = Numbers(
    strides=((10, 11, 50), (20, 21), (30, 31)),
    offsets=(2, 5, 6),
    gathered=((), (), ((40, 41),)),
    sizes=(100, 101),
)
SECOND = Numbers(strides=((12, 13),), offsets=(9,), gathered=((),), sizes=(200, 201))


def test_what_the_layout_fixes_is_no_parameter() -> None:
    assert PARAMETERS.names == ("n0", "s0_0", "b0", "o1", "r1", "s2_0", "s2_1", "size", "end", "m0")
    assert [operand.pointer for operand in PARAMETERS.operands] == ["p0", None, "p2", "p1_0"]


def test_a_launch_passes_numbers_of_the_call_in_that_order() -> None:
    arguments = PARAMETERS.arguments((FIRST, SECOND), Settled((7, 8)), ())
    assert arguments.integers == (100, 10, 50, 5, 21, 30, 31, 40, 8, 201)
    assert arguments.pointers == ((3, 8), (7, 12), (3, 36))  # in bytes, and none of the index
    assert arguments.wide


def test_a_geometry_without_a_number_is_an_error() -> None:
    with pytest.raises(AttributeError, match="ends"):
        PARAMETERS.arguments((FIRST, SECOND), None, ())


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


HEADS = TensorSpec(("B", 4, "S", 64), torch.bfloat16)
MATRIX = TensorSpec(("M", 96), torch.float32)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "elementwise": (lambda x, y, a: (x * a + torch.arange(96), y.t() * 2), (MATRIX, TensorSpec((5, 7)), 0.5)),
    "reduction": (lambda x, a: torch.softmax(x * a, -1), (MATRIX, 0.5)),
    "scan": (lambda x: x.t().cumsum(-1), (MATRIX,)),
    "sort": (lambda x: torch.topk(x, 3), (MATRIX,)),
    "scatter": (
        lambda x, i, y: x.index_add(0, i, y),
        (MATRIX, TensorSpec((9,), torch.int64), TensorSpec((9, 96), torch.float32)),
    ),
    "gemm": (lambda x, w, b: torch.relu(x @ w + b), (MATRIX, TensorSpec((96, 32)), TensorSpec((32,)))),
    "attention": (attention, (HEADS, HEADS, HEADS)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_struct_of_a_cpu_has_these_members(name: str) -> None:
    function, arguments = CASES[name]
    families = set()
    for case in kernels(jitgen.jit(function).lower(*arguments, target="x86-64-v3")):
        families.add(case.family)
        struct = re.search(r"^struct Params \{\n(.*?)^  \w+ run\(\) const;\n\};", case.source.text, re.M | re.S)
        assert struct is not None
        names = [name for line in struct[1].split(";") for name in re.findall(r"\w+(?=,|$)", line.strip())]
        packed = [*case.pointers, *case.scalars], case.integers
        first, last = ([case.members[name] for name in part] for part in packed)
        assert names == [*first, "threads", *last, "streaming"]
        assert len(set(names)) == len(names)
        assert f"sizeof(Params) == {8 * len(names)}," in case.source.text
    assert name in families


@pytest.mark.parametrize("name", CASES)
def test_the_signature_in_triton_has_a_type_for_each(name: str) -> None:
    function, arguments = CASES[name]
    for case in kernels(jitgen.jit(function, backend="triton").lower(*arguments, target="sm_90a")):
        names = [*case.pointers, *case.integers, *case.scalars]
        entry = re.search(rf"^def {case.source.name}\(([^)]*)\):", case.source.text, re.M)
        assert entry is not None
        assert entry[1].split(", ")[: len(names)] == names
        signature = case.source.option("signature")
        assert len(signature) == len(case.source.option("multiples")) == len(names)
        assert [kind.startswith("*") for kind in signature] == [name.startswith("p") for name in names]


@dataclass(frozen=True)
class Case:
    family: str
    source: KernelSource
    pointers: tuple[str, ...]
    integers: tuple[str, ...]
    scalars: tuple[str, ...]
    members: Mapping[str, str]


def kernels(lowered: Any) -> Iterator[Case]:
    """The kernels of a program, with the names of their parameters, of which a launch passes as many."""
    program = lowered._lowered
    for number, kernel in enumerate(program.program.kernels):
        family = registry.family_of(kernel)
        parameters = family.parameters(kernel, program.layouts[number], program.route.device)
        passed = program.arguments(number)
        pointers = tuple(operand.pointer for operand in parameters.operands if operand.pointer)
        assert (len(passed.pointers), len(passed.integers)) == (len(pointers), len(parameters.names))
        scalars = tuple(f"a{index}" for index in range(len(kernel.scalars)))
        members = params_of(kernel, parameters, CPP, ON_CPU).spelled
        yield Case(family.name, program.render(number)[0], pointers, parameters.names, scalars, members)


def test_memory_that_a_walk_meets_again_is_touched_once() -> None:
    body = Body((), (), (TENSOR, INDEX, CHOSEN, replace(CHOSEN, gathered=0)), ())
    walked = [((4, 0), (5, 1)), ((4, 0), (5, 0)), ((4, 0), (5, 1)), ((4, 0), (5, 1))]
    # A row that all rows read is one; what an index chooses, and what is written, is another element each time.
    assert [touched.elements for touched in touched_of(body, walked)] == [5, 1, 20, 20]


def test_work_counts_tensors_and_no_indices() -> None:
    body = Body((), (), (TENSOR, INDEX, CHOSEN), ())
    geometry = replace(FIRST, touched=(Touched(5, 0, 4), Touched(1, 0, 0), Touched(20, 0, 19)))
    kernel = Kernel("name", "family", (body, body), ())
    counted = work(kernel, (geometry, geometry), None, flops=3)
    # Both bodies read the same elements of the tensor: once.
    assert (counted.moved, counted.written, counted.flops) == (5 * 4 + 2 * 20 * 2, 2 * 20 * 2, 3)


def test_a_tensor_map_is_called_after_its_operand() -> None:
    pointers = ["params.x.pointer", "params.weight_2.pointer", "params.x.pointer"]
    assert map_names(pointers) == ["x_map", "weight_2_map", "x_map_2"]


def test_a_question_has_numbers_for_all_of_its_sizes() -> None:
    @dataclass(frozen=True)
    class Asked(Question):
        placements = ("here", "there")
        rows: Any
        widths: tuple[Any, ...]
        dtype: str

    rows = symbols.symbol("n")
    asked = Asked(rows, (symbols.mul(rows, 2), 3), "float32").at({"n": 5})
    assert asked == Asked(5, (10, 3), "float32")
    assert [asked.placement(fused) for fused in (True, False)] == ["here", "there"]
