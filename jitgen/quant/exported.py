"""Prepares torch's writer for quantised weights in the files of ``torch.export.save``.

The writer asks each tensor for its ``layout``, to enter torch's name of it. A quantised weight answers with the name of
its own layout, and is written as a pickle, in the portable one, whatever the writer enters. So it enters "strided".
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from jitgen.quant import layouts

_WRITER = "torch._export.serde.serialize"


def let_be_saved() -> None:
    """Tells torch's writer the names of layouts. It may be told again.

    A writer without such a table is told nothing; if it does not take a weight, ``torch.export.save`` says so.
    """
    writer: Any = importlib.import_module(_WRITER)
    names = getattr(writer, "_TORCH_TO_SERIALIZE_LAYOUT", None)
    if names is not None:
        names.update(dict.fromkeys(layouts.LAYOUTS, writer.Layout.Strided))


def loaded() -> None:
    """Notes that a weight was read from a pickle: if an exported program holds it, that may be saved again."""
    if _WRITER in sys.modules:
        let_be_saved()
