"""Defines kernels that a user wrote in CUDA C++ and C++: ``jitgen.cuda_kernel`` and ``jitgen.cpp_kernel``.

Within a decorated function a launch is a step of the plan. Outside of one it is a decorated function by itself, so that
it is compiled once, stored, recorded and prewarmed like any other. Where torch traces, it is an operator::

    jitgen::launch(Tensor(a!)[] written, Tensor[] read, SymInt[] integers, float[] floats, SymInt[] sizes, str kernel)

Its text has everything that a launch needs, and it returns nothing: it changes what it writes.

Neighbour: ``trace/kernels/c_kernel.py`` reads a kernel, and traces its launches and those of the operator.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from jitgen import console, settings
from jitgen.call.function import JitFunction
from jitgen.call.resolver import MANY_TRACES
from jitgen.call.table import Table
from jitgen.codegen.python import PythonFunction
from jitgen.errors import JitgenError, SharedMemoryError, TraceError, UnsupportedError
from jitgen.frames import followed_as
from jitgen.runtime.overlap import is_same
from jitgen.runtime.zones import Zones
from jitgen.trace.kernels.c_kernel import CKernel, of_launch
from jitgen.trace.kernels.launch import trace_in_progress
from jitgen.trace.location import quote, user_location

_LIBRARY = torch.library.Library("jitgen", "FRAGMENT")
_LIBRARY.define(
    "launch(Tensor(a!)[] written, Tensor[] read, SymInt[] integers, float[] floats, SymInt[] sizes, str kernel) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class _Kernel(CKernel):
    """Launches a kernel outside of traces, too."""

    def configured(self, sizes: Any) -> ConfiguredKernel:
        """Returns the kernel with the sizes of a launch: of one in CUDA C++ the grid, the block and, if there are,
        bytes of shared memory.

        Raises:
            TraceError: these are no sizes of a launch.
        """
        raise NotImplementedError

    def known(self, sizes: Any) -> ConfiguredKernel:
        """Returns the kernel with the sizes of a launch that are numbers, as one object for equal sizes, since each
        traces its first launch."""
        raise NotImplementedError

    def check_strides(self, arguments: Sequence[Any]) -> None:
        """Raises UnsupportedError where a tensor is not contiguous, and the kernel is not told how it lies.

        A caller who passes strides passes numbers: a stride that a contiguous tensor has not must be among them. The
        kernel then gets the tensor as it lies.
        """
        numbers = [argument for argument in arguments if not isinstance(argument, torch.Tensor)]
        for parameter, tensor in zip(self.definition.parameters, arguments, strict=False):
            if not isinstance(tensor, torch.Tensor) or not parameter.is_pointer:
                continue
            strides, expected = tensor.stride(), 1
            if tensor.is_contiguous() or tensor.numel() == 0:
                continue
            for size, stride in reversed(list(zip(tensor.shape, strides, strict=True))):
                if size != 1 and stride != expected and not any(number == stride for number in numbers):
                    raise UnsupportedError(
                        f"{self.name} ({self.where()}): {parameter.name} is not contiguous, and the launch passes no "
                        f"{stride}, which is one of its strides{quote(user_location())}\n  pass "
                        f"{parameter.name}.contiguous(), or its strides where the kernel takes them as numbers"
                    )
                expected *= size

    @functools.cached_property
    def updates_another(self) -> Any:
        """Returns a function of the arguments: whether a tensor that is written is also another of them."""
        parameters = self.definition.parameters
        pairs = [
            f"arguments[{one}] is arguments[{other}]"
            for (one, first), (other, second) in itertools.combinations(enumerate(parameters), 2)
            if first.is_pointer and second.is_pointer and not (first.is_const and second.is_const)
        ]
        line = f"return len(arguments) == {len(parameters)} and ({' or '.join(pairs) or False})"
        return PythonFunction("updates_another", ["arguments"], [line]).define(f"arguments of {self.name}", {})

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """Returns the places of the parameters that take no tensors."""
        return tuple(place for place, own in enumerate(self.definition.parameters) if not own.is_pointer)

    def check_devices(self, arguments: Sequence[Any]) -> None:
        """Raises UnsupportedError where a tensor is not on a device of the kernel's language."""
        kind = "cuda" if self.text.language == "cuda" else "cpu"
        for parameter, argument in zip(self.definition.parameters, arguments, strict=False):
            if isinstance(argument, torch.Tensor) and argument.device.type != kind:
                raise UnsupportedError(
                    f"{self.name} ({self.where()}): {parameter} is on {argument.device}{quote(user_location())}\n  "
                    f"a kernel in {'CUDA C++' if kind == 'cuda' else 'C++'} takes tensors of one {kind.upper()} device"
                ) from None

    @functools.cached_property
    def is_guarded(self) -> bool:
        """Returns whether launches are looked at, as ``JITGEN_DEBUG`` asks at the first one."""
        return bool(settings.get("JITGEN_DEBUG") >= settings.BOUNDED_WAITS)


