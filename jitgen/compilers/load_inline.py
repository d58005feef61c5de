"""Builds ``cpp`` and ``cuda`` sources as torch operators, by ``torch.utils.cpp_extension.load_inline``.

The operator is for programs that need a kernel in torch's dispatcher (``torch.compile``, ``torch.export``, a C++ server
that only loads a library). The other routes compile and launch faster. Neighbours: ``compilers/host.py`` has the
compiler and its flags; ``compilers/torch_operator.hpp`` registers the operator, is appended to the source and documents
the operator's arguments; ``runtime/torch_operator.py`` loads the library, without a compiler.

``load_inline`` loads the library that it has built. A library with a name ``unregistered_*`` registers no operator, so
building has no effect on the process; the operator is registered once, when the library is loaded from the store.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jitgen import scratch
from jitgen.compilers import host, nvrtc
from jitgen.errors import CompileError
from jitgen.forks import Lock
from jitgen.spec import Artifact, KernelSource, Toolchain, artifact_key, digest

_HEADER = "torch_operator.hpp"
_BINARY = "kernel.so"
_SOURCES = {"cpp": "kernel.cpp", "cuda": "kernel.cu"}
_WRITTEN_AS = {"cpp": "main.cpp", "cuda": "cuda.cu"}
_building = Lock()  # a build changes environment variables, which belong to the whole process

# torch disables these operators for its own sources; CUDA's headers and the kernels that include them need them.
_HALF_OPERATORS = tuple(
    f"-U__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
)


def toolchain(language: str = "cpp") -> Toolchain | None:
    """Returns the compilers of this route, and the version of torch; None if this machine cannot build ``language``."""
    import torch

    tools = host.toolchain()
    versions = (("torch", torch.__version__),)
    if tools is None:
        return None
    if language == "cpp":
        return replace(tools, headers=versions)
    nvcc = _nvcc_version()
    return Toolchain("nvcc", nvcc, (*versions, (tools.compiler, tools.version))) if nvcc else None


def missing(language: str = "cpp") -> str | None:
    """Returns what this machine lacks for the route, with what to do about it; None if it lacks nothing."""
    import torch

    if host.toolchain() is None:
        return "a C++ compiler: install g++ or name one in JITGEN_CXX"
    if _ninja() is None:
        return "ninja: pip install ninja"
    if language == "cuda" and _nvcc_version() is None:
        return "nvcc: install a CUDA toolkit and set CUDA_HOME"
    if language == "cuda" and torch.version.cuda is None:
        return "a CUDA build of torch: this one has no CUDA libraries to link the operator against"
    return None


def operator_name(source: KernelSource) -> str:
    """Returns the operator's name in ``torch.ops.jitgen``: the entry symbol, and a digest unique to the
    specialisation."""
    facts = [source.text, [list(header) for header in source.headers], str(source.target)]
    return f"{source.name}_{digest(facts)[:12]}"


def with_operator(source: KernelSource) -> KernelSource:
    """Appends the operator's registration to ``source``: this route compiles that text, and the artifact key covers
    it."""
    if any(name == _HEADER for name, _ in source.headers):
        return source
    operator = operator_name(source)
    registration = f"\n#include <{_HEADER}>\nJITGEN_TORCH_OPERATOR({operator}, {source.name})\n"
    header = Path(__file__).with_name(_HEADER).read_text()
    options = (*source.options, ("operator", operator))
    return replace(
        source, text=source.text + registration, headers=(*source.headers, (_HEADER, header)), options=options
    )


prepare = with_operator
"""Every compiler module has a ``prepare``; this one is idempotent, like the others."""


def compile(source: KernelSource) -> Artifact:
    """Compiles ``source`` (language ``cpp`` or ``cuda``) to a library that registers its operator when loaded.

    Returns:
        files ``kernel.cpp`` or ``kernel.cu``, and ``kernel.so``; meta as for ``compilers/host.py``, and the operator's
        name. The key is that of ``with_operator(source)``.

    Raises:
        CompileError: the toolchain is incomplete, or a compiler refuses the source.
    """
    lack = missing(source.language)
    if lack is not None:
        raise CompileError(f"kernel {source.described} cannot be built by load_inline; this machine lacks {lack}")
    tools = toolchain(source.language)
    assert tools is not None, "missing() has found one"
    complete = prepare(source)
    operator = complete.option("operator")
    with scratch.directory() as directory, _building, _variables(source, directory):
        binary = _build(complete, operator, directory)
    return Artifact(
        key=artifact_key(complete, tools),
        files={_SOURCES[source.language]: complete.text.encode(), _BINARY: binary},
        binary=_BINARY,
        meta={
            "entry": source.name,
            "operator": operator,
            "language": source.language,
            "route": "load_inline",
            "target": str(source.target),
            "toolchain": str(tools),
            "headers": {name: digest(text) for name, text in complete.headers},
        },
    )


def _build(source: KernelSource, operator: str, directory: Path) -> bytes:
    from torch.utils import cpp_extension

    include = directory / "include"
    for name, text in source.headers:
        path = include / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    packages = (nvrtc.find_headers(package) for package in source.packages)
    includes = [str(include), *(path for headers in packages if headers for path in headers.directories)]
    try:
        library = cpp_extension.load_inline(
            f"unregistered_{operator}",
            no_implicit_headers=True,
            is_python_module=False,
            build_directory=str(directory),
            extra_include_paths=includes,
            **_language_arguments(source),
        )
    except (RuntimeError, OSError) as error:
        written = directory / _WRITTEN_AS[source.language]
        log = str(error)
        raise CompileError(
            f"kernel {source.described} did not compile for {source.target} by load_inline",
            path=scratch.keep(_SOURCES[source.language], source.text),
            log=log,
            lines=host.failing_lines(source, log.replace(str(written), "kernel.cpp")),
        ) from None
    return Path(library).read_bytes()


def _language_arguments(source: KernelSource) -> dict[str, Any]:
    linking = ["-Wl,--build-id=none", "-ldl"]
    if source.language == "cpp":
        tools = host.toolchain()
        flags = host.code_flags(source, tools.compiler if tools else "gcc")
        flags = (*flags, f"-frandom-seed={source.name}", *host.added_flags(source))
        return {"cpp_sources": source.text, "extra_cflags": list(flags), "extra_ldflags": linking}
    return {
        "cpp_sources": "",
        "cuda_sources": source.text,
        "extra_cuda_cflags": ["-O3", *_HALF_OPERATORS, *source.option("flags", ())],
        "extra_ldflags": linking,
        "with_cuda": True,
    }


# ----------------------------------------------------------------------------------------------------- the toolchain


@contextmanager
def _variables(source: KernelSource, directory: Path) -> Iterator[None]:
    """Sets the environment variables that cpp_extension and the compilers read: PATH with ninja, the compiler, the GPU
    architecture, and where temporary files go."""
    wanted = {"CXX": " ".join(host.command() or ()), "TMPDIR": str(directory)}
    ninja = _ninja()
    if ninja is not None:
        wanted["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(ninja).parent)])
    if source.language == "cuda":
        major, minor, suffix = re.fullmatch(r"sm_(\d+)(\d)([af]?)", source.target.arch).groups()  # type: ignore[union-attr]
        wanted["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}{suffix}"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _ninja() -> str | None:
    """Returns ninja on PATH, else the one in the directory of the running Python."""
    return shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))


def _nvcc_version() -> str | None:
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME  # None in a CPU build of torch, whatever is installed
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    return _ask_nvcc(nvcc) if nvcc else None


@functools.cache
def _ask_nvcc(nvcc: str) -> str | None:
    result = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release [\d.]+, V([\d.]+)", result.stdout)
    return match.group(1) if match else None
