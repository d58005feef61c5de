"""jitgen: a JIT kernel compiler for PyTorch people.

Decorate a plain PyTorch function with ``jitgen.jit``; its calls run generated Triton, CUDA C++ or C++ kernels that are
compiled once and kept on disk. See README.md; the path of a call is ``jitgen/pipeline.py``.

Importing this touches no GPU and no disk, and imports neither Triton, Jinja nor Dynamo.
"""

from jitgen._version import __version__
from jitgen.api import JitFunction, jit
from jitgen.errors import (
    CacheError,
    CacheMissError,
    CompileError,
    FormatError,
    JitgenError,
    TraceError,
    UnsupportedError,
)
from jitgen.events import CompileEvent, on_compile
from jitgen.manifest import PrewarmReport, prewarm, record
from jitgen.settings import strict
from jitgen.spec import Target, TensorSpec

__all__ = [
    "CacheError",
    "CacheMissError",
    "CompileError",
    "CompileEvent",
    "FormatError",
    "JitFunction",
    "JitgenError",
    "PrewarmReport",
    "Target",
    "TensorSpec",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "jit",
    "on_compile",
    "prewarm",
    "record",
    "strict",
]
