"""Writes launchers as straight-line Python: what is known when a call is bound is in the function's text.

A warm call has microseconds, and a loop over operands that asks each time what kind each is spends them on questions
whose answers do not change. So a launcher is a generated function: allocate, launch, return. For a CPU kernel of two
inputs, its ``source`` reads::

    def launch(t0, t1, p0, p1):
        r0 = empty(sizes2, strides2, dtype2)
        kernel0(pack0(p0, p1, r0.data_ptr(), threads()) + tail0)
        return r0

Neighbours: ``call/specialization.py`` calls ``make_launcher`` with what ``pipeline.py`` fetched; kernels come from
``cpu.py``, ``cuda.py`` and ``interpreter.py``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from jitgen.codegen.python import PythonFunction, block
from jitgen.errors import NumberRangeError, UnsupportedError
from jitgen.runtime import inference, overlap, random
from jitgen.runtime.tensor_map import EncodedMaps, TensorMap
from jitgen.runtime.zones import Zones
from jitgen.spec import DIVISION, GROUPS


@dataclass(frozen=True)
class Allocation:
    """Describes a tensor that a launch allocates."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class IntegerRange:
    """Describes the integers that a parameter of a user's kernel holds.

    Attributes:
        words: kernel, parameter and line, for the refusal of another one.
        least, greatest: that the parameter's type has.
    """

    words: str
    least: int
    greatest: int

    def check(self, number: int) -> None:
        """Raises NumberRangeError where the parameter does not hold ``number``."""
        if not self.least <= number <= self.greatest:
            wider = "" if self.greatest == torch.iinfo(torch.int64).max else ", or give the parameter a wider type"
            raise NumberRangeError(
                f"{self.words} holds {self.least} to {self.greatest}, and {number} is given\n"
                f"  pass a number within it{wider}"
            )


@dataclass(frozen=True)
class Step:
    """Describes one kernel launch.

    Attributes:
        kind: ``"cpu"``, ``"cuda"``, ``"operator"`` or ``"interpreter"``.
        kernel: cpu: the function of one packed buffer; cuda: a ``Launch``; operator: a torch operator, see
            ``compilers/torch_operator.hpp`` for its arguments; interpreter: a function of tensors.
        pointers: (buffer, byte offset) of each operand.
        scalars: for each run-time scalar, Python text over ``a0``, ``a1``, ... (numeric arguments).
        pack, tail, threaded: cpu: the function that packs pointers, scalars and the thread count; the bytes after
            them; whether the kernel is worth more than one thread.
        constants: interpreter, operator: integers that are known when the call is bound.
        written: operator: for each operand whether it is written.
        leading, trailing: operator: text of the integer scalars, before and after ``constants``.
        grid: operator: its launch.
        maps: cuda: the tensor maps that are the kernel's first parameters, in order.
        ranges: of each integer that a user's kernel in C++ takes at each call, and would narrow: its text over ``a0``,
            ``a1``, ..., and what its parameter holds.
        guarded: the name of a kernel that may write outside of its tensors, whose zones are checked (``zones.py``);
            empty for others.
        checked: cpu: for each region the user's lines whose indices it checks; empty where the kernel checks none. What
            the kernel returns is in ``runtime/cpu.py``.
    """

    kind: str
    kernel: Any
    pointers: tuple[tuple[int, int], ...]
    scalars: tuple[str, ...] = ()
    pack: Any = None
    tail: bytes = b""
    threaded: bool = False
    constants: tuple[int, ...] = ()
    written: tuple[bool, ...] = ()
    leading: tuple[str, ...] = ()
    trailing: tuple[str, ...] = ()
    grid: tuple[int, ...] = ()
    maps: tuple[TensorMap, ...] = ()
    checked: tuple[tuple[str, ...], ...] = ()
    ranges: tuple[tuple[str, IntegerRange], ...] = ()
    guarded: str = ""


