"""Which compiler turns which language into what: the table of compile routes."""

from __future__ import annotations

import importlib
from types import ModuleType

from jitgen.errors import UnsupportedError
from jitgen.spec import KernelSource, Target, Toolchain

ROUTES = {
    ("cpp", "host"): "jitgen.compile.host",
    ("cpp", "load_inline"): "jitgen.compile.load_inline",
    ("cuda", "nvrtc"): "jitgen.compile.nvrtc",
    ("cuda", "load_inline"): "jitgen.compile.load_inline",
    ("triton", "triton"): "jitgen.compile.triton",
}
"""(backend, compiler) to the module with ``toolchain`` and ``compile``; a backend's first compiler is its default."""

_KINDS = {"cpp": ("cpu",), "cuda": ("cuda",), "triton": ("cuda", "hip", "interpreter")}


def default_compiler(backend: str) -> str:
    return next(compiler for name, compiler in ROUTES if name == backend)


def backend_for(requested: str, kind: str) -> str:
    """The backend that ``requested`` means for targets of ``kind``: ``"auto"`` is settled here and nowhere else.

    It is ``cpp`` for CPUs and ``cuda`` for NVIDIA's GPUs, since NVRTC starts faster than Triton and its kernels are at
    least as fast; ``triton`` for every other.
    """
    return {"cpu": "cpp", "cuda": "cuda"}.get(kind, "triton") if requested == "auto" else requested


def check(backend: str, compiler: str, target: Target) -> None:
    """UnsupportedError where ``backend`` cannot make code for ``target``, or has no such compiler."""
    if target.kind not in _KINDS[backend]:
        raise UnsupportedError(
            f"backend {backend!r} does not make code for {target}; "
            f"it does for targets of kind {' and '.join(_KINDS[backend])}"
        )
    if (backend, compiler) not in ROUTES:
        names = [name for owner, name in ROUTES if owner == backend]
        raise UnsupportedError(f"backend {backend!r} has no compiler {compiler!r}; it has {', '.join(names)}")


def prepare(source: KernelSource) -> KernelSource:
    """``source`` with all that its compiler adds, so that the artifact key covers it: fixed flags, a registration."""
    found = module(source.language, source.compiler)
    return found.prepare(source)


def toolchain(backend: str, compiler: str) -> Toolchain | None:
    """The toolchain of a route on this machine; None where it has none."""
    found = module(backend, compiler)
    return found.toolchain(backend) if compiler == "load_inline" else found.toolchain()


def toolchain_of(source: KernelSource) -> Toolchain | None:
    """The toolchain that ``source`` would be compiled with here, the packages it includes among it; None without."""
    if source.compiler == "nvrtc":
        return module(source.language, source.compiler).toolchain(source.packages)
    return toolchain(source.language, source.compiler)


def module(backend: str, compiler: str) -> ModuleType:
    """The module that compiles ``backend``'s sources with ``compiler``."""
    return importlib.import_module(ROUTES[backend, compiler])
