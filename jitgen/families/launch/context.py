"""Renders the source of a launch: the user's module, the functions of rules, and an entry that passes the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jitgen.codegen.environment import Rendered, family_folder, user_mark
from jitgen.codegen.printing import printed
from jitgen.codegen.triton import SIGNATURE_TYPES, STORAGE_TYPES, TRITON, load_cast, store_cast
from jitgen.device import Device
from jitgen.errors import UnsupportedError
from jitgen.families.launch import NAME, c_context, splices
from jitgen.families.launch.body import Rule, at_the_call
from jitgen.families.launch.layout import Layout, RuleLayout, launched, parameter_of, parameters, passed_integers
from jitgen.families.launch.schedule import Schedule, explain
from jitgen.ir.body import Body
from jitgen.ir.launches import CONFIG, CONSTANT, FLOAT, TENSOR
from jitgen.ir.program import Kernel
from jitgen.kernel.render import source
from jitgen.spec import KernelSource

POINTERS = SIGNATURE_TYPES | {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
"""Storage dtype to what a user's kernel has behind a pointer, as Triton's launcher tells it."""
_DIALECT = replace(TRITON, coarse={**TRITON.coarse, "erfc": "coarse_erfc({0})"})
"""The dialect of rules. A user's kernel has few threads on a multiprocessor where it multiplies tiles, so that nothing
hides the 55 instructions of libdevice's ``erfc``; ``coarse_erfc`` has 20."""
_LANGUAGES = {"triton": "Triton", "cuda": "CUDA C++", "cpp": "C++"}
_OWN = "jitgen_{0}"
"""What a parameter of the entry is called within the user's kernel."""


def render(
    kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device, compiler: str
) -> tuple[KernelSource, Rendered]:
    """Renders the source of ``kernel``.

    Raises:
        UnsupportedError: the plan's kernels are in another language.
    """
    (body,), (layout,) = kernel.bodies, layouts
    own, location = launched(body), body.instructions[0].location
    language, entry, text, *_ = own.attrs.kernel
    if device.dialect != language:
        raise UnsupportedError(_in_another_language(entry, language, location, device))
    if language != TRITON.name:
        return c_context.render(kernel, layout, schedule, device, compiler)
    declared = parameters(kernel, layouts, device)
    in_memory = [number for number, operand in enumerate(body.operands) if operand.buffer is not None]
    rules = [
        _rule(rule, kind, rule_layout, body, location)
        for (kind, rule), rule_layout in zip(
            [*((splices.LOAD, rule) for rule in own.loads), *((splices.STORE, rule) for rule in own.stores)],
            layout.rules,
            strict=True,
        )
    ]
    replaced = [
        splices.Splice(parameter_of(own.attrs, rule["number"]), rule["kind"], rule["name"], tuple(rule["parameters"]))
        for rule in rules
    ]
    further = dict.fromkeys(parameter for rule in rules for parameter in rule["passed"])
    arguments = [f"{_OWN.format(parameter)}={parameter}" for parameter in further]
    arguments += _arguments(kernel, layout, schedule)
    context = {
        "module": (splices.spliced(text, entry, replaced) if replaced else text).rstrip(),
        "rules": rules,
        "libdevice": any("libdevice." in line.text for rule in rules for line in rule["lines"]),
        "called": entry,
        "arguments": arguments,
        "parameters": [
            *(f"p{number}" for number in in_memory),
            *declared.names,
            *(f"a{index}" for index in range(len(kernel.scalars))),
        ],
        "mark": user_mark(location),
    }
    titles = [line for line in explain(kernel, layouts, schedule, device) if location is None or location not in line]
    built = context, _options(kernel, layout, schedule)
    return source(f"{NAME}_{entry}", kernel, schedule, device, compiler, titles, built, False, family_folder(NAME))


def _in_another_language(entry: str, language: str, location: str | None, device: Device) -> str:
    where = f" at {location}" if location else ""
    remedy = f'use backend="auto" or "{language}"'
    if language == "cpp":
        remedy = "pass CPU tensors"
    elif device.dialect == "cpp":
        interpreted = ", or set TRITON_INTERPRET=1 before the program starts" if language == TRITON.name else ""
        remedy = f"pass CUDA tensors{interpreted}"
    return (
        f"{entry}{where} is a kernel in {_LANGUAGES[language]}, and the plan's kernels are for {device.target} in "
        f"{_LANGUAGES[device.dialect]}; {remedy}"
    )


# --------------------------------------------------------------------------------------------------- what is passed


def _arguments(kernel: Kernel, layout: Layout, schedule: Schedule) -> list[str]:
    """Returns what the entry passes to each parameter of the user's kernel."""
    (body,) = kernel.bodies
    own = launched(body)
    integers = {name: f"n{i}" for i, (name, _, _) in enumerate(passed_integers(own.attrs))}
    known = dict(zip(integers, layout.known, strict=True))
    chosen = dict(schedule.constants)
    of_rules = {operand for rule in (*own.loads, *own.stores) for operand in rule.operands}
    arguments = []
    for name, how, value in own.attrs.parameters:
        late = at_the_call(how, value)
        if how == TENSOR:
            place, dtype = own.places[value], own.dtypes[value]
            argument = f"p{place}"
            if place in of_rules and SIGNATURE_TYPES[body.operands[place].dtype] != POINTERS[dtype]:
                argument += f".to(tl.pointer_type({STORAGE_TYPES[dtype]}))"  # nothing is read or written there
        elif how == CONSTANT:
            argument = value
        elif how == CONFIG:
            argument = chosen[name]
        elif late is not None:
            argument = f"a{kernel.scalars.index(late)}"
        elif name in integers:
            argument = "1" if known[name] == 1 else integers[name]
        else:
            argument = _literal(how, value)
        arguments.append(f"{name}={argument}")
    return arguments


