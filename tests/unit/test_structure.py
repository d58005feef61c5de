"""The modules of jitgen import each other in one direction."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import jitgen
from jitgen.families import registry
from tests.modules import nodes, run_time_nodes

PACKAGE = Path(jitgen.__file__).parent


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("jitgen", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of jitgen that one imports, within functions too, but not for type checking alone."""
    for node in run_time_nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_import_cycles() -> None:
    known = modules()
    graph = {name: {module for module in imports(path, known) if module in known} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None


def _private_attributes(path: Path) -> tuple[set[str], list[ast.Attribute]]:
    """The private names that a module defines, and its accesses to private attributes of objects besides ``self``."""
    defined, read = set(), []
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                defined.add(node.attr)
            elif ast.unparse(node.value).split(".")[0] not in ("torch", "sys"):
                read.append(node)
    return defined, read


PRIVATE_IN = tuple(f"jitgen.{name}" for name in ("call.", "families.", "ir.", "codegen.", "pipeline", "lowering"))
TORCHS_PRIVATE = {
    "_torchdynamo_disable",
    "_torchdynamo_disable_msg",
    "_torchdynamo_inline",
    "_version",
    "_FrameAction",
    "_FrameExecStrategy",
}


OF_NAMED_TUPLES = {"_replace"}


def test_modules_do_not_reach_into_each_other() -> None:
    """Private members are for their own module. Packages that read private members of torch are left out."""
    found, allowed = [], TORCHS_PRIVATE | OF_NAMED_TUPLES
    for name, path in modules().items():
        if name.startswith(PRIVATE_IN):
            defined, read = _private_attributes(path)
            found += [f"{name}:{at.lineno} {ast.unparse(at)}" for at in read if at.attr not in defined | allowed]
    assert not found


FAMILIES = tuple(family.claim.__module__.rpartition(".")[0] for family in registry.FAMILIES)


def _package(module: str) -> str | None:
    """The family's package that ``module`` belongs to."""
    return next((family for family in FAMILIES if module == family or module.startswith(f"{family}.")), None)


def test_only_the_registry_knows_the_families() -> None:
    """Adding a family takes its own package and a row of ``families/registry.py``."""
    assert len(FAMILIES) >= 3
    known = modules()
    for name, path in known.items():
        found = {_package(module) for module in imports(path, known)} - {None, _package(name)}
        assert not found or name == "jitgen.families.registry", f"{name} imports {found}"