MOST_PAIRS = 256
"""Pairs of an updated argument and another whose address ranges a launcher compares one by one, in 30 ns each; more are
compared in their order in memory."""


@dataclass(frozen=True)
class View:
    """Describes an output that is an input, or a view of one.

    Attributes:
        untracked: ``"detached"`` for one without a history, ``"view"`` for one that is made as under ``no_grad``.
    """

    buffer: int
    sizes: tuple[int, ...] | None
    strides: tuple[int, ...] = ()
    offset: int = 0
    untracked: str | None = None


@dataclass(frozen=True)
class LaunchSpec:
    """Describes everything that a bound call does.

    Attributes:
        name: for tracebacks.
        device: where allocations go.
        inputs: how many tensors the launcher takes, as ``t0 ...`` with their pointers ``p0 ...``.
        numbers: how many numeric arguments it takes, as ``a0 ...``.
        temporaries, results: allocations, numbered after the inputs; a result may instead be an input (its number).
        steps: in order.
        returns: for each output tensor a buffer's number or a ``View``.
        rebuild: makes the return value of the list of output tensors; None for exactly one tensor, or for none.
        caller_outputs: the results that the caller allocates (``out=``), as ``o0 ...`` with their pointers ``q0 ...``.
        values: text of values computed at the call, which ``rebuild`` takes after the tensors.
        drawn: offsets that a call draws from torch's generator for its random numbers, if it makes any. ``scalars``
            have ``rng_seed`` and ``rng_offset`` for what was drawn.
        extents: bytes each input spans, 0 where nothing reads it; a launch that updates one refuses another that shares
            memory with it.
        lines: for inputs that are updated, the user's line, for that refusal.
    """

    name: str
    device: torch.device
    inputs: int
    numbers: int
    temporaries: tuple[Allocation, ...]
    results: tuple[Allocation | int, ...]
    steps: tuple[Step, ...]
    returns: tuple[int | View, ...]
    rebuild: Callable[..., Any] | None = None
    caller_outputs: frozenset[int] = frozenset()
    values: tuple[str, ...] = field(default=())
    extents: tuple[int, ...] = ()
    lines: tuple[tuple[int, str | None], ...] = ()
    drawn: int = 0


def make_launcher(spec: LaunchSpec) -> Callable[..., Any]:
    """Returns the function ``(*tensors, *pointers, *numbers, *caller_outputs, *their pointers) -> result`` of
    ``spec``."""
    writer = _Writer(spec)
    function = writer.function()
    launch: Any = function.define(f"launch of {spec.name}", writer.names)
    launch.source = function.text
    return launch


