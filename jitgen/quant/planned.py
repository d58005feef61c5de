"""Plans which weights of a model are quantised and how, before anything changes: for ``quantize_`` and ``calibrate``.

Patterns of names give each layer a format, a group size and a kind of activations; the first that matches decides.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from jitgen.errors import FallbackWarning, FormatError
from jitgen.quant.activations import check_activation
from jitgen.quant.experts import experts_of, rank
from jitgen.quant.formats import Format, check_group_size, find
from jitgen.quant.qtensor import QTensor
from jitgen.quant.report import SkippedLayer

Formats = str | Mapping[str, str | tuple[str, int | None] | None]
"""A format, or one for each pattern of names, perhaps with a group size; None leaves layers as they are."""
Activations = str | Mapping[str, str | None] | None
"""A kind of activations, or one for each pattern of names."""
Filter = Callable[[nn.Module, str], bool] | None


@dataclass(frozen=True)
class Layer:
    """Refers to a module whose weight is quantised.

    Attributes:
        name: what patterns and the report call it: the module's name, with that of the parameter for experts.
        leaf: the name of the parameter in the module.
        transposed: whether the module has its weight as (K, N).
    """

    name: str
    module: nn.Module
    leaf: str = "weight"
    transposed: bool = False

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.module._parameters[self.leaf]  # type: ignore[assignment]
        return weight


@dataclass(frozen=True)
class Job:
    """Describes one weight that is to be quantised.

    Attributes:
        owners: the layers that use it; a tied weight has more than one.
        kind: of the activations that its products quantise.
    """

    owners: tuple[Layer, ...]
    row: Format
    group_size: int | None
    kind: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.owners)

    @property
    def weight(self) -> torch.Tensor:
        """Returns the Parameter."""
        return self.owners[0].weight

    @property
    def transposed(self) -> bool:
        return self.owners[0].transposed

    @property
    def dense(self) -> torch.Tensor:
        """Returns the weight as (N, K)."""
        return self.weight.mT if self.transposed else self.weight


@dataclass(frozen=True)
class Plan:
    """Holds the weights that are to be quantised, and what is left as it is; see ``QuantizationReport``."""

    jobs: tuple[Job, ...]
    skipped: tuple[SkippedLayer, ...]
    others: tuple[SkippedLayer, ...]
    unmatched: tuple[str, ...]

    @property
    def formats(self) -> str:
        return ", ".join(sorted({job.row.name for job in self.jobs}))


def plan(
    model: nn.Module,
    format: Formats,
    group_size: int | None,
    filter_fn: Filter,
    activation: Activations,
    embeddings: bool,
    experts: str | Collection[str] = (),
) -> Plan:
    """Plans what ``quantize_`` does with these arguments.

    Raises:
        FormatError: as ``quantize_``.
    """
    if not isinstance(model, nn.Module):
        raise FormatError(
            f"quantize_ takes a torch.nn.Module, not {type(model).__name__}; jitgen.quantize makes a weight of a tensor"
        )
    choices, activations, users = _choices(format, group_size), _activations(activation), _users(model)
    layers = list(_layers(model, embeddings, (experts,) if isinstance(experts, str) else experts))
    taken = {(id(layer.module), layer.leaf) for layer in layers}
    wanted: dict[int, list[Layer]] = {}
    skipped: list[SkippedLayer] = []
    for layer in layers:
        choice = _choice(choices, layer.name)
        if filter_fn is not None and not filter_fn(layer.module, layer.name):
            reason: str | None = "filter_fn"
        else:
            reason = _obstacle(layer, users, taken) if choice is not None else "no pattern gives it a format"
        if reason is None:
            wanted.setdefault(id(layer.weight), []).append(layer)
            assert choice is not None
            check_activation(_activation(activations, layer.name), *choice)
        else:
            skipped.append(SkippedLayer(layer.name, reason))
    jobs = []
    for owners in wanted.values():
        chosen = {(_choice(choices, owner.name), _activation(activations, owner.name)) for owner in owners}
        reason = _tied(len(owners) < len(users[id(owners[0].weight)]), filter_fn is not None, chosen)
        if reason is None:
            (((row, group), kind),) = ((choice, kind) for choice, kind in chosen if choice is not None)
            jobs.append(Job(tuple(owners), row, group, kind))
        else:
            skipped += [SkippedLayer(owner.name, reason) for owner in owners]
    unmatched = _unmatched(activation, layers)
    _warn_of_unmatched(unmatched, layers)
    others = tuple(_others(model, taken, embeddings))
    return Plan(tuple(jobs), tuple(skipped), others, (*_unmatched(format, layers), *unmatched))


def _tied(is_shared: bool, is_filtered: bool, chosen: Collection[tuple[object, object]]) -> str | None:
    """Returns why a weight is left as it is whose other layers are treated otherwise; None where it need not be."""
    if is_shared:
        kept = "filter_fn keeps" if is_filtered else "has another use, which stays as it is"
        return f"tied to a weight that {kept}"
    if len(chosen) > 1:
        what = "format" if len({choice for choice, _ in chosen}) > 1 else "activation"
        return f"tied to a weight to which another pattern gives another {what}"
    return None


def _warn_of_unmatched(patterns: Sequence[str], layers: Sequence[Layer]) -> None:
    """Warns that ``patterns`` of activations match no layer, so that activations stay as they are."""
    if patterns and layers:
        some = ", ".join(repr(layer.name) for layer in layers[:3])
        warnings.warn(
            f"activation: {', '.join(map(repr, patterns))} matches none of the {len(layers)} layers, which are called "
            f"{some}{' and so on' if len(layers) > 3 else ''}: write such as '*.{layers[-1].name.rpartition('.')[2]}'",
            FallbackWarning,
            stacklevel=4,
        )


def _unmatched(choice: Formats | Activations, layers: Sequence[Layer]) -> tuple[str, ...]:
    """Returns the patterns of a mapping that match no layer's name."""
    patterns = choice if isinstance(choice, Mapping) else ()
    return tuple(
        pattern for pattern in patterns if not any(fnmatch.fnmatchcase(layer.name, pattern) for layer in layers)
    )


