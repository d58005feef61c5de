"""Reads a manifest that nobody vouches for: nothing is built from one before all of it has been checked.

What jitgen makes of a manifest is source code, which is compiled and, for Triton, run. So a manifest is data of a known
form and no more: exact members, known operations, names that are identifiers, numbers within bounds, and shapes that
agree in the recorded call. Anything else raises CacheError with the way to it, such as
``entries[3].graph.nodes[7].attrs[0]``. Neighbours: ``node_schema.py`` is the table of node operations,
``expression_schema.py`` checks sizes and scalars; ``docs/security.md`` says what is trusted and what is not.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from jitgen import settings
from jitgen.codegen.text import NAME_LENGTH, is_function_name
from jitgen.compilers import routes
from jitgen.deploy import expression_schema as expressions
from jitgen.deploy import node_schema, trial_inputs
from jitgen.errors import CacheError, CacheMissError, CompileError, UnsupportedError
from jitgen.fields import SIZE_LIMIT, Field, object_of, shown
from jitgen.ir import graph as graphs
from jitgen.ir import symbols
from jitgen.spec import DTYPES, SCHEMA

FILE_LIMIT = 2**28
"""Bytes of a manifest."""
ENTRY_LIMIT = 100_000
NODE_LIMIT = 100_000
INPUT_LIMIT = 4096
"""The most inputs of a graph, and the most outputs, arguments updated in place, and numeric arguments."""
GUARD_LIMIT = 10_000

_DIGEST = re.compile(r"[0-9a-f]{64}")
_ALIGNMENTS = (1, 2, 4, 8, 16)
_BACKENDS = settings.BACKENDS


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the entries of the manifest ``path``.

    Raises:
        CacheError: the file cannot be read, or is not what ``jitgen.record`` writes.
    """
    try:
        with open(path, "rb", opener=_at_once) as file:
            os.set_blocking(file.fileno(), True)
            raw = file.read(FILE_LIMIT + 1)
        if len(raw) > FILE_LIMIT:
            raise ValueError(f"it has more than {FILE_LIMIT} bytes")
        content = json.loads(raw.decode(), object_pairs_hook=object_of)
        return check(content)
    except (OSError, ValueError, CacheError) as error:
        problem = str(error)
    except RecursionError:
        problem = "it is nested too deeply"
    except Exception as error:  # whatever the file holds, nothing else is to come of it
        problem = f"it cannot be checked ({type(error).__name__}: {shown(str(error))})"
    raise CacheError(f"{os.fspath(path)} is not a readable manifest: {problem}; record it again with jitgen.record")


