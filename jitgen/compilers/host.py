"""Compiles a ``KernelSource`` of language ``cpp`` with the host C++ compiler to an ``Artifact`` with a shared object.

The source is written to a private temporary directory and compiled there under relative names, so no path reaches the
binary, and the same source gives the same bytes in any directory. Neighbours: ``pipeline.py`` calls ``toolchain``,
``prepare`` and ``compile``; ``runtime/cpu.py`` loads the shared object.

A kernel is linked against neither libgomp nor libstdc++. Its OpenMP symbols are undefined; when it is loaded, they
resolve to the libgomp that torch has loaded, so kernels and torch share one thread pool. GCC's driver would link
libgomp for ``-fopenmp``, so that option is passed to the compiler proper (``-Wp,``). Clang generates calls of another
OpenMP runtime, which torch's wheels do not contain; its kernels are vectorised and run on one thread.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jitgen import scratch, settings
from jitgen.errors import CompileError, SourceLine
from jitgen.spec import Artifact, KernelSource, Toolchain, artifact_key, digest

COMPILERS = ("g++", "c++", "clang++")
"""Names of compilers that are looked for on PATH, in this order, if neither ``JITGEN_CXX`` nor ``CXX`` names one."""

_SOURCE = "kernel.cpp"
_BINARY = "kernel.so"
_ASSEMBLY = "kernel.s"

_PLAIN_FLAGS = (
    "-std=c++17",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fno-stack-protector",
    "-w",
)
_CODE_FLAGS = (
    "-O3",
    "-fPIC",
    # No contraction and no reassociation, unless a source asks for it. errno and the floating-point exception flags are
    # not maintained: no result depends on them, and they prevent vectorisation.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
)
_INTERLEAVED = (
    "--param=max-completely-peeled-insns=4000",
    "-fno-tree-loop-distribute-patterns",
    "-fschedule-insns",
    "-fsched-pressure",
)
_LINK_FLAGS = ("-shared", "-nostdlib", "-Wl,--build-id=none", "-Wl,-z,now", "-Wl,-O1")
_LIBRARIES = ("-lm", "-lc")
_UNRESOLVED = ("-Wl,-z,defs", "-Wl,--warn-unresolved-symbols", "-Wl,--no-demangle")
"""Has the linker name the symbols that a loader has to find elsewhere; it changes no binary."""
_UNRESOLVED_SYMBOL = re.compile(r"undefined (?:reference to|symbol:) [`'\"]?(\w+)")
_OPENMP = ("GOMP_", "omp_")


def code_flags(source: KernelSource, compiler: str = "gcc") -> tuple[str, ...]:
    """Returns the flags for optimisation, floating-point rules, OpenMP and instruction sets of a kernel's C++.

    Two options of the source add flags:

    * ``interleaved``: the vectors of a loop of known length are computed in alternation. The loop is unrolled however
      long its body is, and instructions are scheduled before register allocation. Otherwise each vector is a chain of
      dependent operations longer than a processor's reorder window, and a chain of 256 multiplications takes six times
      as long. A loop that clears accumulators is unrolled too, because GCC would make it a ``rep stos``, whose start-up
      takes as long as the sum of a short row. The option makes code slower whose accumulators fill all registers.
    * ``narrow``: vectors of 256 bits, even if the target has wider ones.
    """
    target = source.target
    openmp = ("-Wp,-fopenmp",) if compiler == "gcc" else ("-fopenmp-simd",)
    # Vector code computes both sides of a selection under masks; jump threading would duplicate what follows it.
    selections = ("-fno-thread-jumps",) if compiler == "gcc" else ()
    isa = "x86-64-v3" if target.arch == "x86-64-v4" and source.option("narrow") else target.arch
    arch = () if isa == "generic" else (f"-march={isa}",)
    interleaved = _INTERLEAVED if compiler == "gcc" and source.option("interleaved") else ()
    # GCC prefers 256-bit vectors even for targets with 512-bit ones; streaming kernels are never slower with 512.
    width = ("-mprefer-vector-width=512",) if isa == "x86-64-v4" else ()
    return (*_CODE_FLAGS, *openmp, *selections, *interleaved, *arch, *width)


def flags(source: KernelSource, compiler: str = "gcc") -> tuple[str, ...]:
    """Returns all flags that the compiled code depends on; ``prepare`` makes them part of the artifact key."""
    return (*_PLAIN_FLAGS, *code_flags(source, compiler))


def added_flags(source: KernelSource) -> tuple[str, ...]:
    """Returns the flags after all others: those that ``source`` asks for, then those of ``JITGEN_CXXFLAGS``."""
    return (*source.option("flags", ()), *settings.get("JITGEN_CXXFLAGS"))


# ------------------------------------------------------------------------------------------------------- toolchain

_known: dict[tuple[str, ...], Toolchain | None] = {}


def command() -> tuple[str, ...] | None:
    """Returns the compiler to run, as an argument vector with a resolved program; None if there is none.

    ``JITGEN_CXX`` or ``CXX`` may hold several words, such as ``ccache g++``.
    """
    asked = settings.host_compiler_name()
    for name in [asked] if asked else COMPILERS:
        words = shlex.split(name)
        program = shutil.which(words[0]) if words else None
        if program:
            return (program, *words[1:])
    return None


def fingerprint() -> tuple[str, ...] | None:
    """Returns the identity of ``toolchain``'s compiler: file, size, modification time, arguments and
    ``JITGEN_CXXFLAGS``.

    It costs a few ``stat`` calls, so a caller may remember the answer of ``toolchain`` by it, also across processes. It
    contains a path and a time, so it must not be part of a key.
    """
    words = command()
    if words is None:
        return None
    path = os.path.realpath(words[0])
    facts = os.stat(path)
    return (path, str(facts.st_size), str(facts.st_mtime_ns), *words[1:], *settings.get("JITGEN_CXXFLAGS"))


def toolchain() -> Toolchain | None:
    """Returns the host compiler and its exact version; None if this machine has none.

    Flags of ``JITGEN_CXXFLAGS`` are part of the version, so kernels built with others are not used. The compiler is run
    once per process, with ``--version``, in about 2 ms.
    """
    identity = fingerprint()
    if identity is None:
        return None
    if identity not in _known:
        tools = _ask_version(command() or ())
        added = settings.get("JITGEN_CXXFLAGS")
        _known[identity] = replace(tools, version=f"{tools.version} {shlex.join(added)}") if tools and added else tools
    return _known[identity]


def _ask_version(words: tuple[str, ...]) -> Toolchain | None:
    try:
        result = subprocess.run([*words, "--version"], capture_output=True, text=True, env=_environment(), check=False)
    except OSError:
        return None
    return parse_version(result.stdout) if result.returncode == 0 else None


def parse_version(text: str) -> Toolchain | None:
    """Returns the toolchain from the output of ``--version``: ``Toolchain("gcc", "(Debian 12.2.0-14+deb12u1)
    12.2.0")``."""
    first = text.partition("\n")[0].strip()
    if "clang version" in first:
        return Toolchain("clang", first.partition("clang version")[2].strip())
    if "Free Software Foundation" in text:
        return Toolchain("gcc", first.partition(" ")[2].strip())
    return Toolchain("cxx", first) if first else None


# --------------------------------------------------------------------------------------------------------- compile


def prepare(source: KernelSource) -> KernelSource:
    """Returns ``source`` with this module's flags among its options, so that the artifact key covers them;
    idempotent."""
    if source.option("fixed_flags") is not None:
        return source
    tools = toolchain()
    fixed = list(flags(source, tools.compiler if tools else "gcc"))
    return replace(source, options=(*source.options, ("fixed_flags", fixed)))


def compile(source: KernelSource) -> Artifact:
    """Compiles ``source`` for its target.

    Returns:
        files ``kernel.cpp`` and ``kernel.so``; meta with the entry, target, toolchain, flags and header digests.

    Raises:
        CompileError: there is no compiler, or it refuses the source. The error has the failing lines, and the path of
            a copy of the source.
    """
    tools, words = _require(source)
    with _build_directory(source) as directory:
        link = (*_LINK_FLAGS, *_UNRESOLVED)
        log = _run(source, directory, [*words, *_arguments(source, tools), *link, _SOURCE, "-o", _BINARY, *_LIBRARIES])
        _check_symbols(source, log)
        binary = (directory / _BINARY).read_bytes()
    return Artifact(
        key=artifact_key(source, tools),
        files={_SOURCE: source.text.encode(), _BINARY: binary},
        binary=_BINARY,
        meta={
            "entry": source.name,
            "language": source.language,
            "route": "host",
            "target": str(source.target),
            "toolchain": str(tools),
            "flags": list(_arguments(source, tools)),
            "headers": {name: digest(text) for name, text in source.headers},
        },
    )


def object_file(source: KernelSource, symbol: str) -> bytes:
    """Compiles to a relocatable object, whose packed entry is called ``<symbol>_packed``."""
    tools, words = _require(source)
    renamed = f"-D{source.name}_packed={symbol}_packed"
    with _build_directory(source) as directory:
        _run(source, directory, [*words, *_arguments(source, tools), renamed, "-c", _SOURCE, "-o", "kernel.o"])
        return (directory / "kernel.o").read_bytes()


def assembly(source: KernelSource) -> str:
    """Compiles to the assembly of the binary that ``compile`` would make."""
    tools, words = _require(source)
    with _build_directory(source) as directory:
        _run(source, directory, [*words, *_arguments(source, tools), "-S", _SOURCE, "-o", _ASSEMBLY])
        return (directory / _ASSEMBLY).read_text()


def _require(source: KernelSource) -> tuple[Toolchain, tuple[str, ...]]:
    tools, words = toolchain(), command()
    if tools is not None and words is not None:
        return tools, words
    asked = settings.host_compiler_name()
    raise CompileError(
        "no C++ compiler: "
        + (
            f"{asked!r}, named by JITGEN_CXX or CXX, does not run"
            if asked
            else f"none of {', '.join(COMPILERS)} is on PATH"
        )
        + "; install g++ or name one in JITGEN_CXX, or prewarm the store on a machine that has one"
    )


def _arguments(source: KernelSource, tools: Toolchain) -> tuple[str, ...]:
    extra = added_flags(source)
    # The seed makes the names deterministic that GCC generates; the include directory is relative to the working one.
    seed = (f"-frandom-seed={source.name}",) if tools.compiler == "gcc" else ()
    return (*flags(source, tools.compiler), *seed, *extra, "-I", "include")


def _environment(directory: Path | None = None) -> dict[str, str]:
    """Returns the environment of the compiler, whose temporary files go to ``directory``."""
    return {**os.environ, "LC_ALL": "C"} | ({"TMPDIR": str(directory)} if directory else {})


@contextmanager
def _build_directory(source: KernelSource) -> Iterator[Path]:
    """Provides a private directory with the source and its headers; CompileError if none can be written."""
    try:
        with scratch.directory() as directory:
            texts = {directory / "include" / name: text for name, text in source.headers}
            for folder in {path.parent for path in texts}:
                folder.mkdir(parents=True, exist_ok=True)
            for path, text in {directory / _SOURCE: source.text, **texts}.items():
                path.write_text(text)
            yield directory
    except OSError as error:
        if error.errno is None:
            raise  # a TimeoutError of the caller's own alarm, not an answer of the system
        raise CompileError(
            f"kernel {source.described} cannot be compiled: {error}. Make room, or set TMPDIR to a directory you can "
            "write"
        ) from error


def _run(source: KernelSource, directory: Path, arguments: list[str]) -> str:
    """Runs the compiler, and returns what it says beside its result."""
    result = subprocess.run(
        arguments,
        cwd=directory,
        capture_output=True,
        text=True,
        errors="replace",
        env=_environment(directory),
        check=False,
    )
    if result.returncode != 0:
        raise CompileError(
            f"kernel {source.described} did not compile for {source.target}",
            path=scratch.keep(_SOURCE, source.text),
            log=f"$ {shlex.join(arguments)}\n{result.stderr}{result.stdout}",
            lines=failing_lines(source, result.stderr),
        )
    return result.stderr


def _check_symbols(source: KernelSource, log: str) -> None:
    """Raises CompileError where a kernel that was linked needs a symbol that no process has which loads it."""
    import ctypes

    own, symbols = ctypes.CDLL(None), dict.fromkeys(_UNRESOLVED_SYMBOL.findall(log))
    missing = [name for name in symbols if not name.startswith(_OPENMP) and not hasattr(own, name)]
    if missing:
        raise CompileError(
            f"kernel {source.described} uses {', '.join(missing)}, which the C library has not; kernels are linked "
            "with the C library alone: do without what allocates or throws in the C++ library, such as std::vector",
            path=scratch.keep(_SOURCE, source.text),
            log=log,
        )


# GCC and Clang write "file:line:column: error: ...", nvcc "file(line): error: ...".
_DIAGNOSTIC = re.compile(
    r"^(?P<file>[^\s:()]+)[:(](?P<line>\d+)(?::\d+)?[:)]+ *(?:fatal |catastrophic )?error:? *(?P<message>.*)$"
)
_MENTION = re.compile(rf"\b{re.escape(_SOURCE)}:(?P<line>\d+)[:,]")


def failing_lines(source: KernelSource, log: str) -> tuple[SourceLine, ...]:
    """Lists the lines of the generated source (``kernel.cpp`` in the log) in which a compiler reports errors, each
    once.

    An error in a header is attributed to the line of the source that the log names as leading to it, if any.
    """
    text = source.text.splitlines()
    lines: dict[tuple[int, str], SourceLine] = {}
    mention: int | None = None
    for row in log.splitlines():
        match = _DIAGNOSTIC.match(row)
        if match is None:
            mentioned = _MENTION.search(row)
            mention = int(mentioned["line"]) if mentioned else mention
            continue
        own = match["file"] == _SOURCE
        line = int(match["line"]) if own else mention
        message = (
            match["message"] if own else f"{match['file'].removeprefix('include/')}:{match['line']}: {match['message']}"
        )
        mention = None
        if line is not None and 1 <= line <= len(text):
            lines.setdefault((line, message), SourceLine(line, text[line - 1], message))
    return tuple(lines.values())
