"""The house keeps its rule: nothing outside a family's package knows the family, but the registry's row."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from jitgen.families import registry
from jitgen.ir.regions import STAGES
from tests.modules import nodes

JITGEN = Path(__file__).parents[2] / "jitgen"
NAMES = sorted(family.name for family in registry.FAMILIES)
PACKAGES = {family.name: family.claim.__module__.rpartition(".")[0] for family in registry.FAMILIES}
REGISTRY = JITGEN / "families" / "registry.py"
FORMATS_WORDS = {Path("checkpoints/awq.py"): {"gemm"}}  # what AWQ's configs call the version of a layout


def outside(name: str) -> Iterator[Path]:
    package = JITGEN.parent.joinpath(*PACKAGES[name].split("."))
    return (path for path in sorted(JITGEN.rglob("*.py")) if package not in path.parents)


@cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports, for type checking too."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_only_the_registry_imports_a_family(name: str) -> None:
    package = PACKAGES[name]
    for path in outside(name):
        theirs = {module for module in imported(path) if module == package or module.startswith(f"{package}.")}
        assert not theirs or path == REGISTRY, f"{path.relative_to(JITGEN)} imports {', '.join(sorted(theirs))}"


@pytest.mark.parametrize("name", NAMES)
def test_every_function_of_a_family_exists(name: str) -> None:
    """Those that are ``deferred`` are looked up by name when they are called."""
    family = registry.named(name)
    functions = [value for field in fields(family) if callable(value := getattr(family, field.name))]
    assert len(functions) > 8
    for function in functions:
        assert callable(getattr(import_module(function.__module__), function.__name__))


ENDS = {"convolution": ("cpp",)}
"""The templates of families that lack dialects: others compute convolutions on a GPU."""


@cache
def literals(path: Path) -> set[str]:
    """The strings of a file, keys of dicts aside."""
    keys = {id(key) for node in nodes(path) if isinstance(node, ast.Dict) for key in node.keys}
    return {
        node.value
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in keys
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name not in STAGES])
def test_nothing_else_names_a_family(name: str) -> None:
    """A name that is also the IR's word for an operation says nothing about a family.

    Nor does a value of a file's format, where it is another's word.
    """
    naming = [path.relative_to(JITGEN) for path in outside(name) if name in literals(path)]
    assert [str(path) for path in naming if name not in FORMATS_WORDS.get(path, ())] == []


def test_every_package_is_a_familys_and_every_family_has_templates_of_its_name() -> None:
    packages = {path.parent.name for path in (JITGEN / "families").glob("*/__init__.py")}
    assert packages == {package.split(".")[2] for package in PACKAGES.values()}
    for name in NAMES:
        folder = JITGEN.parent / "templates" / name
        ends = ENDS.get(name, ("cpp", "cu", "py"))
        assert {path.name for path in folder.glob(f"{name}.*.j2")} == {f"{name}.{end}.j2" for end in ends}