def _at_once(path: str, flags: int) -> int:
    """Opens without waiting: a FIFO that nobody writes is an empty file, and a pipe is read to its end."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check(content: Any) -> list[dict[str, Any]]:
    """Checks a manifest's JSON and returns its entries; CacheError with the path to what is wrong, for anything
    else."""
    schema, entries = Field(content).members("schema", "entries")
    if schema.value != SCHEMA or type(schema.value) is not int:
        schema.refuse(f"is {shown(schema.value)}; this jitgen reads schema {SCHEMA}")
    for entry in entries.items(ENTRY_LIMIT):
        _entry(entry)
    return entries.value


Result = TypeVar("Result")


def contained(name: str, step: Callable[..., Result], *arguments: Any) -> Result:
    """Returns ``step(*arguments)``, which works on a checked entry of a manifest; whatever it raises is a JitgenError.

    A graph of the right form may still be none that a function has, and fail in any pass.
    """
    try:
        return step(*arguments)
    except (CacheError, CacheMissError, CompileError, UnsupportedError):
        raise
    except OSError as error:
        raise CompileError(f"{name} cannot be built: {error}") from error
    except Exception as error:
        raise CompileError(
            f"{name} cannot be built from the manifest ({type(error).__name__}: {shown(str(error))}); record it again "
            "with jitgen.record, and if the same comes of it, it is an error of jitgen's: report it"
        ) from error


# ---------------------------------------------------------------------------------------------------------- entries


def _entry(field: Field) -> None:
    names = ("name", "graph", "environment", "inputs", "results", "backend", "compiler", "variant")
    names_of_few = ("batch_invariant", "enlarged", "integers")
    others = [name for name in names_of_few if isinstance(field.value, dict) and name in field.value]
    name, graph, environment, inputs, results, backend, compiler, variant, *rest = field.members(*names, *others)
    optional = dict(zip(others, rest, strict=True))
    _name(name)
    backend.one_of(_BACKENDS)
    compiler.one_of((None, *(compiler for owner, compiler in routes.ROUTES if owner == backend.value)))
    variant.text(_DIGEST, "64 hexadecimal digits")
    tensors = [_memory(item) for item in inputs.items(INPUT_LIMIT)]
    values = _environment(environment, tensors)
    outputs = _graph(graph, values, inputs)
    for name_of_fact in optional.keys() - {"integers"}:
        optional[name_of_fact].one_of((True, False))
    if "integers" in optional:
        _integers(optional["integers"], graph.value["inputs"], tensors)
    if graph.value["name"] != name.value:
        name.refuse(f"{shown(name.value)} is not its graph's name, {shown(graph.value['name'])}")
    caller_outputs = [_memory(item) for item in results.items(len(outputs))]
    if caller_outputs and caller_outputs != outputs:
        results.refuse(f"has sizes {caller_outputs}; the graph's outputs have {outputs}")


def _name(field: Field) -> None:
    if not is_function_name(field.value):
        field.refuse(
            f"{shown(field.value)} is no function's name: an ASCII identifier of at most {NAME_LENGTH} characters, or "
            "<lambda>"
        )


def _memory(field: Field) -> tuple[int, ...]:
    """Returns the sizes of a tensor."""
    sizes, strides, alignment = field.members("sizes", "strides", "alignment")
    sizes_read = tuple(size.size() for size in sizes.items(expressions.RANK_LIMIT))
    steps = [stride.size() for stride in strides.items(len(sizes_read), len(sizes_read))]
    expressions.elements(sizes, sizes_read)
    if sum((size - 1) * step for size, step in zip(sizes_read, steps, strict=True) if size) >= SIZE_LIMIT // 8:
        strides.refuse("reaches further than an address can")
    alignment.one_of(_ALIGNMENTS)
    return sizes_read


def _environment(field: Field, tensors: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Returns a value for every symbol: each size of each input, and the numeric arguments ``a0``, ``a1``, ..."""
    if not isinstance(field.value, dict):
        field.refuse(f"{shown(field.value)} is not an object with a value for every symbol")
    sizes = {f"s{index}_{dim}": size for index, sizes in enumerate(tensors) for dim, size in enumerate(sizes)}
    count = len(field.value) - len(sizes)
    expected = [*sizes, *(f"a{index}" for index in range(min(max(count, 0), INPUT_LIMIT)))]
    values = field.members(*expected)
    for value in values:
        if value.key in sizes:
            value.one_of((sizes[str(value.key)],))
        elif type(value.value) is not float and not _is_integer(value.value):
            value.refuse(f"{shown(value.value)} is neither a float nor an integer of {expressions.BITS_LIMIT} bits")
    return dict(field.value)


def _integers(field: Field, specs: Sequence[Mapping[str, Any]], tensors: Sequence[tuple[int, ...]]) -> None:
    """Checks what integer inputs hold where schedules are timed (``own_integers``)."""
    before = -1
    for item in field.items(len(tensors)):
        number, values = item.items(2, 2)
        before = number.integer(before + 1, len(tensors))
        dtype = specs[before]["dtype"]
        if dtype not in trial_inputs.INDICES:
            number.refuse(f"is an input of {dtype}, not of {', '.join(trial_inputs.INDICES)}")
        limits, count = torch.iinfo(DTYPES[dtype]), math.prod(tensors[before])
        if isinstance(values.value, dict):
            least, most = values.members("least", "most")
            most.integer(least.integer(limits.min, limits.max + 1), limits.max + 1)
        else:
            for value in values.items(count, count):
                value.integer(limits.min, limits.max + 1)


