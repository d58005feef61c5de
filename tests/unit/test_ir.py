"""The IR on its own: symbols, views, regions, bodies, JSON, keys; and which package may import which."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from jitgen_cases import lowered, lowered_graph

import jitgen
from jitgen import lowering
from jitgen.device import Device
from jitgen.families.elementwise.layout import layout as layout_of
from jitgen.families.partition import program_of
from jitgen.ir import graph as graphs
from jitgen.ir import symbols
from jitgen.ir.body import compute_dtype
from jitgen.ir.graph import Builder, Graph, InputSpec, topological
from jitgen.ir.ops import COMPUTE_DTYPES, OPS
from jitgen.ir.views import Memory, NotViewable, Strided, apply, contiguous_strides
from jitgen.kernel.operands import Call, output_strides
from jitgen.runtime.overlap import share
from jitgen.spec import Target, host_target
from tests import fresh
from tests.modules import run_time_nodes

ROOT = Path(jitgen.__file__).parents[1]

# ------------------------------------------------------------------------------------------------------- symbols

n, m = symbols.size_symbol(0, 0), symbols.size_symbol(0, 1)


def test_sums_and_products_have_one_form() -> None:
    assert symbols.add(n, m) == symbols.add(m, n)
    assert symbols.sub(symbols.add(n, m), m) == n
    assert symbols.mul(n, m) == symbols.mul(m, n)
    assert symbols.mul(symbols.add(n, 1), 2) == symbols.add(symbols.mul(n, 2), 2)
    half = symbols.floordiv(n, 2)
    assert symbols.add(symbols.sub(n, half), half) == n
    assert symbols.floordiv(symbols.mul(n, 6), 3) == symbols.mul(n, 2)
    assert symbols.floordiv(symbols.mul(n, m), m) == n
    assert symbols.mod(symbols.mul(n, 4), 2) == 0
    assert symbols.sub(n, n) == 0
    assert symbols.product((n, 1, m, 2)) == symbols.product((2, m, n))


@pytest.mark.parametrize(("left", "right"), [(7, 2), (0, 3), (-7, 2), (12, 5)])
def test_evaluation_is_pythons(left: int, right: int) -> None:
    environment = {"s0_0": left, "s0_1": right}
    for operation, python in (
        (symbols.add, left + right),
        (symbols.sub, left - right),
        (symbols.mul, left * right),
        (symbols.floordiv, left // right),
        (symbols.mod, left % right),
        (symbols.truediv, left / right),
        (symbols.minimum, min(left, right)),
        (symbols.maximum, max(left, right)),
    ):
        value = operation(n, m)
        assert symbols.evaluate(value, environment) == python
        assert eval(symbols.format_expr(value), {}, environment) == python
        assert symbols.from_json(json.loads(json.dumps(symbols.to_json(value)))) == value


@pytest.mark.parametrize("operation", [symbols.floordiv, symbols.mod, symbols.truediv, symbols.power])
@pytest.mark.parametrize("operands", [(n, symbols.mul(m, n)), (symbols.mul(n, m), m), (-2, n)])
def test_text_of_operands_that_are_products(operation: Any, operands: Any) -> None:
    environment = {"s0_0": 3, "s0_1": 2}
    value = operation(*operands)
    assert eval(symbols.format_expr(value), {}, environment) == symbols.evaluate(value, environment)


def test_comparisons_are_decided_where_the_forms_do() -> None:
    assert symbols.compare("eq", symbols.add(n, 1), symbols.add(1, n)) is True
    assert symbols.compare("ne", n, n) is False
    assert symbols.compare("ge", n, 0) is True
    assert symbols.compare("lt", symbols.add(n, m), m) is False
    assert symbols.compare("gt", n, symbols.add(n, 1)) is False
    assert isinstance(symbols.compare("eq", n, m), symbols.Expr)


def test_floats_are_not_reassociated() -> None:
    a = symbols.argument_symbol(0, "float")
    value = symbols.sub(symbols.add(a, 1e20), 1e20)
    assert symbols.evaluate(value, {"a0": 1.0}) == 0.0
    for number in (0.1, -0.0, float("inf"), 1e-310):
        assert symbols.from_json(json.loads(json.dumps(symbols.to_json(number)))).hex() == number.hex()


# --------------------------------------------------------------------------------------------------- graph, views


def test_builder_makes_equal_nodes_once() -> None:
    builder = Builder()
    x = builder.make("input", (), "float32", (n,), (0,))
    assert builder.make("exp", (x,), "float32", (n,)) is builder.make("exp", (x,), "float32", (n,))
    constants = {id(builder.const(value, "float32")) for value in (0.0, -0.0, 0, False, 1, 1.0, True)}
    assert len(constants) == 7


def rotate(x: torch.Tensor, cos: torch.Tensor, scale: float) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * scale)[:, 1:].to(torch.bfloat16)


def test_graph_survives_json() -> None:
    graph = lowered_graph(rotate, torch.ones(3, 8), torch.ones(8), 0.5)
    text = json.dumps(graphs.to_json(graph))
    again = graphs.from_json(json.loads(text))
    assert json.dumps(graphs.to_json(again)) == text
    assert [node.op for node in topological(again.results)] == [node.op for node in topological(graph.results)]
    assert again.guards == graph.guards
    assert "test_ir.py" not in text, "a user's line is no part of the canonical form"


def test_regions_and_bodies_of_a_rotation() -> None:
    program = lowered(rotate, torch.ones(3, 8), torch.ones(8), 0.5).program
    (kernel,) = program.kernels
    for body in kernel.bodies:
        assert all(instruction.op not in ("cat", "view") for instruction in body.instructions)
        assert all(instruction.dtype in COMPUTE_DTYPES for instruction in body.instructions)
        assert [operand.kind for operand in body.operands][-1] == "store"
        for position, instruction in enumerate(body.instructions):
            assert all(argument < position for argument in instruction.args)
            if instruction.op in OPS:
                assert len(instruction.args) == OPS[instruction.op].arity
    assert [dtype for _, dtype in kernel.scalars] == ["float32"]


def test_compute_dtypes() -> None:
    assert {compute_dtype(name) for name in ("float16", "bfloat16", "float8_e5m2", "float32")} == {"float32"}
    assert compute_dtype("float64") == "float64"
    assert compute_dtype("int8") == "int8"


@pytest.mark.parametrize("seed", range(20))
def test_views_are_torchs(seed: int) -> None:
    """Random chains of movements: the strides are those torch computes, and a reshape is refused where torch copies."""
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    tensor = torch.arange(4 * 6 * 5).view(4, 6, 5)
    memory = Strided(tuple(tensor.shape), tuple(tensor.stride()))
    for _ in range(5):
        rank, kind = tensor.ndim, pick(4)
        if kind == 0:
            order = torch.randperm(rank, generator=generator).tolist()
            moved, attrs = tensor.permute(order), ("permute", tuple(order))
        elif kind == 1:
            dim, start = pick(rank), pick(2)
            step = 1 + pick(2)
            moved = tensor[(slice(None),) * dim + (slice(start, None, step),)]
            attrs = ("slice", dim, start, step)
        elif kind == 2:
            moved, attrs = tensor.unsqueeze(0), ("unsqueeze", 0)
        else:
            sizes = (tensor.numel(),) if pick(2) else (*tensor.shape[:-2], -1)
            attrs = ("reshape",)
            try:
                moved = tensor.view(sizes)
            except RuntimeError:
                with pytest.raises(NotViewable):
                    apply(memory, attrs, tuple(tensor.reshape(sizes).shape))
                continue
        memory = apply(memory, attrs, tuple(moved.shape))
        tensor = moved
        for size, ours, theirs in zip(tensor.shape, memory.strides, tensor.stride(), strict=True):
            assert size <= 1 or ours == theirs
        assert memory.offset == tensor.storage_offset() or not tensor.numel()


def test_output_strides_follow_the_inputs() -> None:
    dense = Strided((4, 6), (1, 4))
    assert output_strides((4, 6), [dense]) == (1, 4)
    assert output_strides((4, 6), [dense, Strided((4, 6), (6, 1))]) == (6, 1)
    assert output_strides((4, 6), [Strided((4, 6), (12, 2))]) == (6, 1)
    assert output_strides((4, 6), []) == contiguous_strides((4, 6))
    assert output_strides((0, 3), []) == contiguous_strides((0, 3))


def test_dimensions_collapse_and_accesses_are_as_wide_as_legal() -> None:
    program = lowered(lambda x, y: x + y, torch.ones(4, 8), torch.ones(4, 8)).program
    sizes = {f"s{tensor}_{dim}": size for tensor in (0, 1) for dim, size in enumerate((4, 8))}

    def layout(*strides: tuple[int, int], alignment: int = 16) -> tuple[int, int, tuple[str, ...]]:
        memory = [Memory(Strided((4, 8), stride), alignment) for stride in strides]
        buffers = [*memory, Memory(Strided((4, 8), (8, 1)))]
        (found,), _ = layout_of(program.kernels[0], Call(sizes, buffers, is_gpu=True))
        return found.rank, found.unit, found.operands

    assert layout((8, 1), (8, 1)) == (1, 16, ("contiguous",) * 3)
    assert layout((16, 1), (8, 1)) == (2, 8, ("contiguous",) * 3)
    assert layout((9, 1), (8, 1)) == (2, 1, ("contiguous",) * 3)
    assert layout((8, 1), (8, 1), alignment=8) == (1, 2, ("contiguous",) * 3)
    assert layout((0, 0), (8, 1)) == (1, 16, ("scalar", "contiguous", "contiguous"))
    assert layout((1, 0), (0, 1)) == (2, 8, ("broadcast", "contiguous", "contiguous"))
    assert layout((1, 4), (8, 1))[2] == ("strided", "contiguous", "contiguous")


@pytest.mark.parametrize("seed", range(30))
def test_shared_elements_are_found(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.zeros(12, 20)
    rows, columns = (torch.randint(1, 9, (2,), generator=generator).tolist() for _ in range(2))
    starts = torch.randint(0, 11, (4,), generator=generator).tolist()
    step = 1 + seed % 2
    left = buffer[starts[0] :: step, starts[1] :: step][: rows[0], : columns[0]]
    right = buffer[starts[2] :: step, starts[3] :: step][: rows[1], : columns[1]]
    buffer.zero_()
    left.add_(1)
    assert share(left, right) == bool((right != 0).any())


CPU = Device(Target.parse("x86-64-v3"), "cpp")


def test_program_of_a_graph_made_by_hand() -> None:
    builder = Builder()
    x = builder.make("input", (), "float32", (n,), (0,))
    y = builder.make(
        "sin", (builder.make("add", (x, builder.const(1.0, "float32")), "float32", (n,)),), "float32", (n,)
    )
    graph = Graph("plain", (InputSpec("float32", (n,)),), (y,))
    program = program_of(graph, lambda condition: bool(condition), {"s0_0": 5}, [Memory(Strided((5,), (1,)))], CPU)
    operations = [instruction.op for instruction in program.kernels[0].bodies[0].instructions]
    assert operations == ["load", "const", "add", "sin", "store"]


# ------------------------------------------------------------------------------------------------- keys, rendering

RENDER = """
import sys; sys.path.insert(0, {root!r})
import json, torch, jitgen
exec(open({case!r}).read())
low = [rotate.lower(jitgen.TensorSpec(("M", 64), torch.bfloat16), jitgen.TensorSpec((64,)), 0.5, target=t, backend=b)
       for t, b in (("sm_90a", "cuda"), ("sm_80", "triton"), ("x86-64-v3", "cpp"))]
