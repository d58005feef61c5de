"""Computes the backward of attention: products with a pointwise function of other products, which are computed again in
tiles.

The modules, in the order in which a call needs them:

* ``match``: such products in a graph, and rewrites to the form that is matched.
* ``claim``, ``region``, ``body``: from there to a region and its instructions.
* ``layout``, ``schedule``: strides and parameters, tiles.
* ``wgmma``, ``wgmma_schedule``: the kernel of sm_90a: what it can compute, tensor maps, tiles.
* ``context``, ``triton``, ``cuda``, ``cpp``: what the templates read; ``pairs`` rewrites what a tile
  computes in CUDA.
"""

from __future__ import annotations

from jitgen.families.attention.family import attention_family
from jitgen.families.deferred import deferred

NAME = "attention_backward"

FAMILY = attention_family(__name__, NAME, merge=deferred(__name__, "claim.merge"))
