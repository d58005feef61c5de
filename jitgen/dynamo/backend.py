"""Compiles a whole model into generated kernels: ``torch.compile(model, backend="jitgen")``.

Dynamo hands over graphs of torch calls, before any decomposition: attention is one call there, as a product is, and
jitgen traces these as it traces a decorated function. So nothing of AOTAutograd is used: a program that meets tensors
which require grad computes them as any decorated function does (docs/gradients.md), and what stays with torch is eager
torch. Symbolic sizes reach programs as numbers and shapes; a program has kernels for each bucket of sizes, as a
decorated function has.

Neighbours: ``cut.py`` decides what is a program; ``program.py`` runs one; ``report.py`` tells what became of a model.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from jitgen import console, settings
from jitgen.codegen.python import PythonFunction
from jitgen.deploy import record
from jitgen.dynamo import checkpoint, cut, foreach, launches
from jitgen.dynamo.aliasing import Aliasing, claims, conflict, crossing
from jitgen.dynamo.program import Program, called, program_of, value_of, with_values
from jitgen.dynamo.region import inline, region
from jitgen.dynamo.updates import written
from jitgen.errors import CacheMissError, FallbackWarning, JitgenError, SharedMemoryError
from jitgen.mistakes import SYSTEM_ERRORS
from jitgen.quant import weights

record.listen()

UNCOUNTED = (cut.SIZES, cut.ITEMS, cut.VIEWS)
"""Reasons of nodes that compute no elements."""


@dataclass
class Step:
    """Represents one step of a compiled graph.

    Attributes:
        segment: the run of nodes that it belongs to.
        nodes: those that it runs.
        inputs, outputs: the values that it reads from elsewhere, and of its own those that are read elsewhere.
        program: what runs it; None where torch does.
        checkpointed: of activation checkpointing, the compiled graph that is run and that the backward runs again.
        buffers: which arguments of that graph are buffers of modules.
        conflict: a node that cannot be in a program, and why.
        same: of nodes that torch would call, those whose value is that of another node.
        overwritten_inputs, overwritten_outputs: positions of tensors of a program whose memory later steps write to.
        failures: why calls of the program ran in torch after all.
    """

    segment: cut.Segment
    nodes: Sequence[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    program: Program | None = None
    checkpointed: CompiledGraph | None = None
    buffers: frozenset[int] = frozenset()
    conflict: tuple[fx.Node, str] | None = None
    same: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    overwritten_inputs: tuple[int, ...] = ()
    overwritten_outputs: tuple[int, ...] = ()
    failures: dict[str, int] = field(default_factory=dict)

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        if _clock is not None and self.checkpointed is None:  # its steps are timed
            return self._timed(_clock, values)
        return self.run(values)

    def _timed(self, clock: Clock, values: Sequence[Any]) -> tuple[Any, ...]:
        synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
        synchronize()
        start = time.perf_counter()
        results = self.run(values)
        synchronize()
        taken = time.perf_counter() - start
        if self.program is not None and not self.failures:
            clock.in_kernels += taken
        elif self.segment.reason not in UNCOUNTED:
            clock.in_torch += taken
        return results

    def run(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Runs the step: values of ``inputs`` to those of ``outputs``."""
        if self.checkpointed is not None:
            return (self._run_checkpointed(self.checkpointed, values),)
        if self.program is None or self.failures:
            return self.in_torch(values)
        try:
            if (self.overwritten_inputs or self.overwritten_outputs) and _needs_grad(values):
                return self._kept(self.program, values)
            return self.program(*values)
        except CacheMissError:
            raise
        except JitgenError as error:
            if settings.is_strict():
                raise
            self._note(error)
        return self.in_torch(values)

    @property
    def reason(self) -> str | None:
        """Explains why torch runs the step, or ran it in some call; None if generated kernels do."""
        if self.program is not None:
            return next(iter(self.failures), None)
        return None if self.segment.nodes[0].target is region else self.segment.reason

    def _run_checkpointed(self, graph: CompiledGraph, values: Sequence[Any]) -> Any:
        (node,) = self.segment.nodes
        known = dict(zip(self.inputs, values, strict=True))
        args, kwargs = with_values(node.args, known), with_values(node.kwargs, known)
        return checkpoint.run(graph, checkpoint.policy_of(graph.module), args[1:], kwargs, self.buffers)

    def _kept(self, program: Program, values: Sequence[Any]) -> tuple[Any, ...]:
        """Makes a call whose backward may read any input or result of it, some of which later steps overwrite.

        A backward in eager torch reads what each function saved, which is less; so these are copies here.
        """
        copies = [value.clone() if i in self.overwritten_inputs else value for i, value in enumerate(values)]
        results = program(*copies)
        return tuple(result.clone() if i in self.overwritten_outputs else result for i, result in enumerate(results))

    def in_torch(self, values: Sequence[Any]) -> tuple[Any, ...]:
        known = dict(zip(self.inputs, values, strict=True))
        for node in self.nodes:
            same = self.same.get(node)
            known[node] = called(node, known) if same is None else known[same]
        return tuple(known[node] for node in self.outputs)

    def _note(self, reason: JitgenError) -> None:
        """Notes why this call runs in torch; later ones do as well, unless the reason lies in its arguments alone."""
        if not isinstance(reason, SharedMemoryError):
            self.failures[str(reason)] = self.failures.get(str(reason), 0) + 1
        console.warn(
            f"{len(self.segment.nodes)} nodes of a compiled model run in torch, not in generated kernels: {reason}",
            FallbackWarning,
            stacklevel=3,
        )


