"""jitgen: a JIT kernel compiler for PyTorch people.

Decorate a plain PyTorch function with ``jitgen.jit``; its calls run generated Triton, CUDA C++ or C++ kernels that are
compiled once and kept on disk. See README.md; the path of a call is ``jitgen/pipeline.py``.

Importing this touches no GPU and no disk, and imports neither Triton, Jinja nor Dynamo.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jitgen import quant
from jitgen._version import __version__
from jitgen.api import JitFunction, jit, quantized_linear
from jitgen.deploy.prewarm import PrewarmReport, prewarm
from jitgen.deploy.record import record
from jitgen.errors import (
    CacheError,
    CacheMissError,
    CompileError,
    FallbackWarning,
    FormatError,
    JitgenError,
    SettingError,
    TraceError,
    UnsupportedError,
)
from jitgen.events import CompileEvent, on_compile
from jitgen.settings import strict
from jitgen.spec import Target, TensorSpec

if TYPE_CHECKING:
    from jitgen.quant.modules import quantize_
    from jitgen.quant.qtensor import QTensor
    from jitgen.quant.quantize import quantize

__all__ = [
    "CacheError",
    "CacheMissError",
    "CompileError",
    "CompileEvent",
    "FallbackWarning",
    "FormatError",
    "JitFunction",
    "JitgenError",
    "PrewarmReport",
    "QTensor",
    "SettingError",
    "Target",
    "TensorSpec",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "jit",
    "on_compile",
    "prewarm",
    "quantize",
    "quantize_",
    "quantized_linear",
    "record",
    "strict",
]


_LATER = {"QTensor": "qtensor", "quantize": "quantize", "quantize_": "modules"}


def __getattr__(name: str) -> Any:
    """Quantised weights are imported when they are first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{quant.__name__}.{_LATER[name]}"), name)
    return found
