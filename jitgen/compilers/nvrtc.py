"""Compiles CUDA C++ to a cubin by NVRTC: a ``KernelSource`` in, an ``Artifact`` out. It needs no GPU, no nvcc and
writes no file.

jitgen's static headers are passed in memory (``KernelSource.headers``); third-party ones are found by ``find_headers``.
The program is compiled under the logical name ``jitgen/<key12>/kernel.cu``, so the same source gives the same bytes on
every machine. Neighbours: ``codegen/cuda.py`` is the dialect of the sources, ``pipeline.py`` calls ``compile`` on a
miss, ``runtime/cuda.py`` loads the cubin, ``compilers/disassemble.py`` shows it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jitgen import settings
from jitgen.errors import CompileError, SourceLine
from jitgen.spec import Artifact, KernelSource, Toolchain, artifact_key, register_shortage

INSTALL = "install it with: pip install 'jitgen[cuda]'"

WARPGROUP = 128
"""The number of threads of a warpgroup."""

_NVRTC_DISTRIBUTIONS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_CUDA_DISTRIBUTIONS = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")


# ------------------------------------------------------------------------------------------------------- toolchain


@dataclass(frozen=True)
class Headers:
    """Locates a third-party header package on this machine: its include directories, and (distribution, version)
    pairs."""

    directories: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]


def toolchain(packages: tuple[str, ...] = ()) -> Toolchain | None:
    """Returns the toolchain that compiles a source with headers of ``packages`` here; None if something is missing.

    Flags of ``JITGEN_NVRTCFLAGS`` are part of the version, so kernels built with others are not used.
    """
    version = _nvrtc_version()
    headers = [find_headers(package) for package in packages]
    if version is None or None in headers:
        return None
    added = settings.get("JITGEN_NVRTCFLAGS")
    version = f"{version} {shlex.join(added)}" if added else version
    return Toolchain("nvrtc", version, tuple(pair for located in headers if located for pair in located.versions))


def missing(packages: tuple[str, ...] = ()) -> str | None:
    """Returns what is missing for ``toolchain`` on this machine, and how to install it; None if nothing is."""
    if _distribution("cuda-bindings") is None:
        return "cuda-bindings is not installed; pip install cuda-python"
    if _nvrtc_version() is None:
        return f"the NVRTC library was not found; {INSTALL}"
    for package in packages:
        if find_headers(package) is None:
            how = f"{INSTALL}, or set CUDA_HOME to a toolkit" if package == "cuda" else INSTALL
            return f"the headers of {package!r} were not found; {how}"
    return None


@functools.cache
def find_headers(package: str) -> Headers | None:
    """Returns the headers of ``package``: ``"nvidia-cutlass"``, or ``"cuda"`` for those of the CUDA toolkit.

    Raises:
        KeyError: for any other name.
    """
    return {"nvidia-cutlass": _cutlass_headers, "cuda": _cuda_headers}[package]()


def _cutlass_headers() -> Headers | None:
    distribution = _distribution("nvidia-cutlass")
    if distribution is None:
        return None
    include = Path(str(distribution.locate_file("cutlass_library/source/include")))
    if not (include / "cutlass" / "cutlass.h").is_file():
        return None
    return Headers((str(include),), (("nvidia-cutlass", distribution.version),))


def _cuda_headers() -> Headers | None:
    wheels = [_distribution(name) for name in _CUDA_DISTRIBUTIONS]
    if wheels[0] is not None:
        include = Path(str(wheels[0].locate_file("nvidia/cu13/include")))
        if _is_complete(include):
            versions = ((name, wheel.version) for name, wheel in zip(_CUDA_DISTRIBUTIONS, wheels, strict=True) if wheel)
            return Headers((str(include), str(include / "cccl")), tuple(versions))
    for include in _toolkit_includes():
        if _is_complete(include):
            return Headers((str(include), str(include / "cccl")), (("cuda", _toolkit_version(include)),))
    return None


def _toolkit_includes() -> list[Path]:
    """Returns the include directories of installed toolkits: that of CUDA_HOME, CUDA_PATH or conda, then
    ``/usr/local/cuda``."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        named = None
    else:
        named = find_nvidia_header_directory("nvcc")
    return [Path(directory) for directory in (named, "/usr/local/cuda/include") if directory]


def _is_complete(include: Path) -> bool:
    # CUTLASS needs these three; torch's CUDA wheels contain cuda_fp16.h, but neither crt nor CCCL.
    needed = ("cuda_fp16.h", "crt/host_defines.h", "cccl/cuda/std/version")
    return all((include / name).is_file() for name in needed)


