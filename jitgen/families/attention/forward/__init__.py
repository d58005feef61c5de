"""Computes attention: two products with a softmax between them, from a plain function, in one kernel that walks the
keys once.

The modules, in the order in which a call needs them:

* ``spellings``: other ways to write attention, rewritten to the one that is matched.
* ``match``: what in a graph is attention, and what speaks against one kernel.
* ``claim``, ``results``, ``region``, ``body``: from there to a region and its instructions; ``computed`` and
  ``reading`` say which keys and values the kernel computes as it reads them.
* ``split_keys``: the rewrite of one kernel to two that split the keys.
* ``layout``: strides and parameters. ``schedule``: tiles; on sm_90a those of ``wgmma``, for few keys of ``resident``,
  and for few rows of ``decode``, whose blocks share keys in ``clusters``.
* ``context``, ``addresses``, ``triton``, ``cuda``, ``cpp``: what the templates read. In CUDA ``scales``
  takes a factor out of the rule of scores, ``ramps`` what is linear in a column, and ``elements`` says how keys and
  values are read.
* ``explain``: a kernel in words.
"""

from __future__ import annotations

from jitgen.families.attention.family import attention_family
from jitgen.families.deferred import deferred

NAME = "attention"

FAMILY = attention_family(
    __name__,
    NAME,
    plan=deferred(__name__, "claim.plan"),
    facts=deferred(__name__, "schedule.facts"),
    rewrite_kernel=deferred(__name__, "split_keys.split_keys"),
)
