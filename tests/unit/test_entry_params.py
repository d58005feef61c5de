"""The struct that an entry in CUDA C++ takes: its places against the compiler's, its packing by a launch, its names."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host, nvrtc
from jitgen.errors import CompileError, UnsupportedError
from jitgen.ir.body import Operand
from jitgen.kernel.entry import Member, places
from jitgen.kernel.launch import Arguments
from jitgen.kernel.parameters import Integer, KernelParameters, RegionParameters, declared
from jitgen.kernel.printed_entry import Params
from jitgen.runtime.cuda import Function, Launch
from tests.unit.test_tensor_map import FakeDriver

Spec = jitgen.TensorSpec
half, single = torch.bfloat16, torch.float32
NEEDS_NVRTC = pytest.mark.skipif(nvrtc.toolchain() is None, reason=f"NVRTC: {nvrtc.missing()}")

CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pointwise": (lambda x, y, a: x.t() * a + y, (Spec((64, 32), single), Spec((32, 64), single), 0.5)),
    "gathered": (lambda w, i: F.embedding(i, w), (Spec((100, 64), half), torch.zeros(9, dtype=torch.int64))),
    "indices": (lambda x: x + torch.arange(x.shape[1]), (Spec((7, 9), torch.int64),)),
    "rows": (lambda x: torch.softmax(x, -1), (Spec(("M", 1000), half),)),
    "scan": (lambda x: x.cumsum(-1), (Spec((64, 300), single),)),
    "sort": (lambda x: x.sort(-1), (Spec((64, 300), single),)),
    "scatter": (lambda x, i: x.scatter(1, i, 2.0), (Spec((64, 300), single), Spec((64, 9), torch.int64))),
    "product": (F.linear, (Spec((512, 512), half), Spec((512, 512), half), Spec((512,), half))),
    "products of a batch": (torch.matmul, (Spec((4, 8, 64, 64), single), Spec((4, 8, 64, 64), single))),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        3 * (Spec((2, 8, 700, 128), half),),
    ),
}


def lowered_of(name: str) -> Any:
    function, arguments = CASES[name]
    return jitgen.jit(function).lower(*arguments, backend="cuda", target="sm_90a")._lowered


@pytest.mark.parametrize("name", CASES)
def test_an_entry_takes_one_struct(name: str) -> None:
    lowered = lowered_of(name)
    for number, kernel in enumerate(lowered.program.kernels):
        source, _ = lowered.render(number)
        entries = re.findall(r'extern "C" __global__ void .*\n(\w+)\((.*)\) \{', source.text)
        assert entries
        assert {taken for _, taken in entries} == {"const __grid_constant__ Params params"}
        arguments = lowered.arguments(number)
        packing = arguments.packing("f" * len(kernel.scalars))
        assert packing.layout is not None
        assert f"sizeof(Params) == {packing.layout[1]} " in source.text
        assert sorted(value for value in packing.values if value is not None) == sorted(arguments.integers)
        varying = len(arguments.maps) + len(arguments.pointers) + len(kernel.scalars)
        assert sum(value is None for value in packing.values) == varying


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_places_are_those_of_a_compiler(wide: bool, tmp_path: Path) -> None:
    """Every member of a struct of all kinds of members, by ``offsetof`` of a C++ compiler."""
    members = (
        Member((0, 0), 0, (0, 1, 2)),
        Member((0, 1), None, (3, 4)),
        Member((0, 2), 1, ()),
        Member((0, 3), 2, (5, 6, 7), sizes=2),
        Member((0, 4), None, (8,)),
        Member((0, 5), 3, (9,), sizes=1),
        Member(None, None, (10,)),
    )
    index = "int64_t" if wide else "int32_t"
    found, size = places(1, members, "q" if wide else "i", "fdq")
    where = {(place.source, place.number): place.offset for place in found}
    text = f"""
