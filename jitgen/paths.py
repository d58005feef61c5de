"""Checks paths of files that a user asks to be written, before the work that makes them."""

from __future__ import annotations

import os

from jitgen.errors import JitgenError


def check_writable(path: object, example: str, error: type[JitgenError]) -> str:
    """Returns ``path`` as text; raises ``error`` if no file can be written to it.

    Args:
        example: the name of such a file, for messages.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise error(f"{path!r:.80} is no path; pass that of the file to write, such as {example!r}")
    name = str(os.fspath(path))
    if os.path.isdir(name):
        raise error(f"{name} is a directory; pass the file to write: {os.path.join(name, example)}")
    directory = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(directory):
        raise error(f"{name}: there is no directory {directory}; make it first")
    return name