def _toolkit_version(include: Path) -> str:
    description = include.parent / "version.json"
    if description.is_file():
        return str(json.loads(description.read_text())["cuda"]["version"])
    match = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (include / "cuda.h").read_text())
    number = int(match.group(1)) if match else 0
    return f"{number // 1000}.{number % 1000 // 10}"


@functools.cache
def _nvrtc_version() -> str | None:
    """Returns the exact version of NVRTC: that of its wheel, without loading the library, else what the library
    says."""
    if _distribution("cuda-bindings") is None:
        return None
    for name in _NVRTC_DISTRIBUTIONS:
        distribution = _distribution(name)
        if distribution is not None:
            return distribution.version
    loaded = _loaded_version()
    return ".".join(map(str, loaded)) if loaded else None


def _loaded_version() -> tuple[int, int] | None:
    from cuda.bindings import nvrtc

    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError:  # cuda.pathfinder's DynamicLibNotFoundError
        return None
    return (major, minor) if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else None


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# --------------------------------------------------------------------------------------------------------- compile


def prepare(source: KernelSource) -> KernelSource:
    """Returns ``source`` with this module's flags among its options, so that the artifact key covers them;
    idempotent."""
    if source.option("fixed_flags") is not None:
        return source
    return replace(source, options=(*source.options, ("fixed_flags", _flags(source))))


def compile(source: KernelSource) -> Artifact:
    """Compiles one CUDA source to PTX and a cubin for exactly ``source.target``.

    Options read from the source: ``fmad`` (contract a*b+c, default False), ``lineinfo`` (default False),
    ``maxrregcount`` (int), ``relative_includes`` (headers of packages include what lies beside them, default False),
    ``flags`` (further NVRTC flags, a list of strings).

    Returns:
        files ``kernel.cu``, ``kernel.ptx`` and ``kernel.cubin``; meta with entry, target, toolchain, and the resources
        that ptxas reports: registers, spill_bytes, shared_bytes (static), stack_bytes; and register_pool, where
        warpgroups deal registers among themselves (``spec.register_shortage``). Where the source has more
        entries, ``entries`` has the resources of each of them by name.

    Raises:
        CompileError: the toolchain is incomplete, with what to install; NVRTC refuses the source, with the failing
            lines; or warpgroups ask for more registers than the block has, which would wait forever.
    """
    tools = toolchain(source.packages)
    if tools is None:
        raise CompileError(f"cannot compile {source.described} for {source.target}: {missing(source.packages)}")
    _check_version(tools)
    key = artifact_key(source, tools)
    name = f"jitgen/{key[:12]}/kernel.cu"
    status, log, ptx, cubin = _run(source, name, [*_flags(source), *_include_paths(source)])
    if status is not None:
        lines = failing_lines(log, source, name)
        raise CompileError(f"{source.described} does not compile for {source.target} ({status})", log=log, lines=lines)
    files = {"kernel.cu": source.text.encode(), "kernel.ptx": ptx, "kernel.cubin": cubin}
    meta = {"entry": source.name, "target": str(source.target), "toolchain": str(tools)}
    resources = {name: parse_resources(log, name) | parse_register_pool(ptx.decode(), name) for name in _entries(log)}
    for name, value in resources.items():
        shortage = register_shortage(value.get("register_pool", ()), value["registers"])
        if shortage is not None:
            raise CompileError(f"kernel {name} would wait forever: {shortage}; please report this", log=log)
    own = resources.pop(source.name, None) or parse_resources(log, source.name)
    return Artifact(key, files, "kernel.cubin", meta | own | ({"entries": resources} if resources else {}))


def _check_version(tools: Toolchain) -> None:
    # The key has the version of the wheel, but a library that the process loaded before, through torch, is used first.
    loaded = _loaded_version()
    if loaded is None:
        raise CompileError(f"NVRTC {tools.version} is installed but its library does not load; {INSTALL}")
    if tuple(tools.version.split(".")[:2]) != tuple(map(str, loaded)):
        raise CompileError(
            f"the NVRTC wheel is version {tools.version}, but the process has loaded {loaded[0]}.{loaded[1]}; "
            "remove one of the two from the library path"
        )


def _flags(source: KernelSource) -> list[str]:
    flags = [
        f"--gpu-architecture={source.target.arch}",
        "-std=c++17",
        "-default-device",
        f"--fmad={'true' if source.option('fmad', False) else 'false'}",
        "--ptxas-options=-v",
    ]
    if not source.option("relative_includes", False):
        flags.append("-no-source-include")  # nothing near the working directory may shadow a header
    if source.option("lineinfo", False):
        flags.append("-lineinfo")
    if source.option("maxrregcount"):
        flags.append(f"--maxrregcount={source.option('maxrregcount')}")
    added = source.option("flags", ())
    names = {flag.partition("=")[0].lstrip("-") for flag in added}  # NVRTC takes an option once
    flags = [flag for flag in flags if flag.partition("=")[0].lstrip("-") not in names]
    return [*flags, *added, *settings.get("JITGEN_NVRTCFLAGS")]


