"""Quantises the weights of a model's layers in place with ``quantize_``, and reports what it did.

Layers are every ``nn.Linear``, transformers' ``Conv1D`` (GPT-2), the matrices of experts that a mixture of experts of a
known class has in one parameter of three dimensions (``experts.py``), and every ``nn.Embedding`` where that is asked
for. It works on one weight after another, and a weight's dense numbers are released as soon as it is quantised, so that
memory never holds the model twice.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from contextlib import suppress

import torch
from torch import nn

from jitgen import progress
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant import layouts
from jitgen.quant.layers import QuantizedLinear
from jitgen.quant.planned import Activations, Filter, Formats, Job, plan
from jitgen.quant.qtensor import QTensor
from jitgen.quant.quantize import check_method, quantize, sqnr
from jitgen.quant.report import QuantizationReport, QuantizedLayer, SkippedLayer


def quantize_(
    model: nn.Module,
    format: Formats,
    group_size: int | None = None,
    filter_fn: Filter = None,
    *,
    layout: str | None = None,
    method: str = "mse",
    activation: Activations = None,
    trainable_bias: bool = False,
    embeddings: bool = False,
    experts: str | Collection[str] = (),
) -> QuantizationReport:
    """Quantises the weights of ``model``'s layers in place. The model is called as before.

    Args:
        model: the weights of its Linears, ``Conv1D``s and experts become Parameters that are ``QTensor``s and take no
            gradients. A weight that several of them share is quantised once and remains shared. Their biases take no
            gradients either, so that a call records none: that takes some 100 us more on the host.
        format, group_size, layout, method: the same arguments as those of ``jitgen.quantize``. ``format`` may be a
            mapping from patterns of fully qualified names (``fnmatch``: ``"*.down_proj"``) to a format, to (format,
            group size), or to None for layers that are left as they are. The first pattern that matches decides, and
            ``group_size`` is for those without one of their own. Layers that none matches are left as they are.
        filter_fn: ``(module, fully qualified name) -> bool`` selects the layers to quantise; None selects all.
        activation: the same argument as that of ``jitgen.quantize``, or a mapping from patterns to it; layers that no
            pattern matches leave activations as they are.
        trainable_bias: whether a bias that requires grad continues to.
        embeddings: whether ``nn.Embedding``s are quantised too; one whose weight is also a Linear's shares its codes.
            Where not, a Linear whose weight is an embedding's is left as it is.
        experts: patterns of the fully qualified names of further parameters of three dimensions that are experts, in
            classes that are not known (``quant/experts.py``). Such a class uses them as ``w[i]`` in a product, in
            ``bmm`` or in ``grouped_mm``, and says by an attribute ``is_transposed`` whether ``w[i]`` is (K, N).

    Returns:
        a report with the SQNR and the size of every weight, everything of two or more dimensions that was not
        quantised, with the reason, the biases that are no longer trainable, and the patterns that match no layer.

    Raises:
        FormatError: there is no such format, group size, method or activation, a layer's format has no kernels for its
            activation, or ``model`` is no module. UnsupportedError: there is no such layout. In either case the model
            is unchanged.
    """
    check_method(method)
    layouts.find(layout or "portable")
    planned = plan(model, format, group_size, filter_fn, activation, embeddings, experts)
    layers, skipped, frozen = list[QuantizedLayer](), list(planned.skipped), list[str]()
    with progress.line(f"quantising to {planned.formats}") as say:
        for number, job in enumerate(planned.jobs, 1):
            say(f"{number} of {len(planned.jobs)} weights: {job.names[0]}")
            dense = job.dense
            try:
                made = quantize(dense, job.row.name, job.group_size, layout=layout, method=method, activation=job.kind)
            except FormatError as error:
                skipped += [SkippedLayer(name, str(error)) for name in job.names]
                continue
            layers.append(described(job, dense, made))
            frozen += replace_weight(job, made, trainable_bias)
    let_be_saved()
    return QuantizationReport(tuple(layers), tuple(skipped), tuple(frozen), planned.others, planned.unmatched)


def let_be_saved() -> None:
    """Has ``save_pretrained`` of transformers write quantised weights, in a process whose models may be
    transformers'."""
    if "transformers.modeling_utils" in sys.modules:
        with suppress(UnsupportedError):  # another release of transformers
            importlib.import_module("jitgen.huggingface.quantizer")  # by name: it is above this package


def described(job: Job, dense: torch.Tensor, made: QTensor) -> QuantizedLayer:
    """Describes the weight that ``made`` replaces; ``dense`` (N, K) has the numbers that it was made of."""
    noise, size = sqnr(dense, made), (job.weight.nbytes, made.nbytes)
    return QuantizedLayer(job.names, tuple(dense.shape), made.format, job.group_size, noise, *size, made.activation)


def replace_weight(job: Job, made: QTensor, trainable_bias: bool = False) -> list[str]:
    """Gives the layers of ``job`` their quantised weight; returns the names of the biases that are no longer
    trainable."""
    parameter = nn.Parameter(made.mT if job.transposed else made, requires_grad=False)
    frozen = []
    for layer in job.owners:
        setattr(layer.module, layer.leaf, parameter)
        QuantizedLinear.convert(layer.module)
        if not trainable_bias and freeze_bias(layer.module):
            frozen.append(f"{layer.name}.bias".lstrip("."))
    return frozen


def freeze_bias(module: nn.Module) -> bool:
    """Makes the bias of a quantised layer untrainable; returns whether it was trainable."""
    bias = module._parameters.get("bias")
    if bias is None or not bias.requires_grad:
        return False
    bias.requires_grad_(False)
    return True