#include <cstddef>
#include <cstdint>
#include "jitgen/entry.cuh"
using Index = {index};
struct alignas(64) Map {{ unsigned char bytes[128]; }};
struct Params {{
  Map map;
  jitgen::Operand<const float, Index, 3> a;
  jitgen::Ramp<Index, 1> b;
  jitgen::Operand<float, Index, 0> c;
  jitgen::Operand<float, Index, 1, 2> d;
  jitgen::Ramp<Index, 0> e;
  jitgen::Operand<float, Index, 0, 1> f;
  Index g;
  float x;
  double y;
  int64_t z;
}};
static_assert(sizeof(Params) == {size});
"""
    names = {("map", 0): "map", ("pointer", 0): "a.pointer", ("pointer", 1): "c.pointer", ("pointer", 2): "d.pointer"}
    names |= {("pointer", 3): "f.pointer", ("scalar", 0): "x", ("scalar", 1): "y", ("scalar", 2): "z"}
    integers = [*(f"a.strides[{dim}]" for dim in range(3)), "b.first", "b.strides[0]", "d.strides[0]", "d.sizes[0]"]
    integers += ["d.sizes[1]", "e.first", "f.sizes[0]", "g"]
    names |= {("integer", number): name for number, name in enumerate(integers)}
    assert names.keys() == where.keys()
    text += "".join(f"static_assert(offsetof(Params, {names[key]}) == {at});\n" for key, at in where.items())
    path = tmp_path / "places.cpp"
    include = Path(nvrtc.__file__).parents[2] / "templates/common/include"
    for right, source in ((True, text), (False, text.replace(f"== {where['integer', 6]})", f"== {size})"))):
        path.write_text(source)
        words = [*(host.command() or ()), "-std=c++17", "-w", "-fsyntax-only", f"-I{include}", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is right, done.stderr


@NEEDS_NVRTC
def test_a_struct_that_a_launch_packs_otherwise_does_not_compile() -> None:
    source, _ = lowered_of("rows").render(0)
    nvrtc.compile(source)
    planted = (
        (r"OFFSET\(result\) == \d+", "OFFSET(result) == 4"),
        ("Index length;", "double length;"),
    )
    for old, new in planted:
        text, count = re.subn(old, new, source.text)
        assert count == 1
        with pytest.raises(CompileError, match="the launch packs it so"):
            nvrtc.compile(replace(source, text=text))


def test_a_launch_packs_what_varies_between_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("jitgen.runtime.cuda.bindings", driver)
    members = (Member((0, 0), 0, (0, 1)), Member((0, 1), 1, (2,)), Member(None, None, (3,)))
    arguments = Arguments(((0, 0), (1, 0)), (7, -8, 9, 10), False, (None,), members)
    packing = arguments.packing("f")
    assert packing.codes == "TPiiPiif"
    function, one = Function("k", 0, 0, None, None), (1, 1, 1)
    launch = Launch(function, packing.codes, packing.values, one, one, struct_layout=packing.layout)
    for first, second, scale in ((0x1234, 0x5678, 0.5), (0x9ABC, 0xDEF0, -2.0)):
        image = bytes([first % 256]) * 128
        launch(0, image, first, second, scale)
        slots = (ctypes.c_uint64 * 2).from_address(driver.seen[-1])
        assert packing.layout is not None
        assert slots[1] == 0
        found = ctypes.string_at(slots[0], packing.layout[1])
        assert found[:128] == image
        assert struct.unpack_from("PiiPi4xif", found, 128) == (first, 7, -8, second, 9, 10, scale)
    assert len(launch.pools[0]) == 1


def test_members_follow_operands() -> None:
    loaded, counted, stored = (
        Operand(kind, buffer, "float32", (4,)) for kind, buffer in (("load", 0), ("iota", None), ("store", 1))
    )
    operands = (
        declared(loaded, 0, [""], gathered=(("b", "1"), ("d", "e"))),
        declared(counted, 1, ["1"]),
        declared(stored, 2, ["0", ""]),
    )
    parameters = KernelParameters((RegionParameters((Integer("n0", "sizes", dim=0),), operands),), wide=False)
    assert parameters.names == ("n0", "s0_0", "b", "d", "e", "o1", "s2_1")
    assert parameters.members == (
        Member((0, 0), 0, (1, 4, 2, 3), sizes=2),
        Member((0, 1), None, (5,)),
        Member((0, 2), 1, (6,)),
        Member(None, None, (0,)),
    )


def test_more_than_a_kernel_may_take_is_refused() -> None:
    members = tuple(Member(None, None, (number,)) for number in range(10000))
    params = Params(members, tuple(("Index", f"n{number}") for number in range(10000)), (), "", (), (), {})
    with pytest.raises(UnsupportedError, match="40000 bytes of parameters"):
        params.printed(wide=False)
