"""Defines ``TraceRequest``: the call for which a function is traced, or a graph imported or derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen.quant.weights import PORTABLE, Layouts
from jitgen.trace.captured import Captured
from jitgen.trace.guards import Guards


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """Describes a call that is traced.

    Attributes:
        leaves: the flattened ``(args, kwargs)``. Tensors and ``SymbolicScalar`` become proxies; ``SymbolicNumber`` and
            everything else are passed unchanged.
        tree: the structure of ``(args, kwargs)``.
        guards: has a hint for every symbol; collects the decisions of the trace.
        device: the device of the tensors.
        layouts: the layouts in which kernels read quantised weights that the function closes over.
        objects: the leaves that are neither tensors, numbers nor static; they are followed as captured objects are.
        runs: whether a call follows; see ``Trace``.
        differentiable: whether gradients are computed of the graph; see ``Trace``.
    """

    leaves: Sequence[Any]
    tree: pytree.TreeSpec
    guards: Guards
    device: torch.device
    layouts: Layouts = PORTABLE
    objects: Sequence[Captured] = ()
    runs: bool = True
    differentiable: bool = False
