"""Changed manifests of every family: nothing but a JitgenError comes of any, and no file outside the store.

Most changes are refused by the schema. What it accepts is lowered and rendered for one of the targets, every number of
rows that the entry stands for; Triton sources are looked into, and of what is accepted for the CPU a sample is built.
"""

from __future__ import annotations

import ast
import copy
import faulthandler
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import manifest_samples
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jitgen
from jitgen import pipeline
from jitgen.compilers import host
from jitgen.errors import JitgenError
from jitgen.families import registry
from jitgen.ir import graph as graphs
from jitgen.ir.scans import PLACES, SCANS
from jitgen.ir.scatters import SCATTERS
from jitgen.ir.sorts import SORTS
from jitgen.lowering import Lowered
from jitgen.pipeline import BuiltKernel
from jitgen.store import Store

TARGETS = (("auto", "x86-64-v3"), ("auto", "sm_90a"), ("triton", "sm_90a"), ("auto", "gfx942"))
"""Backend and target: every dialect."""
PAYLOAD = 'x\nimport os; os.system("touch ran")\n#'
VALUES: tuple[Any, ...] = (
    *(
        PAYLOAD,
        "",
        "a",
        "s0_0",
        "a0",
        "input",
        "add",
        "contract",
        "scan",
        "indices",
        "set",
        "philox",
        "mk,nk->mn",
        "view",
        "reshape",
        "float16",
        "bool",
        "int4",
        "sum",
    ),
    *(-(2**63), -1, 0, 1, 2, 3, 5, 7, 8, 64, 4096, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, 10**400),
    *(True, False, None, 0.0, -1.5, 1e308, float("inf"), float("nan"), [], {}, [0], [[]], [1, 2, 3], {"a": 1}),
    *({"float": text} for text in ((0.5).hex(), "nan", "inf", "-0x0.0p+0", "0x1.0000000000000p+1023", PAYLOAD)),
    {"op": "symbol", "args": ["s0_0"], "kind": "int"},
    {"op": "symbol", "args": ["s1_0"], "kind": "int"},
    {"op": "symbol", "args": ["rng_seed"], "kind": "int"},
    {"op": "sum", "args": [1, [-1, {"op": "symbol", "args": ["s0_0"], "kind": "int"}]]},
    {"op": "pow", "args": [{"op": "symbol", "args": ["s0_0"], "kind": "int"}, 64], "kind": "int"},
    {"op": "mod", "args": [7, {"op": "symbol", "args": ["s0_0"], "kind": "int"}], "kind": "int"},
)


class Fuzz:
    """The samples, and what has come of their changes."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.samples: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.build = 0
        """Every nth of what is rendered for the CPU is compiled too; nothing where 0."""

    def attempt(self, raw: bytes, backend: str, target: str) -> None:
        """Prewarm from ``raw``, with what is compiled being rendered only."""
        path = self.directory / "changed.json"
        path.write_bytes(raw)
        store = Store.open(self.directory / "store")
        try:
            jitgen.prewarm(path, [target], store=store)
            self.outcomes["built"] += 1
        except JitgenError as error:
            message = str(error)
            assert "it cannot be checked" not in message, message
            assert message.isprintable() or message.startswith("prewarm is incomplete")
            kind = "refused" if "is not a readable manifest" in message else "failed"
            self.outcomes[kind] += 1
            if kind == "failed":
                self.outcomes[message.split("cannot be built from the manifest")[-1][:60]] += 1

    def fetch(self, lowered: Lowered, store: Store) -> tuple[BuiltKernel, ...]:
        """In place of ``pipeline.fetch``."""
        for number, kernel in enumerate(lowered.program.kernels):
            source, _ = lowered.render(number)
            check_source(source)
            self.outcomes[f"family {kernel.family}"] += 1
            self.outcomes["random numbers"] += "philox" in source.text
        self.outcomes["rendered"] += 1
        on_cpu = lowered.route.target.kind == "cpu"
        self.outcomes["on cpu"] += on_cpu
        if on_cpu and self.build and self.outcomes["on cpu"] % self.build == 0:
            self.outcomes["compiled"] += 1
            return pipeline.build(lowered, store)
        plan = {"name": "x", "artifacts": [], "toolchains": [], "target": "", "backend": "", "compiler": ""}
        store.put_plan(lowered.key, plan | {"specialization": ""})
        return ()


def check_source(source: Any) -> None:
    """What is printed is ASCII without control characters; a Triton source has definitions and imports alone."""
    text = source.text
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    assert "os.system" not in text
    if source.language != "triton":
        return
    for statement in ast.parse(text).body:
        assert isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign)), ast.dump(statement)
        names = [alias.name for alias in getattr(statement, "names", ())]
        modules = [getattr(statement, "module", None) or name for name in names]
        assert all(module.partition(".")[0] == "triton" for module in modules), modules


def ways(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a tree."""
    yield way
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from ways(child, (*way, key))


