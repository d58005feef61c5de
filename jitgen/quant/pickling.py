"""The function that the pickle of a ``QTensor`` names: ``jitgen.quant.rebuild``.

``torch.load(weights_only=True)`` must know that function before any checkpoint is read, so the package itself defines
it. ``qtensor`` needs it too, and must not import the package that imports it: the package sets it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

rebuild: Callable[..., Any]