class _Writer:
    def __init__(self, spec: LaunchSpec):
        self.spec = spec
        self.names: dict[str, Any] = {"empty": _allocator(spec.device), "inf": math.inf, "nan": math.nan}
        self.lines: list[str] = []
        self.buffers = [f"t{index}" for index in range(spec.inputs)]
        self.pointers = {index: f"p{index}" for index in range(spec.inputs)}

    def function(self) -> PythonFunction:
        spec = self.spec
        parameters = [*self.buffers, *self.pointers.values(), *(f"a{i}" for i in range(spec.numbers))]
        parameters += [f"{kind}{index}" for kind in "oq" for index in sorted(spec.caller_outputs)]
        self._refuse_updates()
        for number, (text, own) in enumerate(pair for step in spec.steps for pair in step.ranges):
            self.names[f"range{number}"] = own
            self.lines.append(f"if not {own.least} <= {text} <= {own.greatest}: range{number}.check({text})")
        if any(step.guarded for step in spec.steps):
            self.names["zones_of"] = functools.partial(Zones, spec.device)
            self.lines += ["zones = zones_of()", "empty = zones.empty"]
        if spec.drawn:
            self.names["draw"] = random.drawer(spec.name, spec.device, spec.drawn)
            self.lines.append("rng_seed, rng_offset = draw()")
        for index, allocation in enumerate(spec.temporaries):
            self._allocate(f"w{index}", allocation)
        for index, result in enumerate(spec.results):
            if isinstance(result, int):
                self.buffers.append(self.buffers[result])
                self.pointers[len(self.buffers) - 1] = self.pointers[result]
            elif index in spec.caller_outputs:
                self.buffers.append(f"o{index}")
                self.pointers[len(self.buffers) - 1] = f"q{index}"
            else:
                self._allocate(f"r{index}", result)
        if any(step.kind == "cuda" for step in spec.steps):
            self.names["current_stream"] = torch._C._cuda_getCurrentRawStream
            self.lines.append(f"stream = current_stream({spec.device.index})")
        for index, step in enumerate(spec.steps):
            self._launch(index, step)
            if step.guarded:
                self.lines.append(f"zones.check({step.guarded!r})")
        self._note_updates()
        outputs = [self._output(index, returned) for index, returned in enumerate(spec.returns)]
        if spec.rebuild is None:
            self.lines.append(f"return {outputs[0] if outputs else None}")
        else:
            self.names["rebuild"] = spec.rebuild
            self.lines.append(f"return rebuild([{', '.join(outputs)}]{''.join(', ' + v for v in spec.values)})")
        lines = self.lines
        if spec.numbers:  # only an integer that a user passed can be beyond what a kernel takes
            self.names |= {"out_of_range": (struct.error, OverflowError), "refuse_numbers": _refuse_numbers}
            numbers = ", ".join(f"a{index}" for index in range(spec.numbers))
            lines = block("try:", lines)
            lines += block("except out_of_range as error:", [f"refuse_numbers({spec.name!r}, error, {numbers})"])
        return PythonFunction("launch", parameters, lines)

    def _note_updates(self) -> None:
        """Counts an update of each tensor that existed before the call, so that autograd notices that a saved tensor
        has changed."""
        updated = [f"t{result}" for result in self.spec.results if isinstance(result, int)]
        updated += [f"o{index}" for index in sorted(self.spec.caller_outputs)]
        if updated:
            # What torch.autograd.graph.increment_version calls; tensors of inference mode have no count.
            self.names["increment_version"] = torch._C._increment_version
            self.lines.append(f"increment_version(({', '.join(updated)},))")

    def _refuse_updates(self) -> None:
        extents, lines = self.spec.extents, dict(self.spec.lines)
        updated = [result for result in self.spec.results if isinstance(result, int)]
        if not updated:
            return
        for index in updated:
            self.names |= {"refuse_inference": inference.refuse, "name": self.spec.name}
            refused = f"refuse_inference(name, t{index}, {lines.get(index)!r})"
            self.lines.append(f"if t{index}.is_inference(): {refused}")
        others = [index for index in range(self.spec.inputs) if extents[index]]
        if len(updated) * len(others) > MOST_PAIRS:
            ranges = overlap.Ranges(self.spec.name, tuple((i, extents[i], i in updated) for i in others), lines)
            self.names["refuse_shared"] = ranges.refuse
            addresses, tensors = (", ".join(f"{letter}{index}" for index in others) for letter in "pt")
            self.lines.append(f"refuse_shared(({addresses},), ({tensors},))")
            return
        for index in updated:
            for other in others if extents[index] else ():
                if other != index:
                    self.names |= {"refuse": overlap.refuse, "name": self.spec.name}
                    near = f"p{index} < p{other} + {extents[other]} and p{other} < p{index} + {extents[index]}"
                    self.lines.append(f"if {near}: refuse(name, t{index}, t{other}, {lines.get(index)!r})")

    def _allocate(self, name: str, allocation: Allocation) -> None:
        buffer = len(self.buffers)
        self.names |= {f"sizes{buffer}": allocation.sizes, f"strides{buffer}": allocation.strides}
        self.names[f"dtype{buffer}"] = allocation.dtype
        self.lines.append(f"{name} = empty(sizes{buffer}, strides{buffer}, dtype{buffer})")
        self.buffers.append(name)

    def _pointer(self, buffer: int, offset: int) -> str:
        name = self.pointers.get(buffer) or f"{self.buffers[buffer]}.data_ptr()"
        return f"{name} + {offset}" if offset else name

    def _launch(self, index: int, step: Step) -> None:
        self.names[f"kernel{index}"] = step.kernel
        scalars = list(step.scalars)
        if step.kind == "interpreter":
            operands = [f"flat({self.buffers[buffer]}, {offset})" for buffer, offset in step.pointers]
            self.names["flat"] = _flat
            arguments = [*operands, *map(str, step.constants), *scalars]
            self.lines.append(f"kernel{index}({', '.join(arguments)})")
            return
        if step.kind == "operator":
            self._launch_operator(index, step)
            return
        pointers = [self._pointer(buffer, offset) for buffer, offset in step.pointers]
        if step.kind == "cuda":
            self._launch_cuda(index, step, [*self._maps(index, step), *pointers, *scalars])
            return
        threads = "1"
        if step.threaded:
            self.names["threads"] = torch.get_num_threads
            threads = "threads()"
        self.names |= {f"pack{index}": step.pack, f"tail{index}": step.tail}
        call = f"kernel{index}(pack{index}({', '.join([*pointers, *scalars, threads])}) + tail{index})"
        self.names |= {f"checked{index}": step.checked, "refuse_status": _refuse_status}
        self.lines.append(f"status = {call}")
        self.lines.append(f"if status: refuse_status({self.spec.name!r}, status, checked{index})")

    def _maps(self, index: int, step: Step) -> list[str]:
        """Writes each of the step's encoded tensor maps."""
        texts = []
        for number, description in enumerate(step.maps):
            name = f"maps{index}_{number}"
            self.names[name] = EncodedMaps(description)
            texts.append(f"{name}[{self._pointer(description.buffer, 0)}]")
        return texts

    def _launch_cuda(self, index: int, step: Step, values: list[str]) -> None:
        """Writes the body of ``Launch.__call__``, without the call."""
        launch = step.kernel
        varying, values = iter(values), []
        for number, piece in enumerate(launch.between):
            if piece is not None:
                self.names[f"between{index}_{number}"] = piece
            values.append(next(varying) if piece is None else f"between{index}_{number}")
        for name in ("call", "fresh", "handle", "pack", "pools", "recover"):
            self.names[f"{name}{index}"] = getattr(launch, name)
        self.lines += [
            "try:",
            f"    pool = pools{index}[stream]",
            "    frame = pool.pop()",
            "except (KeyError, IndexError):",
            f"    pool, frame = fresh{index}(stream)",
            f"pack{index}(frame[0], 0, {', '.join(values)})",
            f"status = call{index}(frame[1], handle{index}, frame[2], 0)[0]",
            "if status:",
            f"    recover{index}(frame, status)",
            "pool.append(frame)",
        ]

    def _launch_operator(self, index: int, step: Step) -> None:
        tensors: tuple[list[str], list[str]] = [], []
        offsets: tuple[list[int], list[int]] = [], []
        for (buffer, offset), written in zip(step.pointers, step.written, strict=True):
            tensors[written].append(self.buffers[buffer])
            offsets[written].append(offset)
        threads = ["threads()" if step.threaded else "1"] if not step.grid else []
        self.names["threads"] = torch.get_num_threads
        integers = [*step.leading, *threads, *map(str, step.constants), *step.trailing]
        lists: list[Sequence[Any]] = [*tensors, *offsets, integers, step.scalars, step.grid]
        arguments = ", ".join(f"[{', '.join(map(str, values))}]" for values in lists)
        self.lines.append(f"kernel{index}({arguments})")

    def _output(self, index: int, returned: int | View) -> str:
        if isinstance(returned, int):
            return self.buffers[returned]
        tensor = self.buffers[returned.buffer]
        detached = ".detach()" if returned.untracked == "detached" else ""
        if returned.sizes is None:
            return f"{tensor}{detached}"
        self.names |= {f"view_sizes{index}": returned.sizes, f"view_strides{index}": returned.strides}
        if returned.buffer >= self.spec.inputs:
            self.names["piece"] = _piece
            return f"piece({tensor}, {returned.offset}, view_sizes{index}, view_strides{index})"
        view = f"view_sizes{index}, view_strides{index}, {tensor}.storage_offset() + {returned.offset}"
        if returned.untracked == "view":
            self.names["untracked_view"] = _untracked_view
            return f"untracked_view({tensor}, {view})"
        return f"{tensor}{detached}.as_strided({view})"


