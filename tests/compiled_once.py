"""A C++ compiler for tests that compiles each kernel once, whatever it is called, and does so in less time.

Many kernels that tests compile differ from another one in nothing but their name: the backward of ten layers, or of the
same function in ten tests. ``on_path`` puts a program ``g++`` in front of the machine's on ``PATH``. Run as
``jitgen/compilers/host.py`` runs the host compiler, it compiles the kernel under the name ``ONE`` to an object file,
which it keeps, and links that with the kernel's own name as an alias. A kernel with the same text, headers and flags is
only linked. Every other command goes to the machine's compiler unchanged, and so does a kernel that does not compile,
for its error.

What a kernel includes is compiled beforehand, once for all kernels that begin with the same lines. The linker is run
without the compiler's driver, and without the C library where the kernel uses none of its versioned symbols: reading
the symbols of libm and libc takes 0.02 s, which is four fifths of linking a kernel.

The program is a Python without site packages that imports little, so that it starts in 0.02 s. The process that runs
the tests saves that too: ``tests/conftest.py`` has it call ``compiled`` itself.
"""

from __future__ import annotations

import os
import sys
from _blake2 import blake2b  # hashlib would load OpenSSL, in a fifth of this program's time
from _thread import get_ident

PROGRAM = "g++"
"""The compiler that it stands in for, by name: the first that jitgen looks for."""
ONE = "jitgen_one"
"""What every kernel is called in the object files."""
KEPT_BYTES = 1 << 28
"""Size of the object files and precompiled headers that are kept; what was not used for longest goes first."""
RUNTIME = {"GOMP_parallel", "GOMP_barrier", "omp_get_num_threads", "omp_get_thread_num", "__tls_get_addr"} | {
    *("memcpy", "memmove", "memset", "aligned_alloc", "malloc", "free", "_GLOBAL_OFFSET_TABLE_")
}
"""Symbols of which a process has one, so that a kernel which needs no others need not be linked with a library. The
last is the linker's own."""


