"""Builds the object file of a package's operators: the generated C++ and every kernel in one relocatable file.

A CPU kernel is compiled by the flags of ``compilers/host.py``, so it computes what a call computes, under a name of its
own. A GPU kernel is the cubin that the store has of it. Inductor links the object into the model's library.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

from jitgen import pipeline, scratch
from jitgen.compilers import host, nvrtc
from jitgen.errors import CompileError
from jitgen.export import source
from jitgen.export.table import KernelRef
from jitgen.kernel.launch import OVERLAPS
from jitgen.lowering import Lowered
from jitgen.spec import KernelSource, digest
from jitgen.store.default import default_store

_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")


class Kernels:
    """Compiles the kernels that tables name, each once.

    Attributes:
        refs: by symbol; a cubin with several entries has several.
        objects, binaries: CPU kernels as object files, and GPU kernels as cubins, by symbol.
    """

    def __init__(self) -> None:
        self.refs: dict[str, KernelRef] = {}
        self.objects: dict[str, bytes] = {}
        self.binaries: dict[str, bytes] = {}
        self._sources: dict[str, KernelSource] = {}

    def __call__(self, lowered: Lowered, number: int) -> KernelRef:
        return self._gpu(lowered, number) if lowered.route.device.is_gpu else self._cpu(lowered, number)

    def _cpu(self, lowered: Lowered, number: int) -> KernelRef:
        identity = lowered.identity(number)
        if identity not in self._sources:
            self._sources[identity] = host.prepare(lowered.render(number)[0])
        text = self._sources[identity]
        symbol = f"kernel_{digest([text.text, text.option('fixed_flags')])[:16]}"
        if symbol not in self.refs:
            self.objects[symbol] = host.object_file(text, symbol)
            self.refs[symbol] = KernelRef(symbol)
        return self.refs[symbol]

    def _gpu(self, lowered: Lowered, number: int) -> KernelRef:
        built = pipeline.fetch(lowered, default_store())[number]
        shape, triton = lowered.launch(number), lowered.route.backend == "triton"
        symbol = f"kernel_{built.key[:16]}"
        self.binaries[symbol] = built.artifact.content
        entry = built.artifact.meta["entry"] + shape.entry
        overlaps = OVERLAPS in shape.attributes
        name = f"{symbol}__{digest([entry, shape.any_cluster, overlaps])[:8]}"
        shared = built.artifact.meta.get("shared_bytes", 0) if triton else None
        self.refs[name] = KernelRef(name, entry, shared, shape.any_cluster, overlaps)
        return self.refs[name]


def object_of(text: str, kernels: Kernels) -> bytes:
    """Builds one relocatable object of the generated C++ ``text`` and of ``kernels``.

    Raises:
        CompileError: there is no compiler, or it refuses the text.
    """
    words = host.command()
    if words is None:
        raise CompileError("a package needs a C++ compiler: install g++ or name one in JITGEN_CXX")
    with scratch.directory() as directory:
        files: dict[str, bytes | str] = {"operators.cpp": text, source.HEADER: source.header()}
        files |= {f"{symbol}.o": content for symbol, content in kernels.objects.items()}
        files |= {f"{symbol}.cubin": content for symbol, content in kernels.binaries.items()}
        if kernels.binaries:
            files["binaries.S"] = _binaries(kernels.binaries)
        for name, content in files.items():
            path = directory / name
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        sources = [name for name in files if name.endswith((".cpp", ".S"))]
        for name in sources:
            _run([*words, *_FLAGS, *_includes(bool(kernels.binaries)), "-c", name], directory, name, text)
        objects = [name for name in files if name.endswith(".o")]
        objects += [f"{Path(name).stem}.o" for name in sources]
        _run([*words, "-r", "-nostdlib", *objects, "-o", "whole.object"], directory, "the objects", text)
        return (directory / "whole.object").read_bytes()


def _binaries(symbols: Iterable[str]) -> str:
    """Writes assembly that holds each cubin as an array of bytes."""
    lines = [".section .rodata"]
    for symbol in symbols:
        array = f"{symbol}_binary"
        lines += [".balign 64", f".global {array}", f"{array}:", f'.incbin "{symbol}.cubin"', ".byte 0"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _includes(cuda: bool) -> list[str]:
    from torch.utils import cpp_extension

    directories = [".", *cpp_extension.include_paths()]
    if cuda:
        headers = nvrtc.find_headers("cuda")
        directories += headers.directories if headers else ()
    return [word for path in directories for word in ("-I", path)]


def _run(arguments: list[str], directory: Path, what: str, text: str) -> None:
    result = subprocess.run(arguments, cwd=directory, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        log = f"$ {shlex.join(arguments)}\n{result.stderr}{result.stdout}"
        raise CompileError(f"{what} of a package did not compile", path=scratch.keep("operators.cpp", text), log=log)
