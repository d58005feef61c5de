"""``jitgen.package``: packages of AOTInductor that run where jitgen cannot be imported."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.compile import host, nvrtc
from jitgen.export import source
from jitgen.export.build import Kernels, object_of
from jitgen.export.nodes import found_in, is_ours, open_size
from jitgen.export.table import Row, Variant, segments_of, table_of
from jitgen.lowering import Route
from jitgen.spec import Target

pytestmark = [
    pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
QUICK: dict[str, Any] = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
"""Options of Inductor under which it compiles a small model in a few seconds."""


@jitgen.jit
def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.rms_norm(x, (64,), weight))


class Model(nn.Module):
    """A decorated function and two quantised layers."""

    def __init__(self, format: str = "int4") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.up, self.down = nn.Linear(64, 48), nn.Linear(48, 64, bias=False)
        jitgen.quantize_(self.eval().requires_grad_(False), format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.silu(self.up(normed(x, self.weight)))) + x
        return found


def exported(model: nn.Module, x: torch.Tensor, most: int | None = None) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("rows", min=2, max=most)},) if most else None
    with torch.no_grad():
        return torch.export.export(model, (x,), dynamic_shapes=shapes)


def run_elsewhere(path: Path, text: str, *arguments: str) -> str:
    """The output of a process in which ``import jitgen`` is impossible; ``m`` is the package."""
    begin = f"""
        import sys
        sys.modules["jitgen"] = None
        import torch
        m = torch._inductor.aoti_load_package({str(path)!r})
    """
    program = textwrap.dedent(begin) + textwrap.dedent(text)
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_package_runs_where_jitgen_cannot_be_imported(tmp_path: Path) -> None:
    model = Model()
    model(torch.randn(3, 64))
    path = jitgen.package(exported(model, torch.randn(5, 64), 40), tmp_path / "model.pt2", **QUICK)
    inputs = [torch.randn(rows, 64) for rows in (2, 3, 16, 17, 40)]
    torch.save((inputs, [model(x) for x in inputs]), tmp_path / "expected.pt")
    printed = run_elsewhere(
        Path(path),
        """
        again = torch._inductor.aoti_load_package(sys.argv[1])
        inputs, expected = torch.load(sys.argv[2])
        for x, y in zip(inputs, expected):
            torch.testing.assert_close(m(x), y)
        del m
        torch.testing.assert_close(again(inputs[1]), expected[1])
        for wrong in (torch.randn(41, 64), torch.randn(4, 64).double()):
            try:
                again(wrong)
            except RuntimeError:
                print("refused")
        """,
        path,
        str(tmp_path / "expected.pt"),
    )
    assert printed.split() == ["refused", "refused"]
    x = torch.randn(7, 64)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))


class Several(nn.Module):
    """Two results, a gather that checks its indices, numbers, a product of a size with itself, an empty result."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(11, 8))
        self.work = jitgen.jit(self._work)

    @staticmethod
    def _work(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, scale: float) -> Any:
        scores = torch.softmax(x @ x.T * scale, -1)
        return scores @ x, rows[index] / x.shape[0], x[:0], (x > 0).sum(0)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> Any:
        return self.work(x.T.contiguous().T, index, self.rows, 0.5)


@pytest.mark.slow
def test_results_that_gathers_and_numbers_give(tmp_path: Path) -> None:
    model = Several().eval().requires_grad_(False)
    rows = torch.export.Dim("rows", min=2, max=20)
    example = torch.randn(5, 8), torch.arange(5)
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=({0: rows}, {0: rows}))
    path = jitgen.package(program, tmp_path / "model.pt2", **QUICK)
    found = torch._inductor.aoti_load_package(path)
    for count in (2, 3, 20):
        x, index = torch.randn(count, 8), torch.randint(0, 11, (count,))
        for ours, expected in zip(found(x, index), model(x, index), strict=True):
            torch.testing.assert_close(ours, expected)
    with pytest.raises(RuntimeError):
        found(torch.randn(2, 8), torch.tensor([0, 11]))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "uint4", "nvfp4", "int3"])
def test_formats(format: str, tmp_path: Path) -> None:
    model, x = Model(format), torch.randn(5, 64)
    path = jitgen.package(exported(model, x), tmp_path / "model.pt2", **QUICK)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))


