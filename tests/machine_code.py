"""What of a cubin a GPU runs, and whether two sources compile to the same."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator

from jitgen.compilers import nvrtc
from jitgen.compilers.disassemble import sass
from jitgen.spec import KernelSource

_RUN = (".text", ".nv.constant0", ".nv.constant2", ".nv.constant3", ".nv.shared", ".nv.local")
"""How the names of sections begin that have instructions, the numbers in them, parameters and memory. What others have
is for debuggers and linkers, follows from these, or is in ``_TABLES``."""
_TABLES = (".nv.constant4", ".nv.global")
"""Variables in global memory, and their addresses. Static members of structs are such variables, read or not."""


def without_digests(text: str) -> str:
    """The digest in the name of an entry follows from the text, so that any change of that changes it."""
    return re.sub(r"jitgen_(\w+?)_[0-9a-f]{8}(?![0-9a-f])", r"jitgen_\1", text)


def _sections(cubin: bytes) -> Iterator[tuple[str, int, int, bytes]]:
    """(name, type, size, content) of every section of a 64-bit ELF file."""
    start, size, count, strings = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + number * size) for number in range(count)]
    names = headers[strings][4]
    for name, kind, _, _, offset, length in headers:
        end = cubin.index(b"\0", names + name)
        content = b"" if kind == 8 else cubin[offset : offset + length]  # 8: takes memory, and none of the file
        yield cubin[names + name : end].decode(), kind, length, content


def digest(cubin: bytes) -> str:
    """Of everything in ``cubin`` that a GPU runs, in an order that does not depend on the linker's."""
    sections = list(_sections(cubin))
    relocated = any(length for name, _, length, _ in sections if name.startswith((".rel.text", ".rela.text")))
    run = _RUN + (_TABLES if relocated or "c[0x4]" in sass(cubin) else ())
    found = sorted((without_digests(name), *others) for name, *others in sections if name.startswith(run))
    if not any(name.startswith(".text") for name, *_ in found):
        raise ValueError("no section of this cubin has instructions")
    return hashlib.sha256(repr(found).encode()).hexdigest()


def compiled(source: KernelSource) -> str:
    """The digest of what NVRTC makes of ``source``, and of the registers and memory that it takes."""
    artifact = nvrtc.compile(nvrtc.prepare(source))
    resources = {name: value for name, value in artifact.meta.items() if name not in ("entry", "target", "toolchain")}
    text = without_digests(repr(sorted(resources.items())))
    return hashlib.sha256((digest(artifact.files["kernel.cubin"]) + text).encode()).hexdigest()
