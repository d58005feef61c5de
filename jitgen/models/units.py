"""Finds the units of a model: the modules whose forward is traced as a whole.

A *block* is a member of a list of modules of one class and structure, as the layers of a transformer are. Around the
blocks, each largest module without blocks is a unit too: embeddings, the last norm, the head. A model without blocks is
one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are not called."""


def units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the units of ``model`` with their paths, each once, in the order of its modules."""
    blocks = dict(_blocks(model, ""))
    if not blocks:
        return [("", model)]
    return [*_around(model, "", blocks)]


def members(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that ``module`` may call, with their paths: its own, and those in its containers."""
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from ((f"{name}.{path}", inner) for path, inner in members(child))
        elif not isinstance(child, nn.Identity):
            yield name, child


def _around(module: nn.Module, path: str, blocks: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        if inner in blocks:
            yield inner, child
        elif any(block.startswith(f"{inner}.") for block in blocks):
            yield from _around(child, inner, blocks)
        elif isinstance(child, _CONTAINERS):
            yield from ((f"{inner}.{path}", member) for path, member in members(child))
        elif not isinstance(child, nn.Identity):
            yield inner, child


def _blocks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        members = [*child.named_children()]
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _are_blocks(child, [member for _, member in members]):
            yield from ((f"{inner}.{number}", member) for number, member in members)
        else:
            yield from _blocks(child, inner)


def _are_blocks(container: nn.Module, members: list[nn.Module]) -> bool:
    """Returns whether ``members`` are blocks: two of them have the same structure, whatever else is in the list. The
    steps of an ``nn.Sequential`` are, if they consist of modules themselves."""
    composed = [member for member in members if next(member.children(), None) is not None]
    if isinstance(container, nn.Sequential) and len(composed) < len(members):
        return False
    return len({*map(_structure, members)}) < len(members)


def _structure(module: nn.Module) -> Any:
    return type(module), tuple((name, _structure(child)) for name, child in module.named_children())
