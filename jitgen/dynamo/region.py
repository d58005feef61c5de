"""Makes a decorated function within ``torch.compile`` an operator of Dynamo's graph.

Dynamo follows a call of a decorated function into a stand-in (``stand_ins.py``), which hands the original to
``region``. That is a higher-order operator of torch: Dynamo traces the function into a graph of its own, with every
tensor that the function reads as an operand, and guards what it reads besides. Whoever runs or traces the outer graph
calls ``region`` with that inner graph: kernels run there, or where tensors have no memory, ``jitgen::call`` is called.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch._higher_order_ops.base_hop import BaseHOP

from jitgen.dynamo.operands import admit
from jitgen.dynamo.program import program_of, value_of


class Region(BaseHOP):
    """Implements the operator: ``region(graph module, *operands) -> tuple of results``."""

    def __init__(self) -> None:
        super().__init__("jitgen_region")

    def __call__(self, subgraph: Any, *operands: Any, **options: Any) -> Any:
        if isinstance(subgraph, fx.GraphModule):
            return _lifted(subgraph)(*operands)
        return subgraph(*operands)


region = Region()
admit("jitgen_region")


def inline(module: fx.GraphModule) -> list[tuple[Any, Any]]:
    """Puts the nodes of each region of ``module`` in the place of its call, for whoever makes kernels of the whole.

    Returns:
        For each result what Dynamo knows of it within the region and without: two fake tensors for one tensor.
    """
    same: list[tuple[Any, Any]] = []
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target is not region:
            continue
        inner = getattr(module, node.args[0].target).graph
        copies: dict[fx.Node, fx.Node] = dict(zip(inner.find_nodes(op="placeholder"), node.args[1:], strict=True))
        same += [(value_of(outer), value_of(copied)) for copied, outer in copies.items()]
        with module.graph.inserting_before(node):
            results: Any = module.graph.graph_copy(inner, copies)
        for user in list(node.users):
            index: Any = user.args[1]
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[index])
            same.append((value_of(results[index]), value_of(user)))
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    return same


def _lifted(module: fx.GraphModule) -> Any:
    program = module.meta.get("jitgen_program")
    if program is None:
        graph = module.graph
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        result = graph.output_node().args[0]
        program = program_of(graph.find_nodes(op="placeholder"), nodes, result, module.meta.get("name", "region"))
        module.meta["jitgen_program"] = program
    return program