def _as_objects(arguments: Sequence[Any]) -> list[Any]:
    """Returns ``arguments`` with one object for tensors that are the same elements, such as two views ``x[1:]``."""
    known: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and not any(is_same(argument, other) for other in known):
            known.append(argument)
    return [
        next(other for other in known if is_same(argument, other)) if isinstance(argument, torch.Tensor) else argument
        for argument in arguments
    ]


def _flat(sizes: Sequence[Any]) -> list[Any]:
    """Returns the sizes of a launch in CUDA C++ as seven numbers; none of one in C++.

    Raises:
        TraceError: the grid or the block has no size, or more than three.
    """
    if not sizes:
        return []
    grid, block, shared = sizes
    flat: list[Any] = []
    for size, what in ((grid, "grid"), (block, "block")):
        listed = tuple(size) if isinstance(size, (tuple, list)) else (size,)
        if not 1 <= len(listed) <= 3:
            raise TraceError(f"the {what} is {size!r}; give it one to three sizes")
        flat += (*listed, 1, 1)[:3]
    return [*flat, shared]


def _plain(sizes: Any) -> Any:
    """Returns sizes of a launch with tuples in place of lists, and integers of Python in place of others, as of NumPy.

    What is no size is left for the launch to refuse.
    """
    if isinstance(sizes, (tuple, list)):
        return tuple(map(_plain, sizes))
    return int(sizes) if type(sizes) not in (int, bool) and isinstance(sizes, Integral) else sizes


def _by_operator(kernel: _Kernel, sizes: Sequence[Any], arguments: Sequence[Any]) -> None:
    """Calls the operator, where torch traces."""
    written, read, integers, floats = kernel.divided(arguments)
    torch.ops.jitgen.launch(written, read, integers, floats, _flat(sizes), kernel.operator_text)


class CppKernel(_Kernel):
    """Represents a function in C++: ``kernel(x, out, n)`` calls it. Made by ``jitgen.cpp_kernel``."""

    @followed_as(lambda kernel, *arguments: _by_operator(kernel, (), arguments))
    def __call__(self, *arguments: Any) -> None:
        self._configured(*arguments)

    @functools.cached_property
    def _configured(self) -> ConfiguredKernel:
        return ConfiguredKernel(self, ())

    def configured(self, sizes: Any) -> ConfiguredKernel:
        return self._configured

    def known(self, sizes: Any) -> ConfiguredKernel:
        return self._configured

    def lower(self, *arguments: Any, target: str | None = None) -> Any:
        """Lowers a call, with tensors or specs: see ``JitFunction.lower``."""
        return self._configured.lower(*arguments, target=target)


