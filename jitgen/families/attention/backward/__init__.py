"""The backward of attention: products with a pointwise function of other products, which are computed again in tiles.

The modules, in the order in which a call needs them:

* ``match``: such products in a graph, and rewrites to the form that is matched.
* ``claim``, ``region``, ``body``: from there to a region and its instructions.
* ``layout``, ``schedule``, ``launch``: strides and parameters, tiles, launches.
* ``wgmma``, ``wgmma_schedule``: the kernel of sm_90a: what it can compute, tensor maps, tiles.
* ``context``, ``triton``, ``cuda``, ``cpp``: what the templates read; ``pairs`` rewrites what a tile
  computes in CUDA.
"""

from __future__ import annotations

from jitgen.families.attention.backward.claim import NAME, claim, decide, merge, rewrite_values
from jitgen.families.deferred import deferred
from jitgen.families.family import Family

FAMILY = Family(
    name=NAME,
    rewrite_values=rewrite_values,
    claim=claim,
    decide=decide,
    merge=merge,
    body=deferred(__name__, "body.body_of"),
    layout=deferred(__name__, "layout.layout"),
    candidates=deferred(__name__, "schedule.candidates"),
    parameters=deferred(__name__, "layout.parameters"),
    tensor_maps=deferred(__name__, "wgmma.tensor_maps"),
    render=deferred(__name__, "context.render"),
    launch=deferred(__name__, "launch.launch"),
    work=deferred(__name__, "launch.work"),
    explain=deferred(__name__, "explain.explain"),
    buckets=deferred(__name__, "schedule.buckets"),
)
