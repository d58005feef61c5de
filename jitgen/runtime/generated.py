"""Functions whose text is generated: dispatchers, plans and launchers. Tracebacks show their lines."""

from __future__ import annotations

import linecache
import zlib
from collections.abc import Mapping
from typing import Any


def define(name: str, title: str, text: str, names: Mapping[str, Any]) -> Any:
    """The function ``name`` that ``text`` defines over the global ``names``.

    Args:
        title: what it is, such as ``"launch of add"``. With a checksum of the text it is the file name that tracebacks
            show; functions of the same text share it, so that ``linecache`` does not grow with every plan bound.
    """
    path = f"<jitgen {title} {zlib.crc32(text.encode()):08x}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    variables = dict(names)
    exec(compile(text, path, "exec"), variables)
    # The function does not refer to itself: without that cycle it is freed as soon as nothing refers to it.
    return variables.pop(name)
