"""Manifests come from anywhere: what ``record`` writes is accepted, anything else is refused with the way to it."""

from __future__ import annotations

import copy
import json
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import manifest_samples
import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import CacheError, pipeline
from jitgen.compilers import host
from jitgen.deploy import expression_schema, manifest, manifest_schema, node_schema, row_variants
from jitgen.gradients import plan
from jitgen.ir import graph, ops, symbols
from jitgen.ir.nodes import CUSTOM_GRADIENT
from jitgen.quant.formats import FORMATS
from tests import fresh

Content = dict[str, Any]

CHECKOUT = Path(jitgen.__file__).parents[1]
SYMBOL = {"op": "symbol", "args": ["s0_0"], "kind": "int"}
FLOAT_SYMBOL = {"op": "symbol", "args": ["a0"], "kind": "float"}
TWO = {"float": (2.0).hex()}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Content]:
    directory = tmp_path_factory.mktemp("manifests")
    before = os.environ.get("JITGEN_CACHE_DIR")
    os.environ["JITGEN_CACHE_DIR"] = str(directory / "store")
    found = {
        name: manifest_samples.recorded(directory / f"{number}.json", make())
        for number, (name, make) in enumerate(manifest_samples.CALLS.items())
    }
    if before is not None:
        os.environ["JITGEN_CACHE_DIR"] = before
    return found


# ---------------------------------------------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("name", manifest_samples.CALLS)
def test_what_was_recorded_is_accepted(name: str, samples: dict[str, Content]) -> None:
    content = samples[name]
    assert content["entries"]
    assert manifest_schema.check(content) == content["entries"]


def test_the_samples_have_every_operation(samples: dict[str, Content]) -> None:
    nodes = [n for content in samples.values() for entry in content["entries"] for n in entry["graph"]["nodes"]]
    assert {n["op"] for n in nodes} >= {kind.name for kind in node_schema.CHECKS} - ops.OPS.keys()
    assert {n["attrs"][0] for n in nodes if n["op"] == "view"} == node_schema.VIEWS.keys()
    assert {n["attrs"][0] for n in nodes if n["op"] == "dequantize"} <= FORMATS.keys()


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_calls_with_out_and_merged_recordings_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    function = jitgen.jit(manifest_samples.gate)
    x, y = torch.randn(6, 20), torch.randn(20)
    with jitgen.record(path):
        function(x, y, out=torch.empty(20, 6).t())
    assert any(entry["results"] for entry in manifest_schema.read(path))
    with jitgen.record(path):
        function(x.double(), y.double())
    assert len(manifest_schema.read(path)) == 3
    assert jitgen.prewarm(path, ["cpu"]).count("failed") == 0


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("name", ["described", "scaled", "padded not", "scaled by nan"])
def test_what_was_recorded_is_built(name: str, samples: dict[str, Content], tmp_path: Path) -> None:
    """Functions without kernels, scalars that are known where a row is one, and infinite ones among them."""
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(samples[name]))
    assert jitgen.prewarm(path, ["cpu"]).count("failed") == 0
    function, arguments = manifest_samples.CALLS[name]()
    torch.testing.assert_close(jitgen.jit(function)(*arguments), function(*arguments), equal_nan=True)


def test_the_table_covers_what_expressions_are_made_of() -> None:
    assert expression_schema.OPERATORS.keys() == symbols._EVALUATE.keys()


def _marked(x: torch.Tensor) -> torch.Tensor:
    return F.elu(x) * F.max_pool1d(x, 3, 1, 1) + torch.linalg.vector_norm(x).detach()


def _forward(function: Callable[..., Any], x: torch.Tensor) -> None:
    function(x)


def _backward(function: Callable[..., Any], x: torch.Tensor) -> None:
    function(x).sum().backward()


