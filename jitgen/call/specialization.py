"""Defines ``Specialization``: one trace of a function, and the launchers bound from it.

A ``Specialization`` is for the dtypes, ranks, sizes of 1, devices and static values of a call, and for the facts its
trace relied on; every call with these shares it, whatever its sizes. Binding it to concrete sizes and strides makes a
launcher (``runtime/launcher.py``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from jitgen import inspect, pipeline, settings
from jitgen.call import integers
from jitgen.call.integers import launch_of, with_launch
from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.draws import offsets_drawn
from jitgen.ir.graph import Guard, described_inputs
from jitgen.ir.program import Kernel
from jitgen.ir.symbols import Expr
from jitgen.ir.views import Memory, Strided
from jitgen.kernel.launch import OVERLAPS
from jitgen.lowering import Lowered, Partitioned, Route
from jitgen.pipeline import BuiltKernel
from jitgen.runtime import loaded, overlap
from jitgen.runtime.launcher import Allocation, LaunchSpec, Step, View, make_launcher
from jitgen.spec import DTYPES
from jitgen.store import Store
from jitgen.trace.traced import Output, Sizes, Traced


@dataclass(eq=False, repr=False)
class Specialization:
    """Holds one trace, and the kernels and launchers made from it: see the module.

    Attributes:
        name: the function's.
        traced: the trace.
        route: backend, compiler and target of its kernels.
        partitions: how its graph was partitioned into kernels, once for each range of sizes that needs other kernels.
    """

    name: str
    traced: Traced
    route: Route
    partitions: list[Partitioned] = field(default_factory=list)
    _built: dict[str, tuple[BuiltKernel, ...]] = field(default_factory=dict, repr=False)
    _lowered: dict[str, Lowered] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        static = ", ".join(f"{name}={value}" for name, value in self.static_sizes.items())
        kernels = ", ".join(kernel.name for kernel in self.kernels)
        return f"Specialization({self.name}{self.signature}, static={{{static}}}, kernels=({kernels}))"

    @property
    def kernels(self) -> tuple[BuiltKernel, ...]:
        """Returns the compiled kernels that calls have launched so far, each once, in the order they were first needed.

        More than one call needs where sizes, strides or alignment asked for several variants.
        """
        return tuple({(kernel.name, kernel.key): kernel for built in self._built.values() for kernel in built}.values())

    @property
    def lowered(self) -> tuple[inspect.Lowered, ...]:
        """Returns what its calls have launched so far, to be read: ``source`` and ``explain()``, once for each
        variant."""
        return tuple(map(inspect.Lowered, self._lowered.values()))

    @property
    def signature(self) -> str:
        """Returns the inputs as text, with symbolic sizes by name: ``(bfloat16[s0_0, 4096], ...)``."""
        return f"({', '.join(described_inputs(self.traced.graph, self.static_sizes))})"

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Returns the conditions of the trace, and then those of its partitions."""
        partitioned = (guard for partition in self.partitions for guard in partition.guards)
        return tuple(dict.fromkeys([*self.traced.graph.guards, *partitioned]))

    @functools.cached_property
    def static_numbers(self) -> frozenset[int]:
        """Returns the indices of the numeric arguments whose value the trace depends on."""
        names = {name for guard in self.traced.graph.guards for name in symbols.symbols_of(guard.expr)}
        return frozenset(int(name[1:]) for name in names if name.startswith("a"))

    @property
    def static_sizes(self) -> dict[str, Any]:
        """Returns the symbols that the trace fixed to a number, with that number."""
        fixed: dict[str, Any] = {}
        for guard in self.traced.graph.guards:
            expr, value = guard.expr, guard.value
            if expr.op == "eq" and value is True and isinstance(expr.args[0], Expr) and type(expr.args[1]) is int:
                expr, value = expr.args
            if expr.op == "symbol" and expr.kind != "bool":
                fixed[expr.args[0]] = value
        return fixed

    def fits(self, environment: Mapping[str, Any]) -> bool:
        """Returns whether the sizes and numbers of a call meet every guard of the trace."""
        return all(guard.holds(dict(environment)) for guard in self.traced.graph.guards)

    def lower(self, environment: Mapping[str, Any], memory: Sequence[Memory], out: Sequence[Memory | None]) -> Lowered:
        """Lowers a call to its kernels: see ``pipeline.lower``."""
        lowered = pipeline.lower(self.traced.graph, environment, memory, self.route, out, self.partitions)
        integers.check(lowered.program.kernels, environment)
        if lowered.partitioned not in self.partitions:
            self.partitions.append(lowered.partitioned)
        return lowered

    def built(
        self, lowered: Lowered, store: Store, remedy: Callable[[], str | None] | None = None
    ) -> tuple[BuiltKernel, ...]:
        """Returns the compiled kernels that a call of ``lowered`` launches; none if it has nothing to compute.

        Args:
            remedy: see ``pipeline.fetch``.
        """
        if lowered.is_empty:
            return ()
        kernels = self._built.get(lowered.key)
        if kernels is None:
            kernels = self._built[lowered.key] = pipeline.fetch(lowered, store, remedy)
            self._lowered[lowered.key] = lowered
        return kernels

    # ------------------------------------------------------------------------------------------------ launching

    def bind(
        self,
        lowered: Lowered,
        kernels: Sequence[BuiltKernel],
        environment: Mapping[str, Any],
        device: torch.device,
        numbers: int,
        caller_outputs: frozenset[int],
    ) -> Any:
        """Binds the launcher of a call with this layout; ``runtime/launcher.py`` says what it takes.

        Args:
            numbers: how many numeric arguments the call has.
            caller_outputs: the results whose memory the caller owns.
        """
        program = lowered.program
        first_result = len(program.inputs) + len(program.temporaries)
        updated = {position: index for index, position in program.mutated}
        allocations = [
            Allocation(memory.view.sizes, memory.view.strides, DTYPES[buffer.dtype])
            for buffer, memory in zip(program.buffers, lowered.memories, strict=True)
        ]
        rebuild, computed = self._rebuild()
        inputs_used = self.traced.graph.inputs_used
        spec = LaunchSpec(
            name=self.name,
            device=device,
            inputs=len(program.inputs),
            numbers=numbers,
            temporaries=tuple(allocations[len(program.inputs) : first_result]),
            results=tuple(updated.get(i, a) for i, a in enumerate(allocations[first_result:])),
            steps=tuple(self._steps(lowered, kernels, environment, device)),
            returns=tuple(self._returns(lowered)),
            rebuild=None if rebuild is _nothing else rebuild,
            values=tuple(_text(expr, environment) for expr in computed),
            drawn=offsets_drawn(scalar for kernel in program.kernels for scalar, _ in kernel.scalars),
            caller_outputs=caller_outputs,
            extents=tuple(
                overlap.extent(a.sizes, a.strides, a.dtype.itemsize) if index in inputs_used else 0
                for index, a in enumerate(allocations[: len(program.inputs)])
            ),
            lines=tuple((index, node.location) for index, node in self.traced.graph.mutated),
        )
        return make_launcher(spec)

    def _returns(self, lowered: Lowered) -> Iterator[int | View]:
        """Yields each output of a call: the number of its buffer, or what view of an input it is."""
        program = lowered.program
        arguments = len(program.inputs) - len(self.traced.captured)
        for index, (output, strided) in enumerate(zip(program.outputs, lowered.laid_out.aliases, strict=True)):
            if isinstance(output, int):
                yield len(program.inputs) + len(program.temporaries) + output
                continue
            untracked = self._untracked.get(index)
            if untracked == "view" and output.input - arguments not in self.traced.under_no_grad:
                untracked = None  # gradients are disabled at the call, or it requires none
            if not output.movements:
                yield View(output.input, None, untracked=untracked)
            else:
                assert strided is not None
                yield View(output.input, strided.sizes, strided.strides, strided.offset, untracked)

    @property
    def returns_one_tensor(self) -> bool:
        """Returns whether the function returns the graph's only result as it is."""
        return self._rebuild()[0] is None

    def returned(self, tensors: Sequence[torch.Tensor], environment: Mapping[str, Any]) -> Any:
        """Rebuilds what the function returns from ``tensors``, the graph's results."""
        rebuild, computed = self._rebuild()
        if "detached" in self._untracked.values():
            untracked = self._untracked.get
            tensors = [t.detach() if untracked(index) == "detached" else t for index, t in enumerate(tensors)]
        if rebuild is None:
            return tensors[0]
        return rebuild(tensors, *(symbols.evaluate(expr, environment) for expr in computed))

    @functools.cached_property
    def _untracked(self) -> dict[int, str]:
        """Explains why autograd does not know of some of the graph's results that no mark explains."""
        kept = self.traced.changes.kept if self.traced.changes is not None else ()
        return {
            output.index: output.untracked
            for output in (*self.traced.leaves, *kept)
            if output.index is not None and output.untracked
        }

    def _rebuild(self) -> tuple[Any, tuple[Expr, ...]]:
        """Returns how the output tensors become the function's return value, and the values that a call computes for
        that."""
        leaves, tree, changes = self.traced.leaves, self.traced.tree, self.traced.changes
        if changes is not None:
            pass  # to be made when the results are there
        elif tree == _LEAF and leaves[0].index is not None:
            return None, ()
        elif tree == _LEAF and leaves[0].value is None:
            return _nothing, ()
        elif tree == _tuple_of(len(leaves)) and all(leaf.index is not None for leaf in leaves):
            return tuple, ()
        kept: tuple[Output, ...] = changes.kept if changes is not None else ()
        others = [leaf.value for leaf in (*leaves, *kept) if leaf.index is None]
        flattened = [size for value in others for size in (value if isinstance(value, Sizes) else [value])]
        expressions = tuple(value for value in flattened if isinstance(value, Expr))

        def rebuild(tensors: list[torch.Tensor], *values: Any) -> Any:
            computed = iter(values)

            def known(value: Any) -> Any:
                if isinstance(value, Sizes):
                    return torch.Size(map(known, value))
                return next(computed) if isinstance(value, Expr) else value

            def values_of(outputs: Sequence[Output]) -> list[Any]:
                return [
                    tensors[output.index] if output.index is not None else known(output.value) for output in outputs
                ]

            flat = values_of(leaves)
            if changes is not None:
                changes.make(values_of(kept))
            return pytree.tree_unflatten(flat, tree)

        return rebuild, expressions

    def _steps(
        self, lowered: Lowered, kernels: Sequence[BuiltKernel], environment: Mapping[str, Any], device: torch.device
    ) -> Any:
        for number, built in enumerate(kernels):
            if not lowered.work(number).elements:
                continue
            scalars = tuple(_text(expr, environment) for expr, _ in built.kernel.scalars)
            formats = "".join(_FORMATS[dtype] for _, dtype in built.kernel.scalars)
            ranges = tuple(
                (_text(value, environment), own)
                for value, own in integers.ranges_of(built.kernel)
                if any(map(symbols.is_known_at_the_call, symbols.symbols_of(value)))
            )
            if lowered.route.compiler == "load_inline":
                yield replace(self._operator_step(lowered, number, built, scalars), ranges=ranges)
                continue
            make = {"cpu": self._cpu_step, "cuda": self._cuda_step, "interpreter": self._interpreter_step}
            kind = lowered.route.target.kind
            if kind not in make:
                raise UnsupportedError(f"kernels for {lowered.route.target} can be compiled here but not run")
            step = make[kind](lowered, number, built, scalars, formats, device)
            yield replace(step, guarded=guarded(built.kernel), ranges=ranges)

    def _cpu_step(
        self, lowered: Lowered, number: int, built: BuiltKernel, scalars: Any, formats: str, device: Any
    ) -> Step:
        from jitgen.runtime import cpu

        arguments, work, entry = lowered.arguments(number), lowered.work(number), built.artifact.meta["entry"]
        function = loaded.once((built.key, None, "", 0), lambda: cpu.load_packed(built.artifact.content, entry))
        streaming = int(work.moved > cpu.last_level_cache())
        tail = cpu.packer("q" * len(arguments.integers) + "i")(*arguments.integers, streaming)
        pack = cpu.packer("P" * len(arguments.pointers) + formats + "i")
        threaded = cpu.worth_threads(work.moved, work.flops)
        return Step("cpu", function, arguments.pointers, scalars, pack, tail, threaded, checked=built.kernel.checked)

    def _cuda_step(
        self, lowered: Lowered, number: int, built: BuiltKernel, scalars: Any, formats: str, device: Any
    ) -> Step:
        from jitgen.runtime import cuda, residency
        from jitgen.runtime.tensor_map import TensorMap

        meta, index = built.artifact.meta, device.index
        shape, arguments, triton = lowered.launch(number), lowered.arguments(number), lowered.route.backend == "triton"
        if triton and (meta.get("global_scratch") or [0])[0]:
            raise UnsupportedError(
                f"{self.name}: {built.name} makes descriptors of tensors on the GPU (tl.make_tensor_descriptor), which "
                "need memory that jitgen's launcher does not give them; use pointers, or launch the kernel outside of "
                "the decorated function"
            )
        # Triton decides how much shared memory a kernel that it compiled takes.
        shared = meta.get("shared_bytes", 0) if triton else shape.shared_bytes
        entry = meta["entry"] + shape.entry
        packing = arguments.packing(formats, in_struct=not triton)
        struct_bytes = packing.layout[1] if packing.layout else 0
        function = replace(
            loaded.once(
                (built.key, index, shape.entry, shared),
                lambda: cuda.load(built.artifact.content, entry, index, shared, struct_bytes),
            ),
            kernel=built.name,
        )
        cooperative = bool(meta.get("cooperative"))
        pool = meta.get("entries", {}).get(entry, meta).get("register_pool", ())
        residency.check(function, shape, pool, cooperative)
        parameters, values = packing.codes, packing.values
        if triton:
            parameters, values = parameters + "PP", (*values, 0, 0)
        launch = cuda.Launch(
            function,
            parameters,
            values,
            residency.resident_grid(function, shape),
            shape.block,
            shared,
            cluster=(shape.cluster, 1, 1) if shape.any_cluster and shape.cluster > 1 else None,
            pdl=OVERLAPS in shape.attributes,
            cooperative=cooperative,
            struct_layout=packing.layout,
        )
        maps = tuple(TensorMap(**vars(described)) for described in arguments.maps)
        return Step("cuda", launch, arguments.pointers, scalars, maps=maps)

    def _operator_step(self, lowered: Lowered, number: int, built: BuiltKernel, scalars: Any) -> Step:
        from jitgen.runtime import cpu, torch_operator

        arguments, work = lowered.arguments(number), lowered.work(number)
        if arguments.maps:
            raise UnsupportedError(
                f"{self.name}: this product copies by tensor maps, which a torch operator does not get; "
                "use the backend's own compiler, without compiler='load_inline'"
            )
        meta = built.artifact.meta
        operator = loaded.once(
            (built.key, None, "", 0), lambda: torch_operator.load(built.artifact.content, meta["operator"])
        )
        written = tuple(
            o.kind == "store" for body in built.kernel.bodies for o in body.operands if o.buffer is not None
        )
        kinds = [dtype for _, dtype in built.kernel.scalars]
        integers = tuple(text for text, dtype in zip(scalars, kinds, strict=True) if dtype == "int64")
        floats = tuple(text for text, dtype in zip(scalars, kinds, strict=True) if dtype != "int64")
        if lowered.route.target.kind == "cpu":
            constants = (*arguments.integers, int(work.moved > cpu.last_level_cache()))
            threaded = cpu.worth_threads(work.moved, work.flops)
            return Step(
                "operator",
                operator,
                arguments.pointers,
                floats,
                threaded=threaded,
                constants=constants,
                written=written,
                leading=integers,
            )
        shape = lowered.launch(number)
        return Step(
            "operator",
            operator,
            arguments.pointers,
            floats,
            constants=tuple(value for value in arguments.packing("").values if value is not None),
            written=written,
            trailing=integers,
            grid=(*shape.grid, *shape.block, shape.shared_bytes),
        )

    def _interpreter_step(
        self, lowered: Lowered, number: int, built: BuiltKernel, scalars: Any, formats: str, device: Any
    ) -> Step:
        from jitgen.runtime import interpreter

        meta, arguments = built.artifact.meta, lowered.arguments(number)
        kernel = loaded.once(
            (built.key, None, "", 0),
            lambda: interpreter.load(built.artifact.text("kernel.py"), meta["entry"], meta["signature"]),
        )
        grid, name = lowered.launch(number).grid, with_launch(lowered.program.kernels[number])
        return Step(
            "interpreter",
            lambda *values: kernel(name, grid, *values),
            arguments.pointers,
            scalars,
            constants=arguments.integers,
        )


