"""A family that lives outside jitgen (``tests/own_family``), through everything that jitgen does with a kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import jitgen
from jitgen.compilers import host
from jitgen.families import registry
from jitgen.families.family import Claim, Family, Partition
from jitgen.ir.graph import Node
from tests import fresh, own_family
from tests.own_family import FAMILY

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
import jitgen
from jitgen.families import registry
from tests.own_family import FAMILY

registry.register(FAMILY)
compiled = []
jitgen.on_compile(compiled.append)

@jitgen.jit
def sums(x):
    return x.cumsum(1)

x = torch.randn(7, 50)
torch.testing.assert_close(sums(x), x.cumsum(1))
print(len(compiled), [kernel.template for kernel in sums.lower(x).kernels])
"""


@pytest.fixture(autouse=True)
def _a_store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    before = list(registry.FAMILIES)
    yield
    registry.FAMILIES[:] = before


def sums(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).cumsum(1)


def run_program(**environment: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)} | environment
    return fresh.run(PROGRAM, cwd=ROOT, env=environment)


def test_it_computes_what_it_claims() -> None:
    registry.register(FAMILY)
    x = torch.randn(30, 40)
    for value in (x, x.t(), x[::2, 1:], x.flip(1), x[:1].expand(5, 40)):
        assert torch.allclose(jitgen.jit(sums)(value), value.cumsum(1), atol=1e-5)
    low = jitgen.jit(sums).lower(x)
    assert [kernel.template for kernel in low.kernels] == ["templates/row_sums.cpp.j2"]
    assert "by a family of the tests" in low.explain()
    assert torch.allclose(jitgen.jit(scaled)(x), scaled(x), atol=1e-4)
    assert [k.template.split("/")[0] for k in jitgen.jit(scaled).lower(x).kernels] == ["elementwise", "templates"]
    # What it does not claim is computed as before.
    assert torch.allclose(jitgen.jit(sums)(x.double()), x.double().cumsum(1))
    assert [k.template for k in jitgen.jit(sums).lower(x, backend="cuda", target="sm_90a").kernels] == [
        "scan/scan.cu.j2"
    ]


@pytest.mark.slow
def test_a_second_process_finds_it_in_the_store() -> None:
    first = run_program()
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == "1 ['templates/row_sums.cpp.j2']"
    refused = run_program(JITGEN_STRICT="1", JITGEN_CACHE_DIR=os.environ["JITGEN_CACHE_DIR"] + "-other")
    assert "CacheMissError" in refused.stderr
    second = run_program(JITGEN_STRICT="1", JITGEN_CXX="/nonexistent/g++")
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith("0 ")


@pytest.mark.slow
def test_a_manifest_is_prewarmed_and_served_strictly(tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    done = run_program(JITGEN_RECORD=str(path), JITGEN_CACHE_DIR=str(tmp_path / "development"))
    assert done.returncode == 0, done.stderr
    registry.register(FAMILY)
    report = jitgen.prewarm(path, targets=["cpu"], jobs=1)
    assert report.count("compiled") >= 1
    assert report.count("failed") == report.count("skipped") == 0
    served = run_program(JITGEN_STRICT="1", JITGEN_CXX="/nonexistent/g++")
    assert served.returncode == 0, served.stderr
    assert served.stdout.startswith("0 ")


def test_its_templates_and_its_code_are_part_of_the_key(tmp_path: Path) -> None:
    x = torch.ones(3, 5)

    def key() -> str:
        return jitgen.jit(sums).lower(x).key

    plain = key()
    templates = shutil.copytree(own_family.HERE / "templates", tmp_path / "templates")
    registry.register(own_family.family(templates))
    first = key()
    assert first not in (plain, "")
    assert torch.equal(jitgen.jit(sums)(x), x.cumsum(1))
    header = templates / "include" / "row_sums.hpp"
    before = header.read_text()
    header.write_text(before.replace("sum = 0", "sum = 100"))
    assert key() != first
    assert torch.equal(jitgen.jit(sums)(x), x.cumsum(1) + 100)
    header.write_text(before)
    assert key() == first
    template = templates / "row_sums.cpp.j2"
    template.write_text(template.read_text().replace("x + row * x_row", "x"))
    assert key() != first
    x = torch.randn(3, 5)
    assert torch.allclose(jitgen.jit(sums)(x), x[:1].cumsum(1).expand(3, 5))


def test_what_a_family_makes_of_values_is_part_of_the_key() -> None:
    """A family may claim nothing and yet decide what others compute; its kernels must not be taken for theirs."""

    def nothing(*arguments: object) -> object:
        raise AssertionError("it has no kernels that it could be asked about")

    def sums_for_products(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
        return [replace(value, op="add") if value.op == "mul" else value for value in values]

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    x, y = torch.full((5,), 3.0), torch.full((5,), 4.0)
    before = jitgen.jit(product).lower(x, y).key
    assert torch.equal(jitgen.jit(product)(x, y), x * y)
    hooks = dict.fromkeys(("layout", "parameters", "candidates", "render", "launch", "work", "explain"), nothing)
    registry.register(
        Family(
            name="swapped",
            claim=lambda values, partition: Claim((), values),
            rewrite_values=sums_for_products,
            **hooks,  # type: ignore[arg-type]
        )
    )
    assert jitgen.jit(product).lower(x, y).key != before
    assert torch.equal(jitgen.jit(product)(x, y), x + y)


def test_a_family_that_claims_nothing_is_in_nobodys_way() -> None:
    def nothing(*arguments: object) -> object:
        raise AssertionError("it has no kernels that it could be asked about")

    asked = []

    def claim(values: object, partition: object) -> Claim:
        asked.append(values)
        return Claim((), values)  # type: ignore[arg-type]

    hooks = dict.fromkeys(("layout", "parameters", "candidates", "render", "launch", "work", "explain"), nothing)
    registry.register(Family(name="idle", claim=claim, **hooks))  # type: ignore[arg-type]
    x = torch.randn(6, 7)
    low = jitgen.jit(lambda x: (x.cumsum(1), x.softmax(0), (x @ x.t()).relu(), x + 1)).lower(x)
    assert asked
    assert low.kernels
    assert torch.allclose(jitgen.jit(lambda x: x.cumsum(0) + x.sum())(x), x.cumsum(0) + x.sum(), atol=1e-5)
    registry.unregister("idle")
    with pytest.raises(KeyError):
        registry.named("idle")


def test_the_last_one_registered_is_asked_first_and_replaces_its_namesake() -> None:
    registry.register(FAMILY)
    other = own_family.family()
    registry.register(other)
    assert registry.FAMILIES[0] is other
    assert sum(family.name == FAMILY.name for family in registry.FAMILIES) == 1