def changed(content: Any, choose: random.Random) -> Any:
    """``content`` with one change somewhere."""
    places = list(ways(content))[1:]
    if not places:
        return content
    way = choose.choice(places)
    parent = content
    for key in way[:-1]:
        parent = parent[key]
    key, action = way[-1], choose.randrange(7)
    if action == 0:
        del parent[key]
    elif action == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif action == 1:
        parent[choose.choice(("", "code", "s7_0", "a0", PAYLOAD))] = copy.deepcopy(parent[key])
    elif action == 2:  # what stands elsewhere fits more often
        other = content
        for step in choose.choice(places):
            other = other[step]
        parent[key] = copy.deepcopy(other)
    elif action == 3 and type(parent[key]) is int:
        parent[key] += choose.choice((-2, -1, 1, 2, 16))
    elif action == 4 and isinstance(parent, list):
        other_key = choose.randrange(len(parent))
        parent[key], parent[other_key] = parent[other_key], parent[key]
    else:
        parent[key] = copy.deepcopy(choose.choice(VALUES))
    return content


UNARY = ("exp", "neg", "abs", "sqrt", "sigmoid", "floor", "isnan", "cast", "bitwise_not")
BINARY = ("add", "mul", "maximum", "pow", "atan2", "eq", "lt", "left_shift", "remainder")


def _other_size(entry: Any, choose: random.Random) -> None:
    """One size, wherever it stands, is another one."""
    places = [place for place in entry["inputs"] if place["sizes"]]
    if not places:
        return
    before = choose.choice(choose.choice(places)["sizes"])
    size = choose.choice((0, 2, 3, 16, 1000, 2**20, 2**33))
    for index, place in enumerate(entry["inputs"]):
        for dim, found in enumerate(place["sizes"]):
            if found == before:
                place["sizes"][dim] = entry["environment"][f"s{index}_{dim}"] = size


def _other_memory(entry: Any, choose: random.Random) -> None:
    for place in entry["inputs"]:
        place["strides"] = [choose.choice((0, 1, 2, 7, 2**33)) for _ in place["strides"]]
        place["alignment"] = choose.choice((1, 2, 4, 8, 16))


def _other_dtype(entry: Any, choose: random.Random) -> None:
    before, after = choose.sample(["float16", "bfloat16", "float32", "float64", "int32", "int64"], 2)
    changed = json.loads(json.dumps(entry).replace(f'"{before}"', f'"{after}"'))
    entry.update(changed)


def _other_operation(entry: Any, choose: random.Random) -> None:
    nodes = [node for node in entry["graph"]["nodes"] if node["inputs"]]
    node = choose.choice(nodes or [{"op": "", "inputs": [], "attrs": []}])
    if node["op"] == "reduce":
        node["attrs"][0] = choose.choice(("sum", "prod", "max", "min", "argmax", "any"))
    elif node["op"] == "view" and node["attrs"][0] == "permute":
        choose.shuffle(node["attrs"][1])
        node["shape"].reverse()
    elif node["op"] == "scan":
        node["attrs"] = [choose.choice(SCANS), choose.randrange(len(node["shape"])), choose.choice((True, False))]
        node["dtype"] = "int64" if node["attrs"][0] in PLACES else node["dtype"]
    elif node["op"] == "sort":
        _, dim, descending, start = node["attrs"]
        node["attrs"] = [choose.choice(SORTS), dim, not descending, choose.choice((start, 0, 1, 2))]
        node["dtype"] = "int64" if node["attrs"][0] == "indices" else node["dtype"]
    elif node["op"] == "scatter":
        node["attrs"][0] = choose.choice(list(SCATTERS))
        choose.shuffle(node["attrs"][1])
    elif node["op"] == "gather":
        choose.shuffle(node["attrs"])
    elif not node["attrs"]:
        node["op"] = choose.choice({1: UNARY, 2: BINARY}.get(len(node["inputs"]), (node["op"],)))
        node["dtype"] = "bool" if node["op"] in ("isnan", "eq", "lt") else node["dtype"]


def _other_operands(entry: Any, choose: random.Random) -> None:
    """Nodes read others of the same form that are there before them."""
    nodes = entry["graph"]["nodes"]
    for number, node in enumerate(nodes):
        for place, operand in enumerate(node["inputs"]):
            form = nodes[operand]["dtype"], nodes[operand]["shape"]
            alike = [other for other in range(number) if (nodes[other]["dtype"], nodes[other]["shape"]) == form]
            if choose.randrange(3) == 0:
                node["inputs"][place] = choose.choice(alike)


def _other_outputs(entry: Any, choose: random.Random) -> None:
    count = len(entry["graph"]["nodes"])
    entry["graph"]["outputs"] = [choose.randrange(count) for _ in range(choose.randrange(1, 5))] if count else []


