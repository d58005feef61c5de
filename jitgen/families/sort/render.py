"""Rendering a sort kernel."""

from __future__ import annotations

from jitgen.families.sort.claim import NAME
from jitgen.families.sort.context import context
from jitgen.kernel.render import renderer

render = renderer(NAME, "jitgen.families.sort", context, "rows")
