"""Disassembles a cubin, and reads the resources that each of its entries uses. It is for inspection; no launch needs
it.

It runs ``cuobjdump``, which runs the ``nvdisasm`` in its own directory, from Triton's wheel or from a CUDA toolkit.
Neighbours: ``compilers/nvrtc.py`` and ``compilers/triton.py`` make the cubins, ``inspect.py`` shows the result as
``exe.asm["sass"]``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

from jitgen import scratch
from jitgen.errors import CompileError

_TOOL = "cuobjdump"
_FIELDS = {"registers": "REG", "spill_bytes": "LOCAL", "shared_bytes": "SHARED", "stack_bytes": "STACK"}


def sass(cubin: bytes) -> str:
    """Returns the machine code of every entry, as ``cuobjdump -sass`` prints it, without its encoding comments.

    Raises:
        CompileError: where no disassembler is installed, or these bytes are no cubin.
    """
    text = _dump(cubin, "-sass")
    instructions = (re.sub(r"\s*/\* 0x[0-9a-f]{16} \*/", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in instructions if line) + "\n"


def resource_usage(cubin: bytes, entry: str) -> dict[str, int]:
    """Returns the resources that ``entry`` uses.

    Returns:
        of one thread: registers, spill_bytes (local memory other than the stack) and stack_bytes; of one block:
        shared_bytes (static shared memory, including the 1 KiB that the system reserves from sm_90 on).

    Raises:
        CompileError: as ``sass``, or when the cubin has no such entry.
    """
    text = _dump(cubin, "--dump-resource-usage")
    match = re.search(rf"Function {re.escape(entry)}:\s*\n\s*(\S.*)", text)
    if match is None:
        raise CompileError(f"the cubin has no entry {entry!r}", log=text)
    usage = dict(pair.split(":") for pair in re.findall(r"\w+:\d+", match.group(1)))
    return {name: int(usage.get(label, 0)) for name, label in _FIELDS.items()}


def _dump(cubin: bytes, option: str) -> str:
    tool = find_tool()
    if tool is None:
        raise CompileError(
            f"{_TOOL} was not found; it comes with Triton (pip install triton) and with a CUDA toolkit (set CUDA_HOME)"
        )
    with scratch.directory() as directory:
        path = directory / "kernel.cubin"
        path.write_bytes(cubin)
        result = subprocess.run([tool, option, str(path)], capture_output=True, text=True)
    if result.returncode != 0:
        raise CompileError(f"{_TOOL} could not read the cubin", log=result.stdout + result.stderr)
    return result.stdout


@functools.cache
def find_tool() -> str | None:
    """Returns the ``cuobjdump`` to run: that of Triton's wheel, else of a CUDA toolkit, else on PATH."""
    try:
        wheel = importlib.metadata.distribution("triton").locate_file("triton/backends/nvidia/bin")
        candidates = [Path(str(wheel), _TOOL)]
    except importlib.metadata.PackageNotFoundError:
        candidates = []
    candidates += [Path(directory, "bin", _TOOL) for directory in (_toolkit(), "/usr/local/cuda") if directory]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    return shutil.which(_TOOL)


def _toolkit() -> str | None:
    """Returns the installed toolkit that CUDA_HOME or CUDA_PATH names, as cuda-python finds it."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    include = find_nvidia_header_directory("nvcc")
    return str(Path(include).parent) if include else None
