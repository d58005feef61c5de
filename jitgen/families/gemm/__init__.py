"""Multiplies matrices with prologue and epilogue: low-bit and dense weights, fused with what follows them.

A kernel has one or more regions, and a region has one or more *contractions*. A contraction is the product of the
activation (M, K), which all regions of the kernel share, and a weight (N, K) of its own. The region's instructions are
the *epilogue*: they compute the (M, N) results from the accumulators before anything is rounded. Accumulators are
float32, float64 for float64 operands, and int32 or int64 for integers. Where pointwise instructions compute the
activation, they are the *prologue*.

The modules, in the order in which a call needs them:

* ``code_products``: products of integer codes that a graph has as products of floats.
* ``largest``: the argmax of a product's columns, without storing these.
* ``integer_products``: products that a dialect has no mainloop for.
* ``stored``: which values of a graph are in memory so that no product is computed twice.
* ``claim``, ``hidden_products``, ``matrices``: from a graph to regions.
* ``split_k``: the rewrite of one kernel to two that split K over a temporary.
* ``layout``: strides of the operands.
* ``schedule``, ``schedules/<dialect>``, ``wgmma_tiles``: the choice of a mainloop and its tiles (``mainloops``).
* ``context``, ``<dialect>``: what the templates read.
* ``launch``, ``wgmma``: grid, arguments and tensor maps.

In every dialect the kernel's parameters are a pointer for each operand in memory (in the order of the regions), the
integers that ``layout.parameters`` declares, and the run-time scalars; tensor maps come before all others.
"""

from __future__ import annotations

from jitgen.families.deferred import deferred, family_in

FAMILY = family_in(
    __name__,
    "gemm",
    respell=deferred(__name__, "largest.respelled"),
    plan=deferred(__name__, "stored.with_stored_values"),
    rewrite_values=deferred(__name__, "integer_products.reduce_integer_products"),
    decide=deferred(__name__, "schedule.decide"),
    joins=deferred(__name__, "claim.joins"),
    rewrite_kernel=deferred(__name__, "split_k.split_k"),
    problem=deferred(__name__, "schedule.problem"),
    cost=deferred(__name__, "schedule.cost"),
    facts=deferred(__name__, "schedule.facts"),
    settle=deferred(__name__, "launch.settle"),
    launch=deferred(__name__, "launch.launch"),
    tensor_maps=deferred(__name__, "launch.tensor_maps"),
    work=deferred(__name__, "launch.work"),
    explain=deferred(__name__, "explain.explain"),
    buckets=deferred(__name__, "schedule.buckets"),
)
