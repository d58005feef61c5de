"""Shows what a call would run without running it: ``Lowered`` and ``Executable``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen import lowering, pipeline
from jitgen.balance import Balance
from jitgen.compilers import routes
from jitgen.errors import JitgenError
from jitgen.families import registry
from jitgen.ir.program import Alias, Kernel
from jitgen.pipeline import BuiltKernel
from jitgen.spec import KernelSource, artifact_key
from jitgen.store import Store
from jitgen.store.default import default_store


@dataclass(frozen=True)
class KernelText:
    """Describes one kernel of a lowered function.

    Attributes:
        name: its name in the function: the function's, and a number or a word where there are several.
        entry: its symbol in the binary, which profilers show. Equal kernels, of other functions too, have the same.
        backend: ``"cpp"``, ``"cuda"``, ``"triton"`` or ``"cutlass"``.
        source: the generated source.
        template: the template it came from, such as ``"elementwise/elementwise.cu.j2"``.
        key: the artifact key under the toolchain of this machine; None where it has no such toolchain.
    """

    name: str
    entry: str
    backend: str
    source: str
    template: str
    key: str | None


class Lowered:
    """Describes a function lowered for one signature and target; made by ``JitFunction.lower``, which needs no device.

    Attributes:
        kernels: the kernels a call launches, in order; of a call that computes gradients, those of its forward.
        source: all their sources.
        backward: the same of its backward, for gradients that lie in memory as the results do; None where the call
            computes no gradients.
    """

    def __init__(self, lowered: lowering.Lowered, backward: lowering.Lowered | None = None):
        self._lowered = lowered
        self.backward = None if backward is None else Lowered(backward)

    @property
    def lowered(self) -> lowering.Lowered:
        """Returns what the passes made of the function."""
        return self._lowered

    @functools.cached_property
    def kernels(self) -> tuple[KernelText, ...]:
        route = self._lowered.route
        tools = routes.toolchain(route.backend, route.compiler)
        texts = []
        for kernel, source in zip(self._lowered.program.kernels, self._sources, strict=True):
            key = artifact_key(routes.prepare(source), tools) if tools else None
            texts.append(KernelText(kernel.name, source.name, route.backend, source.text, source.template, key))
        return tuple(texts)

    @functools.cached_property
    def _sources(self) -> tuple[KernelSource, ...]:
        """Returns the source of each kernel; equal kernels are rendered once."""
        made = {first: self._lowered.render(first)[0] for first in set(self._lowered.firsts)}
        return tuple(made[first] for first in self._lowered.firsts)

    @property
    def source(self) -> str:
        return "\n".join(kernel.source for kernel in self.kernels)

    @property
    def key(self) -> str:
        """Returns the request key."""
        return self._lowered.key

    @property
    def target(self) -> str:
        return str(self._lowered.route.target)

    @property
    def balance(self) -> Balance:
        """Compares what a call's kernels move and compute with the least that the function needs."""
        return self._lowered.balance

    def explain(self) -> str:
        """Explains in words how many kernels there are and why, what each reads and writes, and what the specialisation
        assumes."""
        from jitgen.ir.assumptions import assumptions

        lowered = self._lowered
        program = lowered.program
        count, temporaries = len(program.kernels), len(program.temporaries)
        lines = [
            f"{program.name}: {lowered}",
            f"{count} kernel{'s' * (count != 1)}, {temporaries} temporar{'y' if temporaries == 1 else 'ies'}",
        ]
        if lowered.partitioned.preferred:
            lines.append(f"  by {lowered.route.backend}: {lowered.partitioned.preferred}")
        for number, kernel in enumerate(program.kernels):
            work = lowered.work(number)
            title, *details = lowered.explain(number)
            lines.append(
                f"  {kernel.name} ({self._sources[number].name}): {title}; "
                f"{work.moved} bytes moved ({work.written} written), {work.flops} operations, "
                f"for {work.elements} elements"
            )
            lines += [f"    {detail}" for detail in (*kernel.described_stages, *details)]
        lines += [f"  rewritten: {name}" for name in program.rewrites]
        for family, question, _ in program.decisions:
            decision = registry.decision(family, question.at(lowered.environment), lowered.route.device)
            lines.append(f"  {question}: {question.placement(decision.fused)}: {decision.why}")
        first, returned = len(program.inputs), {o.input for o in program.outputs if isinstance(o, Alias)}
        for number, buffer in enumerate(program.temporaries, first):
            makers = [k.name for k in program.kernels if _writes(k, number)]
            readers = [k.name for k in program.kernels if _reads(k, number)]
            shape = ", ".join(map(str, buffer.shape))
            lines.append(
                f"  temporary {buffer.dtype}[{shape}]: written by {', '.join(makers)}, "
                + (f"read by {', '.join(readers)}" if readers else "returned" if number in returned else "read by none")
            )
        if not count:
            lines.append("  every output is an argument or a view of one: nothing is computed")
        lines.extend(f"  assumes {fact}" for fact in assumptions(lowered.graph.guards))
        lines.append(f"balance: {self.balance}")
        return "\n".join(lines)

    def compile(self, store: Store | None = None) -> Executable:
        """Compiles the kernels into the store, or finds them there. This needs the toolchain, not the device.

        Raises:
            CompileError: the source does not compile, or the toolchain is missing.
            CacheMissError: in strict mode, when it is not in the store.
        """
        return Executable(self._lowered, pipeline.fetch(self._lowered, store or default_store()))


