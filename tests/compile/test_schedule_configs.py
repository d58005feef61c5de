"""The ``struct Config`` of every candidate of a product compiles, and the static header has the tile, the threads and
the shared memory that the schedule says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import nvrtc
from jitgen.families import registry
from jitgen.families.gemm.mainloops import BlockMainloop, WgmmaTilings
from jitgen.schedule.choose import Choice
from jitgen.spec import KernelSource

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC and the headers of CUDA")


def linear(x: Any, w: Any) -> Any:
    return F.linear(x, w)


def transposed(x: Any, w: Any) -> Any:
    return x @ w


def swiglu(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def spec(*shape: int, dtype: torch.dtype = torch.bfloat16, format: str | None = None) -> jitgen.TensorSpec:
    return jitgen.TensorSpec(shape, dtype, format=format, group_size=128 if format else None)


DECLARED = re.compile(
    r"^(?:struct Config[\w: ]* \{\n(?:  .*\n)*\};|using (?:Weight|Shape)\w* = .*;|static_assert\(.*;)$", re.MULTILINE
)
"""The Config of a source, the types that are made of it and of the weight, and what is asserted of them."""
PROBLEMS = {
    "int4, one row": (linear, spec(1, 4096), spec(4096, 4096, format="int4")),
    "int4, few rows": (swiglu, spec(16, 4096), *[spec(4096, 4096, format="int4")] * 2),
    "int4": (linear, spec(700, 4096), spec(3000, 4096, format="int4")),
    "int4, two weights": (swiglu, spec(700, 4096), *[spec(4096, 4096, format="int4")] * 2),
    "dense, one row": (linear, spec(1, 4096), spec(4096, 4096)),
    "dense": (linear, spec(700, 4096), spec(3000, 4096)),
    "dense, unaligned": (linear, spec(700, 4095), spec(3000, 4095)),
    "dense along N, few rows": (transposed, spec(7, 4096), spec(4096, 1024)),
    "float32 along N": (transposed, spec(3, 1024, dtype=torch.float32), spec(1024, 1000, dtype=torch.float32)),
    "float32, few rows": (linear, spec(3, 1024, dtype=torch.float32), spec(999, 1024, dtype=torch.float32)),
    "float32": (linear, spec(300, 1024, dtype=torch.float32), spec(999, 1024, dtype=torch.float32)),
    "float64": (linear, spec(300, 1024, dtype=torch.float64), spec(999, 1024, dtype=torch.float64)),
}


def checks(problem: str) -> list[KernelSource]:
    """For each mainloop a source that has the types and the assertions of all of its candidates."""
    function, *specs = PROBLEMS[problem]
    low = jitgen.jit(function, backend="cuda").lower(*specs, target="sm_90a").lowered
    (kernel,), device = low.program.kernels, low.route.device
    family = registry.family_of(kernel)
    asked = family.problem(kernel, low.layouts[0], low.laid_out.geometries[0], device)
    found: dict[str, list[str]] = {}
    sources: dict[str, KernelSource] = {}
    for number, candidate in enumerate(family.candidates(asked, device)):
        if isinstance(candidate, WgmmaTilings):
            continue
        source = replace(low, choices=(Choice(candidate),)).render(0)[0]
        lines = DECLARED.findall(source.text)
        if isinstance(candidate, BlockMainloop):
            (name,) = re.findall(r"jitgen::(\w+)Shared<Config0", source.text)
            has = {"tokens": candidate.block_m, "rows": candidate.block_n, "threads": 32 * candidate.warps}
            lines += [f"static_assert(jitgen::{name}Block<Config0>::{each} == {n});" for each, n in has.items()]
        head = "\n".join(re.findall(r"^#include .*$", source.text, re.MULTILINE))
        sources[head] = source
        found.setdefault(head, []).append("\n".join([f"namespace candidate{number} {{", *dict.fromkeys(lines), "}"]))
    entry = f'extern "C" __global__ void {low.render(0)[0].name}() {{}}'
    return [replace(source, text="\n".join([head, *found[head], entry, ""])) for head, source in sources.items()]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.quick(where=lambda problem: problem in ("int4, one row", "dense, unaligned"))
def test_the_header_has_what_every_candidate_says(problem: str) -> None:
    for source in checks(problem):
        assert source.text.count("bytes == ") > 0
        assert nvrtc.compile(source).meta["entry"] == source.name


@pytest.mark.parametrize(("right", "wrong"), [("bytes == ", "bytes == 1"), ("::threads == ", "::threads == 1")])
def test_another_number_is_refused(right: str, wrong: str) -> None:
    (source,) = checks("int4, one row")
    assert right in source.text
    with pytest.raises(jitgen.CompileError) as refused:
        nvrtc.compile(replace(source, text=source.text.replace(right, wrong)))
    assert "static assertion failed" in refused.value.log
