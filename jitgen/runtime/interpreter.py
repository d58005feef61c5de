"""Runs a rendered Triton source on CPU tensors under Triton's interpreter (``TRITON_INTERPRET=1``).

This is how the numerics of Triton kernels are tested without a GPU. The interpreted source is the one that is compiled.
For the duration of a launch this module replaces what the interpreter lacks or computes wrongly:

- ``libdevice``: interpreted, its functions do nothing. Each is replaced by torch's function, computed in float64.
- bfloat16: Triton's conversion truncates and mishandles NaN and infinity, and arithmetic and ``tl.dot`` take the bits
  for integers. Here torch converts, to nearest even, and arithmetic is done in float32 and rounded once.
- float8: tensors are passed as bytes, as the dialect reads and writes them (``codegen/triton.py``).
- conditions: one of a scalar that a block is combined with stays a bool; the interpreter would make it an integer, and
  refuse it as a mask.
- scalars: each has its type in the signature; the interpreter would guess a type from the value.
- Triton 3.6: minima and maxima that pass over NaN have it, a fused multiplication and addition rounds twice, and numpy
  refuses what it makes of scalars as bounds of loops, and of ``~`` of bytes.

Neighbours: ``compilers/triton.py`` makes the artifact whose facts ``load`` takes; ``call/specialization.py`` calls it.
"""

from __future__ import annotations

import builtins
import hashlib
import linecache
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jitgen import settings
from jitgen.errors import CompileError, JitgenError, SourceLine

Grid = tuple[int, ...]

# libdevice's name of a function -> torch's, where they differ.
_TORCH_NAMES = {"nearbyint": "round", "rint": "round"}

_NUMPY_SCALARS = {"i32": "int32", "i64": "int64", "fp32": "float32", "fp64": "float64"}


def load(
    text: str, entry: str, signature: Sequence[str], constants: Mapping[str, Any] | None = None
) -> Callable[..., None]:
    """Returns the kernel ``entry`` of a Triton source, to be called as ``kernel(name, grid, *arguments)`` on CPU
    tensors. What the interpreter refuses in it is a CompileError that has the ``name``.

    Args:
        signature: types of the run-time parameters in order, such as ``["*bf16", "i32", "fp32"]``.
        constants: values of the remaining parameters by name.

    Raises:
        JitgenError: when ``TRITON_INTERPRET=1`` was not set before Triton was imported.
    """
    path = f"jitgen/{hashlib.sha256(text.encode()).hexdigest()[:12]}/interpreted.py"
    # The interpreter reads the text of functions again when they are first called, so the entry is not removed.
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    namespace: dict[str, Any] = {"__name__": "jitgen_kernel"}
    exec(builtins.compile(text, path, "exec"), namespace)
    kernel = namespace[entry]
    if not settings.interpreting_triton() or not _is_interpreted(kernel):
        raise JitgenError("running Triton on CPU tensors needs TRITON_INTERPRET=1 from the start of the process")
    namespace |= _replaced(namespace)

    def launch(name: str, grid: Grid, *arguments: Any) -> None:
        import numpy
        from triton.runtime.errors import InterpreterError

        values = [_argument(kind, value) for kind, value in zip(signature, arguments, strict=True)]
        try:
            with _torch_conversions(), _without_waste(), numpy.errstate(all="ignore"):
                kernel[grid](*values, **(constants or {}))
        except InterpreterError as error:
            lines = _failing_lines(path, text.splitlines(), error)
            raise CompileError(f"Triton's interpreter refuses {name}", log=str(error), lines=lines) from error

    return launch


def _failing_lines(path: str, text: Sequence[str], error: BaseException) -> tuple[SourceLine, ...]:
    """Returns the line of each function of the source at ``path`` that was running, the innermost one first."""
    lines: list[SourceLine] = []
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.walk_tb(cause.__traceback__)
        numbers = [number for frame, number in frames if frame.f_code.co_filename == path]
        innermost, cause = cause, cause.__cause__
        if numbers:
            lines.insert(0, SourceLine(numbers[-1], text[numbers[-1] - 1], "the call that leads there"))
    return (*(replace(line, message=str(innermost)) for line in lines[:1]), *lines[1:])