class Executable:
    """Holds compiled kernels: their code (``asm``) and resources (``report``)."""

    def __init__(self, lowered: lowering.Lowered, kernels: Sequence[BuiltKernel]):
        self._lowered = lowered
        self._kernels = tuple(kernels)

    @functools.cached_property
    def asm(self) -> Mapping[str, str | bytes]:
        """Returns the code of all kernels by kind: ``ptx`` and ``sass`` (str), ``cubin`` (bytes); for the CPU ``asm``
        (str) and ``so`` (bytes); for AMD ``amdgcn`` (str) and ``hsaco`` (bytes).

        The text of several kernels is joined. Their binaries cannot be: the mapping does not have them, and reading one
        raises JitgenError.
        """
        code: dict[str, list[str | bytes]] = {}
        for number, built in enumerate(self._kernels):
            for name in built.artifact.files:
                kind = name.rpartition(".")[2]
                if kind in ("cubin", "so", "hsaco"):
                    code.setdefault(kind, []).append(built.artifact.read(name))
                elif kind in ("ptx", "amdgcn", "ttir"):
                    code.setdefault(kind, []).append(built.artifact.text(name))
            if "kernel.cubin" in built.artifact.files:
                from jitgen.compilers import disassemble

                code.setdefault("sass", []).append(disassemble.sass(built.artifact.read("kernel.cubin")))
            elif self._lowered.route.target.kind == "cpu" and self._lowered.route.compiler == "host":
                from jitgen.compilers import host

                code.setdefault("asm", []).append(host.assembly(self._lowered.render(number)[0]))
        return _Code(code)

    @functools.cached_property
    def report(self) -> tuple[dict[str, Any], ...]:
        """Returns, for each kernel: name, key, origin, toolchain, registers, spill_bytes, shared_bytes, flops,
        bytes_moved, elements.

        Bytes of shared memory are of a block, its static and dynamic memory together. Resources are None where the
        target has none to report (a CPU, an AMD binary). Of a source with several entries, entry and resources are
        those of the one that this call launches.
        """
        rows = []
        for number, built in enumerate(self._kernels):
            work = self._lowered.work(number)
            meta, entry, dynamic = built.artifact.meta, built.artifact.meta["entry"], 0
            if self._lowered.route.device.dialect == "cuda":
                launch = self._lowered.launch(number)
                entry, dynamic = entry + launch.entry, launch.shared_bytes
            of_entry = meta.get("entries", {}).get(entry, meta)
            resources = {name: of_entry.get(name) for name in ("registers", "spill_bytes", "shared_bytes")}
            if resources["shared_bytes"] is not None:
                resources["shared_bytes"] += dynamic
            if "kernel.cubin" in built.artifact.files and resources["registers"] is None:
                from jitgen.compilers import disassemble

                used = disassemble.resource_usage(built.artifact.read("kernel.cubin"), entry)
                resources |= {name: used[name] for name in ("registers", "spill_bytes")}
            rows.append(
                {
                    "name": built.name,
                    "entry": entry,
                    "key": built.key,
                    "origin": built.origin,
                    "target": str(self._lowered.route.target),
                    "toolchain": meta["toolchain"],
                    **resources,
                    "flops": work.flops,
                    "bytes_moved": work.moved,
                    "elements": work.elements,
                }
            )
        return tuple(rows)


def _writes(kernel: Kernel, buffer: int) -> bool:
    return any(o.buffer == buffer and o.kind == "store" for body in kernel.bodies for o in body.operands)


def _reads(kernel: Kernel, buffer: int) -> bool:
    return any(o.buffer == buffer and o.kind != "store" for body in kernel.bodies for o in body.operands)


class _Code(dict[str, str | bytes]):
    """Maps kinds of code to code, as ``Executable.asm`` returns it."""

    def __init__(self, code: Mapping[str, Sequence[str | bytes]]):
        """Joins ``code``, which holds that of every kernel by kind."""
        texts = {kind: [text for text in codes if isinstance(text, str)] for kind, codes in code.items()}
        super().__init__({kind: "\n".join(codes) for kind, codes in texts.items() if codes})
        self.update({kind: codes[0] for kind, codes in code.items() if len(codes) == 1})
        self._not_joined = {kind: len(codes) for kind, codes in code.items() if kind not in self}

    def __missing__(self, kind: str) -> str | bytes:
        if kind not in self._not_joined:
            raise KeyError(kind)
        count = self._not_joined[kind]
        raise JitgenError(
            f"{count} kernels: their {kind} files cannot be joined; read them from the store by report's keys"
        )
