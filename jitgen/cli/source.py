"""Prints the kernels of a function for a target with ``jitgen source``; the machine needs no such device.

It calls ``JitFunction.lower``. With ``--asm`` it also compiles the kernels, into the store.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jitgen import settings
from jitgen.cli.show import json_option, print_json, say

_LITERALS = {"true": True, "false": False, "none": None}
arguments_option: Callable[[Any], Any] = click.option(
    "--arg",
    "texts",
    multiple=True,
    metavar="[NAME=]VALUE",
    help="An argument: a tensor such as 'bf16[M,4096]', a quantised weight such as 'int4g128[14336,4096]', a number, "
    "true, false, none, a quoted string. One for each.",
)


@click.command()
@click.argument("function", metavar="FILE_OR_MODULE:FUNCTION")
@click.option("--target", help="Such as sm_90a, gfx942, x86-64-v3 (default: cpu, this host).")
@arguments_option
@click.option(
    "--backend", type=click.Choice(settings.BACKENDS), help="Default: the function's own, else by the target."
)
@click.option("--explain", is_flag=True, help="Say in words what runs and why, instead of printing the source.")
@click.option(
    "--asm", type=click.Choice(["ptx", "sass", "asm", "amdgcn"]), help="Compile, and print this instead of the source."
)
@json_option
def source(
    function: str,
    target: str | None,
    texts: tuple[str, ...],
    backend: str | None,
    explain: bool,
    asm: str | None,
    as_json: bool,
) -> None:
    """Print the source generated for a call of FUNCTION with these arguments.

    FUNCTION need not be decorated. `jitgen source model.py:gate --target sm_90a --arg 'bf16[M,4096]' --arg 2.0`
    """
    lowered = lower(load_function(function), texts, target, backend)
    code = None
    if asm:
        assembly = lowered.compile().asm
        if asm not in assembly:
            raise click.UsageError(f"{lowered.target} has no {asm}; it has {', '.join(assembly)}")
        code = str(assembly[asm])
    if as_json:
        facts: dict[str, Any] = {"function": function, "target": lowered.target, "key": lowered.key}
        facts["kernels"] = [vars(kernel) for kernel in lowered.kernels]
        facts["explanation"] = lowered.explain()
        print_json(facts | ({"asm": code} if asm else {}))
    else:
        say(lowered.explain() if explain and not asm else code or lowered.source)


def lower(function: Any, texts: tuple[str, ...], target: str | None, backend: str | None) -> Any:
    """Lowers ``function``, a ``JitFunction``, for the arguments of ``--arg`` options, by default for this host."""
    positional, named = read_arguments(texts)
    _check_arguments(function, positional, named)
    return function.lower(*positional, target=target or "cpu", backend=backend, **named)


def load_function(text: str) -> Any:
    """Returns the jitgen function named ``model.py:gate``, ``package.model:gate`` or ``model.py:Class.method``.

    A function that is not decorated is decorated here. A file is imported under its own name, with its directory first
    on the path, as for a script; code under ``if __name__ == "__main__"`` does not run.
    """
    from jitgen.api import JitFunction, jit

    origin, separator, name = text.rpartition(":")
    if not separator or not name or not origin:
        raise click.UsageError(f"{text!r}: write the file or module, a colon and the function, such as model.py:gate")
    module = _import_file(Path(origin)) if origin.endswith(".py") else _import_module(origin)
    value: Any = module
    for attribute in name.split("."):
        try:
            value = getattr(value, attribute)
        except AttributeError:
            raise click.UsageError(f"{origin} has no {name!r}") from None
    if not callable(value):
        raise click.UsageError(f"{text} is a {type(value).__name__}, not a function")
    return value if isinstance(value, JitFunction) else jit(value)


def _check_arguments(function: Any, positional: list[Any], named: dict[str, Any]) -> None:
    """Raises click.UsageError if ``function`` does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        raise click.UsageError(f"{function.name}{signature}: {error}; give each argument by --arg") from None


def _import_module(name: str) -> Any:
    # `python -m jitgen` has the working directory on its path; the installed script `jitgen` does not.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise click.UsageError(f"cannot import {name}: {error}. A file is given with its ending, as model.py") from None


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise click.UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    # A file with the name of a module that is already imported, such as code.py, must not replace that module.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def read_arguments(texts: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the positional and the named arguments given by ``--arg`` options."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for text in texts:
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=(.*)", text, re.DOTALL)
        if match:
            named[match.group(1)] = read_argument(match.group(2))
        else:
            positional.append(read_argument(text))
    return positional, named


def read_argument(text: str) -> Any:
    """Returns one argument: a ``TensorSpec`` if a dtype precedes a bracket, otherwise a Python literal or a dtype.

    Raises:
        click.UsageError: ``text`` is none of these. UnsupportedError: there can be no such tensor.
    """
    from jitgen.errors import UnsupportedError
    from jitgen.spec import TensorSpec, parse_dtype

    stripped = text.strip()
    if re.match(r"[A-Za-z]", stripped) and "[" in stripped:
        return TensorSpec.parse(stripped)
    if stripped.lower() in _LITERALS:
        return _LITERALS[stripped.lower()]
    try:
        return ast.literal_eval(stripped)
    except (ValueError, SyntaxError):
        pass
    try:
        return parse_dtype(stripped)
    except UnsupportedError:
        raise click.UsageError(
            f"cannot read {text!r}; write a tensor such as 'bf16[M,4096]', a number, true, false, none, a dtype, "
            "or a string in quotes of its own"
        ) from None
