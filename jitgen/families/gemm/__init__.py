"""Matrix products with prologue and epilogue: low-bit and dense weights, fused with what follows them.

A kernel has one or more regions, and a region has one or more *contractions*. A contraction is the product of the
activation (M, K), which all regions of the kernel share, and a weight (N, K) of its own. The region's instructions are
the *epilogue*: they compute the (M, N) results from the accumulators before anything is rounded. Accumulators are
float32, float64 for float64 operands, and int32 or int64 for integers. Where pointwise instructions compute the
activation, they are the *prologue*.

The modules, in the order in which a call needs them:

* ``integer_products``: products that a dialect has no mainloop for.
* ``claim``, ``hidden_products``, ``matrices``: from a graph to regions.
* ``split_k``: the rewrite of one kernel to two that split K over a temporary.
* ``layout``: strides of the operands.
* ``schedule``, ``schedules/<dialect>``, ``wgmma_tiles``: the choice of a mainloop and its tiles (``mainloops``).
* ``render``, ``context``, ``<dialect>``: what the templates read.
* ``launch``, ``wgmma``: grid, arguments and tensor maps.

In every dialect the kernel's parameters are a pointer for each operand in memory (in the order of the regions), the
integers that ``launch.integer_names`` lists, and the run-time scalars; tensor maps come before all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.families.family import Family
from jitgen.families.gemm.claim import claim, joins
from jitgen.families.gemm.integer_products import reduce_integer_products
from jitgen.families.gemm.launch import arguments, launch, work
from jitgen.families.gemm.layout import layout
from jitgen.families.gemm.schedule import buckets, candidates, cost, facts, problem, prologue
from jitgen.families.gemm.split_k import split_k

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def _render(*of: Any) -> tuple[KernelSource, Rendered]:
    from jitgen.families.gemm.render import render

    return render(*of)


def _explain(*of: Any) -> list[str]:
    from jitgen.families.gemm.explain import explain

    return explain(*of)


FAMILY = Family(
    name="gemm",
    claim=claim,
    rewrite_values=reduce_integer_products,
    decide=prologue,
    joins=joins,
    rewrite_kernel=split_k,
    layout=layout,
    problem=problem,
    candidates=candidates,
    cost=cost,
    facts=facts,
    render=_render,
    launch=launch,
    arguments=arguments,
    work=work,
    explain=_explain,
    buckets=buckets,
)
