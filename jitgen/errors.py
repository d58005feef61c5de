"""The exceptions jitgen raises, and nothing else.

::

    JitgenError
    ├── TraceError          the function cannot be traced: what, where, what to do instead
    ├── UnsupportedError    an operation, dtype or layout without a row in jitgen's tables
    ├── FormatError         a weight, group size or checkpoint that does not fit its format
    ├── CompileError        generated source did not render or compile (path, log, failing lines)
    ├── CacheMissError      strict serving, and the kernel is not in the store
    ├── CacheError          the store itself is unusable
    └── DriverError         the CUDA driver refused a load or a launch (``runtime/cuda.py``)

Every message says what was wrong, where, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass


class JitgenError(Exception):
    """Base class of every error jitgen raises on purpose."""


class TraceError(JitgenError):
    """The decorated function cannot be turned into a graph.

    Raised for data-dependent control flow, values that leave the traced world (``.item()``, ``print`` of a value
    is fine), and mutation that cannot be expressed. The message names the user's file and line.
    """


class UnsupportedError(JitgenError):
    """An operation, dtype, layout or device for which jitgen has no row."""


class FormatError(JitgenError):
    """A quantised weight does not fit its format."""


@dataclass(frozen=True)
class SourceLine:
    """One failing line of a generated source, traced back to what wrote it.

    Attributes:
        line: 1-based line in the generated source.
        text: the line itself.
        message: what the compiler said about it.
        template: ``"cpp/elementwise.cpp.j2:31"``, the template line that produced it, if known.
        user: ``"model.py:12"``, the user's line whose expression it prints, if any.
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
    """A template did not render, or a generated source did not compile.

    Attributes:
        path: where the offending source was kept for reading, if it was written.
        log: the compiler's complete output.
        lines: the failing lines, each with the template line and the user's line it came from.
    """

    def __init__(self, message: str, *, path: str | None = None, log: str = "", lines: tuple[SourceLine, ...] = ()):
        self.path = path
        self.log = log
        self.lines = lines
        parts = [message, *(str(line) for line in lines)]
        if path:
            parts.append(f"source kept at {path}")
        if log and not lines:
            parts.append(log.strip()[-4000:])
        super().__init__("\n".join(parts))


class CacheMissError(JitgenError):
    """Strict mode, and the store holds no kernel for this call."""


class CacheError(JitgenError):
    """The store cannot be read or written."""
