"""Rendering a scan kernel."""

from __future__ import annotations

from jitgen.families.scan.claim import NAME
from jitgen.families.scan.context import context
from jitgen.kernel.render import renderer

render = renderer(NAME, "jitgen.families.scan", context, "rows")
