"""Renders the source of a launch in CUDA C++ or C++: the functions of rules, the user's text, and an entry.

The entry calls the user's function with the arguments in the order of its parameters. In CUDA C++ that function, a
kernel before, is inlined into the entry, which takes over what it says of its launches. Elements pass between the
user's types and those of rules as bits.
"""

from __future__ import annotations

from typing import Any

from jitgen.codegen.c_text.definition import Definition, definition_of
from jitgen.codegen.c_text.files import includes_of, location_of
from jitgen.codegen.cpp import CPP
from jitgen.codegen.cuda import CUDA
from jitgen.codegen.dialect import Dialect
from jitgen.codegen.edits import edited
from jitgen.codegen.environment import Rendered, family_folder, user_mark
from jitgen.codegen.printing import printed
from jitgen.device import Device
from jitgen.families.launch import NAME, hooks
from jitgen.families.launch.body import Rule, at_the_call
from jitgen.families.launch.layout import Layout, RuleLayout, launched, parameter_of, parameters, passed_integers
from jitgen.families.launch.schedule import Schedule, explain
from jitgen.ir.attributes import LaunchAttrs
from jitgen.ir.body import Body, compute_dtype
from jitgen.ir.launches import TENSOR
from jitgen.ir.ops import flops_of
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import operations_in
from jitgen.kernel.printed_entry import IN_CUDA, ON_CPU, params_of
from jitgen.kernel.render import source
from jitgen.spec import KernelSource

SHORT = 4
"""Operations of a rule that is inlined behind a loop, too; a longer one is called there. Inlined by hand, bias, GELU
and residual behind a tiled product had the compiler compute addresses in each pass of the loop, to spare registers:
2,992 us where the kernel alone takes 2,756, and called they take 2,760. Three operations cost nothing (H200,
docs/measured/h200-own-calls.json)."""
_BUILT_IN = {
    name: f"#ifdef __CUDACC_RTC__\n{content}#else\n#include_next <{name}>\n#endif\n"
    for name, content in (
        ("stdint.h", ""),
        ("cstdint", "namespace std {\nusing namespace jitgen;\n}\n"),
        ("stddef.h", ""),
        ("cstddef", "namespace std {\nusing ::size_t;\n}\n"),
        ("math.h", ""),
        ("cmath", ""),
    )
}
"""Headers that NVRTC does not have, and what of them is not there without."""


def render(
    kernel: Kernel, layout: Layout, schedule: Schedule, device: Device, compiler: str
) -> tuple[KernelSource, Rendered]:
    """Renders the source of ``kernel``, whose language is the device's dialect."""
    (body,) = kernel.bodies
    own, location = launched(body), body.instructions[0].location
    text = own.attrs.kernel
    definition = definition_of(text.text, text.entry, language=text.language)
    is_cuda = text.language == "cuda"
    declared = parameters(kernel, [layout], device)
    dialect = CUDA if is_cuda else CPP
    params = params_of(kernel, declared, dialect, IN_CUDA if is_cuda else ON_CPU)
    context: dict[str, Any]
    if is_cuda:
        spelled = dict(params.spelled)
        context = {"params": params.printed(declared.wide), "index": f"int{64 if declared.wide else 32}_t"}
        attributes = map(definition.written_out, definition.attributes)
        context["attributes"] = "".join(f"{attribute} " for attribute in attributes)
        context["namespace"] = definition.name.rpartition("::")[0] if context["attributes"] else ""
    else:
        spelled = {name: f"params.{own_name}" for name, own_name in params.spelled.items()}
        context = {"params": params.packed}
    listed = [*((False, rule) for rule in own.loads), *((True, rule) for rule in own.stores)]
    rules = [
        _rule(rule, is_store, rule_layout, body, dialect, spelled)
        | {"is_apart": is_cuda and is_store and _is_apart(rule, own.attrs, definition)}
        for (is_store, rule), rule_layout in zip(listed, layout.rules, strict=True)
    ]
    edits = hooks.as_function(definition) if is_cuda else []
    if rules:
        functions: tuple[dict[str, str], dict[str, str]] = {}, {}
        for (is_store, rule), printed_rule in zip(listed, rules, strict=True):
            functions[is_store][parameter_of(own.attrs, rule.number)] = f"jitgen_launch::{printed_rule['name']}"
        edits += hooks.replaced(definition, *functions)
    lines = edited(text.text, edits, keeps_lines=True).rstrip("\n").split("\n")
    context |= {
        "module": [
            {"text": line, "mark": user_mark(location_of(text.text, number))} for number, line in enumerate(lines, 1)
        ],
        "rules": rules,
        "called": definition.called,
        "arguments": [*(["params"] if rules else []), *_arguments(kernel, layout, spelled, dialect)],
        "mark": user_mark(location),
    }
    titles = [line for line in explain(kernel, [layout], schedule, device) if location is None or location not in line]
    flags = {"flags": list(text.flags)} if text.flags else {}
    options = flags | ({"fmad": True} if is_cuda and not any("fmad" in flag for flag in text.flags) else {})
    included = [name for content in (text.text, *dict(text.headers).values()) for name, *_ in includes_of(content)]
    own_headers, packages = text.headers, tuple[str, ...]()
    if is_cuda:
        known = dict(text.headers)
        built_in = {name: _BUILT_IN[name] for name in included if name in _BUILT_IN and name not in known}
        own_headers = tuple(sorted((known | built_in).items()))
        others = [name for name in included if name not in known and name not in built_in]
        packages = ("cuda",) if others else ()
    name = f"{NAME}_{definition.name.rpartition('::')[2]}"
    built, own_files = (context, options), (own_headers, packages)
    return source(name, kernel, schedule, device, compiler, titles, built, False, family_folder(NAME), own_files)


