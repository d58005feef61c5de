"""Launches kernels that users wrote, in a plan with generated ones.

A kernel's single body has the instruction ``launch``, whose attributes are those of the node, and an operand for each
of the node's. What it writes it finds in memory as it was before, unless nobody has set its elements. The source is the
user's own, behind an entry that passes the arguments in the launcher's order.
"""

from __future__ import annotations

from jitgen.families.deferred import deferred, family_in

NAME = "launch"

FAMILY = family_in(
    __name__,
    NAME,
    plan=deferred(__name__, "claim.plan"),
    body=deferred(__name__, "body.body"),
    facts=deferred(__name__, "schedule.facts"),
    work=deferred(__name__, "layout.work"),
)
