"""A decorated function within ``torch.compile``: an operator of Dynamo's graph.

Dynamo follows a call of a decorated function into ``in_dynamo`` (``call/opaque.py`` says how), which hands the original
to ``region``. That is a higher-order operator of torch: Dynamo traces the function into a graph of its own, with every
tensor that the function reads as an operand, and guards what it reads besides. Whoever runs or traces the outer graph
calls ``region`` with that inner graph: kernels run there, or where tensors have no memory, ``jitgen::call`` is called.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._higher_order_ops.base_hop import BaseHOP

from jitgen.dynamo.program import program_of


class Region(BaseHOP):
    """See the module. ``region(graph module, *operands) -> tuple of results``."""

    def __init__(self) -> None:
        super().__init__("jitgen_region")

    def __call__(self, subgraph: Any, *operands: Any, **options: Any) -> Any:
        if isinstance(subgraph, fx.GraphModule):
            return _lifted(subgraph)(*operands)
        return subgraph(*operands)

    def cacheable(self) -> bool:
        return False


region = Region()


def _lifted(module: fx.GraphModule) -> Any:
    found = module.meta.get("jitgen_program")
    if found is None:
        found = module.meta["jitgen_program"] = program_of(module.graph, module.meta.get("name", "region"))
    return found