def _is_integer(value: Any) -> bool:
    return type(value) is int and value.bit_length() <= expressions.BITS_LIMIT


# ----------------------------------------------------------------------------------------------------------- graphs


def _graph(field: Field, environment: Mapping[str, Any], tensors: Field) -> list[tuple[int, ...]]:
    """Returns the sizes of the graph's outputs in the recorded call."""
    names = ("schema", "name", "inputs", "nodes", "outputs", "guards", "mutated")
    schema, name, inputs, nodes, outputs, guards, mutated = field.members(*names)
    schema.one_of((SCHEMA,))
    _name(name)
    specs = _inputs(inputs, tensors)
    values: list[node_schema.Value] = []
    items = nodes.items(NODE_LIMIT)
    for item in items:
        values.append(node_schema.node(item, values, environment, specs))
    of_weights = node_schema.weight_tensors(items)
    for guard in guards.items(GUARD_LIMIT):
        _guard(guard, environment)
    results = [_result(output, values, of_weights) for output in outputs.items(INPUT_LIMIT)]
    updated = -1
    for item in mutated.items(INPUT_LIMIT):
        index, value = item.items(2, 2)
        before, updated = updated, index.integer(0, len(specs))
        if updated <= before:
            index.refuse("is not in ascending order, each input once")
        if any(values[position].index == updated for position in of_weights):
            index.refuse("is a tensor of a quantised weight, which is not updated")
        result = _result(value, values, of_weights)
        expected = specs[updated][0], tuple(tensors.value[updated]["sizes"])
        if (result.dtype, result.shape) != expected:
            value.refuse(
                f"is {result.dtype} {list(result.shape)}; input {updated} is {expected[0]} {list(expected[1])}"
            )
    if graphs.to_json(graphs.from_json(field.value)) != field.value:
        field.refuse("its nodes are not in the order that record writes them in, each once and each of use")
    return [output.shape for output in results]


def _inputs(field: Field, tensors: Field) -> list[tuple[str, Any]]:
    """Returns dtype and symbolic shape of every input: a symbol for each size but 1."""
    count = len(tensors.value)
    specs = []
    for index, item in enumerate(field.items(count, count)):
        dtype, shape = item.members("dtype", "shape")
        sizes = tensors.value[index]["sizes"]
        expected = [symbols.to_json(size) for size in graphs.input_shape(index, sizes)]
        for size, wanted in zip(shape.items(len(expected), len(expected)), expected, strict=True):
            if type(size.value) is not type(wanted) or size.value != wanted:
                size.refuse(f"is not the size of a dimension of {1 if wanted == 1 else 'other than 1'}: {wanted}")
        specs.append((dtype.one_of(DTYPES), shape.value))
    return specs


def _guard(field: Field, environment: Mapping[str, Any]) -> None:
    expression, value = field.items(2, 2)
    if not expressions.is_expression(expression):
        expression.refuse(f"{shown(expression.value)} is not an expression")
    actual, expected = expressions.scalar(expression, environment), expressions.number(value)
    undefined = (
        isinstance(actual, float) and isinstance(expected, float) and math.isnan(actual) and math.isnan(expected)
    )
    if type(actual) is not type(expected) or not (actual == expected or undefined):
        field.refuse(f"does not hold in the recorded call: there it is {shown(actual)}, not {shown(expected)}")


def _result(field: Field, values: Sequence[node_schema.Value], of_weights: frozenset[int]) -> node_schema.Value:
    value = values[field.integer(0, len(values))]
    if value.weight or field.value in of_weights:
        field.refuse("returns a quantised weight, or a tensor of one")
    return value
