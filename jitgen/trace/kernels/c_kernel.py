"""Defines a kernel that a user wrote in CUDA C++ or C++, and traces its launches.

A kernel is a file, or a text, and the name of a function in it. What the function includes of the user's own is read
when the kernel is made, so that its content is part of every key; headers of CUDA and of compilers are found where a
kernel is compiled. A pointer to ``const`` is read, another one is written. Sizes among the arguments stay symbolic.

Neighbours: ``codegen/c_text/`` reads the text, ``launch.py`` makes the nodes, ``call/own_kernels.py`` launches
kernels outside of traces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jitgen.codegen.c_text.definition import Definition, Parameter, definition_of
from jitgen.codegen.c_text.files import MOST_HEADERS, includes_of, is_harmless_flag, note_file, without_markers
from jitgen.codegen.c_text.types import dtypes_of, is_integer
from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.attributes import KernelText
from jitgen.ir.launches import DOUBLE, TENSOR, UNSPECIALIZED
from jitgen.trace.kernels.launch import Launch, trace_in_progress
from jitgen.trace.numbers import SymbolicNumber, unwrap
from jitgen.trace.table import of_lists

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

_SUFFIXES = (".cu", ".cuh", ".cpp", ".cc", ".cxx", ".c", ".h", ".hpp")


class CKernel:
    """Represents a kernel in CUDA C++ or C++.

    Attributes:
        text: what it is.
        file: its path, or the file that has its text; with ``line`` for messages.
        line: the line there at which its text begins, from 1.
        definition: of its function.
        operator_text: what the operator of a launch says of it (``call/own_kernels.py``).
    """

    __jitgen_follows__ = ()
    """What a trace that meets a kernel follows of it (``trace/captures.py``): nothing, as it never changes."""

    def __init__(
        self,
        language: str,
        source: str | Path,
        entry: str,
        include_dirs: Sequence[str | Path] = (),
        options: Sequence[str] = (),
    ) -> None:
        path = _path_of(source)
        if path is not None:
            try:
                text = path.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise UnsupportedError(
                    f"the kernel {entry}: cannot read {path}: {error}; give a file that can be read, or the text"
                ) from None
            self.file, self.line = str(path), 1
        else:
            text = str(source)
            self.file, self.line = _made_at()
        text = without_markers(text)
        refused = [flag for flag in options if not is_harmless_flag(flag)]
        if refused:
            raise UnsupportedError(
                f"the kernel {entry}: the option {refused[0]!r} is not passed to a compiler; options are -D, -O, -W, "
                "-use_fast_math, --fmad=, --maxrregcount= and the like. The target says for which machine a kernel is "
                "compiled, and include_dirs= where headers are"
            )
        self.definition: Definition = definition_of(text, entry, self.file, language)
        directories = [Path(directory) for directory in include_dirs]
        text, headers = _with_headers(text, path.parent if path is not None else None, directories)
        self.text = KernelText(language, entry, text, headers, tuple(options))
        self.operator_text = json.dumps([*self.text, self.file, self.line])
        self.name = self.definition.name.rpartition("::")[2]
        if any(ord(character) < 9 for content in (text, *dict(headers).values()) for character in content):
            raise UnsupportedError(f"{self.where()}: the text of {self.name} has control characters; take them out")
        note_file(text, self.file, self.line)
        if not any(parameter.is_pointer and not parameter.is_const for parameter in self.definition.parameters):
            raise UnsupportedError(
                f"{self.where()}: {self.name} writes nothing, as none of its pointers is to what is not const; give it "
                "one for its result"
            )

    @classmethod
    def of_operator(cls, text: str) -> Any:
        """Returns the kernel that ``operator_text`` says."""
        language, entry, source, headers, flags, file, line = json.loads(text)
        kernel = cls.__new__(cls)
        kernel.text = KernelText(language, entry, source, tuple((name, own) for name, own in headers), tuple(flags))
        kernel.file, kernel.line, kernel.operator_text = file, line, text
        kernel.definition = definition_of(source, entry, file, language)
        kernel.name = kernel.definition.name.rpartition("::")[2]
        return kernel

    def __repr__(self) -> str:
        return f"<jitgen.{self.text.language}_kernel {self.text.entry} of {self.where()}>"

    def where(self, position: int | None = None) -> str:
        """Returns file and line of the definition, or of ``position`` in its text."""
        line = self.definition.line if position is None else self.definition.line_of(position)
        return f"{self.file}:{self.line - 1 + line}"

    def traced(self, sizes: Sequence[Any], arguments: Sequence[Any]) -> bool:
        """Traces a launch where a trace is in progress; returns whether one is.

        Args:
            sizes: of a kernel in CUDA C++ the grid, the block and the bytes of shared memory; else none.
        """
        trace = trace_in_progress.get()
        if trace is None:
            return False
        self.launched(trace, sizes, arguments)
        return True

    def launched(self, trace: Trace, sizes: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Traces a launch."""
        with torch._C.DisableTorchFunction():
            _Launch(trace, self).trace(sizes, arguments)

    def divided(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Divides the arguments of a launch into tensors that are written, others, integers and floats."""
        self.check_count(arguments)
        written: list[Any] = []
        read: list[Any] = []
        integers: list[Any] = []
        floats: list[Any] = []
        for parameter, argument in zip(self.definition.parameters, arguments, strict=True):
            if parameter.is_pointer:
                (read if parameter.is_const else written).append(argument)
            else:
                (floats if self._is_float(parameter) else integers).append(argument)
        return written, read, integers, floats

    def joined(
        self, written: Sequence[Any], read: Sequence[Any], integers: Sequence[Any], floats: Sequence[Any]
    ) -> list[Any]:
        """Returns what ``divided`` has divided."""
        of_pointers, of_numbers = {True: iter(read), False: iter(written)}, {True: iter(floats), False: iter(integers)}
        return [
            next(of_pointers[parameter.is_const] if parameter.is_pointer else of_numbers[self._is_float(parameter)])
            for parameter in self.definition.parameters
        ]

    def _is_float(self, parameter: Parameter) -> bool:
        return is_integer(self.definition.type_of(parameter)) is False

    def check_count(self, arguments: Sequence[Any]) -> None:
        """Raises UnsupportedError where a launch has another number of arguments than the kernel has parameters."""
        expected = self.definition.parameters
        if len(arguments) != len(expected):
            raise UnsupportedError(
                f"{self.name} ({self.where()}) takes {len(expected)} arguments, and {len(arguments)} are given; "
                f"{'launch' if self.text.language == 'cuda' else 'call'} it with {', '.join(map(str, expected))}"
            )


def of_launch(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the grid, the block and the bytes of shared memory that seven numbers are; nothing for none."""
    return (tuple(sizes[:3]), tuple(sizes[3:6]), sizes[6]) if sizes else ()


@of_lists("jitgen.launch")
def launch(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Traces the operator that stands for a launch where torch traces."""
    written, read, integers, floats, sizes, text = args
    kernel = CKernel.of_operator(text)
    kernel.launched(written[0].owner, of_launch(sizes), kernel.joined(written, read, integers, floats))


def _path_of(source: str | Path) -> Path | None:
    """Returns the path that ``source`` is; None for the text of a kernel."""
    if isinstance(source, Path):
        return source
    is_path = "\n" not in source and "{" not in source and source.endswith(_SUFFIXES)
    return Path(source) if is_path else None


def _made_at() -> tuple[str, int]:
    """Returns the file and the line of the call that makes a kernel of a text."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(Path(__file__).parents[2]) in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _with_headers(
    text: str, folder: Path | None, directories: Sequence[Path]
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Returns ``text``, and (name, text) of the headers that it includes of ``folder`` and ``directories``.

    A header is called as it is included. Where that is no name below a folder, or two headers would have one name, the
    includes of one are rewritten.
    """
    names: dict[Path, str] = {}
    texts: dict[str, str] = {}

    def included(text: str, folder: Path | None) -> str:
        edits = []
        for name, is_quoted, (start, end) in includes_of(text):
            path = next(_candidates(name, folder if is_quoted else None, directories), None)
            if path is None:
                continue
            own = names.get(path)
            if own is None:
                plain = name if ".." not in Path(name).parts and not Path(name).is_absolute() else path.name
                own, number = plain, 1
                while own in texts:
                    number += 1
                    own = f"own{number}/{plain}"
                if len(texts) >= MOST_HEADERS:
                    raise UnsupportedError(f"a kernel includes more than {MOST_HEADERS} headers; give it fewer")
                names[path], texts[own] = own, ""
                texts[own] = included(without_markers(path.read_text()), path.parent)
            if own != name:
                edits.append((start, end, own))
        for start, end, own in reversed(edits):
            text = text[:start] + own + text[end:]
        return text

    text = included(text, folder)
    return text, tuple(sorted(texts.items()))


def _candidates(name: str, folder: Path | None, directories: Sequence[Path]) -> Iterator[Path]:
    for directory in [*([folder] if folder is not None else []), *directories]:
        path = directory / name
        if path.is_file():
            yield path.resolve()


class _Launch(Launch):
    """Holds one launch of a kernel in CUDA C++ or C++."""

    def __init__(self, trace: Trace, kernel: CKernel) -> None:
        super().__init__(trace, kernel.name, kernel.where())
        self.kernel = kernel
        is_cuda = kernel.text.language == "cuda"
        self.remedy = f"{'launch' if is_cuda else 'call'} it with the arguments of its definition" + (
            ", on a grid of blocks of threads" if is_cuda else ""
        )

    def trace(self, sizes: Sequence[Any], arguments: Sequence[Any]) -> None:
        kernel = self.kernel
        definition = kernel.definition
        if len(arguments) != len(definition.parameters):
            raise self.wrong(
                f"it takes {len(definition.parameters)} arguments ({', '.join(map(str, definition.parameters))}), and "
                f"{len(arguments)} are given"
            )
        passed = [
            self._parameter(parameter, argument)
            for parameter, argument in zip(definition.parameters, arguments, strict=True)
        ]
        tensors = {name: value for name, how, value in passed if how == TENSOR}
        written = sorted({tensors[p.name] for p in definition.parameters if p.is_pointer and not p.is_const})
        config = ((), (), tuple(self._sizes(sizes)))
        self.emit(kernel.text, passed, [config], written, tensors)

    def _sizes(self, sizes: Sequence[Any]) -> Iterator[Any]:
        """Yields the sizes of the grid, and of a kernel in CUDA C++ those of the block and the bytes of shared
        memory."""
        if self.kernel.text.language != "cuda":
            yield from (1, 1, 1)
            return
        grid, block, shared = sizes
        yield from self.sizes(grid, "grid")
        yield from self.sizes(block, "block")
        expr = unwrap(shared)
        if symbols.kind_of(expr) != "int" or self.trace_.guards.hint(expr) < 0:
            raise self.wrong(f"{shared!r} is no number of bytes of shared memory")
        yield self.fixed(expr)

    def _parameter(self, parameter: Parameter, value: Any) -> tuple[str, str, Any]:
        """Returns name of a parameter, how it is passed, and what."""
        name, definition = parameter.name, self.kernel.definition
        is_tensor = isinstance(value, torch.Tensor) or type(value).__name__ == "TensorProxy"
        where = self.kernel.where(parameter.start)
        if parameter.is_pointer:
            if not is_tensor:
                raise self.wrong(f"{name} is {parameter} in {where}, and {_words(value)} is given")
            number = self.operand(name, value)
            expected, dtype = dtypes_of(definition.type_of(parameter)), self.operands[number].dtype
            if expected and dtype not in expected:
                raise self.wrong(
                    f"{name} is {parameter} in {where}, and a tensor of {dtype} is given; convert it to "
                    f"{' or '.join(expected)}"
                )
            return name, TENSOR, number
        if is_tensor:
            raise self.wrong(f"{name} is the number {parameter} in {where}, and a tensor is given")
        expr = unwrap(value) if isinstance(value, SymbolicNumber) else value
        kind = symbols.kind_of(expr)
        if kind == "bool":
            expr, kind = int(self.trace_.guards.value(expr)), "int"
        if kind not in ("int", "float"):
            raise self.wrong(f"{name} is the number {parameter} in {where}, and {_words(value)} is given")
        if kind == "float" and is_integer(definition.type_of(parameter)):
            raise self.wrong(f"{name} is the integer {parameter} in {where}, and {_words(value)} is given")
        return name, UNSPECIALIZED if kind == "int" else DOUBLE, expr


def _words(value: Any) -> str:
    """Says what an argument is."""
    kind = symbols.kind_of(unwrap(value)) if isinstance(value, SymbolicNumber) else type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
