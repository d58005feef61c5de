"""What of this installation decides what is generated and computed; part of every request key."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from jitgen.spec import e4m3fn_saturates

_NOT_CODE = ("cli/", "bench/", "_data/", "store/", "deploy/", "__main__")
"""Parts of the package that have no say in what is generated."""


@cache
def code_digest() -> str:
    """sha256 over jitgen's own code and templates: whatever may change what a request generates."""
    from jitgen._data import templates_directory

    package = Path(__file__).parent
    return _digest((package, "*.py"), (package / "compile", "*.hpp"), (templates_directory(), "*"))


def folders_digest(*folders: Path) -> str:
    """sha256 over every file below ``folders``, as they are now: they may be edited while a process runs."""
    return _digest(*((folder, "*") for folder in folders))


def _digest(*roots: tuple[Path, str]) -> str:
    total = hashlib.sha256()
    for root, pattern in roots:
        for path in sorted(root.rglob(pattern)):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not name.startswith(_NOT_CODE) and "__pycache__" not in name:
                total.update(f"{name}\0".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def numeric_facts() -> dict[str, bool]:
    """What of the installed torch decides results."""
    return {"e4m3fn_saturates": e4m3fn_saturates()}
