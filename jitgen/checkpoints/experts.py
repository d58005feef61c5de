"""Joins the experts that a checkpoint has in a matrix each, as transformers 4 named them, into the parameters of three
dimensions that a model of transformers 5 has.

``experts.0.gate_proj.weight`` and ``up_proj`` (Qwen, DeepSeek), or ``w1`` and ``w3`` (Mixtral), are the rows of
``experts.gate_up_proj[0]``, one below the other; ``down_proj`` or ``w2`` are ``experts.down_proj[0]``. Quantised ones
are joined as they are, codes and scales; numbers stay the same. A scale of a whole matrix becomes one of each of its
rows, and so does one of 128 rows where matrices have no multiple of so many. Of static scales of activations the
largest is taken, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from jitgen.errors import FormatError
from jitgen.quant.experts import experts_of
from jitgen.quant.formats import Format, find
from jitgen.quant.qtensor import QTensor

Named = TypeVar("Named")
SOURCES: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
    "up_proj": (("up_proj",),),
}
"""For a parameter of experts, the matrices of one of them that are its rows, as checkpoints name them."""
RENAMED = (".block_sparse_moe.", ".mlp.")
"""What transformers 4 called the module of Mixtral's experts, and what transformers 5 does."""


def stacked(
    model: nn.Module, state: Mapping[str, torch.Tensor], notes: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns ``state`` and ``notes``, on activations by the names of weights, with the names of ``model``, and its
    parameters of experts made of their matrices.

    Raises:
        FormatError: an expert is missing, or the matrices of experts do not fit one another.
    """
    tensors, words = dict(state), dict(notes)
    parameters = [
        (name, module, leaf, transposed)
        for name, module in model.named_modules()
        for leaf, transposed in experts_of(module, name).items()
        if leaf in SOURCES and f"{name}.{leaf}" not in state
    ]
    if any(RENAMED[1] in f".{name}." for name, *_ in parameters):
        known = {name for name, _ in model.named_modules()}
        tensors, words = _renamed(tensors, known), _renamed(words, known)
    for name, module, leaf, transposed in parameters:
        prefix = f"{name}." if name else ""
        for sources in SOURCES[leaf]:
            if f"{prefix}0.{sources[0]}.weight" not in tensors:
                continue
            count = module._parameters[leaf].shape[0]
            names = [f"{prefix}{index}.{source}.weight" for index in range(count) for source in sources]
            missing = [one for one in names if one not in tensors]
            if missing:
                raise FormatError(f"{prefix}{leaf}: there is no {missing[0]}, of {count} experts")
            made = _joined(f"{prefix}{leaf}", [tensors.pop(one) for one in names], count)
            tensors[f"{prefix}{leaf}"] = made.mT if transposed else made
            said = [words.pop(one) for one in names if one in words]
            if said:
                words[f"{prefix}{leaf}"] = said[0] + (", the largest of the experts" if "static" in said[0] else "")
            break
    return tensors, words


def _renamed(state: Mapping[str, Named], modules: set[str]) -> dict[str, Named]:
    """Renames what the model has by its new name alone."""
    old, new = RENAMED
    return {
        name.replace(old, new) if old in name and name.partition(old)[0] + new[:-1] in modules else name: value
        for name, value in state.items()
    }


def _joined(name: str, matrices: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Joins the matrices, as many for each of ``count`` experts, to a weight of three dimensions."""
    per_expert = len(matrices) // count
    fits = all(matrix.shape == matrices[index % per_expert].shape for index, matrix in enumerate(matrices))
    if not fits or len({(matrix.shape[-1], type(matrix)) for matrix in matrices}) != 1:
        raise FormatError(f"{name}: its experts have matrices of several sizes or kinds")
    weights = [matrix for matrix in matrices if isinstance(matrix, QTensor)]
    if not weights:
        return torch.cat(list(matrices)).unflatten(0, (count, -1))
    formats = {find(weight.format) for weight in weights}
    facts = {(weight.group_size, weight.dtype, weight.activation, weight.transposed) for weight in weights}
    if len(facts) != 1 or len({_without_scale(format) for format in formats}) != 1:
        raise FormatError(f"{name}: its experts are of several formats: {', '.join(sorted(f.name for f in formats))}")
    if any(format.tensor_scale or format.ordered or format.smoothed for format in formats):
        raise FormatError(
            f"{name}: experts of {next(iter(formats)).name} have a factor or an order of columns each, and no weight "
            "of three dimensions has several"
        )
    return _of_portable(weights, formats, count)


def _without_scale(format: Format) -> str:
    return ".".join(word for word in format.name.split(".") if word != format.scale)


def _of_portable(weights: Sequence[QTensor], formats: set[Format], count: int) -> QTensor:
    first, format = weights[0], find(weights[0].format)
    group_size, columns = first.group_size, first.shape[1]
    whole = format.scale_rows == 1 or (format.scale_rows == 128 and all(one.shape[0] % 128 == 0 for one in weights))
    dropped = {"static", *(() if whole else ("tensor", "rows128"))}
    scale = format.scale if len({one.scale for one in formats}) == 1 else "float32"
    words = [word for word in format.name.split(".")[1:] if word not in (*dropped, format.scale)]
    made = find(".".join([format.row, scale, *words]))
    named: dict[str, list[torch.Tensor]] = {tensor: [] for tensor in made.tensor_names}
    for weight in weights:
        tensors = dict(zip(find(weight.format).tensor_names, weight.portable_tensors(), strict=True))
        for tensor, values in named.items():
            value = tensors[tensor]
            if tensor != "codes" and not whole:
                value = value.repeat_interleave(format.scale_rows or weight.shape[0], 0)[: weight.shape[0]]
            dtypes = {"scales": made.scale_dtype, "zeros": made.zero_dtype}
            values.append(value.to(dtypes.get(tensor, value.dtype)))
    joined = tuple(torch.cat(values) for values in named.values())
    shape = sum(weight.shape[0] for weight in weights), columns
    facts: dict[str, Any] = {"experts": count, "activation": first.activation}
    result = QTensor(joined, made.name, group_size, shape, first.dtype, **facts)
    scales = [weight.input_scale for weight in weights if weight.input_scale is not None]
    return result.with_input_scale(torch.stack(scales).max()) if scales else result