class CudaKernel(_Kernel):
    """Represents a kernel in CUDA C++: ``kernel[grid, block](x, out, n)`` launches it. Made by ``jitgen.cuda_kernel``.

    ``kernel[grid, block, shared_bytes]`` gives each block dynamic shared memory. ``kernel(grid, block, args,
    shared_mem=..., stream=...)`` is the same launch, as ``cupy.RawKernel`` and ``torch.cuda._compile_kernel`` spell it.
    """

    @functools.cached_property
    def _known(self) -> Table[Any, ConfiguredKernel]:
        """Returns the kernel with the sizes of launches that there were, by these."""
        return Table()

    @functools.cached_property
    def _numbers(self) -> Iterator[int]:
        """Counts the sizes that are entered, in whatever threads."""
        return itertools.count(1)

    @followed_as(lambda kernel, sizes: kernel.configured(sizes))
    def __getitem__(self, sizes: Any) -> ConfiguredKernel:
        if trace_in_progress.get() is not None:  # sizes may be symbolic
            return self._made(sizes)
        return self.known(sizes)

    def _made(self, sizes: Any) -> ConfiguredKernel:
        """Returns ``configured`` with plain sizes; Dynamo would not follow how it looks at them."""
        return ConfiguredKernel(self, _plain(self.configured(sizes).sizes))

    def known(self, sizes: Any) -> ConfiguredKernel:
        try:
            return self._known[sizes]
        except (KeyError, TypeError):  # new, or lists
            pass
        made = self._made(sizes)
        if not all(type(size) is int for size in _flat(made.sizes)):  # 1.0 and True are equal to 1
            return made
        known = self._known.kept(_plain(sizes), made)
        if known is made and next(self._numbers) == MANY_TRACES:
            self._warn_of_sizes()
        return known

    def _warn_of_sizes(self) -> None:
        """Warns that launches have many sizes, each of which is traced."""
        console.warn(
            f"{self.name} has been launched with {MANY_TRACES} grids, blocks or bytes of shared memory. The first "
            "launch with each takes milliseconds: launch it within a decorated function, where the sizes of "
            "tensors, and a grid that follows from them, are symbolic",
            stacklevel=4,
        )

    def configured(self, sizes: Any) -> ConfiguredKernel:
        if not isinstance(sizes, tuple) or not 2 <= len(sizes) <= 3:
            raise TraceError(
                f"{self.name} is launched as kernel[grid, block](...) or kernel[grid, block, shared_bytes](...); "
                f"these sizes are {sizes!r}"
            )
        return ConfiguredKernel(self, (*sizes, 0)[:3])

    def __call__(
        self, grid: Any = 1, block: Any = 1, args: Sequence[Any] = (), shared_mem: Any = 0, stream: Any = None
    ) -> None:
        self[grid, block, shared_mem](*args, stream=stream)