def _replaced(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a source has of libdevice, the module or functions of it, as torch computes it."""
    own = _libdevice()
    replaced: dict[str, Any] = {"libdevice": own}
    for name, value in namespace.items():
        if isinstance(value, types.ModuleType):
            replaced |= {name: own} if value.__name__.endswith(".libdevice") else {}
        elif str(getattr(value, "__module__", "")).endswith(".libdevice"):
            replaced[name] = getattr(own, value.__name__, value)
    return replaced


def _is_interpreted(kernel: Any) -> bool:
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernel, InterpretedFunction)


def _argument(kind: str, value: Any) -> Any:
    if kind.startswith("*"):
        import torch

        word = {"*u8": torch.uint8, "*i16": torch.int16}.get(kind)  # a narrow float is perhaps read or written as bits
        return value if word is None or not value.dtype.is_floating_point else value.view(word)
    import numpy
    import triton.language as tl

    dtype = tl.str_to_ty(kind, None)
    return _tensor(numpy.array([value], dtype=_NUMPY_SCALARS[kind]), dtype, dtype)


def _tensor(data: Any, scalar: Any, type_: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(data, scalar), type_)


# -------------------------------------------------------------------------------------------------------- libdevice


def _libdevice() -> types.ModuleType:
    """Builds a module that replaces ``triton.language.extra.libdevice`` and has those of its functions that torch has
    too."""
    import torch
    from triton.language.extra import libdevice

    module = types.ModuleType("libdevice")
    for name in vars(libdevice):
        function = getattr(torch, _TORCH_NAMES.get(name, name), None)
        if function is not None and not name.startswith("_"):
            setattr(module, name, _elementwise(function))
    return module


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        import torch
        import triton.language as tl
        from triton.runtime.interpreter import interpreter_semantic

        tensors = [interpreter_semantic.to_tensor(operand) for operand in operands]
        scalar = tensors[0].dtype
        values = [torch.from_numpy(tensor.handle.data.copy()).double() for tensor in tensors]
        data = function(*values).numpy().astype(tensors[0].handle.data.dtype)
        blocks = any(tensor.type.is_block() for tensor in tensors)
        return _tensor(data, scalar, tl.block_type(scalar, list(data.shape)) if blocks else scalar)

    return call


# ------------------------------------------------------------------------------------------------------ conversions


@contextmanager
def _torch_conversions() -> Iterator[None]:
    """Makes the interpreter convert float32 and bfloat16 as torch does, compute bfloat16 in float32, and keep the
    conditions of scalars bools; that of Triton 3.6 computes what it computes wrongly as later ones do."""
    import numpy
    import triton.language as tl
    from triton._C.libtriton import interpreter as native
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype, interpreter_builder

    names = ("cast_impl", "binary_op", "create_dot", "create_splat")
    cast_impl, binary_op, create_dot, create_splat = (getattr(interpreter_builder, name) for name in names)

    def cast(source: Any, target: Any) -> Any:
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.float32, tl.bfloat16):
            return TensorHandle(_bfloat16_bits(source.data), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle(_float32(source.data), tl.float32)
        return cast_impl(source, target)

    def binary(left: Any, right: Any, function: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return binary_op(left, right, function)
        result = function(_float32(left.data), _float32(right.data))
        if result.dtype != numpy.float32:
            return TensorHandle(result, tl.int1)
        return TensorHandle(_bfloat16_bits(result), tl.bfloat16)

    def dot(left: Any, right: Any, total: Any, *options: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16:
            left, right = (TensorHandle(_float32(operand.data), tl.float32) for operand in (left, right))
        return create_dot(left, right, total, *options)

    def splat(type_: Any, value: Any) -> Any:
        if value.data.dtype == numpy.bool_:
            value = TensorHandle(value.data, tl.int1)
        return create_splat(type_, value)

    def fused(x: Any, y: Any, z: Any) -> Any:
        x, y = (operand.data.astype(numpy.float64) for operand in (x, y))
        return TensorHandle((x * y + z.data).astype(z.data.dtype), z.dtype.scalar)

    def all_ones(type_: Any) -> Any:
        return TensorHandle(~numpy.zeros(1, _get_np_dtype(type_)), type_.scalar)

    replaced = dict(zip(names, (cast, binary, dot, splat), strict=True))
    if not hasattr(native, "fma_fp64"):  # Triton 3.6
        replaced |= {"create_fma": fused, "get_all_ones_value": all_ones}
        replaced["create_minnumf"] = lambda left, right: binary(left, right, numpy.fmin)
        replaced["create_maxnumf"] = lambda left, right: binary(left, right, numpy.fmax)
    for name, function in replaced.items():
        setattr(interpreter_builder, name, function)
    try:
        yield
    finally:
        for name in replaced:
            delattr(interpreter_builder, name)


@contextmanager
def _without_waste() -> Iterator[None]:
    """Drops what takes the interpreter a third of its time and changes nothing: it checks 32-bit integers for
    overflow and asserts nothing unless it debugs, and it replaces Triton's language again at each call of a device
    function. What it replaces there it never restores, so that Triton would compile nothing afterwards: the kernel's
    own restoration restores all, the latest first."""
    from triton.language import tensor
    from triton.runtime import interpreter

    builder, patch, patched = interpreter.interpreter_builder, interpreter._patch_lang, set[int]()
    replacements: list[Any] = []

    def patch_once(function: Any) -> Any:
        seen = id(function.__globals__) in patched
        patched.add(id(function.__globals__))
        replacement = None if seen else patch(function)
        tensor.__index__ = _number
        if replacement is not None:  # some versions of Triton restore nothing at all
            replacements.append(replacement)
        return types.SimpleNamespace(restore=restore)

    def restore() -> None:
        while replacements:
            replacements.pop().restore()

    options = builder.options
    builder.options = replace(options, sanitize_overflow=options.debug)
    interpreter._patch_lang = patch_once
    try:
        yield
    finally:
        builder.options, interpreter._patch_lang = options, patch


def _number(scalar: Any) -> int:
    return int(scalar.handle.data.item())


def _float32(bits: Any) -> Any:
    """Converts an array of bfloat16 bits to float32 numbers."""
    import torch

    return torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy()


def _bfloat16_bits(numbers: Any) -> Any:
    import torch

    return torch.from_numpy(numbers.copy()).bfloat16().view(torch.uint16).numpy()
