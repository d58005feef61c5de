"""The second route: a generated source becomes a torch operator, by ``torch.utils.cpp_extension.load_inline``.

For ``cpp`` and ``cuda`` sources alike. The operator is for programs that want jitgen's kernel as one of torch's own
(``torch.compile``, ``torch.export``, a C++ server that only loads a library); jitgen's ordinary routes are faster to
compile and to call. Neighbours: ``host.py`` gives compiler and flags, ``torch_operator.hpp`` the registration, which
is appended to the source and documents the operator's arguments; ``runtime/torch_operator.py`` loads what comes out,
without any compiler.

``load_inline`` loads what it has built. A library named ``unregistered_*`` does not register itself, so building has no
effect on the process, and the kernel is registered once, when it is loaded from its place in the store.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jitgen.compile import host, nvrtc
from jitgen.errors import CompileError
from jitgen.spec import Artifact, KernelSource, Toolchain, artifact_key, digest

_HEADER = "torch_operator.hpp"
_BINARY = "kernel.so"
_SOURCES = {"cpp": "kernel.cpp", "cuda": "kernel.cu"}
_WRITTEN_AS = {"cpp": "main.cpp", "cuda": "cuda.cu"}
_building = threading.Lock()  # PATH and the compiler's variables are the whole process's

# torch turns these operators off for its own sources; CUDA's headers, and kernels on them, expect them.
_HALF_OPERATORS = tuple(
    f"-U__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
)


def toolchain(language: str = "cpp") -> Toolchain | None:
    """The compilers of this route and the torch they build for; None when this machine cannot build ``language``."""
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
    """What this machine lacks for the route, as a sentence; None when nothing."""
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
    """The operator's name in ``torch.ops.jitgen``: the entry, and a digest that tells its specialisations apart."""
    facts = [source.text, [list(header) for header in source.headers], str(source.target)]
    return f"{source.name}_{digest(facts)[:12]}"


def with_operator(source: KernelSource) -> KernelSource:
    """``source`` with its registration appended: what this route compiles, and what its artifact key is made of."""
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
"""What ``compile`` adds to a source before it computes the key; applying it again changes nothing."""


def compile(source: KernelSource) -> Artifact:
    """Compile ``source`` (language ``cpp`` or ``cuda``) to a library that registers its operator when loaded.

    Returns:
        files ``kernel.cpp`` or ``kernel.cu``, and ``kernel.so``; meta with the operator's name beside the usual facts.
        The key is that of ``with_operator(source)``.

    Raises:
        CompileError: something of the toolchain is missing, or the compiler refused the source.
    """
    lack = missing(source.language)
    if lack is not None:
        raise CompileError(f"kernel {source.name} cannot be built by load_inline; this machine lacks {lack}")
    tools = toolchain(source.language)
    assert tools is not None, "missing() has said that there is one"
    complete = prepare(source)
    operator = complete.option("operator")
    directory = Path(tempfile.mkdtemp(prefix=f"jitgen-{source.name[:40]}-"))
    with _building, _variables(source):
        binary = _build(complete, operator, directory)
    shutil.rmtree(directory, ignore_errors=True)
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
            f"kernel {source.name} did not compile for {source.target} by load_inline",
            path=str(written),
            log=log,
            lines=host.failing_lines(source, log.replace(str(written), "kernel.cpp")),
        ) from None
    return Path(library).read_bytes()


def _language_arguments(source: KernelSource) -> dict[str, Any]:
    extra = list(source.option("flags", ()))
    linking = ["-Wl,--build-id=none", "-ldl"]
    if source.language == "cpp":
        tools = host.toolchain()
        flags = host.code_flags(source, tools.compiler if tools else "gcc")
        seed = f"-frandom-seed={source.name}"
        return {"cpp_sources": source.text, "extra_cflags": [*flags, seed, *extra], "extra_ldflags": linking}
    return {
        "cpp_sources": "",
        "cuda_sources": source.text,
        "extra_cuda_cflags": ["-O3", *_HALF_OPERATORS, *extra],
        "extra_ldflags": linking,
        "with_cuda": True,
    }


# ----------------------------------------------------------------------------------------------------- the toolchain


@contextmanager
def _variables(source: KernelSource) -> Iterator[None]:
    """The environment that cpp_extension reads: where ninja is, which compiler, which GPU architecture."""
    wanted = {"CXX": " ".join(host.command() or ())}
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
    """ninja on PATH, or the one that pip put beside the running Python."""
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