def _layers(model: nn.Module, embeddings: bool, experts: Collection[str]) -> Iterator[Layer]:
    """Yields the layers that ``quantize_`` knows, in the order of the model."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear) or (embeddings and type(module) is nn.Embedding):
            yield Layer(name, module)
        elif kind == "Conv1D" and not isinstance(module, nn.Conv1d) and rank(module, "weight") == 2:
            yield Layer(name, module, transposed=True)
        else:
            for leaf, transposed in experts_of(module, name, experts).items():
                yield Layer(f"{name}.{leaf}".lstrip("."), module, leaf, transposed)


def _others(model: nn.Module, taken: set[tuple[int, str]], embeddings: bool) -> Iterator[SkippedLayer]:
    """Yields parameters of two and more dimensions in modules that are no layers to ``quantize_``."""
    for name, module in model.named_modules():
        for leaf in module._parameters:
            if (id(module), leaf) not in taken and rank(module, leaf) >= 2:
                reason = f"a parameter of {type(module).__name__}"
                if isinstance(module, nn.Embedding):
                    reason += ", which embeddings=True quantises" if not embeddings else ", which reads it itself"
                elif rank(module, leaf) == 3:
                    reason += ", which experts=... quantises where products alone use it, as w[i], w[ids] or w.mT"
                yield SkippedLayer(f"{name}.{leaf}".lstrip("."), reason)


def _choices(format: Formats, group_size: int | None) -> list[tuple[str, Format | None, int | None]]:
    """Lists (pattern, format or None, group size) in the order in which they are tried."""
    if isinstance(format, Mapping):
        stated = [(key, value if isinstance(value, tuple) else (value, group_size)) for key, value in format.items()]
    else:
        stated = [("*", (format, group_size))]
    choices: list[tuple[str, Format | None, int | None]] = []
    for pattern, (name, group) in stated:
        row = None if name is None else find(name)
        choices.append((pattern, row, None if row is None else check_group_size(group, row)))
    return choices


def _choice(choices: list[tuple[str, Format | None, int | None]], name: str) -> tuple[Format, int | None] | None:
    """Returns the format and group size of the layer called ``name``; None if it is left as it is."""
    for pattern, row, group_size in choices:
        if fnmatch.fnmatchcase(name, pattern):
            return None if row is None else (row, group_size)
    return None


def _activations(activation: Activations) -> list[tuple[str, str | None]]:
    """Lists (pattern, kind of activation or None) in the order in which they are tried."""
    return list(activation.items()) if isinstance(activation, Mapping) else [("*", activation)]


def _activation(activations: list[tuple[str, str | None]], name: str) -> str | None:
    """Returns how the layer called ``name`` quantises its activation."""
    return next((kind for pattern, kind in activations if fnmatch.fnmatchcase(name, pattern)), None)


def _users(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Maps the ``id`` of a parameter to the modules that have it, each with the parameter's name there."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((module, name))
    return users


def _obstacle(layer: Layer, users: dict[int, list[tuple[nn.Module, str]]], taken: set[tuple[int, str]]) -> str | None:
    """Returns the reason why the weight of ``layer`` cannot be quantised; None if it can."""
    weight = layer.module._parameters.get(layer.leaf)
    if weight is None:
        return "its weight is not a plain parameter (a parametrisation, or weight norm); remove that first"
    if isinstance(weight, QTensor):
        return f"quantised already, as {weight.format}"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight has no shape yet; run the model once first"
    if weight.device.type == "meta":
        return "its weight is on the meta device; load it first"
    if isinstance(layer.module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight itself"
    if isinstance(layer.module, nn.Embedding) and layer.module.max_norm is not None:
        return "its max_norm changes the weight"
    others = [type(user).__name__ for user, name in users[id(weight)] if (id(user), name) not in taken]
    if others:
        remedy = "; embeddings=True quantises both" if others[0] == "Embedding" else ""
        return f"its weight is tied to that of a module of type {others[0]}, which reads it itself{remedy}"
    return None
