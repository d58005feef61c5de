"""Looking at what would run, without running it: ``Lowered`` and ``Executable`` as users see them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen import families, pipeline
from jitgen.compile import routes
from jitgen.errors import JitgenError
from jitgen.ir.program import Kernel
from jitgen.pipeline import BuiltKernel
from jitgen.spec import artifact_key
from jitgen.store import Store


@dataclass(frozen=True)
class KernelText:
    """One kernel of a lowered function.

    Attributes:
        name: its entry symbol.
        backend: ``"cpp"``, ``"cuda"`` or ``"triton"``.
        source: the generated source.
        template: the template it came from, such as ``"cuda/elementwise.cu.j2"``.
        key: the artifact key under the toolchain of this machine; None where it has no such toolchain.
    """

    name: str
    backend: str
    source: str
    template: str
    key: str | None


class Lowered:
    """A function lowered for one signature and target; made by ``JitFunction.lower``. Needs no device.

    Attributes:
        kernels: the kernels a call launches, in order.
        source: all their sources.
    """

    def __init__(self, lowered: pipeline.Lowered):
        self._lowered = lowered

    @functools.cached_property
    def kernels(self) -> tuple[KernelText, ...]:
        route = self._lowered.route
        found = []
        for number in range(len(self._lowered.program.kernels)):
            source, _ = self._lowered.render(number)
            tools = routes.toolchain(route.backend, route.compiler)
            key = artifact_key(routes.prepare(source), tools) if tools else None
            found.append(KernelText(source.name, route.backend, source.text, source.template, key))
        return tuple(found)

    @property
    def source(self) -> str:
        return "\n".join(kernel.source for kernel in self.kernels)

    @property
    def key(self) -> str:
        """The request key."""
        return self._lowered.key

    @property
    def target(self) -> str:
        return str(self._lowered.route.target)

    def explain(self) -> str:
        """In words: how many kernels and why, what each reads and writes, and what the specialisation assumes."""
        lowered = self._lowered
        program = lowered.program
        count, temporaries = len(program.kernels), len(program.temporaries)
        lines = [
            f"{program.name}: {pipeline.describe(lowered)}",
            f"{count} kernel{'s' * (count != 1)}, {temporaries} temporar{'y' if temporaries == 1 else 'ies'}",
        ]
        for number, kernel in enumerate(program.kernels):
            arguments = lowered.arguments(number)
            title, *details = families.of(kernel).explain(
                kernel, lowered.layouts[number], lowered.schedules[number], lowered.route.tiled
            )
            lines.append(
                f"  {kernel.name}: {title}; {arguments.moved} bytes moved ({arguments.written} written), "
                f"{arguments.flops} operations, for {arguments.elements} elements"
            )
            lines += [f"    {detail}" for detail in details]
        for computed, decision in program.prologues:
            place = "in its product" if decision.fused else "before its product"
            operations = ", ".join(computed.operations)
            lines.append(f"  activation [{computed.rows}, {computed.length}] by {operations}: {place}: {decision.why}")
        first = len(program.inputs)
        for number, buffer in enumerate(program.temporaries, first):
            makers = [k.name for k in program.kernels if _writes(k, number)]
            readers = [k.name for k in program.kernels if _reads(k, number)]
            shape = ", ".join(map(str, buffer.shape))
            lines.append(
                f"  temporary {buffer.dtype}[{shape}]: written by {', '.join(makers)}, "
                + (f"read by {', '.join(readers)}" if readers else "returned")
            )
        if not count:
            lines.append("  every output is an argument or a view of one: nothing is computed")
        lines.extend(f"  assumes {guard}" for guard in lowered.graph.guards)
        return "\n".join(lines)

    def compile(self, store: Store | None = None) -> Executable:
        """Compile into the store (or find it there). Needs the toolchain, not the device.

        Raises:
            CompileError: the source does not compile, or the toolchain is missing.
            CacheMissError: in strict mode, when it is not in the store.
        """
        return Executable(self._lowered, pipeline.fetch(self._lowered, store or pipeline.default_store()))


class Executable:
    """Compiled kernels, for looking at: ``asm`` and ``report``."""

    def __init__(self, lowered: pipeline.Lowered, kernels: Sequence[BuiltKernel]):
        self._lowered = lowered
        self._kernels = tuple(kernels)

    @functools.cached_property
    def asm(self) -> Mapping[str, str | bytes]:
        """Code over all kernels by kind: ``ptx`` and ``sass`` (str), ``cubin`` (bytes); for the CPU ``asm`` (str) and
        ``so`` (bytes); for AMD ``amdgcn`` (str) and ``hsaco`` (bytes).

        Several kernels' text is joined. Their binaries cannot be: they are no items of the mapping, and asking for one
        raises JitgenError.
        """
        parts: dict[str, list[str | bytes]] = {}
        for number, built in enumerate(self._kernels):
            for name in built.artifact.files:
                kind = name.rpartition(".")[2]
                if kind in ("cubin", "so", "hsaco"):
                    parts.setdefault(kind, []).append(built.artifact.read(name))
                elif kind in ("ptx", "amdgcn", "ttir"):
                    parts.setdefault(kind, []).append(built.artifact.text(name))
            if "kernel.cubin" in built.artifact.files:
                from jitgen.compile import disassemble

                parts.setdefault("sass", []).append(disassemble.sass(built.artifact.read("kernel.cubin")))
            elif self._lowered.route.target.kind == "cpu" and self._lowered.route.compiler == "host":
                from jitgen.compile import host

                parts.setdefault("asm", []).append(host.assembly(self._lowered.render(number)[0]))
        return _Code(parts)

    @functools.cached_property
    def report(self) -> tuple[dict[str, Any], ...]:
        """Per kernel: name, key, origin, toolchain, registers, spill_bytes, shared_bytes, flops, bytes_moved, elements.

        Resources are None where the target has none to report (a CPU, an AMD binary).
        """
        rows = []
        for number, built in enumerate(self._kernels):
            arguments = self._lowered.arguments(number)
            meta = built.artifact.meta
            resources = {name: meta.get(name) for name in ("registers", "spill_bytes", "shared_bytes")}
            if "kernel.cubin" in built.artifact.files and resources["registers"] is None:
                from jitgen.compile import disassemble

                used = disassemble.resource_usage(built.artifact.read("kernel.cubin"), meta["entry"])
                resources |= {name: used[name] for name in ("registers", "spill_bytes")}
            rows.append(
                {
                    "name": meta["entry"],
                    "key": built.key,
                    "origin": built.origin,
                    "target": str(self._lowered.route.target),
                    "toolchain": meta["toolchain"],
                    **resources,
                    "flops": arguments.flops,
                    "bytes_moved": arguments.moved,
                    "elements": arguments.elements,
                }
            )
        return tuple(rows)


def _writes(kernel: Kernel, buffer: int) -> bool:
    return any(o.buffer == buffer and o.kind == "store" for body in kernel.bodies for o in body.operands)


def _reads(kernel: Kernel, buffer: int) -> bool:
    return any(o.buffer == buffer and o.kind != "store" for body in kernel.bodies for o in body.operands)


class _Code(dict[str, str | bytes]):
    """What ``Executable.asm`` is, of the parts that each kernel has of every kind."""

    def __init__(self, parts: Mapping[str, Sequence[str | bytes]]):
        texts = {kind: [part for part in found if isinstance(part, str)] for kind, found in parts.items()}
        super().__init__({kind: "\n".join(found) for kind, found in texts.items() if found})
        self.update({kind: found[0] for kind, found in parts.items() if len(found) == 1})
        self._apart = {kind: len(found) for kind, found in parts.items() if kind not in self}

    def __missing__(self, kind: str) -> str | bytes:
        if kind not in self._apart:
            raise KeyError(kind)
        count = self._apart[kind]
        raise JitgenError(
            f"{count} kernels: their {kind} files cannot be joined; read them from the store by report's keys"
        )