def _literal(how: str, value: Any) -> str:
    """Returns a number of the source as Triton's launcher would pass it: an integer that is 1 is a constant."""
    if how != FLOAT and value == 1:
        return "1"
    if how == FLOAT:
        number = repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
        return f"tl.full((), {number}, tl.float32)"
    return f"tl.full((), {value}, {'tl.int32' if -(2**31) <= value < 2**31 else 'tl.int64'})"


def _options(kernel: Kernel, layout: Layout, schedule: Schedule) -> dict[str, Any]:
    """Returns the options of the source."""
    (body,) = kernel.bodies
    own = launched(body)
    of_rules = {operand for rule in (*own.loads, *own.stores) for operand in rule.operands}
    passed = [known for known in layout.known if known != 1]
    signature = [
        f"*{(SIGNATURE_TYPES if number in of_rules else POINTERS)[operand.dtype]}"
        for number, operand in enumerate(body.operands)
        if operand.buffer is not None
    ]
    signature += ["i64" if layout.wide else "i32"] * (len(passed) + len(layout.multiples))
    signature += [SIGNATURE_TYPES[dtype] for _, dtype in kernel.scalars]
    multiples = [*layout.alignments, *(known or 1 for known in passed)]
    multiples += [16 if is_multiple else 1 for is_multiple in layout.multiples]
    return {
        "signature": signature,
        "multiples": [*multiples, *[1] * len(kernel.scalars)],
        "num_warps": schedule.option("num_warps"),
        "num_stages": schedule.option("num_stages"),
        "enable_fp_fusion": True,
        **{name: number for name, number in schedule.options if name not in ("num_warps", "num_stages")},
    }


# ------------------------------------------------------------------------------------------------------------ rules


def _rule(rule: Rule, kind: str, layout: RuleLayout, body: Body, location: str | None) -> dict[str, Any]:
    """Presents the function of a rule: it gets the offset of an element in its tensor, and what the user's call has."""
    text = printed(rule.instructions, _DIALECT, coarse=body.coarse)
    loads, stores, value, has_dims = [], [], "", False
    for position, instruction, offset, first in layout.accesses(rule, _integer):
        if instruction.op == "launch":
            value = text.names[position]
            continue
        operand, pointer = body.operands[instruction.attr], _OWN.format(f"p{instruction.attr}")
        if instruction.op == "store":
            stored = store_cast(text.names[instruction.args[0]], operand.dtype)
            stores.append({"pointer": pointer, "value": stored, "mark": user_mark(instruction.location)})
            continue
        has_dims |= offset not in ("at", "0")
        index = {"at": "at", "0": "at * 0"}.get(offset, f"({offset})")
        if first is not None:
            expression = f"({first} + {index}).to({TRITON.types[operand.dtype]})"
        else:
            expression = load_cast(f"tl.load({pointer} + {index}, mask=mask)", operand.dtype)
        loads.append({"value": text.values[instruction.attr], "expression": expression})
    is_store = kind == splices.STORE
    names = [f"p{number}" for number in rule.operands if body.operands[number].buffer is not None]
    names += [f"m{number}" for number in _integers_of(layout)]
    names += list(text.scalars)
    result = text.names[len(rule.instructions) - 1] if not is_store else ""
    return {
        "name": _OWN.format(f"{'store' if is_store else 'load'}{rule.number}"),
        "kind": kind,
        "number": rule.number,
        "passed": names,
        "parameters": [_OWN.format(name) for name in names],
        "scalars": [(name, _OWN.format(name)) for name in text.scalars],
        "dtype": STORAGE_TYPES[rule.dtype],
        "value": value,
        "widened": load_cast("value", rule.dtype),
        "has_dims": has_dims,
        "dims": _dims(layout),
        "loads": loads,
        "lines": list(text.lines.values()),
        "stores": stores,
        "result": store_cast(result, rule.dtype) if result else "",
        "mark": user_mark(location),
    }


def _integer(number: int) -> str:
    return _OWN.format(f"m{number}")


def _integers_of(layout: RuleLayout) -> list[int]:
    """Returns the integers that a rule takes, in order."""
    strides = (-1 - stride for along in layout.strides for stride in along if stride < 0)
    return sorted({*layout.sizes, *strides, *(first for first in layout.first if first is not None)})


def _dims(layout: RuleLayout) -> list[tuple[str, str]]:
    """Returns, from the last dimension to the second, the name of a coordinate and the size of its dimension."""
    return [(f"i{dim}", _integer(layout.sizes[dim - 1])) for dim in range(len(layout.sizes), 0, -1)]
