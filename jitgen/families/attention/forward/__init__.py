"""Attention: two products with a softmax between them, from a plain function, in one kernel that walks the keys once.

The modules, in the order in which a call needs them:

* ``spellings``: other ways to write attention, rewritten to the one that is matched.
* ``match``: what in a graph is attention, and what speaks against one kernel.
* ``claim``, ``results``, ``heads``, ``region``, ``body``: from there to a region and its instructions.
* ``split_keys``: the rewrite of one kernel to two that split the keys.
* ``layout``, ``schedule``, ``launch``: strides, tiles, arguments.
* ``render``, ``context``, ``<dialect>``: what the templates read; ``narrow`` and ``bounds`` rewrite and analyse the
  rule of scores.

The kernel's parameters, in every dialect: a pointer for each operand in memory, in order, the integers that
``launch.integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from jitgen.families.attention.forward.claim import NAME, claim, decide, rewrite_values
from jitgen.families.deferred import deferred
from jitgen.families.family import Family

FAMILY = Family(
    name=NAME,
    rewrite_values=rewrite_values,
    claim=claim,
    decide=decide,
    body=deferred(__name__, "body.body_of"),
    rewrite_kernel=deferred(__name__, "split_keys.split_keys"),
    layout=deferred(__name__, "layout.layout"),
    candidates=deferred(__name__, "schedule.candidates"),
    render=deferred(__name__, "render.render"),
    launch=deferred(__name__, "launch.launch"),
    arguments=deferred(__name__, "launch.arguments"),
    work=deferred(__name__, "launch.work"),
    explain=deferred(__name__, "explain.explain"),
    buckets=deferred(__name__, "schedule.buckets"),
)
