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

from jitgen.families.attention.backward.claim import NAME, claim, decide, merge, rewrite_values
from jitgen.families.attention.family import attention_family

FAMILY = attention_family(__name__, NAME, rewrite_values=rewrite_values, claim=claim, decide=decide, merge=merge)
