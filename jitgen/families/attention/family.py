"""Declares what the families of attention and of its gradients have alike."""

from __future__ import annotations

from typing import Any

from jitgen.families.deferred import deferred, family_in
from jitgen.families.family import Family

RULE = "jitgen.families.attention.rule"


def attention_family(package: str, name: str, **hooks: Any) -> Family:
    """Makes the family ``name``, of whose package modules are imported when they are asked for; ``hooks`` are further
    attributes of ``Family``."""
    return family_in(
        package,
        name,
        rewrite_values=deferred(package, "claim.rewrite_values"),
        decide=deferred(package, "claim.decide"),
        body=deferred(package, "body.body_of"),
        tensor_maps=deferred(package, "wgmma.tensor_maps"),
        launch=deferred(RULE, "launch.launch"),
        work=deferred(RULE, "launch.work"),
        explain=deferred(package, "explain.explain"),
        buckets=deferred(package, "schedule.buckets"),
        **hooks,
    )
