"""Rendering a kernel of attention's backward."""

from __future__ import annotations

from jitgen.families.attention.backward.claim import NAME
from jitgen.families.attention.backward.context import context
from jitgen.kernel.render import renderer

render = renderer(NAME, "jitgen.families.attention.backward", context)