def _include_paths(source: KernelSource) -> list[str]:
    # These are no flags, because a key contains the versions of packages and no paths.
    packages = [headers for headers in map(find_headers, source.packages) if headers]
    return [f"--include-path={directory}" for headers in packages for directory in headers.directories]


def _run(source: KernelSource, name: str, flags: list[str]) -> tuple[str | None, str, bytes, bytes]:
    """Runs NVRTC; returns its name of the error or None, the log, the PTX and the cubin."""
    from cuda.bindings import nvrtc

    texts = [text.encode() for _, text in source.headers]
    names = [include.encode() for include, _ in source.headers]
    status, program = nvrtc.nvrtcCreateProgram(source.text.encode(), name.encode(), len(texts), texts, names)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return status.name, "", b"", b""
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return status.name, text, b"", b""
        ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0")
        return None, text, ptx, _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(size_of: Any, read: Any, program: Any) -> bytes:
    _, size = size_of(program)
    if size <= 1:  # only the terminator; and ``read`` must not write to a one-byte object, which Python interns
        return b""
    buffer = bytes(size)
    read(program, buffer)
    return buffer


# ------------------------------------------------------------------------------------------------------------- logs

_DIAGNOSTIC = re.compile(
    r"^(?:(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\)|At end of source): "
    r"(?:catastrophic )?error(?: #[\w-]+)?: (?P<message>.+)$",
    re.MULTILINE,
)


def failing_lines(log: str, source: KernelSource, name: str) -> tuple[SourceLine, ...]:
    """Returns the lines in which a log of NVRTC or nvcc reports errors.

    An error in a header is reported at the line of the source that the log says led to it, or at line 0 where the log
    names none; its message has the header's name and line.
    """
    texts = {name: source.text} | dict(source.headers)
    diagnostics = list(_DIAGNOSTIC.finditer(log))
    ends = [diagnostic.start() for diagnostic in diagnostics[1:]] + [len(log)]
    failing = []
    for diagnostic, end in zip(diagnostics, ends, strict=False):
        file, message = diagnostic["file"] or name, diagnostic["message"]
        lines = texts.get(file, "").splitlines()
        number = int(diagnostic["line"] or len(lines))
        if file != name:
            message = f"{message} ({file} line {number})"
            caller = re.search(rf"at line (\d+) of {re.escape(name)}", log[diagnostic.end() : end])
            text = _line(lines, number)
            number = int(caller.group(1)) if caller else 0
            failing.append(SourceLine(number, _line(source.text.splitlines(), number) or text, message))
        else:
            failing.append(SourceLine(number, _line(lines, number), message))
    return tuple(failing)


def _line(lines: list[str], number: int) -> str:
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _entries(log: str) -> list[str]:
    """Returns the entries that ``ptxas -v`` has compiled."""
    return re.findall(r"Compiling entry function '(\w+)'", log)


def parse_register_pool(ptx: str, entry: str) -> dict[str, list[int]]:
    """Reads ``register_pool`` from PTX: the registers of a thread of each warpgroup of ``entry`` after setmaxnreg,
    first of the one that releases some; empty without setmaxnreg. Nothing where none are dealt."""
    section = re.split(rf"\.entry {entry}\b", ptx)[-1].partition(".entry ")[0]
    released, requested = (
        [int(number) for number in re.findall(rf"setmaxnreg\.{what}\.sync\.aligned\.u32\s+(\d+)", section)]
        for what in ("dec", "inc")
    )
    threads = re.search(r"\.maxntid (\d+)", section)
    if not requested or threads is None:
        return {}
    return {"register_pool": [max(released), *(max(requested),) * (int(threads[1]) // WARPGROUP - 1)]}


def parse_resources(log: str, entry: str) -> dict[str, Any]:
    """Reads the registers of a thread, and the bytes of spills, static shared memory and stack of ``entry``, from
    ``ptxas -v``."""
    section = log.split(f"Compiling entry function '{entry}'", 1)[-1].split("Compiling entry function", 1)[0]

    def number(pattern: str) -> int:
        match = re.search(pattern, section)
        return int(match.group(1)) if match else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "shared_bytes": number(r"(\d+) bytes smem"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
    }