def _second_derivative(function: Callable[..., Any], x: torch.Tensor) -> None:
    (found,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    found.sum().backward()


def _lowered(function: Callable[..., Any], x: torch.Tensor) -> None:
    function.lower(x)


def _transformed(function: Callable[..., Any], x: torch.Tensor) -> None:
    torch.func.vmap(torch.func.grad(lambda row: function(row).sum()))(x.detach()[None])


def _compiled(function: Callable[..., Any], x: torch.Tensor) -> None:
    torch.compile(_marked, backend="jitgen")(x).sum().backward()


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("call", [_forward, _backward, _second_derivative, _lowered, _transformed, _compiled])
def test_marks_for_gradients_are_not_recorded(
    call: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace whose gradients are computed has nodes that state them, and views that mark values; no manifest does."""
    differentiated: list[graph.Graph] = []
    active = plan._active
    monkeypatch.setattr(plan, "_active", lambda of, wanted: (differentiated.append(of), active(of, wanted))[1])
    with jitgen.record(tmp_path / "specs.json"):
        call(jitgen.jit(_marked), torch.randn(6, 20, requires_grad=True))
    assert any(node.kind is CUSTOM_GRADIENT for of in differentiated for node in graph.topological(of.outputs))
    nodes = [node for entry in manifest_schema.read(tmp_path / "specs.json") for node in entry["graph"]["nodes"]]
    assert nodes
    assert {node["op"] for node in nodes} <= {kind.name for kind in node_schema.CHECKS}
    assert {node["attrs"][0] for node in nodes if node["op"] == "view"} <= node_schema.VIEWS.keys()


# ---------------------------------------------------------------------------------------------------- the exploits


def _prewarm(directory: Path, content: Content, target: str) -> subprocess.CompletedProcess[str]:
    (directory / "evil.json").write_text(json.dumps(content))
    return fresh.run(
        "from jitgen.cli import main; main()",
        *("prewarm", "evil.json", "--target", target),
        cwd=directory,
        env=os.environ | {"JITGEN_CACHE_DIR": str(directory / "store"), "PYTHONPATH": str(CHECKOUT)},
    )


def _named(content: Content, name: Any) -> Content:
    renamed = copy.deepcopy(content)
    for entry in renamed["entries"]:
        entry["name"] = entry["graph"]["name"] = name
    return renamed


PYTHON_NAME = 'h\nimport os; os.system("touch ran")\n#'
CPP_NAME = 'h\n#include <cstdio>\n__attribute__((constructor)) static void run() { fclose(fopen("ran", "w")); }\n//'


@pytest.mark.parametrize(("name", "target"), [(PYTHON_NAME, "gfx942"), (CPP_NAME, "x86-64-v2")])
@pytest.mark.quick(where=lambda target: target == "gfx942")
def test_a_name_runs_no_code(name: str, target: str, samples: dict[str, Content], tmp_path: Path) -> None:
    done = _prewarm(tmp_path, _named(samples["gate"], name), target)
    assert done.returncode == 2
    assert "entries[0].name: " in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.json"], "nothing was built, and nothing ran"


def test_nor_does_a_symbol(samples: dict[str, Content]) -> None:
    content = copy.deepcopy(samples["gate"])
    text = json.dumps(content).replace("s0_0", "s0_0\\nimport os")
    with pytest.raises(CacheError, match=r"entries\[0\]\.environment: lacks s0_0"):
        manifest_schema.check(json.loads(text))


# --------------------------------------------------------------------------------------------------- what is refused


def _numbers(content: Content) -> dict[str, int]:
    """Of the first node of each operation, and of each kind of view (``view_slice``), in the first entry."""
    numbers: dict[str, int] = {}
    for number, node in enumerate(content["entries"][0]["graph"]["nodes"]):
        numbers.setdefault(node["op"], number)
        if node["op"] == "view":
            numbers.setdefault(f"view_{node['attrs'][0]}", number)
    return numbers


def _placed(content: Content, way: str, value: Any) -> Content:
    """``content`` with ``value`` at ``way``."""
    changed = copy.deepcopy(content)
    *keys, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", way)]
    place: Any = changed
    for key in keys:
        place = place[key]
    place[last] = value
    return changed


def _deep(levels: int) -> Any:
    value: Any = SYMBOL
    for _ in range(levels):
        value = {"op": "max", "args": [value, 2], "kind": "int"}
    return value


NODE = "graph.nodes[{%s}].%s"
AT = "graph.nodes[{%s}]"
GUARD = "graph.guards[0]"
# (sample, where, what is put there, what the message says; a fifth is where it says so, if somewhere else)
REFUSED: list[tuple[Any, ...]] = [
    ("gate", "name", "other", "not its graph's name"),
    *(("gate", "name", name, "no function's name") for name in ("", "a b", "größe", "x" * 101, "1a", 7, None, "a\n")),
    *(("gate", "graph.name", name, "no function's name") for name in ("a\n#", "h\u2028", ["h"])),
    ("gate", "backend", "rocm", "none of auto, triton, cuda, cpp"),
    ("gate", "backend", ["cpp"], "none of auto"),
    ("gate", "compiler", "nvrtc", "none of null"),
    ("gate", "variant", "abc", "64 hexadecimal digits"),
    ("gate", "variant", 7, "64 hexadecimal digits"),
    # memory
    *(("gate", "inputs[0].sizes[0]", size, "not an integer of at least 0") for size in (-1, 2**63, 6.0, True, "6")),
    *(("gate", "inputs[0].strides[1]", stride, "not an integer of at least 0") for stride in (-1, 2**64, None)),
    ("gate", "inputs[0].strides", [1], "has 1 items; it may have exactly 2"),
    ("gate", "inputs[0].strides", [2**62, 1], "further than an address"),
    ("gate", "inputs[0].sizes", [2**40, 2**40], "elements"),
    ("gate", "inputs[0].sizes", [1] * 65, "items"),
    *(("gate", "inputs[0].alignment", value, "none of 1, 2, 4, 8, 16") for value in (0, 3, 32, -8, True, 8.0)),
    ("gate", "inputs[0]", [], "not an object"),
    ("gate", "inputs", [], "lacks", "environment"),
    ("gate", "results", [{"sizes": [6, 21], "strides": [21, 1], "alignment": 16}], "the graph's outputs have"),
    ("gate", "results", [{"sizes": [6, 20], "strides": [20, 1], "alignment": 16}] * 2, "items"),
    # the environment
    ("gate", "environment.s0_0", 7, "none of 6"),
    ("gate", "environment.s0_0", 6.0, "none of 6"),
    ("gate", "environment.s9_0", 7, "lacks a0", "environment"),
    ("gate", "environment", [], "not an object"),
    *(("scaled", "environment.a1", value, "neither a float nor an integer") for value in ("3", True, None, 2**2000)),
    ("scaled", "environment.a0", 1, "none of int", "graph.nodes[1].attrs[0].kind"),
    # inputs
    ("gate", "graph.schema", 2, "none of 1"),
    ("gate", "graph.schema", True, "none of 1"),
    ("gate", "graph.inputs[0].dtype", "float7", "none of float64"),
    ("gate", "graph.inputs[0].shape[0]", 6, "not the size of a dimension"),
    ("gate", "graph.inputs[0].shape[0]", {**SYMBOL, "args": ["s1_0"]}, "not the size of a dimension"),
    ("gate", "graph.inputs[0].shape[0]", 1, "not the size of a dimension"),
    ("gate", "graph.inputs[0].shape", [], "items"),
    ("gate", "graph.inputs", [], "items"),
    # nodes
    *(("gate", "graph.nodes[0].op", op, "no node operation") for op in ("system", "", None, ["input"])),
    ("gate", "graph.nodes[0].dtype", "float7", "none of float64"),
    ("gate", "graph.nodes[0].dtype", "float64", "its dtype is float64, not float32", "graph.nodes[0]"),
    ("gate", "graph.nodes[0].shape", [6, 20], "not that of input 0", "graph.nodes[0]"),
    ("gate", "graph.nodes[0].shape[0]", -1, "a size is an integer of at least 0"),
    ("gate", "graph.nodes[0].shape[0]", True, "a size is an integer of at least 0"),
    ("gate", "graph.nodes[0].shape[0]", TWO, "a size is an integer of at least 0"),
    ("gate", "graph.nodes[0].shape", [1] * 65, "items"),
    ("gate", "graph.nodes[0].shape", [2**32, 2**32], "elements"),
    ("gate", "graph.nodes[0].attrs", [2], "not an integer of at least 0 and below 2", "graph.nodes[0].attrs[0]"),
    ("gate", "graph.nodes[0].attrs", [0, 0], "items"),
    ("gate", "graph.nodes[1].inputs", [1], "not an integer of at least 0 and below 1", "graph.nodes[1].inputs[0]"),
    ("gate", "graph.nodes[1].inputs", [-1], "not an integer of at least 0", "graph.nodes[1].inputs[0]"),
    ("gate", NODE % ("mul", "inputs"), [0], "items"),
    ("gate", NODE % ("mul", "inputs"), [0, 0, 0], "items"),
    ("gate", NODE % ("mul", "attrs"), ["x"], "items"),
    ("rope", NODE % ("mul", "inputs"), [0, 1], "an operand is", AT % "mul"),
    ("gate", NODE % ("mul", "dtype"), "float64", "its dtype is float64", AT % "mul"),
    ("gate", NODE % ("sigmoid", "op"), "bitwise_not", "not defined for float32", AT % "sigmoid"),
    ("causal", NODE % ("where", "inputs[0]"), 0, "its condition is not bool", AT % "where"),
    ("causal", NODE % ("iota", "dtype"), "float32", "its dtype is float32", AT % "iota"),
    ("causal", NODE % ("iota", "attrs[0]"), 1, "not an integer of at least 0 and below 1"),
    *(("causal", NODE % ("const", "attrs[0]"), value, "not a number of", AT % "const") for value in (True, 2)),
    ("integers", NODE % ("const", "attrs[0]"), 2**63, "out of the range of int64", AT % "const"),
    ("integers", NODE % ("const", "attrs[0]"), TWO, "not a number of int64", AT % "const"),
    ("causal", NODE % ("const", "attrs[0]"), 1.5, "neither a bool, nor an integer"),
    ("causal", NODE % ("const", "attrs[0]"), "0", "neither a bool, nor an integer"),
    *(
        ("scaled", NODE % ("scalar", "attrs[0]"), {"float": text}, "not an expression")
        for text in ("0x1.0000000000000p+0", "1.0; import os")
    ),
    ("scaled", NODE % ("scalar", "attrs[0]"), 3, "not an expression"),
    ("scaled", NODE % ("scalar", "shape"), [3], "not []", AT % "scalar"),
    # numbers and expressions
    *(
        (
            "narrowed",
            NODE % ("const", "attrs[0]"),
            {"float": text},
            "as float.hex writes it or too large",
            NODE % ("const", "attrs[0].float"),
        )
        for text in ("1.5", "0x1p0", "0x1.8p+1", "Infinity", "0x1.0000000000000p+9999", "__import__('os')", 1, None)
    ),
    ("narrowed", NODE % ("const", "attrs[0]"), {"float": (1.0).hex(), "x": 1}, "not an expression or has"),
    *(
        ("gate", "graph.nodes[0].shape[0]", {"op": op, "args": [SYMBOL, 2], "kind": kind}, *rest)
        for op, kind, *rest in (
            ("system", "int", "none of add", "graph.nodes[0].shape[0].op"),
            (["max"], "int", "none of add", "graph.nodes[0].shape[0].op"),
            ("max", "text", "none of int, float", "graph.nodes[0].shape[0].kind"),
            ("add", "int", "none of float", "graph.nodes[0].shape[0].kind"),
            ("eq", "bool", "a size is an integer"),
            ("truediv", "float", "a size is an integer"),
            ("product", "int", "is not an expression", "graph.nodes[0].shape[0].args[1]"),
            ("symbol", "int", "items", "graph.nodes[0].shape[0].args"),
        )
    ),
    *(
        ("gate", "graph.nodes[0].shape[0]", value, *rest)
        for value, *rest in (
            ({**SYMBOL, "args": ["s9_9"]}, "no symbol of the environment", "graph.nodes[0].shape[0].args[0]"),
            ({**SYMBOL, "args": [["s0_0"]]}, "no symbol of the environment", "graph.nodes[0].shape[0].args[0]"),
            ({**SYMBOL, "kind": "float"}, "none of int", "graph.nodes[0].shape[0].kind"),
            ({"op": "symbol", "args": ["s0_0"]}, "lacks kind"),
            ({**SYMBOL, "code": 1}, "has 'code'"),
            ({"op": "mod", "args": [SYMBOL, 0], "kind": "int"}, "cannot be evaluated"),
            ({"op": "pow", "args": [SYMBOL, 10**9], "kind": "int"}, "cannot be evaluated"),
            ({"op": "pow", "args": [-3, TWO | {"float": (0.5).hex()}], "kind": "float"}, "no real number"),
            (
                {"op": "max", "args": [SYMBOL, TWO], "kind": "int"},
                "a float in an expression",
                "graph.nodes[0].shape[0].args[1]",
            ),
            ({"op": "max", "args": [SYMBOL], "kind": "int"}, "items", "graph.nodes[0].shape[0].args"),
            (
                {"op": "max", "args": [SYMBOL, 2**2000], "kind": "int"},
                "at most 1024 bits",
                "graph.nodes[0].shape[0].args[1]",
            ),
            (
                {"op": "sum", "args": [1.0, [1, SYMBOL]]},
                "neither a bool, nor an integer",
                "graph.nodes[0].shape[0].args[0]",
            ),
            ({"op": "sum", "args": [0, [True, SYMBOL]]}, "not an integer", "graph.nodes[0].shape[0].args[1][0]"),
            ({"op": "sum", "args": [0, [1, 2]]}, "not an expression", "graph.nodes[0].shape[0].args[1][1]"),
            ({"op": "sum", "args": [0, [1]]}, "items", "graph.nodes[0].shape[0].args[1]"),
            ({"op": "sum", "args": [-9, [1, SYMBOL]]}, "a size is an integer"),
            ({"op": "sum", "args": [0, *[[1, SYMBOL]] * 1000]}, "items", "graph.nodes[0].shape[0].args"),
            (_deep(101), "nested more than 100 levels deep", f"graph.nodes[0].shape[0]{'.args[0]' * 100}"),
        )
    ),
    ("scaled", NODE % ("scalar", "attrs[0].args"), [FLOAT_SYMBOL], "no symbol", NODE % ("scalar", "attrs[0].args[0]")),
    # movement
    *(("moved", NODE % ("view", "attrs[0]"), kind, "none of permute") for kind in ("system", None, 1)),
    ("moved", NODE % ("view", "attrs"), [], "items"),
    ("moved", NODE % ("view_permute", "attrs[1]"), [0, 0], "a dimension twice"),
    ("moved", NODE % ("view_permute", "attrs[1]"), [0], "items"),
    ("moved", NODE % ("view_permute", "attrs[1]"), 1, "not an array"),
    ("moved", NODE % ("view_permute", "attrs[1]"), [0, 1], "its shape is", AT % "view_permute"),
    ("moved", NODE % ("view_permute", "dtype"), "float64", "its dtype is", AT % "view_permute"),
    ("moved", NODE % ("view_slice", "attrs[1]"), 2, "below 2"),
    ("moved", NODE % ("view_slice", "attrs[2]"), -2, "outside of a dimension"),
    ("moved", NODE % ("view_slice", "attrs[2]"), TWO, "outside of a dimension"),
    ("moved", NODE % ("view_slice", "attrs[2]"), 3, "reaches from 3", AT % "view_slice"),
    ("moved", NODE % ("view_slice", "attrs[3]"), 0, "a step of 0"),
    ("moved", NODE % ("view_slice", "attrs[3]"), 2**40, "below 2147483648"),
    ("moved", NODE % ("view_unsqueeze", "attrs[1]"), 3, "below 3"),
    ("moved", NODE % ("view_unsqueeze", "attrs[1]"), 0, "its shape is", AT % "view_unsqueeze"),
    ("moved", NODE % ("view_squeeze", "attrs[1]"), 0, "not 1", AT % "view_squeeze"),
    ("moved", NODE % ("view_reshape", "shape"), [31], "different numbers of elements", AT % "view_reshape"),
    ("softmax", NODE % ("view_expand", "shape[0]"), 7, "does not expand to", AT % "view_expand"),
    ("softmax", NODE % ("view_expand", "shape"), [6], "does not expand to", AT % "view_expand"),
    ("rope", NODE % ("cat", "attrs[0]"), 3, "below 3"),
    ("rope", NODE % ("cat", "attrs[0]"), 0, "does not fit beside", AT % "cat"),
    ("rope", NODE % ("cat", "inputs"), [0], "items"),
    ("rope", NODE % ("cat", "inputs"), [0, 0], "have 16 elements along dimension", AT % "cat"),
    ("rope", NODE % ("cat", "inputs"), [], "items"),
    ("rope", NODE % ("cat", "dtype"), "float32", "its dtype is float32", AT % "cat"),
    # arithmetic
    ("softmax", NODE % ("reduce", "attrs[0]"), "median", "none of sum"),
    ("softmax", NODE % ("reduce", "attrs[1]"), [], "items"),
    ("softmax", NODE % ("reduce", "attrs[1]"), [2], "below 2", NODE % ("reduce", "attrs[1][0]")),
    ("softmax", NODE % ("reduce", "attrs[1]"), [1, 1], "ascending"),
    ("softmax", NODE % ("reduce", "attrs[1]"), [0, 1], "its shape is", AT % "reduce"),
    ("softmax", NODE % ("reduce", "attrs[0]"), "any", "any of float16", AT % "reduce"),
    ("softmax", NODE % ("reduce", "attrs[0]"), "argmax", "not int64", AT % "reduce"),
    ("dense", NODE % ("contract", "attrs[2]"), "exact", "none of ieee, tf32, fast"),
    ("dense", NODE % ("contract", "inputs"), [0, 0], "its shape is", AT % "contract"),
    ("dense", NODE % ("contract", "dtype"), "float16", "its dtype is float16", AT % "contract"),
    (
        *("transposed", NODE % ("contract", "inputs"), lambda numbers: [numbers["dequantize"]] * 2),
        *("activation is a quantised weight", AT % "contract"),
    ),
    ("quantised", NODE % ("dequantize", "attrs[0]"), "int9", "none of int8, int4, uint4"),
    ("quantised", NODE % ("dequantize", "attrs[2]"), "another", "none of portable"),
    *(
        ("quantised", NODE % ("dequantize", "attrs[1]"), group, "group_size", AT % "dequantize")
        for group in (7, "32", 32.0, True, [32])
    ),
    ("quantised", NODE % ("dequantize", "attrs[1]"), 64, "a tensor is", AT % "dequantize"),
    ("quantised", NODE % ("dequantize", "shape"), [64, 96], "a tensor is", AT % "dequantize"),
    ("quantised", NODE % ("dequantize", "shape"), [64, 2**56], "dequantize", AT % "dequantize"),
    ("quantised", NODE % ("dequantize", "shape"), [SYMBOL, 64], "not (N, K) in numbers", AT % "dequantize"),
    ("quantised", NODE % ("dequantize", "dtype"), "int8", "a weight of int8", AT % "dequantize"),
    ("quantised", NODE % ("dequantize", "inputs"), [1], "items"),
    (
        *("quantised", NODE % ("add", "inputs"), lambda numbers: [numbers["dequantize"]] * 2, "of a quantised weight"),
        NODE % ("add", "inputs[0]"),
    ),
    ("described", NODE % ("cast", "attrs"), ["copy", -1], "not an integer", NODE % ("cast", "attrs[1]")),
    (
        "described",
        NODE % ("cast", "attrs"),
        ["copied"],
        "none of contiguous, channels_last, copy",
        NODE % ("cast", "attrs[0]"),
    ),
    ("described", NODE % ("cast", "attrs"), ["contiguous", 1], "items"),
    ("described", NODE % ("cast", "dtype"), "float16", "its dtype is float16", AT % "cast"),
    ("narrowed", NODE % ("cast", "shape"), [3, 8], "its shape is", AT % "cast"),
    # guards, outputs, updates, order
    ("padded", GUARD, [], "items"),
    ("padded", f"{GUARD}[0]", 1, "not an expression"),
    ("padded", f"{GUARD}[0]", SYMBOL, "does not hold", GUARD),
    ("padded", f"{GUARD}[1]", "x", "neither a bool, nor an integer"),
    ("padded", f"{GUARD}[1]", 77, "does not hold", GUARD),
    ("padded", "graph.guards", {}, "not an array"),
    ("gate", "graph.outputs", [99], "below 7", "graph.outputs[0]"),
    ("gate", "graph.outputs", [True], "below 7", "graph.outputs[0]"),
    (
        *("quantised", "graph.outputs", lambda numbers: [numbers["dequantize"]], "a quantised weight"),
        "graph.outputs[0]",
    ),
    (
        *("quantised", NODE % ("add", "inputs"), lambda numbers: [numbers["dequantize"] - 1] * 2),
        *("is a tensor of a quantised weight or an operand is", AT % "add"),
    ),
    (
        *("quantised", NODE % ("dequantize", "inputs"), lambda numbers: [numbers["dequantize"] - 2] * 2),
        *("a tensor is", AT % "dequantize"),
    ),
    (
        *("quantised", "graph.outputs", lambda numbers: [numbers["dequantize"] - 1], "or a tensor of one"),
        "graph.outputs[0]",
    ),
    (
        *("quantised", "graph.mutated", lambda numbers: [[1, numbers["dequantize"] - 2]]),
        *("is a tensor of a quantised weight", "graph.mutated[0][0]"),
    ),
    ("updated", "graph.mutated[0]", [5, 2], "below 2", "graph.mutated[0][0]"),
    ("updated", "graph.mutated[0]", [1, 99], "below 6", "graph.mutated[0][1]"),
    ("updated", "graph.mutated", [[0, 5], [0, 5]], "ascending", "graph.mutated[1][0]"),
    ("updated", "graph.mutated[0]", [0, 1], "input 0 is float32", "graph.mutated[0][1]"),
    ("gate", "graph.outputs", [0], "not in the order", "graph"),
    ("gate", "graph.nodes", [], "not an integer of at least 0 and below 0", "graph.outputs[0]"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{case[1]}-{str(case[2])[:20]}")
def test_refused(case: tuple[Any, ...], samples: dict[str, Content]) -> None:
    sample, way, value, words, *elsewhere = case
    recorded = samples[sample]
    numbers = _numbers(recorded)
    content = _placed(recorded, f"entries[0].{way.format_map(numbers)}", value(numbers) if callable(value) else value)
    expected = f"entries[0].{(elsewhere or [way])[0].format_map(numbers)}: "
    with pytest.raises(CacheError) as refused:
        manifest_schema.check(content)
    message = str(refused.value)
    assert message.startswith(expected), message
    assert any(word in message for word in words.split(" or ")), message
    assert message.isascii()
    assert message.isprintable()


def test_only_its_weight_reads_a_part(samples: dict[str, Content]) -> None:
    """It is laid out anew for each backend: what else read it would be of another shape, and was cut without end."""
    content = copy.deepcopy(samples["transposed"])
    traced = content["entries"][0]["graph"]
    number = _numbers(content)["dequantize"]
    (part,) = (place for place in traced["nodes"][number]["inputs"] if traced["nodes"][place]["dtype"] == "float32")
    reduced = {**traced["nodes"][part], "op": "reduce", "inputs": [part], "attrs": ["prod", [1]]}
    traced["outputs"].append(len(traced["nodes"]))
    traced["nodes"].append(reduced)
    way = re.escape(f"graph.nodes[{len(traced['nodes']) - 1}].inputs[0]: is a tensor of a quantised weight")
    with pytest.raises(CacheError, match=way):
        manifest_schema.check(content)
    weight = {**traced["nodes"][number], "dtype": "float16"}
    traced["nodes"][-1] = weight
    with pytest.raises(CacheError, match="is a tensor of another weight already"):
        manifest_schema.check(content)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "utf-8"),
        (b"null", "the file: None is not an object"),
        (b"[]", "the file: an array of 0 is not an object"),
        (b"{}", "the file: lacks schema, entries"),
        (b'{"schema": 0, "entries": []}', "schema: is 0; this jitgen reads schema 1"),
        (b'{"schema": true, "entries": []}', "schema: is True"),
        (b'{"schema": 1, "entries": {}}', "entries: an object of 0 is not an array"),
        (b'{"schema": 1, "entries": [], "code": "x"}', "has 'code'"),
        (b'{"schema": 1, "entries": [], "a\\nb\\u001b[31m": 1}', r"has 'a\nb\x1b[31m'"),
        (b'{"schema": 1, "schema": 1, "entries": []}', "a member twice"),
        (b'{"schema": 1, "entries": [{}]}', "entries[0]: lacks name"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema": 1, "entries": ' + b"[" * 500 + b"]" * 500 + b"}", "entries[0]: an array of 1 is not an object"),
        (b'{"schema": 1' + b"0" * 5000 + b', "entries": []}', "not a readable manifest"),
    ],
)
def test_refused_files(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(raw)
    with pytest.raises(CacheError) as refused:
        jitgen.prewarm(path, ["cpu"])
    message = str(refused.value)
    assert message.startswith(f"{path} is not a readable manifest: ")
    assert message.endswith("; record it again with jitgen.record")
    assert words in message


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CacheError, match="not a readable manifest"):
        manifest_schema.read(tmp_path)
    with pytest.raises(CacheError, match="not a readable manifest"):
        manifest_schema.read(tmp_path / "absent")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CacheError, match="Expecting value"):
        manifest_schema.read(tmp_path / "fifo")
    monkeypatch.setattr(manifest_schema, "FILE_LIMIT", 10)
    (tmp_path / "large").write_text("[" + " " * 10 + "]")
    with pytest.raises(CacheError, match="more than 10 bytes"):
        manifest_schema.read(tmp_path / "large")


def test_a_pipe_is_read_to_its_end(samples: dict[str, Content], tmp_path: Path) -> None:
    """As in ``jitgen prewarm <(zcat specs.json.gz)``."""
    os.mkfifo(tmp_path / "fifo")
    text = json.dumps(samples["gate"])
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)

    def write() -> None:
        with open(tmp_path / "fifo", "w") as file:
            for start in range(0, len(text), 1000):
                file.write(text[start : start + 1000])
                file.flush()
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not select.select([reader], [], [], 1)[0]:
            pass
        assert manifest_schema.read(tmp_path / "fifo") == samples["gate"]["entries"]
    finally:
        writer.join()
        os.close(reader)


def test_no_number_takes_long_to_compute(samples: dict[str, Content]) -> None:
    """A product of a thousand powers, each within the limit, took seconds; products of those took hours."""
    content = copy.deepcopy(samples["scaled"])
    power = {"op": "pow", "args": [{"op": "symbol", "args": ["s0_0"], "kind": "int"}, 20_000], "kind": "int"}
    product = {"op": "product", "args": [power] * 1000, "kind": "int"}
    content["entries"][0]["graph"]["guards"].append([product, 1])
    started = time.monotonic()
    with pytest.raises(CacheError, match="an integer product of more than"):
        manifest_schema.check(content)
    assert time.monotonic() - started < 2


def test_a_recording_is_not_merged_into_another_file(samples: dict[str, Content], tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    evil = json.dumps(_named(samples["gate"], PYTHON_NAME))
    path.write_text(evil)
    with pytest.raises(CacheError, match=r"entries\[0\]\.name"), jitgen.record(path):
        pass
    assert path.read_text() == evil


def test_limits(samples: dict[str, Content], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, way in (
        ("ENTRY_LIMIT", "entries"),
        ("NODE_LIMIT", "entries[0].graph.nodes"),
        ("INPUT_LIMIT", "entries[0].inputs"),
        ("GUARD_LIMIT", "entries[0].graph.guards"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(manifest_schema, name, 0)
            with pytest.raises(CacheError, match=re.escape(f"{way}: has ")):
                manifest_schema.check(samples["padded"])


def test_an_entry_that_fails_otherwise_is_reported(
    samples: dict[str, Content], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a pass raises on a graph that no function has, it is that entry's failure and no traceback."""
    path = tmp_path / "specs.json"
    path.write_text(json.dumps({"schema": 1, "entries": samples["gate"]["entries"] + samples["norm"]["entries"]}))
    for module, pass_name in ((row_variants, "variants"), (manifest, "relower"), (pipeline, "fetch")):
        with monkeypatch.context() as patched:

            def fails(*arguments: Any) -> Any:
                raise KeyError("x\x1b")

            patched.setattr(module, pass_name, fails)
            with pytest.raises(jitgen.JitgenError, match="prewarm is incomplete") as failed:
                jitgen.prewarm(path, ["cpu"])
            message = str(failed.value)
            assert "gate cannot be built from the manifest (KeyError: " in message
            assert "norm cannot be built from the manifest (KeyError: " in message
            assert "\x1b" not in message
            assert {entry.origin for entry in failed.value.report.entries} == {"failed"}  # type: ignore[attr-defined]