print(json.dumps([[l.key, l.source] for l in low]))
"""
CASE = """
@jitgen.jit
def rotate(x, cos, scale):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * scale
"""


def test_keys_and_sources_are_the_same_elsewhere(tmp_path: Path) -> None:
    """In another directory, under another home, in another process with another hash seed, with other user lines."""
    results = []
    for number, seed in enumerate((None, "77")):
        home = tmp_path / f"home {number}"
        home.mkdir()
        case = home / f"case{number}.py"
        case.write_text("\n" * (number * 17) + CASE)
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("JITGEN_", "XDG_", "TRITON_"))
        }
        environment |= {"HOME": str(home), "JITGEN_CACHE_DIR": str(home / "store")}
        code = RENDER.format(root=str(ROOT), case=str(case))
        if seed is None:
            done = fresh.run(code, cwd=home, env=environment)
        else:
            environment["PYTHONHASHSEED"] = seed
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=home, env=environment, capture_output=True, text=True
            )
        assert done.returncode == 0, done.stderr
        assert str(home) not in done.stdout
        assert str(ROOT) not in done.stdout
        results.append(done.stdout)
        assert list((home / "store").rglob("*")) == [], "lowering and rendering write nothing"
    assert results[0] == results[1]


def test_request_keys_tell_apart_what_matters() -> None:
    x, y = torch.ones(4, 8), torch.ones(8)

    def key(function: object, *arguments: object, **options: object) -> str:
        return lowered(function, *arguments, **options).key  # type: ignore[arg-type]

    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y

    base = key(scaled, x, y)
    assert base == key(scaled, x[:2], y), "sizes are no part of it"
    assert base == key(scaled, torch.ones(6, 32), torch.ones(32))
    others = [
        key(scaled, x.double(), y),
        key(scaled, x.t().contiguous().t(), y),
        key(scaled, x, y[:1]),
        key(scaled, x, y, target="generic" if host_target().arch != "generic" else "x86-64-v2"),
        key(scaled, x, y, target="sm_90a", backend="cuda"),
        key(scaled, x, y, target="sm_90", backend="cuda"),
        key(scaled, x, y, target="sm_90a", backend="triton"),
        key(lambda x, y: x * 2 + y, x, y),
    ]
    assert len({base, *others}) == len(others) + 1


def test_code_is_part_of_the_request_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    before = lowered(lambda x: x + 1, x).key
    monkeypatch.setattr(lowering, "code_digest", lambda: "of other code")
    assert lowered(lambda x: x + 1, x).key != before


# ----------------------------------------------------------------------------------------------------- structure

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "spec": {"errors", "settings", "quant"},
    "schedule": {"console", "errors", "fields", "settings", "spec", "_data"},
    "device": {"schedule", "spec"},
    "fields": {"errors"},
    "paths": {"errors"},
    "fingerprint": {"spec", "_data"},
    "ir": {"errors", "spec"},
    "quant": {"errors", "fingerprint", "forks", "frames", "paths", "spec", "ir", "progress"},
    "trace": {"codegen", "errors", "forks", "settings", "spec", "ir", "quant"},
    "checkpoints": {"errors", "spec", "quant", "progress"},
    "huggingface": {"errors", "quant", "call"},
    "integrations": {"errors", "quant", "call"},
    "models": {"call", "console", "errors", "ir", "quant", "runtime", "settings", "spec", "trace"},
    "gradients": {"errors", "spec", "ir", "trace"},
    "codegen": {"errors", "settings", "spec", "ir", "_data", "_version"},
    "kernel": {"errors", "spec", "device", "ir", "codegen", "_version"},
    "families": {
        "errors",
        "spec",
        "schedule",
        "device",
        "fingerprint",
        "ir",
        "codegen",
        "quant",
        "kernel",
    },
    "console": {"settings"},
    "forks": set(),
    "frames": set(),
    "progress": {"console", "forks"},
    "scratch": set(),
    "compilers": {"errors", "forks", "scratch", "settings", "spec", "_version"},
    "store": {"console", "errors", "settings", "spec", "_version", "_data"},
    "runtime": {"codegen", "errors", "scratch", "settings", "spec"},
}
"""What the modules of each package may import of jitgen, besides their own package."""
OUTERMOST = {"api", "cli", "tune", "__main__"}


@cache
def imports(path: Path) -> set[str]:
    """The parts of jitgen that a module imports, within functions too (but not for type checking alone)."""
    found: set[str] = set()
    for node in run_time_nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jitgen":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("jitgen.")}
    return found


def test_calls_know_of_no_deployment() -> None:
    """Recording subscribes to the events of calls."""
    for path in sorted((ROOT / "jitgen" / "call").rglob("*.py")):
        assert not imports(path) & {"deploy", "export", "dynamo"}, path


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package: str) -> None:
    place = ROOT / "jitgen" / package
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
        assert imports(path) - {package} <= ALLOWED[package], path


def test_nothing_imports_what_is_outermost() -> None:
    for path in sorted((ROOT / "jitgen").rglob("*.py")):
        part = path.relative_to(ROOT / "jitgen").parts[0].removesuffix(".py")
        if part not in OUTERMOST | {"__init__"}:
            assert not imports(path) & OUTERMOST, path


LIGHT = """
import sys, os
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
import torch
before, known = set(sys.modules), len(opened)
import jitgen
jitgen.jit
heavy = [name for name in set(sys.modules) - before
         if name.split(".")[0] in ("triton", "jinja2", "sympy", "cuda", "ctypes", "click", "rich") or "_dynamo" in name]
files = [str(path) for path in opened[known:] if not str(path).endswith((".py", ".pyc"))]
print(heavy, [path for path in files if not os.path.isdir(path)], torch.cuda.is_initialized())
"""


def test_import_is_light() -> None:
    done = fresh.run(LIGHT, cwd=ROOT)
    assert done.stdout.strip() == "[] [] False"


def test_dtypes_have_compute_dtypes_that_operations_know() -> None:
    for op in OPS.values():
        assert set(op.domain) <= set(COMPUTE_DTYPES), op.name
        assert op.arity in (1, 2, 3)
