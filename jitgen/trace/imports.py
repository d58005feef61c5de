"""Has Dynamo imported outside of a trace.

When it is imported, Dynamo keeps Python's own functions (``getattr``, ``vars``), to tell them from others later. If a
function that is being traced were to import it, it would keep what stands for them (``look_ups.py``), and break graphs
of ``torch.compile`` at the true ones for good. So the import ends that run of the function, and it is run again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

from jitgen.trace.guards import tracing

_DYNAMO = "torch._dynamo"


class ImportsDynamo(BaseException):
    """Ends a run that imports Dynamo; no error, which a function may handle."""


class _Finder:
    """Finds no module; raises where a trace asks for Dynamo."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _DYNAMO and tracing.get() is not None:
            raise ImportsDynamo
        return None


@contextmanager
def dynamo_is_imported_before() -> Iterator[None]:
    """Raises ``ImportsDynamo`` where code within it is the first to import Dynamo."""
    if _DYNAMO in sys.modules:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def import_dynamo() -> None:
    importlib.import_module(_DYNAMO)
