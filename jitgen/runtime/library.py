"""Makes a file that the dynamic loader can open from the bytes of a shared object in memory.

What the store has verified is what is loaded: between reading a file and loading it by its path it could be replaced.
So its bytes go into a sealed memory file (Linux), or else into a file of this process's own scratch directory.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

from jitgen import scratch

_count = itertools.count(1)


@contextmanager
def file_of(content: bytes | str, name: str) -> Iterator[str]:
    """Provides a path at which ``content`` can be loaded while the context lasts.

    Args:
        content: the bytes of a shared object; or a path, which is the result.
        name: shown for the mapping by debuggers and profilers.
    """
    if isinstance(content, str):
        yield content
        return
    descriptor = _memory_file(content, name)
    if descriptor is not None:
        try:
            yield _new_path(descriptor)
        finally:
            os.close(descriptor)
        return
    with scratch.directory() as directory:
        path = directory / "kernel.so"
        path.write_bytes(content)
        yield str(path)


def _memory_file(content: bytes, name: str) -> int | None:
    """Returns a descriptor of a file in memory that nobody can change any more; None if the system has or allows
    none."""
    if not hasattr(os, "memfd_create"):
        return None
    import fcntl

    try:
        descriptor = os.memfd_create(f"jitgen:{name[:200]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _new_path(descriptor: int) -> str:
    """Returns a path of an open descriptor that no library of this process was loaded by.

    The dynamic loader takes a library whose path it knows for the one it has, and numbers of descriptors are used
    again. So the path has a number of its own, written in steps that lead nowhere: ``./`` for a 1 and ``/`` for a 0.
    """
    number = "".join("./" if digit == "1" else "/" for digit in f"{next(_count):b}")
    return f"/proc/self/fd/{number}{descriptor}"