def _follow(kernel: ConfiguredKernel, *arguments: Any, stream: Any = None) -> None:
    """Launches ``kernel`` as Dynamo follows it."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        _by_operator(kernel.kernel, kernel.sizes, arguments)


class ConfiguredKernel:
    """Represents a kernel with the sizes of a launch.

    By itself, a launch is a decorated function of its arguments alone, so that a warm one is a look-up of their types
    and then the dispatcher of that function.
    """

    __slots__ = ("_by_types", "_function", "_functions", "kernel", "sizes")

    def __init__(self, kernel: _Kernel, sizes: tuple[Any, ...]) -> None:
        self.kernel, self.sizes = kernel, sizes
        self._functions: dict[tuple[int, ...] | None, Any] = {}
        self._function: Any = None
        """That of launches without repeated tensors, once one was launched without zones."""
        self._by_types: Mapping[tuple[type, ...], Any] = {}

    @followed_as(_follow)
    def __call__(self, *arguments: Any, stream: Any = None) -> None:
        """Launches the kernel on torch's current stream, or on ``stream``, one of torch's."""
        if stream is not None:
            with torch.cuda.stream(stream):
                return self(*arguments)
        if self._function is None or trace_in_progress.get() is not None:
            return self._launch(arguments)
        try:
            if self.kernel.updates_another(arguments):
                self._update(arguments)
            else:
                self._by_types.get(tuple(map(type, arguments)), self._function)(*arguments)
        except SharedMemoryError:  # before it launches
            self._launch(arguments)
        except JitgenError:
            self.kernel.check_devices(arguments)
            raise

    def lower(self, *arguments: Any, target: str | None = None) -> Any:
        """Lowers a launch, with tensors or specs: see ``JitFunction.lower``."""
        return self._function_of(None).lower(*arguments, target=target)

    def _function_of(self, places: tuple[int, ...] | None) -> Any:
        """Returns the function of launches.

        Args:
            places: where a tensor is given several times, for each argument the first place at which it is given.
        """
        known = self._functions.get(places)
        if known is not None:
            return known
        kernel, sizes = self.kernel, of_launch(_flat(self.sizes))
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places or ()))}
        indices = None if places is None else [numbers[place] for place in places]

        def launch(*arguments: Any) -> None:
            if indices is not None:
                arguments = tuple(arguments[index] for index in indices)
            kernel.check_strides(arguments)
            kernel.traced(sizes, arguments)

        return self._functions.setdefault(places, JitFunction(launch, kernel.text.language, name=kernel.name))

    def _launch(self, arguments: Sequence[Any]) -> None:
        """Launches the kernel on ``arguments`` with all checks."""
        kernel = self.kernel
        if kernel.traced(self.sizes, arguments):
            return
        try:
            if kernel.is_guarded:
                self._launch_guarded(arguments)
            else:
                self._call(arguments)
                self._function = self._function_of(None)
                self._by_types = self._function.dispatchers
        except JitgenError:
            kernel.check_devices(arguments)
            raise

    def _call(self, arguments: Sequence[Any]) -> None:
        """Calls the function of a launch; one that gets a tensor several times updates it in place."""
        updates_another = self.kernel.updates_another
        if not updates_another(arguments):
            try:
                self._function_of(None)(*arguments)
                return
            except SharedMemoryError:  # before it launches
                arguments = _as_objects(arguments)
                if not updates_another(arguments):
                    raise
        self._update(arguments)

    def _update(self, arguments: Sequence[Any]) -> None:
        """Calls the function of launches that get some tensor several times."""
        ids = [*map(id, arguments)]
        for place in self.kernel.numbers:  # of which one that occurs twice may differ at the next call
            ids[place] = -1 - place
        places = tuple(map(ids.index, ids))
        self._function_of(places)(*(arguments[place] for place in dict.fromkeys(places)))

    def _launch_guarded(self, arguments: Sequence[Any]) -> None:
        """Launches it on copies of what it writes, with zones around them that are looked at afterwards."""
        kernel, arguments = self.kernel, _as_objects(arguments)
        written = {id(tensor): tensor for tensor in kernel.divided(arguments)[0]}
        zones = {device: Zones(device) for device in {tensor.device for tensor in written.values()}}
        copies = {
            key: zones[tensor.device].empty(tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)
            for key, tensor in written.items()
        }
        self._call([copies.get(id(argument), argument) for argument in arguments])
        for own in zones.values():
            own.check(f"{kernel.name} ({kernel.where()})")
        for key, tensor in written.items():
            tensor.copy_(copies[key])


def cuda_kernel(
    source: str | Path, entry: str, *, include_dirs: Sequence[str | Path] = (), options: Sequence[str] = ()
) -> CudaKernel:
    """Makes a kernel of CUDA C++, which is compiled at its first launch and kept in the store.

    Launched within a decorated function, it is a step of the plan, and what is computed pointwise around it is computed
    in its hooks, ``JITGEN_PROLOGUE(x[i], row, column)`` and ``out[i] = JITGEN_EPILOGUE(value, row, column);``.

    Args:
        source: the text, or the path of a file.
        entry: the name of the ``__global__`` function, with namespaces and, of a template, its arguments:
            ``"scale<float, 4>"``. A pointer to ``const`` is read, another one is written.
        include_dirs: where its own headers are, besides the folder of its file.
        options: of the compiler, such as ``-DWIDTH=4`` or ``-use_fast_math``.

    Raises:
        UnsupportedError: the file cannot be read, has no such kernel, or one that takes what no launch passes.
    """
    return CudaKernel("cuda", source, entry, include_dirs, options)


def cpp_kernel(
    source: str | Path, entry: str, *, include_dirs: Sequence[str | Path] = (), options: Sequence[str] = ()
) -> CppKernel:
    """Makes a kernel of a function in C++ for CPUs; see ``cuda_kernel``. It is called as ``kernel(x, out, n)``.

    It may use OpenMP, whose threads are torch's, and is linked with nothing but the C library.
    """
    return CppKernel("cpp", source, entry, include_dirs, options)


# ------------------------------------------------------------------------------------------------------------ operator


@functools.lru_cache(256)
def _kernel(text: str) -> _Kernel:
    kind = CudaKernel if json.loads(text)[0] == "cuda" else CppKernel
    return kind.of_operator(text)


def _run(
    written: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    sizes: Sequence[int],
    kernel: str,
) -> None:
    own = _kernel(kernel)
    with torch.no_grad():
        own.known(of_launch(sizes))(*own.joined(written, read, integers, floats))


def _changes_alone(*arguments: Any) -> None:
    """Computes nothing, as fake tensors need of an operator without results."""


def _without_gradients(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], *others: Any) -> None:
    """Calls the operator where no gradient would flow through it, since nobody knows its derivative.

    Raises:
        UnsupportedError: one would.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*written, *read)):
        own = _kernel(others[-1])
        raise UnsupportedError(
            f"the launch of {own.name} ({own.where()}): an argument requires grad, and nobody knows the derivative of "
            "a kernel that you wrote\n  put the launch into a torch.autograd.Function or a torch.library.custom_op "
            "with a backward, or call it under torch.no_grad()"
        )
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.jitgen.launch.default(written, read, *others)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("launch", _run, _key)
_LIBRARY.impl("launch", _without_gradients, "Autograd")
torch.library.register_fake("jitgen::launch", _changes_alone, lib=_LIBRARY)