def on_path(program: str, kept: str, directory: str) -> str:
    """Writes the program into ``directory``; returns the ``PATH`` on which it comes first.

    Args:
        program: the machine's compiler.
        kept: where object files are kept, for all processes of a run and for the next run.
    """
    import shlex  # not in the program itself

    os.makedirs(kept, exist_ok=True)
    path = os.path.join(directory, PROGRAM)
    call = f"compiled_once.run({program!r}, {kept!r}, sys.argv[1:])"
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import compiled_once; {call}"
    with open(path, "w") as file:
        file.write(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -ISc {shlex.quote(code)} "$@"\n')
    os.chmod(path, 0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def prune(kept: str) -> None:
    """Deletes the files that were not used for longest, beyond ``KEPT_BYTES``."""
    with os.scandir(kept) as entries:
        files = sorted((facts.st_mtime, facts.st_size, entry.path) for entry in entries for facts in (entry.stat(),))
    size = sum(own for _, own, _ in files)
    for _, own, path in files:
        if size <= KEPT_BYTES:
            break
        os.unlink(path)
        size -= own


def run(program: str, kept: str, arguments: list[str]) -> None:
    """Does what ``program`` does with ``arguments``, from a kept object file where there is one; does not return."""
    if not compiled(program, kept, arguments, ""):
        os.execv(program, [program, *arguments])


def compiled(program: str, kept: str, arguments: list[str], directory: str) -> bool:
    """Compiles and links a kernel in ``directory``, which ends in "/"; False if it is none, or does not compile."""
    names = [argument.partition("=")[2] for argument in arguments if argument.startswith("-frandom-seed=jitgen_")]
    if len(names) != 1 or "-shared" not in arguments or "kernel.cpp" not in arguments:
        return False
    (name,) = names
    with open(f"{directory}kernel.cpp") as file:  # whose comments name the function too
        lines = ["" if line.startswith("//") else line for line in file.read().replace(name, ONE).split("\n")]
    start = next((number for number, line in enumerate(lines) if line and line[0] != "#"), len(lines))
    prefix, rest = "\n".join(lines[:start]), "\n".join(lines[start:])
    split = arguments.index("-shared")
    flags = [argument for argument in arguments[:split] if not argument.startswith("-frandom-seed=")]
    flags.append(f"-frandom-seed={ONE}")
    facts = os.stat(program)
    key = blake2b(repr((program, facts.st_size, facts.st_mtime_ns, flags, prefix)).encode(), digest_size=20)
    headers = _headers(f"{directory}include")
    reached = _reached(prefix.encode(), headers)
    for header in sorted(reached):
        key.update(f"\n{header}\n".encode() + headers[header])
    included = os.path.join(kept, f"{key.hexdigest()}.hpp")
    for header in sorted(headers.keys() - reached):
        key.update(f"\n{header}\n".encode() + headers[header])
    key.update(rest.encode())
    path = os.path.join(kept, f"{key.hexdigest()}.o")
    try:
        code = _read(path)
        os.utime(path)
    except FileNotFoundError:
        if not _precompile(program, flags, prefix, included, directory):
            return False
        _write(f"{directory}one.cpp", f'#include "{included}"\n{rest}'.encode())
        if not _done(program, [*flags, "-c", "one.cpp", "-o", "one.o"], directory):
            return False
        code = _read(f"{directory}one.o")
        _write(path, code)
    defined, undefined = symbols_of(code)
    if any(symbol.startswith("_Z") for symbol in undefined):  # of the C++ library: the linker has something to say
        return False
    aliases = [f"--defsym={name}{symbol[len(ONE) :]}={symbol}" for symbol in defined if symbol.startswith(ONE)]
    linking = [path if argument == "kernel.cpp" else argument for argument in arguments[split:]]
    linker = os.path.join(os.path.dirname(program), "ld")
    if undefined - RUNTIME or not os.path.exists(linker):
        return _done(program, [*linking, *(f"-Wl,{alias}" for alias in aliases)], directory)
    return _done(linker, [*(word for argument in linking for word in _for_linker(argument)), *aliases], directory)


def _headers(directory: str) -> dict[str, bytes]:
    """The headers below ``directory`` by the names that they are included by."""
    return {
        os.path.join(folder, name)[len(directory) + 1 :]: _read(os.path.join(folder, name))
        for folder, _, files in os.walk(directory)
        for name in files
    }


def _reached(text: bytes, headers: dict[str, bytes]) -> set[str]:
    """The names of the ``headers`` that ``text`` may include, itself or by others."""
    reached, waiting = set[str](), [text]
    while waiting:
        for name in _included(waiting.pop()):
            if name in headers and name not in reached:
                reached.add(name)
                waiting.append(headers[name])
    return reached


_known: dict[bytes, list[str]] = {}


def _included(text: bytes) -> list[str]:
    """The names that the lines of ``text`` include; each text is read once."""
    if text not in _known:
        lines = [line for line in text.split(b"\n") if b"include" in line and line.lstrip().startswith(b"#")]
        names = [line.replace(b'"', b"<").replace(b">", b"<").split(b"<")[1:2] for line in lines]
        _known[text] = [name.decode() for (name,) in filter(None, names)]
    return _known[text]


def symbols_of(code: bytes) -> tuple[set[str], set[str]]:
    """The global symbols that an ELF object file of 64 bits defines, and those that it does not."""

    def number(at: int, size: int) -> int:
        return int.from_bytes(code[at : at + size], "little")

    headers = [number(40, 8) + number(58, 2) * section for section in range(number(60, 2))]
    (table,) = [header for header in headers if number(header + 4, 4) == 2]  # SHT_SYMTAB
    names = number(headers[number(table + 40, 4)] + 24, 8)
    found: tuple[set[str], set[str]] = set(), set()
    first = number(table + 24, 8)
    for symbol in range(first + 24 * number(table + 44, 4), first + number(table + 32, 8), 24):
        start = names + number(symbol, 4)
        found[number(symbol + 6, 2) == 0].add(code[start : code.index(0, start)].decode())
    return found


def _for_linker(argument: str) -> list[str]:
    """What the compiler's driver makes of an argument, without libraries."""
    if argument.startswith("-Wl,"):
        return argument.split(",")[1:]
    return [] if argument == "-nostdlib" or argument.startswith("-l") else [argument]


def _precompile(program: str, flags: list[str], prefix: str, included: str, directory: str) -> bool:
    """Compiles the first lines of a kernel to ``<included>.gch``, if it is not there; whether they compile."""
    precompiled = f"{included}.gch"
    try:
        os.utime(included)
        os.utime(precompiled)
    except FileNotFoundError:
        _write(f"{directory}pre.hpp", prefix.encode())
        if not _done(program, [*flags, "-x", "c++-header", "pre.hpp", "-o", "pre.hpp.gch"], directory):
            return False
        _write(precompiled, _read(f"{directory}pre.hpp.gch"))
        _write(included, prefix.encode())
    return True


def _done(program: str, arguments: list[str], directory: str) -> bool:
    """Runs a program in ``directory``; whether it succeeds."""
    if directory:
        import subprocess  # not in the program itself, which is in the directory

        environment = {**os.environ, "LC_ALL": "C", "TMPDIR": directory}
        done = subprocess.run([program, *arguments], cwd=directory, env=environment, capture_output=True, check=False)
        return done.returncode == 0
    silent = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    process = os.posix_spawn(program, [program, *arguments], os.environ, file_actions=silent)
    return os.waitpid(process, 0)[1] == 0


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, data: bytes) -> None:
    """Writes a file that other processes see whole or not at all."""
    own = f"{path}.{os.getpid()}.{get_ident()}"
    with open(own, "wb") as file:
        file.write(data)
    os.replace(own, path)
