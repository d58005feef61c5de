"""Compares what a config's ``config_groups`` say of one weight with the tensors that the weight has.

compressed-tensors writes them, and so does ModelOpt since it follows it. A group names the modules it is for by their
names, by patterns or by their classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jitgen.checkpoints.source import Source
from jitgen.checkpoints.weight import GO_BY_TENSORS, require_groups
from jitgen.errors import FormatError


@dataclass(frozen=True)
class Label:
    """Holds what the config says of a weight: for each fact, the values in the groups it may belong to; empty for none.

    Attributes:
        prefix: the name of the weight's module.
        num_bits, type, symmetric, strategy, group_size, block_structure, actorder: as compressed-tensors names them.
    """

    prefix: str
    num_bits: frozenset[int]
    type: frozenset[str]
    symmetric: frozenset[bool]
    strategy: frozenset[str]
    group_size: frozenset[int]
    block_structure: frozenset[tuple[int, ...]]
    actorder: frozenset[Any]

    @staticmethod
    def read(source: Source, prefix: str) -> Label:
        stated = [group.get("weights") for group in groups_of(source, prefix)]
        weights = [weight for weight in stated if isinstance(weight, Mapping)]

        def told(fact: str, *kinds: type) -> frozenset[Any]:
            return frozenset(weight[fact] for weight in weights if type(weight.get(fact)) in kinds)

        blocks = [weight["block_structure"] for weight in weights if isinstance(weight.get("block_structure"), list)]
        return Label(
            prefix,
            num_bits=told("num_bits", int),
            type=told("type", str),
            symmetric=told("symmetric", bool),
            strategy=told("strategy", str),
            group_size=frozenset(size for size in told("group_size", int) if size > 0),
            block_structure=frozenset(tuple(block) for block in blocks if all(type(size) is int for size in block)),
            actorder=told("actorder", str, bool),
        )

    def require(self, name: str, fact: str, expected: Collection[Any], actual: str) -> None:
        """Raises FormatError if the config only says values of ``fact`` that the tensors do not allow."""
        told = getattr(self, fact)
        if told and not told & set(expected):
            values = ", ".join(sorted(map(str, told)))
            raise FormatError(f"{name}: the config says {fact} {values}, and {actual}; {GO_BY_TENSORS}")

    def require_groups(self, name: str, scales: torch.Tensor, shape: tuple[int, int]) -> None:
        """Raises FormatError if the config lets other columns or rows share a scale than do; ``scales`` has two
        dimensions, for a weight of ``shape``."""
        rows, columns = shape
        groups = scales.shape[1]
        actual = f"scales are {list(scales.shape)}"
        if self.strategy and self.strategy <= {"group", "tensor_group"}:
            require_groups(name, self.group_size, columns, groups)
        if groups != 1 or scales.shape[0] != rows:
            self.require(name, "strategy", {"group", "tensor_group", "tensor", "block"}, actual)
        if scales.numel() != 1:
            self.require(name, "strategy", {"group", "tensor_group", "channel", "block"}, actual)


def groups_of(source: Source, prefix: str) -> list[Mapping[str, Any]]:
    """Lists the ``config_groups`` that the module called ``prefix`` may belong to."""
    groups = source.config.get("config_groups")
    described = (
        [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    )
    named = [group for group in described if any(_names(target, prefix) for target in _targets(group))]
    # Where no group names the module, one that names its class has it, and classes are not in files.
    of_classes = [group for group in described if any(_is_class(target, source) for target in _targets(group))]
    return named or of_classes or described


def _targets(group: Mapping[str, Any]) -> list[str]:
    targets = group.get("targets")
    return [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []


def _is_class(target: str, source: Source) -> bool:
    """Returns whether a target may be a class of modules: it is no pattern, no path and no module of the source."""
    return not target.startswith("re:") and "." not in target and f"{target}.weight" not in source


def _names(target: str, prefix: str) -> bool:
    """Returns whether a target means this module: by its name, or by ``re:`` and a pattern of names."""
    if not target.startswith("re:"):
        return target == prefix
    try:
        return re.match(target.removeprefix("re:"), prefix) is not None
    except re.error as error:
        raise FormatError(f"the config has the target {target!a:.80}, which is no pattern: {error}") from None
