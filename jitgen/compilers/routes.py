"""Lists the compile routes: which compilers a backend has, and which targets it makes code for.

Neighbours: ``pipeline.py`` compiles by ``module`` and ``prepare``; ``call/`` chooses backend and compiler here.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from jitgen.errors import UnsupportedError
from jitgen.spec import KernelSource, Target, Toolchain

ROUTES = {
    ("cpp", "host"): "jitgen.compilers.host",
    ("cpp", "load_inline"): "jitgen.compilers.load_inline",
    ("cuda", "nvrtc"): "jitgen.compilers.nvrtc",
    ("cuda", "load_inline"): "jitgen.compilers.load_inline",
    ("triton", "triton"): "jitgen.compilers.triton",
    ("cutlass", "nvrtc"): "jitgen.compilers.nvrtc",
}
"""The module of the compiler for each (backend, compiler). The first compiler of a backend is its default."""

_EXAMPLES = {"cpu": "CPUs (x86-64-v3)", "cuda": "NVIDIA GPUs (sm_90a)", "hip": "AMD GPUs (gfx942)", "interpreter": ""}
"""How messages name a kind of targets, with one of them; the interpreter has no name."""
_KINDS = {"cpp": ("cpu",), "cuda": ("cuda",), "cutlass": ("cuda",), "triton": ("cuda", "hip", "interpreter")}


def default_compiler(backend: str) -> str:
    return next(compiler for name, compiler in ROUTES if name == backend)


def backend_for(requested: str, kind: str) -> str:
    """Returns the backend for targets of ``kind``: ``requested``, unless that is ``"auto"``.

    ``"auto"`` is ``cpp`` for CPUs, ``cuda`` for NVIDIA GPUs, where NVRTC starts faster than Triton and its kernels are
    at least as fast, and ``triton`` for all other targets.
    """
    return {"cpu": "cpp", "cuda": "cuda"}.get(kind, "triton") if requested == "auto" else requested


def check(backend: str, compiler: str, target: Target) -> None:
    """Raises UnsupportedError if ``backend`` cannot make code for ``target``, or has no such compiler."""
    if target.kind not in _KINDS[backend]:
        kinds = " and ".join(filter(None, map(_EXAMPLES.__getitem__, _KINDS[backend])))
        raise UnsupportedError(
            f"backend {backend!r} does not make code for {target}, but for {kinds}: name another target or backend"
        )
    if backend == "cutlass" and target.arch != "sm_90a":
        raise UnsupportedError(
            f"backend 'cutlass' makes code for sm_90a (H100, H200), and not for {target}; use backend='cuda' there"
        )
    if (backend, compiler) not in ROUTES:
        names = [name for owner, name in ROUTES if owner == backend]
        raise UnsupportedError(f"backend {backend!r} has no compiler {compiler!r}; it has {', '.join(names)}")


def prepare(source: KernelSource) -> KernelSource:
    """Returns ``source`` with everything that its compiler adds (flags, a registration), so that the artifact key
    covers it."""
    compiler = module(source.language, source.compiler)
    return compiler.prepare(source)


def toolchain(backend: str, compiler: str) -> Toolchain | None:
    """Returns the toolchain of a route on this machine; None if it has none."""
    compiler_module = module(backend, compiler)
    return compiler_module.toolchain(backend) if compiler == "load_inline" else compiler_module.toolchain()


def toolchain_of(source: KernelSource) -> Toolchain | None:
    """Returns the toolchain that would compile ``source`` here, with its third-party headers; None if there is none."""
    if source.compiler == "nvrtc":
        return module(source.language, source.compiler).toolchain(source.packages)
    return toolchain(source.language, source.compiler)


def module(backend: str, compiler: str) -> ModuleType:
    """Returns the module that compiles ``backend``'s sources with ``compiler``."""
    return importlib.import_module(ROUTES[backend, compiler])
