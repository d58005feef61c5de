"""Writes the C++ of a package's operators: their tables as constants, and their registration with torch.

``operators.hpp`` is the static part. The text is C++20, as torch's headers are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jitgen.export.table import Buffer, KernelRef, Segment, Step, Table, Variant

HEADER = "operators.hpp"
REGISTRATION = """
// A process may load several packages with these operators: the first registers them, and stays.
extern "C" {{
extern bool {namespace}_is_here;
bool {namespace}_is_here = false;
}}

STABLE_TORCH_LIBRARY_FRAGMENT({namespace}, library) {{
  if (jitgen::operators::another_library_has("{namespace}_is_here")) return;
{definitions}
  {namespace}_is_here = true;
  jitgen::operators::stay_loaded();
}}

STABLE_TORCH_LIBRARY_IMPL({namespace}, {key}, library) {{
  if (!{namespace}_is_here) return;
{implementations}
}}
"""


def header() -> str:
    """Returns the text of ``operators.hpp``."""
    return Path(__file__).with_name(HEADER).read_text()


def schema(name: str) -> str:
    """Returns the schema of an operator."""
    return f"{name}(Tensor[] tensors) -> Tensor[]"


def operators_source(namespace: str, tables: Sequence[Table], kernels: Iterable[KernelRef], key: str) -> str:
    """Writes the C++ file.

    Args:
        namespace: of the operators, which are ``call0``, ``call1``, ... in the order of ``tables``.
        key: ``"CPU"`` or ``"CUDA"``.
    """
    writer = _Writer()
    for kernel in kernels:
        writer.kernel(kernel, key)
    for index, table in enumerate(tables):
        writer.table(f"call{index}", table)
    names = [f"call{index}" for index in range(len(tables))]
    lines = [
        f"#define JITGEN_{key}",
        f"#include <{HEADER}>",
        "",
        *writer.declarations,
        "namespace {",
        "using namespace jitgen::operators;",
        *writer.lines,
        "}  // namespace",
    ]
    registration = REGISTRATION.format(
        namespace=namespace,
        key=key,
        definitions="\n".join(f'  jitgen::operators::define(library, "{schema(name)}");' for name in names),
        implementations="\n".join(
            f'  library.impl("{name}", TORCH_BOX(&jitgen::operators::call<{name}>));' for name in names
        ),
    )
    return "\n".join(lines) + "\n" + registration


@dataclass
class _Writer:
    """Writes constants; equal ones are written once.

    Attributes:
        declarations: outside of the namespace.
        lines: within it.
    """

    declarations: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    _known: dict[tuple[str, str], str] = field(default_factory=dict)

    def kernel(self, kernel: KernelRef, key: str) -> None:
        symbol = kernel.symbol
        if key == "CUDA":
            binary = f"{symbol.partition('__')[0]}_binary"
            facts = f'{binary}, "{kernel.entry}", {_bool(kernel.any_cluster)}, {_bool(kernel.overlaps)}'
            self.declarations.append(f'extern "C" const unsigned char {binary}[];')
            self.lines.append(f"const Kernel {symbol}{{{facts}, {{}}, {{}}}};")
            return
        self.declarations.append(f'extern "C" int32_t {symbol}_packed(const unsigned char*);')
        self.lines.append(f"const Kernel {symbol}{{{symbol}_packed}};")

    def table(self, name: str, table: Table) -> None:
        segments = [self._segment(segment) for segment in table.segments]
        inputs = self._array("Buffer", map(_buffer, table.inputs))
        tensor, dim = table.key or (-1, -1)
        facts = f'"{_escaped(table.name)}", {inputs}, {len(table.inputs)}, {tensor}, {dim}'
        array = self._array("Segment", segments)
        self.lines.append(f"constexpr Operator {name}{{{facts}, {array}, {len(segments)}, {table.last}}};")

    def _segment(self, segment: Segment) -> str:
        base, slope = (self._array("int64_t", map(_integer, row)) for row in (segment.base, segment.slope))
        return f"{{{segment.first}, &{self._variant(segment.variant)}, {base}, {slope}}}"

    def _variant(self, variant: Variant) -> str:
        allocations = self._array("Buffer", map(_buffer, variant.allocations))
        steps = self._array("Step", map(self._step, variant.steps))
        results = self._array("int32_t", map(str, variant.results))
        facts = f"{allocations}, {len(variant.allocations)}, {steps}, {len(variant.steps)}"
        return self._constant("Variant", f"{{{facts}, {results}, {len(variant.results)}}}")

    def _step(self, step: Step) -> str:
        buffers = self._array("int32_t", map(str, step.buffers))
        regions = self._array("char* const", (f'"{_escaped(region)}"' for region in step.regions))
        offsets = self._array("int32_t", map(str, step.offsets))
        return f'{{&{step.kernel.symbol}, "{step.arguments}", {buffers}, {regions}, {offsets}, {step.bytes}}}'

    def _array(self, kind: str, items: Iterable[str]) -> str:
        """Returns the name of an array of ``items``; the null pointer for none."""
        values = list(items)
        return self._constant(kind, f"{{{', '.join(values)}}}", "[]") if values else "nullptr"

    def _constant(self, kind: str, value: str, suffix: str = "") -> str:
        name = self._known.get((kind, value))
        if name is None:
            name = self._known[kind, value] = f"constant{len(self._known)}"
            constexpr = "const" if kind.startswith("char") else "constexpr"
            self.lines.append(f"{constexpr} {kind} {name}{suffix} = {value};")
        return name


def _buffer(buffer: Buffer) -> str:
    return f"{{{buffer.rank}, aoti_torch_dtype_{buffer.dtype}}}"


def _integer(value: int) -> str:
    return "INT64_MIN" if value == -(2**63) else f"{value}"


def _bool(value: bool) -> str:
    return str(value).lower()


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() and c not in '"\\?' and c.isascii() else "." for c in text)
