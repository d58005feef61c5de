"""Rendering an attention kernel."""

from __future__ import annotations

from jitgen.families.attention.forward.claim import NAME
from jitgen.families.attention.forward.context import context
from jitgen.kernel.render import renderer

render = renderer(NAME, "jitgen.families.attention.forward", context)