def _nothing(tensors: Sequence[torch.Tensor]) -> None:
    """Returns what a function returns that only changes its arguments."""


def guarded(kernel: Kernel) -> str:
    """Returns the name of a kernel whose zones are checked: one that a user wrote, in a debugging process."""
    is_checked = launch_of(kernel) is not None and settings.get("JITGEN_DEBUG") >= settings.BOUNDED_WAITS
    return with_launch(kernel) if is_checked else ""


_LEAF = pytree.tree_flatten(0)[1]
_FORMATS = {"float32": "f", "float64": "d", "int64": "q"}


def _tuple_of(count: int) -> pytree.TreeSpec:
    """Returns the structure of a tuple of ``count`` leaves; that of ``((x,),)`` is another one."""
    return pytree.tree_flatten(tuple(range(count)))[1]


def _text(expr: Any, environment: Mapping[str, Any]) -> str:
    """Prints ``expr`` as Python text: sizes are known when a call is bound, numeric arguments go by name."""
    if not isinstance(expr, Expr):
        return repr(expr)
    if not any(map(symbols.is_known_at_the_call, symbols.symbols_of(expr))):
        value = symbols.evaluate(expr, environment)
        return repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    known = {name: value for name, value in environment.items() if not name.startswith("a")}
    return re.sub(r"\b[s]\d+_\d+\b", lambda match: f"({known[match.group()]})", symbols.format_expr(expr))


def memory_of(tensor: torch.Tensor, aligned: bool = False) -> Memory:
    """Returns the memory of ``tensor``; with ``aligned``, the target's accesses do not depend on its address."""
    alignment = 16
    if not aligned:
        address = tensor.data_ptr()
        while address % alignment:
            alignment //= 2
    return Memory(Strided(tuple(tensor.shape), tuple(tensor.stride())), alignment)