def _is_apart(rule: Rule, attrs: LaunchAttrs, definition: Definition) -> bool:
    """Returns whether a rule of CUDA C++ is a function that is called, so that it takes no registers of the loop."""
    operations = sum(flops_of(name) for name in operations_in(rule.instructions))
    return operations > SHORT and hooks.is_behind_loops(definition, parameter_of(attrs, rule.number))


def _arguments(kernel: Kernel, layout: Layout, spelled: dict[str, str], dialect: Dialect) -> list[str]:
    """Returns what the entry passes to each parameter of the user's function."""
    (body,) = kernel.bodies
    own = launched(body)
    integers = {name: f"n{number}" for number, (name, _, _) in enumerate(passed_integers(own.attrs))}
    arguments = []
    for name, how, value in own.attrs.parameters:
        late = at_the_call(how, value)
        if how == TENSOR:
            argument = f"jitgen_launch::Pointer{{{spelled[f'p{own.places[value]}']}}}"
        elif late is not None:
            argument = spelled[f"a{kernel.scalars.index(late)}"]
        elif name in integers:
            argument = spelled[integers[name]]
        else:
            argument = dialect.constant(value, "float64" if isinstance(value, float) else "int64")
        arguments.append(argument)
    return arguments


def _rule(
    rule: Rule, is_store: bool, layout: RuleLayout, body: Body, dialect: Dialect, spelled: dict[str, str]
) -> dict[str, Any]:
    """Presents the function of a rule, which gets an element's index, row and column."""
    text = printed(rule.instructions, dialect, coarse=body.coarse)
    loads, stores, uses_dims = [], [], False
    for position, instruction, offset, first in layout.accesses(rule, lambda number: spelled[f"m{number}"]):
        if instruction.op == "launch":
            storage, kind = dialect.storage_types[rule.dtype], dialect.types[compute_dtype(rule.dtype)]
            bits = f"jitgen::load(jitgen_launch::bits_as<{storage}>(element))"
            loads.append({"type": kind, "value": text.names[position], "expression": bits})
            continue
        number = instruction.attr
        operand, pointer = body.operands[number], spelled.get(f"p{number}", "")
        if instruction.op == "store":
            value, storage = text.names[instruction.args[0]], dialect.storage_types[operand.dtype]
            mark = user_mark(instruction.location)
            stores.append({"pointer": pointer, "value": value, "storage": storage, "mark": mark})
            continue
        uses_dims |= offset != "at"
        kind = dialect.types[compute_dtype(operand.dtype)]
        loaded = f"jitgen::load({pointer}[{offset}])" if first is None else f"{kind}({first} + {offset})"
        loads.append({"type": kind, "value": text.values[number], "expression": loaded})
    locals_ = [(name, kind, f"params.{name}") for name, kind in text.scalars.items() if "." not in name]
    return {
        "name": f"{'epilogue' if is_store else 'prologue'}{rule.number}",
        "is_store": is_store,
        "dims": _dims(layout, spelled) if uses_dims else [],
        "scalars": locals_,
        "loads": loads,
        "lines": list(text.lines.values()),
        "stores": stores,
        "storage": dialect.storage_types[rule.dtype],
        "result": "" if is_store else text.names[len(rule.instructions) - 1],
    }


def _dims(layout: RuleLayout, spelled: dict[str, str]) -> list[str]:
    """Returns the lines that compute the coordinate of each dimension of the element's index.

    In a matrix the hook's row saves a division where the element lies in it; kernels may count in another way.
    """
    if layout.is_matrix:
        size = spelled[f"m{layout.sizes[0]}"]
        return [
            "const int32_t guess = row;",
            f"const int64_t after = at - int64_t(guess) * {size};",
            f"const bool is_in_row = after >= 0 && after < {size};",
            f"const Index i0 = is_in_row ? guess : at / {size}, i1 = is_in_row ? Index(after) : at % {size};",
        ]
    lines = ["Index rest = at;"] if layout.sizes else []
    for dim in range(len(layout.sizes), 0, -1):
        size = spelled[f"m{layout.sizes[dim - 1]}"]
        lines += [f"const Index i{dim} = rest % {size};", f"rest /= {size};"]
    return [*lines, f"const Index i0 = {'rest' if layout.sizes else 'at'};"]
