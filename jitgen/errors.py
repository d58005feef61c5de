"""Defines the exceptions jitgen raises, three warnings, and nothing else.

::

    JitgenError
    ├── TraceError          the function cannot be traced: what, where, what to do instead
    │   └── NumberRangeError   a number is beyond the range of the dtype it is for; a RuntimeError too, as in torch
    ├── UnsupportedError    an operation, dtype, layout or device that jitgen does not support
    │   ├── CaptureMissError   a call within the capture of a CUDA graph whose kernels are not loaded
    │   └── InternalError      a mistake of jitgen's: no plan, or an error in planning that has another meaning
    ├── FormatError         a weight, group size or checkpoint that does not fit its format
    ├── CompileError        generated source did not render or compile (path, log, failing lines)
    ├── CacheMissError      strict mode forbids compiling, and the store lacks the kernel
    ├── CacheError          the store itself is unusable, or a manifest is
    ├── SettingError        an environment variable that does not parse; a ValueError too
    └── DriverError         the CUDA driver refuses a kernel, or the kernel would hang (``runtime/cuda.py``)

Three warnings are UserWarnings, after which the call goes on: ``CacheWarning`` (the store could not do what it is for),
``CompileWarning`` (a kernel is compiled after ``jitgen.freeze``) and ``FallbackWarning`` (a quantised layer runs in
torch instead of a kernel).

Every message says what was wrong, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class JitgenError(Exception):
    """Serves as the base class of every error that jitgen raises on purpose."""


class TraceError(JitgenError):
    """Reports that the decorated function cannot be turned into a graph.

    Raised for control flow that depends on the elements of a tensor, for a tensor's value read as a Python number
    (``.item()``), and for an update in place that a graph cannot express. The message names the user's file and line.
    """


class NumberRangeError(TraceError, RuntimeError):
    """Reports a Python number beyond the range of the dtype that it becomes an element or a factor of. Torch raises a
    RuntimeError for it."""


class UnsupportedError(JitgenError):
    """Reports an operation, dtype, layout or device that jitgen does not support."""


class InternalError(UnsupportedError):
    """Reports a mistake of jitgen's: it finds no kernels for an expression, or fails while it plans or renders them.
    The original error, if there is one, is its ``__cause__``."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}\n  this is a mistake of jitgen, please report it; until it is mended, compute a part of this "
            "expression in another decorated function"
        )


class CaptureMissError(UnsupportedError):
    """Reports a call within the capture of a CUDA graph whose kernels are not loaded: nothing can be compiled there.

    Attributes:
        resolve: compiles and loads them for the next call with such arguments, once the capture has ended; None where
            the call was ``bind``.
    """

    resolve: Callable[[], object] | None = None


class RequiresGrad(UnsupportedError):
    """Reports a tensor that requires grad where a launch without gradients was asked for. A call then computes
    gradients (``call/derivative.py``); a plan and ``out=``, which cannot, raise it."""


class SharedMemoryError(UnsupportedError):
    """Reports a call whose arguments share memory that it updates; the same function may take other arguments."""


class FormatError(JitgenError):
    """Reports a weight, group size or checkpoint that does not fit a quantised format."""


@dataclass(frozen=True)
class SourceLine:
    """Describes one line of a generated source that a compiler refuses, and the lines that it was generated from.

    Attributes:
        line: 1-based line number in the generated source.
        text: the line itself.
        message: the compiler's message.
        template: the template line that produced it, such as ``"elementwise/elementwise.cpp.j2:31"``; None if unknown.
        user: the user's line whose expression it computes, such as ``"model.py:12"``; None if there is none.
    """

    line: int
    text: str
    message: str
    template: str | None = None
    user: str | None = None

    def __str__(self) -> str:
        origin = f" (from {self.template})" if self.template else ""
        user = f" (your expression at {self.user})" if self.user else ""
        return f"line {self.line}{origin}{user}: {self.message}\n    {self.text.strip()}"


class CompileError(JitgenError):
    """Reports that a template did not render, or that a generated source did not compile.

    Attributes:
        path: the file that the failing source was written to; None if it was not written.
        log: the compiler's complete output.
        lines: the failing lines, each with the template line and the user's line that it came from.
    """

    def __init__(self, message: str, *, path: str | None = None, log: str = "", lines: tuple[SourceLine, ...] = ()):
        self.path = path
        self.log = log
        self.lines = lines
        sections = [message, *(str(line) for line in lines)]
        if path:
            sections.append(f"source kept at {path}")
        if log and not lines:
            sections.append(log.strip()[-4000:])
        super().__init__("\n".join(sections))


class CacheMissError(JitgenError):
    """Reports that strict mode, or ``jitgen.freeze``, forbids compiling, and that the store has no kernel for this
    call."""


class CacheError(JitgenError):
    """Reports that the store cannot be read or written, or that a manifest is not what ``jitgen.record`` writes."""


class SettingError(JitgenError, ValueError):
    """Reports a ``JITGEN_*`` environment variable with a value that it cannot have."""


class CacheWarning(UserWarning):
    """Warns that the store cannot be written, that an entry is damaged, or that a remote does not answer; the call goes
    on."""


class CompileWarning(UserWarning):
    """Warns that a kernel is compiled although ``jitgen.freeze("warn")`` said that everything was compiled already."""


class FallbackWarning(UserWarning):
    """Warns that a product with a quantised weight runs in torch, on the dequantised weight, slower than the dense
    layer was; or that a weight of a checkpoint is loaded as a plain tensor, or left out, because no format has its
    numbers."""
