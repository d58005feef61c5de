"""A C++ compiler for tests that compiles each kernel once, whatever it is called.

Many kernels that tests compile differ from another one in nothing but their name: the backward of ten layers, or of the
same function in ten tests. ``on_path`` puts a program ``g++`` in front of the machine's on ``PATH``. Run as
``jitgen/compilers/host.py`` runs the host compiler, it compiles the kernel under the name ``ONE`` to an object file,
which it keeps, and links that with the kernel's own name as an alias. A kernel with the same text, headers and flags is
only linked, in 0.05 s instead of 0.25 s. Every other command goes to the machine's compiler unchanged, and so does a
kernel that does not compile, for its error.

The program is a Python without site packages that imports little, so that it starts in 0.02 s.
"""

from __future__ import annotations

import hashlib
import os
import sys

PROGRAM = "g++"
"""The compiler that it stands in for, by name: the first that jitgen looks for."""
ONE = "jitgen_one"
"""What every kernel is called in the object files."""
KEPT_BYTES = 1 << 28
"""Of object files, at most; what was not used for longest goes first."""


def on_path(program: str, kept: str, directory: str) -> str:
    """Writes the program into ``directory``; returns the ``PATH`` on which it comes first.

    Args:
        program: the machine's compiler.
        kept: where object files are kept, for all processes of a run and for the next run.
    """
    import shlex  # not in the program itself

    os.makedirs(kept, exist_ok=True)
    path = os.path.join(directory, PROGRAM)
    call = f"compiled_once.compile({program!r}, {kept!r}, sys.argv[1:])"
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import compiled_once; {call}"
    with open(path, "w") as file:
        file.write(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -ISc {shlex.quote(code)} "$@"\n')
    os.chmod(path, 0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def prune(kept: str) -> None:
    """Deletes the object files that were not used for longest, beyond ``KEPT_BYTES``."""
    with os.scandir(kept) as entries:
        found = [(facts.st_mtime, facts.st_size, entry.path) for entry in entries for facts in (entry.stat(),)]
    size = sum(each for _, each, _ in found)
    for _, own, path in sorted(found):
        if size <= KEPT_BYTES:
            break
        os.unlink(path)
        size -= own


def compile(program: str, kept: str, arguments: list[str]) -> None:
    """Does what ``program`` does with ``arguments``, from a kept object file where there is one; does not return."""
    names = [argument.partition("=")[2] for argument in arguments if argument.startswith("-frandom-seed=jitgen_")]
    if len(names) != 1 or "-shared" not in arguments or "kernel.cpp" not in arguments:
        os.execv(program, [program, *arguments])
    (name,) = names
    with open("kernel.cpp") as file:  # whose comments name the function too
        text = "\n".join("" if line.startswith("//") else line for line in file.read().replace(name, ONE).split("\n"))
    split = arguments.index("-shared")
    compiling = [each for each in arguments[:split] if not each.startswith("-frandom-seed=")]
    compiling += [f"-frandom-seed={ONE}", "-c", "one.cpp", "-o", "one.o"]
    facts = os.stat(program)
    key = hashlib.sha256(repr((program, facts.st_size, facts.st_mtime_ns, compiling, text)).encode())
    for folder, folders, files in os.walk("include"):
        folders.sort()
        for header in sorted(files):
            with open(os.path.join(folder, header), "rb") as opened:
                key.update(f"\n{folder}/{header}\n".encode() + opened.read())
    path = os.path.join(kept, f"{key.hexdigest()}.o")
    try:
        code = _read(path)
        os.utime(path)
    except FileNotFoundError:
        with open("one.cpp", "w") as file:
            file.write(text)
        silent = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
        compiler = os.posix_spawn(program, [program, *compiling], os.environ, file_actions=silent)
        if os.waitpid(compiler, 0)[1]:  # it does not compile
            os.execv(program, [program, *arguments])
        code = _read("one.o")
        own = f"{path}.{os.getpid()}"
        with open(own, "wb") as kept_file:
            kept_file.write(code)
        os.replace(own, path)
    ends = {symbol[len(ONE) :] for symbol in code.decode("latin-1").split("\0") if symbol.startswith(ONE)}
    exported = [f"-Wl,--defsym={name}{end}={ONE}{end}" for end in ends if f"{ONE}{end}".isidentifier()]
    linking = [path if argument == "kernel.cpp" else argument for argument in arguments[split:]]
    os.execv(program, [program, *linking, *exported])


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