def _needs_grad(values: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


class CompiledGraph:
    """Represents one graph of Dynamo's, as it runs.

    Attributes:
        module: the graph.
        steps: in the order in which they run.
    """

    def __init__(self, module: fx.GraphModule, steps: list[Step]):
        self.module = module
        self.steps = steps
        self._run = _runner(module, steps)
        self._read: dict[int, weakref.ref[torch.Tensor]] = {}

    def __call__(self, *leaves: Any) -> Any:
        if not self._read:
            memories = [_memory(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self._read = {id(memory): weakref.ref(memory) for memory in memories}
        return self._run(*leaves)

    def all_steps(self) -> Iterator[Step]:
        """Yields ``steps``, with the steps of a checkpointed graph in place of its call."""
        for step in self.steps:
            yield from [step] if step.checkpointed is None else step.checkpointed.all_steps()

    def reads(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Returns whether one of ``tensors`` was an argument of the first call, as the parameters of its model were."""
        memories = map(_memory, tensors)
        return any(id(memory) in self._read and self._read[id(memory)]() is memory for memory in memories)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the object that is referred to weakly for a tensor. Of a quantised weight it is one that it consists of:
    ``Module.to`` swaps such weights, and torch swaps no tensor that has weak references."""
    memory: torch.Tensor = tensor.tensors[0] if weights.is_quantized(tensor) else tensor
    return memory


@dataclass
class Clock:
    """Counts the time that calls took, in seconds."""

    in_kernels: float = 0.0
    in_torch: float = 0.0


_clock: Clock | None = None


@contextmanager
def timed() -> Iterator[Clock]:
    """Times the calls of compiled graphs within this context, part by part."""
    global _clock
    before, _clock = _clock, Clock()
    try:
        yield _clock
    finally:
        _clock = before


_compiled: weakref.WeakValueDictionary[int, CompiledGraph] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def compiled() -> list[CompiledGraph]:
    """Lists every graph that this process has compiled and Dynamo has not forgotten, in their order."""
    return [graph for _, graph in sorted(_compiled.items())]


def compile_graph(module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> CompiledGraph:
    """Implements the backend, as ``torch.compile`` calls it.

    Raises:
        JitgenError: in strict mode, for a node without kernels.
    """
    try:
        made = _compiled_graph(module)
    except (JitgenError, *SYSTEM_ERRORS):
        raise
    except Exception as error:
        if settings.is_strict():
            raise
        made = _graph_in_torch(module, error)
    _compiled[next(_numbers)] = made
    return made


def _graph_in_torch(module: fx.GraphModule, error: Exception) -> CompiledGraph:
    """Returns ``module`` as one step that torch runs, because jitgen failed to divide it."""
    reason = f"jitgen failed to divide this graph, please report it: {type(error).__name__}: {error}"
    console.warn(f"a graph of a compiled model runs in torch: {reason}", FallbackWarning, stacklevel=2)
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    segment = cut.Segment(nodes, reason)
    steps = [Step(segment, nodes, cut.inputs_of(nodes), cut.outputs_of(nodes))] if nodes else []
    return CompiledGraph(module, steps)


def _compiled_graph(module: fx.GraphModule, stays_with_torch: str | None = None) -> CompiledGraph:
    """Compiles ``module`` in steps; ``stays_with_torch`` is the reason if all of it does."""
    if stays_with_torch is None:
        foreach.divide(module.graph)
        launches.bind(module.graph)
    # Where all of it does, decorated functions are operators, which a policy may choose.
    aliasing = Aliasing(module.graph, inline(module) if stays_with_torch is None else ())
    rejected: dict[fx.Node, str] = dict.fromkeys(module.graph.nodes, stays_with_torch) if stays_with_torch else {}
    steps = list(_steps(module.graph.nodes, rejected, aliasing))
    for step in steps:
        if checkpoint.is_checkpoint(step.segment.nodes[0]):
            inner = checkpoint.graph_of(step.segment.nodes[0])
            reason = stays_with_torch or (checkpoint.POLICY if checkpoint.policy_of(inner) is not None else None)
            step.checkpointed = _compiled_graph(inner, reason)
            step.buffers = checkpoint.buffers_of(step.segment.nodes[0])
    _note_overwritten(steps, aliasing)
    return CompiledGraph(module, steps)


def _steps(nodes: Iterable[fx.Node], rejected: dict[fx.Node, str], aliasing: Aliasing) -> Iterator[Step]:
    """Yields the steps of ``nodes``. A run in which there turn out to be nodes that no kernel can compute is cut at
    these, and no other is made again.

    Args:
        rejected: such nodes, each with the reason; more are added.
    """
    stack = [iter(cut.segments(nodes, rejected, aliasing))]
    while stack:
        segment = next(stack[-1], None)
        if segment is None:
            stack.pop()
            continue
        steps = _steps_of(segment, aliasing)
        refused = {node: reason for step in steps for node, reason in _refused(step).items()}
        if refused:
            rejected.update(refused)
            stack.append(iter(cut.segments(segment.nodes, rejected, aliasing)))
        else:
            yield from steps


def _steps_of(segment: cut.Segment, aliasing: Aliasing) -> list[Step]:
    """Divides ``segment`` into steps: a program, if it computes anything, and the views of its results."""
    if segment.reason is not None:
        return [Step(segment, segment.nodes, cut.inputs_of(segment.nodes), cut.outputs_of(segment.nodes))]
    crossed = crossing(segment.nodes, aliasing)
    steps = []
    if crossed.live:
        inputs = cut.inputs_of(crossed.live)
        facts = claims(inputs, crossed, aliasing)
        program = program_of(inputs, crossed.live, tuple(crossed.outputs), _name(segment), facts)
        steps = [Step(segment, crossed.live, inputs, crossed.outputs, program, conflict=conflict(crossed, aliasing))]
    if crossed.views:
        same = {node: other for node, other in crossed.views.items() if other is not None}
        inputs = cut.inputs_of([node for node in crossed.views if node not in same])
        inputs = [node for node in dict.fromkeys([*inputs, *same.values()]) if node not in crossed.views]
        views = cut.Segment(list(crossed.views), cut.VIEWS, segment.layer)
        steps.append(Step(views, views.nodes, inputs, views.nodes, same=same))
    return steps


def _note_overwritten(steps: Sequence[Step], aliasing: Aliasing) -> None:
    """Notes for each program which of its tensors later steps write to."""
    later: frozenset[int] = frozenset()
    for step in reversed(steps):
        here = aliasing.storages_of_all(
            argument for node in step.nodes if aliasing.updates(node) for argument in written(node)
        )
        if step.program is not None:
            step.overwritten_inputs = tuple(
                index
                for index, node in enumerate(step.inputs)
                if aliasing.storages(node) & later and not aliasing.storages(node) & here
            )
            step.overwritten_outputs = tuple(
                i for i, node in enumerate(step.outputs) if aliasing.storages(node) & later
            )
        later |= here


def _name(segment: cut.Segment) -> str:
    """Returns a name for kernels: the class of the layer."""
    for node in segment.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            if segment.layer and path.replace("[", ".").replace("]", "").endswith(segment.layer.rpartition(".")[2]):
                return str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    return "model"


def _refused(step: Step) -> dict[fx.Node, str]:
    """Returns the nodes of ``step`` that cannot be in its program, each with the reason."""
    if step.program is None:
        return {}
    if step.conflict is not None:
        return dict([step.conflict])
    values = (*step.inputs, *step.nodes)
    refused = step.program.refused(list(map(value_of, values)))
    return {values[number]: reason for number, reason in refused.items()}


def _runner(module: fx.GraphModule, steps: Sequence[Step]) -> Callable[..., Any]:
    """Writes the compiled graph as a function of Dynamo's inputs: straight-line Python, as launchers are."""
    graph = module.graph
    names = {node: f"v{index}" for index, node in enumerate(graph.nodes)}
    placeholders = [names[node] for node in graph.nodes if node.op == "placeholder"]
    namespace: dict[str, Any] = {"module": module}
    last = {value: step for step in steps for value in step.inputs}
    kept = set(graph.output_node().all_input_nodes)
    lines = [f"{names[node]} = module.{node.target}" for node in graph.find_nodes(op="get_attr")]
    for index, step in enumerate(steps):
        namespace[f"step{index}"] = step
        read = ", ".join(names[node] for node in step.inputs)
        written = "".join(f"{names[node]}, " for node in step.outputs)
        call = f"step{index}(({read}{',' if len(step.inputs) == 1 else ''}))"
        lines.append(f"{written}= {call}" if written else call)
        dead = [names[node] for node in step.inputs if last[node] is step and node not in kept]
        if dead:
            lines.append(f"del {', '.join(dead)}")
    output = pytree.tree_map_only(fx.Node, lambda node: _Name(names[node]), graph.output_node().args[0])
    lines.append(f"return {output!r}")
    run: Callable[..., Any] = PythonFunction("run", placeholders, lines).define("backend", namespace)
    return run


class _Name:
    """Represents a variable of the runner's text."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name