def _more_nodes(entry: Any, choose: random.Random) -> None:
    """Pointwise nodes and reductions on top, which become outputs."""
    nodes = entry["graph"]["nodes"]
    for _ in range(choose.randrange(1, 4)):
        number = choose.randrange(len(nodes) or 1)
        if not nodes:
            return
        below, shape = nodes[number], nodes[number]["shape"]
        node = {
            "op": choose.choice(UNARY[:6]),
            "inputs": [number],
            "dtype": below["dtype"],
            "shape": shape,
            "attrs": [],
        }
        if shape and choose.randrange(2):
            dim = choose.randrange(len(shape))
            small = [*shape[:dim], 1, *shape[dim + 1 :]]
            kind = choose.choice(("sum", "max", "argmin", "prod"))
            node |= {"op": "reduce", "attrs": [kind, [dim]], "shape": small}
            node["dtype"] = "int64" if kind == "argmin" else below["dtype"]
            if choose.randrange(2):
                nodes.append(node)
                node = {**node, "op": "view", "inputs": [len(nodes) - 1], "attrs": ["expand"], "shape": shape}
        elif len(shape) > 1 and choose.randrange(2):
            order = choose.sample(range(len(shape)), len(shape))
            node |= {"op": "view", "attrs": ["permute", order], "shape": [shape[dim] for dim in order]}
        nodes.append(node)
        entry["graph"]["outputs"].append(len(nodes) - 1)


CONSISTENT = (
    *(_other_size, _other_memory, _other_dtype, _other_operation, _other_operands, _other_outputs, _more_nodes),
)


def consistent(content: Any, choose: random.Random) -> Any:
    """``content`` with a change in every place where it shows, so that the schema may accept it."""
    entry = choose.choice(content["entries"])
    for _ in range(choose.choice((1, 1, 2, 3))):
        choose.choice(CONSISTENT)(entry, choose)
    with suppress(Exception):
        entry["graph"] = graphs.to_json(graphs.from_json(entry["graph"]))
    return content


def changed_bytes(raw: bytes, choose: random.Random) -> bytes:
    for _ in range(choose.randrange(1, 4)):
        place, length = choose.randrange(len(raw) + 1), choose.randrange(1, 6)
        inserted = choose.choice(
            (b"", bytes(choose.randrange(256) for _ in range(length)), b"[" * 3000, b'"', b"{", b"1e999")
        )
        raw = raw[:place] + inserted + raw[place + choose.choice((0, length)) :]
    return raw


def run(fuzz: Fuzz, seed: int) -> None:
    choose = random.Random(seed)
    backend, target = choose.choice(TARGETS)
    text = choose.choice(fuzz.samples)
    if choose.randrange(10) == 0:
        return fuzz.attempt(changed_bytes(text.encode(), choose), backend, target)
    content = json.loads(text)
    for entry in content["entries"]:
        entry["backend"] = backend
    if choose.randrange(2) == 0:
        content = consistent(content, choose)
    else:
        for _ in range(choose.choice((1, 1, 1, 2, 4))):
            content = changed(content, choose)
    return fuzz.attempt(json.dumps(content).encode(), backend, target)


def listing(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    """With the working directory and HOME in directories that must stay as they are."""
    directory, canary = tmp_path_factory.mktemp("fuzz"), tmp_path_factory.mktemp("canary")
    (canary / "kept").write_text("kept")
    patched = pytest.MonkeyPatch()
    patched.setenv("JITGEN_CACHE_DIR", str(directory / "empty"))
    found = Fuzz(directory)
    for number, make in enumerate(manifest_samples.CALLS.values()):
        found.samples.append(json.dumps(manifest_samples.recorded(directory / f"{number}.json", make())))
    patched.chdir(canary)
    patched.setenv("HOME", str(canary))
    (directory / "temporary").mkdir()
    patched.setattr("tempfile.tempdir", str(directory / "temporary"))
    patched.setattr(pipeline, "fetch", found.fetch)
    before = listing(directory / "..")
    yield found
    assert listing(canary) == ["kept"]
    outside = {Path(path).name for path in listing(directory / "..") if "/store/" not in path and path not in before}
    # torch makes a directory of its own when a part of it is first imported; compilers leave nothing behind.
    assert {name for name in outside if not name.startswith("torchinductor_")} <= {"changed.json", "store"}
    patched.undo()


EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "4")) * 5
FEW = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)


@FEW
@given(seed=st.integers(0, 2**64))
def test_nothing_else_comes_of_a_changed_manifest(fuzz: Fuzz, seed: int) -> None:
    run(fuzz, seed)


@FEW
@given(
    content=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_nor_of_any_json(fuzz: Fuzz, content: Any) -> None:
    fuzz.attempt(json.dumps(content).encode(), *TARGETS[0])
    fuzz.attempt(json.dumps({"schema": 1, "entries": [content]}).encode(), *TARGETS[0])


@pytest.mark.slow
def test_nothing_else_comes_of_many_changed_manifests(fuzz: Fuzz) -> None:
    """20,000 changes; of those that render for the CPU every hundredth is compiled."""
    fuzz.build = 100 if host.toolchain() is not None else 0
    fuzz.outcomes.clear()
    for seed in range(20_000):
        faulthandler.dump_traceback_later(600, exit=True)  # a pass that does not end is an error too
        try:
            run(fuzz, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    faulthandler.cancel_dump_traceback_later()
    print(fuzz.outcomes)
    assert fuzz.outcomes["refused"] > 8_000
    assert fuzz.outcomes["rendered"] > 1_000
    for family in registry.FAMILIES:
        assert fuzz.outcomes[f"family {family.name}"] > 100
    assert fuzz.outcomes["random numbers"] > 100