def _piece(tensor: torch.Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Returns a tensor in the memory of ``tensor``, a temporary. It is no view of that to autograd, which would refuse
    updates of one that an autograd function returns."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), offset, sizes, strides)


def _untracked_view(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    with torch.no_grad():
        return tensor.as_strided(sizes, strides, offset)


def _allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """Returns the fastest ``(sizes, strides, dtype) -> tensor`` on ``device``.

    Inductor's allocation calls take half the time of ``torch.empty_strided``. They are private to torch, and the CUDA
    one allocates on the current device, so it is used only where there is one device.
    """
    from torch._C._dynamo import guards

    if device.type == "cpu" and hasattr(guards, "_empty_strided_cpu"):
        return guards._empty_strided_cpu
    if device.type == "cuda" and torch.cuda.device_count() == 1 and hasattr(guards, "_empty_strided_cuda"):
        return guards._empty_strided_cuda
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _refuse_numbers(name: str, error: Exception, *numbers: Any) -> NoReturn:
    """Raises the error of a launch that packs an integer beyond int64."""
    values = ", ".join(map(str, numbers))
    raise UnsupportedError(
        f"{name}: kernels take integers within int64, and this call with {values} needs one beyond it; make it a float"
    ) from error


def _refuse_status(name: str, status: int, checked: Sequence[Sequence[str]]) -> NoReturn:
    """Raises the error of a launch that got no memory, met an index out of range, or divided an integer by 0, as torch
    does.

    Args:
        status: what the kernel returned (``runtime/cpu.py``).
        checked: for each region the user's lines.
    """
    if status < 0:
        raise MemoryError(
            f"{name}: a kernel's scratch memory cannot be allocated; free memory, or let it run on fewer threads, each "
            "of which has its own (torch.set_num_threads)"
        )
    lines = [line for line in checked[status - 1] if line]
    where = "; ".join(lines)
    if lines and all(line.endswith(DIVISION) for line in lines):
        raise RuntimeError(f"{name}: integer division by zero at {where.replace(DIVISION, '')}")
    if lines and all(line.endswith(GROUPS) for line in lines):
        raise IndexError(
            f"{name}: offsets of groups descend or exceed what they divide, or an id is of no group, at "
            f"{where.replace(GROUPS, '')}"
        )
    raise IndexError(f"{name}: an index is out of range{f' at {where}' if where else ''}")


def _flat(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns the memory of ``tensor`` from ``offset`` bytes on, as the interpreter takes a pointer. It may point
    beside the tensor's storage, where a kernel that stores a slice of its rows counts from the rows' beginning."""
    start = tensor.storage_offset() + offset // tensor.element_size()
    if 0 <= start < tensor.untyped_storage().nbytes() // tensor.element_size():
        return tensor.as_strided((1,), (1,), start)
    if not tensor.numel():
        return tensor
    memory = (ctypes.c_char * tensor.element_size()).from_address(tensor.data_ptr() + offset)
    return torch.frombuffer(memory, dtype=tensor.dtype)
