"""Digests what of this installation decides what is generated and computed; it is part of every request key.

jitgen's own Python is hashed without comments, documentation and blank lines: a change of these changes no kernel, and
rebuilds none. Templates and headers are hashed as they are, since their comments are in the sources that are compiled.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from pathlib import Path

from jitgen.spec import e4m3fn_saturates

_NOT_CODE = (
    *("api.py", "call/", "checkpoints/", "dynamo/", "export/", "gradients/", "huggingface/", "nn/", "trace/"),
    *("bench/", "cli/", "deploy/", "inspect.py", "paths.py", "store/"),
    *(
        "_data",
        "__init__.py",
        "__main__.py",
        "balance.py",
        "console.py",
        "events.py",
        "forks.py",
        "misses.py",
        "progress.py",
    ),
)
"""Files and folders of the package that have no say in what a graph becomes. Some make graphs, and the graph is in the
key; some read and write files; some are what people use."""

_BEFORE_COMMENT = re.compile(r"""(?:[^"'#]+|"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')*""")
"""What of a line is code: all before a ``#`` that is in no string."""


@cache
def code_digest() -> str:
    """Returns the sha256 over jitgen's own code and templates: whatever may change what a request generates."""
    from jitgen._data import templates_directory

    package = Path(__file__).parent
    total = hashlib.sha256()
    for path in generating_files(package):
        _add(total, path.relative_to(package).as_posix(), without_comments(path.read_text(encoding="utf-8")).encode())
    return _digest(total, (package / "compilers", "*.hpp"), (templates_directory(), "*"))


def generating_files(package: Path) -> list[Path]:
    """Returns the modules below ``package`` that decide what a graph becomes, in order."""
    modules: list[Path] = []
    for entry in os.scandir(package):
        name = f"{entry.name}/" if entry.is_dir() else entry.name
        if not name.startswith(_NOT_CODE):
            modules += Path(entry.path).rglob("*.py") if entry.is_dir() else [Path(entry.path)]
    return sorted(path for path in modules if path.suffix == ".py")


def without_comments(text: str) -> str:
    """Returns the lines of a module of jitgen that have code, without comments and documentation.

    A string in triple quotes that is alone on its lines is documentation, which holds in jitgen's modules
    (``tests/unit/test_fingerprint.py``). This reads lines: a tokenizer takes 20 times as long.
    """
    kept: list[str] = []
    string: list[str] = []
    """The lines of a string in triple quotes that goes on."""
    quotes = ""
    apostrophes = "'''" in text
    for line in text.split("\n"):
        bare = line.strip()
        if quotes:
            string.append(line)
            if quotes in line:
                if not (string[0].lstrip().startswith('"""') and bare.endswith('"""')):
                    kept += string
                string, quotes = [], ""
        elif not bare or bare[0] == "#":
            continue
        elif '"""' in bare or (apostrophes and "'''" in bare):
            delimiter = '"""' if '"""' in bare else "'''"
            if bare.count(delimiter) % 2:
                string, quotes = [line], delimiter
            elif not (bare.startswith('"""') and bare.endswith('"""')):
                kept.append(line)
        elif "#" in bare and (code := _BEFORE_COMMENT.match(line)) is not None and line[code.end() :][:1] in ("#", ""):
            kept.append(code.group().rstrip())
        else:
            kept.append(line)
    return "\n".join(kept)


def folders_digest(*folders: Path) -> str:
    """Returns the sha256 over every file below ``folders``, as they are now: they may be edited while a process
    runs."""
    return _digest(hashlib.sha256(), *((folder, "*") for folder in folders))


def _digest(total: hashlib._Hash, *roots: tuple[Path, str]) -> str:
    """Returns the digest of ``total`` and every file of a pattern below each root, byte for byte."""
    for root, pattern in roots:
        for path in sorted(root.rglob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                _add(total, path.relative_to(root).as_posix(), path.read_bytes())
    return total.hexdigest()


def _add(total: hashlib._Hash, name: str, content: bytes) -> None:
    total.update(f"{name}\0".encode())
    total.update(hashlib.sha256(content).digest())


def numeric_facts() -> dict[str, bool]:
    """Returns the facts of the installed torch that decide results."""
    return {"e4m3fn_saturates": e4m3fn_saturates()}
