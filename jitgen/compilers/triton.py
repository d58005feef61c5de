"""Compiles Triton to cubin or hsaco: a ``KernelSource`` in, an ``Artifact`` out. It needs no GPU, HOME or cache
directory.

The stages of Triton's compiler are run as ``triton.compile`` runs them (the same in 3.6 to 3.9), but without its disk
cache. The key of that cache hashes the whole installation, which takes 0.8 s of the 1.0 s of a first compile, and its
directory must be writable. The source is compiled under the logical name ``jitgen/<key12>/kernel.py``, the only path in
the binary, so the same source gives the same bytes on every machine. Neighbours: ``codegen/triton.py`` is the dialect
of the sources, ``pipeline.py`` calls ``compile`` on a miss, ``runtime/cuda.py`` and ``runtime/interpreter.py`` run the
result.

The options of a ``KernelSource`` are:

- ``signature``: types of the run-time parameters in order, such as ``["*bf16", "i32", "fp32"]``.
- ``constants``: values of the other parameters by name; they are not parameters of the binary.
- ``multiples``: for each parameter in ``signature`` a known divisor of its value (for a pointer, of its address in
  bytes); 1 where none is known.
- ``num_warps``, ``num_stages``, ``num_ctas``, ``maxnreg``: as for ``triton.compile``.
- ``enable_fp_fusion``: contract a*b+c; False by default.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.metadata
import linecache
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jitgen import scratch, settings
from jitgen.errors import CompileError, SourceLine
from jitgen.forks import Lock
from jitgen.spec import Artifact, KernelSource, Target, Toolchain, artifact_key

_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm")

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")

_FIXED = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Multiplications and additions are not contracted and subnormals not flushed, so that all dialects compute alike."""

_FORMATS = {"i32": "i", "u32": "i", "i64": "q", "u64": "q", "fp32": "f", "fp64": "d"}
"""The launcher's format character (``runtime/cuda.py``) for each type of scalar parameter; that of a pointer is
``P``."""

_SCRATCH = "PP"
"""Formats of the parameters that Triton appends to every kernel: pointers to global and profiling scratch memory."""

# LLVM's state and linecache are shared by all threads of the process.
_lock = Lock()


@functools.cache
def toolchain() -> Toolchain | None:
    """Returns the installed Triton, found without importing it; None if there is none.

    LLVM, ptxas and libdevice are in Triton's wheel, so its version determines theirs.
    """
    for name in _DISTRIBUTIONS:
        for distribution in importlib.metadata.distributions(name=name):
            return Toolchain("triton", distribution.version)
    return None


def prepare(source: KernelSource) -> KernelSource:
    """Returns ``source`` with this module's settings among its options, so that the artifact key covers them;
    idempotent."""
    if source.option("fixed_options") is not None:
        return source
    return replace(source, options=(*source.options, ("fixed_options", _FIXED)))


def compile(source: KernelSource) -> Artifact:
    """Compiles one source for its target.

    Returns:
        files ``kernel.py``, ``kernel.ttir`` and, for NVIDIA, ``kernel.ptx`` and ``kernel.cubin``, for AMD,
        ``kernel.amdgcn`` and ``kernel.hsaco``; for the interpreter ``kernel.py`` only. Meta: entry, target, toolchain,
        signature; for a GPU also parameters (the format characters of the binary's parameters: those of the signature
        and of two scratch pointers), num_warps, warp_size, num_ctas, cluster, shared_bytes, global_scratch and
        profile_scratch (each bytes per program and alignment), cooperative, pdl, tensordesc.

    Raises:
        CompileError: Triton refuses the source. The failing lines are in the error, the innermost function's first.
    """
    tools = toolchain()
    if tools is None:
        raise CompileError("Triton is not installed; pip install triton")
    key = artifact_key(source, tools)
    files = {"kernel.py": source.text.encode()}
    meta: dict[str, Any] = {
        "entry": source.name,
        "target": str(source.target),
        "toolchain": str(tools),
        "signature": list(source.option("signature", ())),
    }
    if source.target.kind == "interpreter":
        return Artifact(key, files, "kernel.py", meta | {"constants": dict(source.option("constants") or {})})
    if settings.interpreting_triton():
        raise CompileError(f"cannot compile for {source.target} while TRITON_INTERPRET=1; unset it")
    parameters = _parameters(source)
    with _lock, scratch.directory() as directory, _temporary_files(directory):
        stages, metadata = _compile(source, f"jitgen/{key[:12]}/kernel.py")
    files |= {f"kernel.{stage}": content for stage, content in stages.items()}
    facts = _facts(metadata) | {"parameters": parameters}
    return Artifact(key, files, "kernel.cubin" if "cubin" in stages else "kernel.hsaco", meta | facts)


