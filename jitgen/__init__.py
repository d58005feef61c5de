"""Compiles plain PyTorch functions just in time: jitgen is a JIT kernel compiler for PyTorch people.

Decorate a plain PyTorch function with ``jitgen.jit``; its calls run generated Triton, CUDA C++ or C++ kernels that are
compiled once and stored on disk. See README.md; the path of a call is ``jitgen/pipeline.py``.

Importing this touches no GPU and no disk, and imports nothing but torch and what torch must know to load checkpoints of
quantised weights; the command line starts without torch. Every name is imported when it is first asked for.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from jitgen import forks as forks
from jitgen._version import __version__

if TYPE_CHECKING:
    from jitgen.api import JitFunction, jit, quantized_linear
    from jitgen.call.own_functions import device_function
    from jitgen.call.own_kernels import cpp_kernel, cuda_kernel
    from jitgen.checkpoints.load import load_quantized
    from jitgen.deploy.prewarm import PrewarmReport, prewarm
    from jitgen.deploy.record import record
    from jitgen.dynamo.report import report
    from jitgen.errors import (
        CacheError,
        CacheMissError,
        CacheWarning,
        CaptureMissError,
        CompileError,
        CompileWarning,
        FallbackWarning,
        FormatError,
        InternalError,
        JitgenError,
        NumberRangeError,
        RequiresGrad,
        SettingError,
        SharedMemoryError,
        TraceError,
        UnsupportedError,
    )
    from jitgen.events import CompileEvent, on_compile
    from jitgen.export.package import package
    from jitgen.huggingface.quantizer import JitgenConfig
    from jitgen.models.compile import compile, decompile
    from jitgen.quant.calibration import calibrate
    from jitgen.quant.io import save_quantized
    from jitgen.quant.modules import quantize_
    from jitgen.quant.qtensor import QTensor
    from jitgen.quant.quantize import quantize
    from jitgen.settings import freeze, strict
    from jitgen.spec import Target, TensorSpec

__all__ = [
    "CacheError",
    "CacheMissError",
    "CacheWarning",
    "CaptureMissError",
    "CompileError",
    "CompileEvent",
    "CompileWarning",
    "FallbackWarning",
    "FormatError",
    "InternalError",
    "JitFunction",
    "JitgenConfig",
    "JitgenError",
    "NumberRangeError",
    "PrewarmReport",
    "QTensor",
    "RequiresGrad",
    "SettingError",
    "SharedMemoryError",
    "Target",
    "TensorSpec",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "calibrate",
    "compile",
    "cpp_kernel",
    "cuda_kernel",
    "decompile",
    "device_function",
    "freeze",
    "jit",
    "load_quantized",
    "on_compile",
    "package",
    "prewarm",
    "quantize",
    "quantize_",
    "quantized_linear",
    "record",
    "report",
    "save_quantized",
    "strict",
]

_MODULES = {
    "jitgen.api": ("JitFunction", "jit", "quantized_linear"),
    "jitgen.call.own_functions": ("device_function",),
    "jitgen.call.own_kernels": ("cpp_kernel", "cuda_kernel"),
    "jitgen.checkpoints.load": ("load_quantized",),
    "jitgen.deploy.prewarm": ("PrewarmReport", "prewarm"),
    "jitgen.deploy.record": ("record",),
    "jitgen.dynamo.report": ("report",),
    "jitgen.errors": ("RequiresGrad", *(name for name in __all__ if name.endswith(("Error", "Warning")))),
    "jitgen.export.package": ("package",),
    "jitgen.events": ("CompileEvent", "on_compile"),
    "jitgen.huggingface.quantizer": ("JitgenConfig",),
    "jitgen.models.compile": ("compile", "decompile"),
    "jitgen.quant.calibration": ("calibrate",),
    "jitgen.quant.io": ("save_quantized",),
    "jitgen.quant.modules": ("quantize_",),
    "jitgen.quant.qtensor": ("QTensor",),
    "jitgen.quant.quantize": ("quantize",),
    "jitgen.settings": ("freeze", "strict"),
    "jitgen.spec": ("Target", "TensorSpec"),
}
"""The module of each public name."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Returns a public name, or a submodule: ``jitgen.spec`` works after ``import jitgen`` alone."""
    home = _HOMES.get(name)
    try:
        module = importlib.import_module(home or f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = globals()[name] = getattr(module, name) if home else module
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_the_command() -> bool:
    """Returns whether this process is ``jitgen ...`` or ``python -m jitgen ...``, which imports torch where it needs
    it."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    return name == "jitgen" or (name == "-m" and sys.orig_argv[sys.orig_argv.index("-m") :][1:2] == ["jitgen"])


if not _is_the_command():
    importlib.import_module("jitgen.quant")  # torch.load(weights_only=True) may then read a quantised weight
