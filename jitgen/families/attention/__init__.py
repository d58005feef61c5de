"""Attention: two products with a softmax between them, from a plain function, in one kernel that walks the keys once.

The modules, in the order in which a call needs them:

* ``match``: what in a graph is attention, and what speaks against one kernel.
* ``claim``, ``heads``, ``region``, ``body``: from there to a region and its instructions.
* ``split_keys``: the rewrite of one kernel to two that split the keys.
* ``layout``, ``schedule``, ``launch``: strides, tiles, arguments.
* ``render``, ``context``, ``<dialect>``: what the templates read; ``narrow`` and ``bounds`` rewrite and analyse the
  rule of scores.

The kernel's parameters, in every dialect: a pointer for each operand in memory, in order, the integers that
``launch.integer_names`` lists, and the run-time scalars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitgen.families.attention.body import body_of
from jitgen.families.attention.claim import NAME, claim, decide
from jitgen.families.attention.launch import arguments, launch, work
from jitgen.families.attention.layout import layout
from jitgen.families.attention.schedule import buckets, candidates
from jitgen.families.attention.split_keys import split_keys
from jitgen.families.family import Family

if TYPE_CHECKING:
    from jitgen.codegen.environment import Rendered
    from jitgen.spec import KernelSource


def _render(*of: Any) -> tuple[KernelSource, Rendered]:
    from jitgen.families.attention.render import render

    return render(*of)


def _explain(*of: Any) -> list[str]:
    from jitgen.families.attention.explain import explain

    return explain(*of)


FAMILY = Family(
    name=NAME,
    claim=claim,
    decide=decide,
    body=body_of,
    rewrite_kernel=split_keys,
    layout=layout,
    candidates=candidates,
    render=_render,
    launch=launch,
    arguments=arguments,
    work=work,
    explain=_explain,
    buckets=buckets,
)