def _compile(source: KernelSource, path: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Runs the stages of Triton's compiler; returns their outputs by name, except ``ttgir`` and ``llir``, and the
    kernel's metadata."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    target = _gpu_target(source.target)
    backend = make_backend(target)
    stages: dict[str, Any] = {}
    outputs: dict[str, bytes] = {}
    with _failing_lines(source):
        options = backend.parse_options(_options(source))
        metadata: dict[str, Any] = {"target": target, **vars(options)}
        kernel = _ast_source(source, path)
        backend.add_stages(stages, options, kernel.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        generators = backend.get_codegen_implementation(options)
        module = kernel.make_ir(target, options, generators, backend.get_module_map(), context)
        for name, stage in stages.items():
            module = stage(module, metadata)
            if name not in ("ttgir", "llir"):
                outputs[name] = module if isinstance(module, bytes) else str(module).encode()
    return outputs, metadata


@contextmanager
def _temporary_files(directory: Path) -> Iterator[None]:
    """Puts the temporary files of Triton, and of its ptxas, into ``directory``, where a killed process leaves nothing
    for long. The modules of its backends use ``tempfile`` for them, and each gets one that knows the directory."""
    importlib.import_module("triton.backends")  # which imports them all
    own = threading.get_ident()

    def file(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == own:  # other threads may compile kernels that are not jitgen's
            options["dir"] = directory
        return tempfile.NamedTemporaryFile(*arguments, **options)

    modules: list[Any] = [module for name, module in sys.modules.items() if name.startswith("triton.backends.")]
    replaced = [module for module in modules if getattr(module, "tempfile", None) is tempfile]
    for module in replaced:
        module.tempfile = types.SimpleNamespace(NamedTemporaryFile=file)
    try:
        yield
    finally:
        for module in replaced:
            module.tempfile = tempfile


def _gpu_target(target: Target) -> Any:
    from triton.backends.compiler import GPUTarget

    if target.kind == "cuda":
        return GPUTarget("cuda", target.capability, 32)
    if target.kind == "hip":
        return GPUTarget("hip", target.arch, 64 if target.arch.startswith("gfx9") else 32)
    raise CompileError(f"Triton does not compile for {target}; expected an NVIDIA or AMD architecture")


def _options(source: KernelSource) -> dict[str, Any]:
    asked = {name: source.option(name) for name in _OPTIONS if source.option(name) is not None}
    # By default, Triton links libdevice so that it flushes subnormals, which torch's CUDA kernels do not.
    return _FIXED | asked


def _ast_source(source: KernelSource, path: str) -> Any:
    """Makes Triton's ``ASTSource`` of the entry. Triton gets a function's text by ``inspect``, which reads
    linecache."""
    from triton.compiler import ASTSource

    namespace: dict[str, Any] = {"__name__": "jitgen_kernel"}
    linecache.cache[path] = (len(source.text), None, source.text.splitlines(keepends=True), path)
    try:
        exec(builtins.compile(source.text, path, "exec"), namespace)
    finally:
        linecache.cache.pop(path, None)
    function = namespace[source.name]
    constants: Mapping[str, Any] = source.option("constants") or {}
    remaining = [name for name in function.arg_names if name not in constants]
    declared = source.option("signature", ())
    if len(declared) != len(remaining):
        raise CompileError(f"{source.name} takes {', '.join(remaining)}, and its signature has {len(declared)} types")
    types = dict(zip(remaining, declared, strict=True))
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    multiples = zip(remaining, source.option("multiples", ()), strict=False)
    known = {function.arg_names.index(name): multiple for name, multiple in multiples if multiple > 1}
    attributes = {(position,): [["tt.divisibility", multiple]] for position, multiple in known.items()}
    return ASTSource(function, signature, dict(constants), attributes)


def _parameters(source: KernelSource) -> str:
    formats = []
    for kind in source.option("signature", ()):
        if not kind.startswith("*") and kind not in _FORMATS:
            raise CompileError(f"{source.name}: parameter type {kind!r} is neither a pointer nor {', '.join(_FORMATS)}")
        formats.append("P" if kind.startswith("*") else _FORMATS[kind])
    return "".join(formats) + _SCRATCH


def _facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    num_ctas = metadata.get("num_ctas", 1)
    return {
        "entry": metadata["name"],
        "num_warps": metadata["num_warps"],
        "warp_size": metadata["target"].warp_size,
        "num_ctas": num_ctas,
        "cluster": list(metadata.get("cluster_dims", (num_ctas, 1, 1))),
        "shared_bytes": metadata["shared"],
        # In some versions these are absent or None where a kernel needs no scratch memory.
        "global_scratch": [metadata.get("global_scratch_size") or 0, metadata.get("global_scratch_align") or 1],
        "profile_scratch": [metadata.get("profile_scratch_size") or 0, metadata.get("profile_scratch_align") or 1],
        "cooperative": bool(metadata.get("launch_cooperative_grid", False)),
        "pdl": bool(metadata.get("launch_pdl", False)),
        "tensordesc": list(metadata.get("tensordesc_meta") or ()),
    }


# ---------------------------------------------------------------------------------------------------------- errors


@contextmanager
def _failing_lines(source: KernelSource) -> Iterator[None]:
    """Turns an exception of any class, as Triton's front end may raise, into a CompileError with the failing lines."""
    try:
        yield
    except CompileError:
        raise
    except Exception as error:
        message = f"Triton cannot compile {source.described} for {source.target}"
        raise CompileError(message, log=str(error), lines=_lines(source, error)) from error


def _lines(source: KernelSource, error: BaseException) -> tuple[SourceLine, ...]:
    from triton.compiler.errors import CompilationError

    if isinstance(error, SyntaxError):
        return (SourceLine(error.lineno or 1, error.text or "", error.msg),)
    lines: list[SourceLine] = []
    text = source.text.splitlines()
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CompilationError) and cause.src and hasattr(cause.node, "lineno"):
            # Triton counts the lines of a node from the first line of its function.
            line = source.text[: max(source.text.find(cause.src), 0)].count("\n") + cause.node.lineno
            lines.insert(0, SourceLine(line, text[line - 1], cause.error_message or "the call that leads there"))
        cause = cause.__cause__
    return tuple(lines)
