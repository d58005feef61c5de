"""Reports which nodes of a compiled model run in generated kernels, and why the others do not (``jitgen.report``).

Neighbours: ``backend.py`` has the compiled graphs.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jitgen.balance import Balance
from jitgen.call.specialization import Specialization
from jitgen.dynamo import backend
from jitgen.dynamo.flops import flops
from jitgen.models.compile import UnitForward, forwards, graph_of
from jitgen.pipeline import BuiltKernel


@dataclass(frozen=True)
class NodeReport:
    """Describes one node of a compiled graph.

    Attributes:
        function: what it calls, such as ``"linear"``.
        layer: the numbered layer of the model that it belongs to, or "".
        reason: why torch runs it; None where a generated kernel does.
        flops: floating-point operations, at the sizes for which the graph was compiled.
    """

    function: str
    layer: str
    reason: str | None
    flops: int


@dataclass(frozen=True)
class KernelReport:
    """Describes one kernel that calls of a compiled model have launched.

    Attributes:
        name: its name in the program; that of a backward's kernel has ``_backward`` in it.
        entry: its symbol in the binary, which profilers show; equal kernels have the same.
        program: the program that launches it, named after the class of a layer.
        layers: the numbered layers of the model that are this program; empty for what belongs to none.
        target: what it was compiled for.
        key: the artifact key, by which the store has it.
        source: its generated source.
    """

    built: BuiltKernel = field(repr=False)
    program: str
    layers: tuple[str, ...]
    target: str

    @property
    def name(self) -> str:
        return self.built.name

    @property
    def entry(self) -> str:
        return self.built.entry

    @property
    def key(self) -> str:
        return self.built.key

    @property
    def source(self) -> str:
        return self.built.source


@dataclass(frozen=True)
class ProgramReport:
    """Describes what a call of one program amounts to.

    Attributes:
        program: named after the class of a layer; that of a backward ends in ``_backward``.
        layers: the numbered layers of the model that are this program; empty for what belongs to none.
        balance: of one call, at the sizes of one that was made; programs of several sizes are listed for each.
    """

    program: str
    layers: tuple[str, ...]
    balance: Balance

    def __str__(self) -> str:
        times = f", {len(self.layers)} layers" if len(self.layers) > 1 else ""
        return f"{self.program}{times}: {self.balance}"


@dataclass(frozen=True)
class UnitReport:
    """Describes one module of a model that ``jitgen.compile`` has compiled, which is traced as a whole.

    Attributes:
        path: of the module in its model.
        module: its class.
        reason: why its last call ran in torch; None where generated kernels ran it.
        divided: whether its own modules are units, since it cannot be one; ``reason`` says why.
    """

    path: str
    module: str
    reason: str | None
    divided: bool


@dataclass(frozen=True)
class Report:
    """Reports what became of a model; ``str`` of it is a summary.

    Attributes:
        graphs: how many graphs Dynamo made of it.
        nodes: of all of them, those of checkpointed regions among them; arithmetic of sizes and the views that torch
            makes of results are not.
        kernels: that its calls and their backwards have launched so far, each once, by the order of the programs.
        programs: what a call of each program amounts to, beside the least that it needs.
        explanations: of these kernels, in words: how many each program has and why, what each reads and writes.
        units: the modules of a model that ``jitgen.compile`` has compiled.
        cuda_graph: what became of its calls that were to be captured; None if none were.
        seconds_in_kernels, seconds_in_torch: of the calls that ``report`` was asked to time; None without any.
    """

    graphs: int
    nodes: tuple[NodeReport, ...]
    seconds_in_kernels: float | None = None
    seconds_in_torch: float | None = None
    kernels: tuple[KernelReport, ...] = ()
    explanations: tuple[str, ...] = ()
    programs: tuple[ProgramReport, ...] = ()
    units: tuple[UnitReport, ...] = ()
    cuda_graph: str | None = None

    @property
    def balance(self) -> Balance:
        """Sums the balance of all programs, each as often as the model has layers of it."""
        return sum((program.balance * max(len(program.layers), 1) for program in self.programs), Balance())

    @property
    def share_of_nodes(self) -> float:
        """Returns the share of nodes in generated kernels, from 0 to 1."""
        return _share(sum(node.reason is None for node in self.nodes), len(self.nodes))

    @property
    def share_of_flops(self) -> float:
        """Returns the share of floating-point operations in generated kernels, from 0 to 1: of those of products,
        attention and convolutions, as torch's FlopCounterMode counts them. Pointwise ones that stay with torch, such as
        complex ones, are in ``share_of_nodes`` alone."""
        return _share(
            sum(node.flops for node in self.nodes if node.reason is None), sum(node.flops for node in self.nodes)
        )

    @property
    def share_of_time(self) -> float | None:
        """Returns the share of the time of calls in generated kernels, their launches among it; None if none was
        timed."""
        if self.seconds_in_kernels is None or self.seconds_in_torch is None:
            return None
        return _share(self.seconds_in_kernels, self.seconds_in_kernels + self.seconds_in_torch)

    def __str__(self) -> str:
        if not self.graphs and not self.units:
            return "no graph of it was compiled with backend='jitgen' and is still known to Dynamo"
        lines = []
        if self.units:
            called = [unit for unit in self.units if not unit.divided]
            inside = sum(unit.reason is None for unit in called)
            lines.append(f"{len(called)} modules are compiled as a whole: {inside} in generated kernels")
        if self.cuda_graph is not None:
            lines.append(self.cuda_graph)
        if self.graphs:
            inside, share = sum(node.reason is None for node in self.nodes), _percent(self.share_of_nodes)
            lines += [
                f"{self.graphs} graphs, {len(self.nodes)} nodes: {inside} in generated kernels ({share})",
                "floating-point operations of products, attention and convolutions in generated kernels: "
                f"{_percent(self.share_of_flops)}",
            ]
        if self.share_of_time is not None:
            lines.append(f"time in generated kernels: {self.share_of_time:.1%}")
        lines += [f"balance of {program}" for program in self.programs]
        if len(self.programs) > 1 or any(len(program.layers) > 1 for program in self.programs):
            lines.append(f"balance of all: {self.balance}")
        reasons = Counter((node.function, node.reason) for node in self.nodes if node.reason is not None)
        lines += [f"in torch: {count} x {name}: {reason}" for (name, reason), count in reasons.most_common()]
        for divided, what in ((True, "divided"), (False, "in torch")):
            modules = Counter(
                (unit.module, unit.reason) for unit in self.units if unit.reason and unit.divided is divided
            )
            lines += [f"{what}: {count} x {name}: {reason}" for (name, reason), count in modules.most_common()]
        return "\n".join(lines)


def _share(share: float, whole: float) -> float:
    return share / whole if whole else 1.0


def _percent(share: float) -> str:
    """Returns a share in percent, rounded down: what stays with torch is never hidden."""
    return f"{math.floor(share * 1000) / 10:.1f}%"


def report(subject: Any = None, *args: Any, **kwargs: Any) -> Report:
    """Reports what became of ``subject``, which was compiled with ``jitgen.compile`` or ``torch.compile(...,
    backend="jitgen")``, and called.

    Args:
        subject: the model, compiled or not, a compiled function, or None for all that this process has compiled.
        args, kwargs: of a call of ``subject`` that is made, and timed; ``subject`` is the compiled one then.

    Raises:
        TypeError: ``subject`` is neither a module nor a function.
    """
    if subject is not None and not callable(subject):
        raise TypeError(f"report takes a model or a compiled function, not {type(subject).__name__}")
    seconds: tuple[float | None, float | None] = None, None
    if args or kwargs:
        with backend.timed() as clock:
            subject(*args, **kwargs)
        seconds = clock.in_kernels, clock.in_torch
    graphs = [graph for graph in backend.compiled() if subject is None or _belongs(graph, subject)]
    nodes = [
        NodeReport(
            str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)),
            step.segment.layer,
            step.reason,
            flops(node),
        )
        for graph in graphs
        for step in graph.all_steps()
        if step.reason not in backend.UNCOUNTED
        for node in step.segment.nodes
    ]
    compiled_units = forwards(subject) if subject is None or isinstance(subject, torch.nn.Module) else []
    programs = [*_programs(graphs), *_programs_of_units(compiled_units)]
    kernels = [
        KernelReport(kernel, specialization.name, layers, str(specialization.route.target))
        for specialization, layers in programs
        for kernel in specialization.kernels
    ]
    explanations = [lowered.explain() for specialization, _ in programs for lowered in specialization.lowered]
    balances = [
        ProgramReport(specialization.name, layers, lowered.balance)
        for specialization, layers in programs
        for lowered in specialization.lowered
    ]
    units = [UnitReport(unit.path, unit.name, unit.reason, unit.divided) for unit in compiled_units]
    return Report(
        len(graphs),
        tuple(nodes),
        *seconds,
        kernels=tuple(kernels),
        explanations=tuple(explanations),
        programs=tuple(balances),
        units=tuple(units),
        cuda_graph=_captured(subject),
    )


def _captured(subject: Any) -> str | None:
    graphs = graph_of(subject) if isinstance(subject, torch.nn.Module) else None
    if graphs is None:
        return None
    last = f"; the last call was none: {graphs.reason}" if graphs.reason else ""
    return f"{graphs.captured} forms of calls are CUDA graphs{last}"


def _programs_of_units(units: Sequence[UnitForward]) -> Iterator[tuple[Specialization, tuple[str, ...]]]:
    """Yields what calls of units have resolved, each once, with the units that it is for."""
    paths: dict[Any, list[str]] = {}
    for unit in units:
        for function in unit.functions:
            paths.setdefault(function, []).append(unit.path)
    for function, names in paths.items():
        for specialization in function.all_specializations:
            yield specialization, tuple(names)


def _programs(graphs: Sequence[backend.CompiledGraph]) -> Iterator[tuple[Specialization, tuple[str, ...]]]:
    """Yields what calls of ``graphs`` and their backwards have resolved, each once, with the layers that it is for."""
    layers: dict[Any, list[str]] = {}
    for graph in graphs:
        for step in graph.all_steps():
            if step.program is not None:
                layers.setdefault(step.program.function, []).append(step.segment.layer)
    for function, names in layers.items():
        for specialization in function.specializations:
            yield specialization, tuple(dict.fromkeys(filter(None, names)))


def _belongs(graph: backend.CompiledGraph, subject: Any) -> bool:
    """Returns whether ``graph`` was made of ``subject``."""
    if isinstance(subject, torch.nn.Module):
        tensors = [*subject.parameters(), *subject.buffers()]
        return graph.reads(tensors) if tensors else _is_traced_from(graph, type(subject).forward)
    function = inspect.unwrap(getattr(subject, "_torchdynamo_orig_callable", subject))
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return _belongs(graph, owner)
    return _is_traced_from(graph, function)


def _is_traced_from(graph: backend.CompiledGraph, function: Any) -> bool:
    code: Any = getattr(function, "__code__", None)
    return code is not None and any(
        f'File "{code.co_filename}"' in trace and f"in {code.co_name}" in trace for trace in _traces(graph)
    )


def _traces(graph: backend.CompiledGraph) -> Sequence[str]:
    return [node.stack_trace or "" for node in graph.module.graph.nodes]