def test_what_a_package_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Random(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return jitgen.jit(lambda x: F.dropout(x, 0.5, True))(x)  # type: ignore[no-any-return]

    with pytest.raises(jitgen.UnsupportedError, match="random numbers"):
        jitgen.package(exported(Random(), torch.randn(3, 4)), tmp_path / "model.pt2")
    sizes = {0: torch.export.Dim("rows", min=2, max=9), 1: torch.export.Dim("columns", min=2, max=9)}

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return jitgen.jit(lambda x: x * 2)(x)  # type: ignore[no-any-return]

    program = torch.export.export(Doubled(), (torch.randn(3, 4),), dynamic_shapes=(sizes,))
    with pytest.raises(jitgen.UnsupportedError, match="one size open"):
        jitgen.package(program, tmp_path / "model.pt2")
    with pytest.raises(jitgen.UnsupportedError, match="at most 4096 values"):
        jitgen.package(exported(Doubled(), torch.randn(3, 4), 100_000), tmp_path / "model.pt2")


def test_segments_have_every_row() -> None:
    chosen = random.Random(0)
    variants = [Variant((), (), (index,)) for index in range(2)]
    for _ in range(200):
        rows: list[Row] = []
        key = 1
        for _ in range(chosen.randint(1, 12)):
            key += chosen.randint(1, 3)
            values = tuple(chosen.choice((7, 2 * key, -key // 3, key * key)) for _ in range(3))
            rows.append((key, chosen.choice(variants), values))
        found = list(segments_of(rows))
        for key, variant, values in rows:
            segment = [each for each in found if each.first <= key][-1]
            assert (segment.variant, segment.at(key)) == (variant, values)
    straight: list[Row] = [(key, variants[0], (3 * key, 5)) for key in range(2, 1000)]
    assert len(list(segments_of(straight))) == 1


# ---------------------------------------------------------------------------------------------------------- CUDA


class Product(nn.Module):
    """A product large enough for the tensor cores and the copy engine of sm_90a."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 256, dtype=torch.bfloat16))
        self.work = jitgen.jit(lambda x, weight: F.silu(x @ weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work(x, self.weight)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_operators_of_a_gpu_compile(backend: str) -> None:
    """The tables, cubins and C++ of operators for sm_90a, on a machine without a GPU."""
    lack = nvrtc.missing() if backend == "cuda" else None
    if lack:
        pytest.skip(f"this machine lacks {lack}")
    route = Route(backend, {"cuda": "nvrtc", "triton": "triton"}[backend], Target.parse("sm_90a"))
    kernels, tables = Kernels(), []
    for model, x in ((Model(), torch.randn(5, 64)), (Product(), torch.randn(256, 512, dtype=torch.bfloat16))):
        program = exported(model.eval().requires_grad_(False), x, 300).run_decompositions({})
        size = open_size(program)
        [call] = [node for node in program.graph.nodes if is_ours(node) and "call" in node.target.name()]
        sizes = range(2, 301, 13)
        tables.append(table_of(found_in(call, size).use, sizes, route, kernels))
    letters = {step.arguments[0] for each in tables for segment in each.segments for step in segment.variant.steps}
    assert letters == ({"T", "P"} if backend == "cuda" else {"P"})
    text = source.operators_source("jitgen_test", tables, kernels.refs.values(), "CUDA")
    assert object_of(text, kernels)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", [Model, Product])
def test_a_package_runs_on_a_gpu(model: type[nn.Module], tmp_path: Path) -> None:
    made = model().eval().requires_grad_(False).cuda()
    width, dtype = (64, torch.float32) if model is Model else (512, torch.bfloat16)
    x = torch.randn(5, width, dtype=dtype, device="cuda")
    path = jitgen.package(exported(made, x, 300), tmp_path / "model.pt2", **QUICK)
    inputs = [torch.randn(rows, width, dtype=dtype, device="cuda") for rows in (2, 16, 17, 128, 300)]
    torch.save((inputs, [made(each) for each in inputs]), tmp_path / "expected.pt")
    run_elsewhere(
        Path(path),
        """
        inputs, expected = torch.load(sys.argv[1])
        for x, y in zip(inputs, expected):
            torch.testing.assert_close(m(x), y)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.testing.assert_close(m(inputs[0]), expected[0])
        """,
        str(tmp_path / "expected.pt"),
    )
