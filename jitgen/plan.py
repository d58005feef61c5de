"""``LaunchPlan``: one bound signature, without the look-up."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen import pipeline
from jitgen.errors import UnsupportedError
from jitgen.quant.formats import find
from jitgen.runtime.guards import TensorFacts, has_repeated, layout_check

if TYPE_CHECKING:
    from jitgen.function import JitFunction


_MISSING = object()
"""Stands for an argument that a call leaves out."""


class LaunchPlan:
    """The launch plan of one signature: ``plan(*args, out=None)``, made by ``JitFunction.bind``.

    Arguments must have the shapes, strides, dtypes, device and (on a GPU) the alignment to 16 bytes that the plan was
    bound with; a tensor that differs is a ValueError, never a wrong launch. Numbers may differ, except where the trace
    needed their value. ``out`` is a tensor, or a tuple of tensors for a function with several results, into which the
    results are written; it may have any strides, and may be an input itself, but not overlap one in part.
    """

    def __new__(
        cls, function: JitFunction, leaves: Sequence[Any], tree: Any = None, apart: Sequence[Any] = ()
    ) -> LaunchPlan:
        """``apart``: for each argument the token of a quantised weight, whose parts are leaves, or None."""
        plan = super().__new__(_callable_class(function.name, leaves, apart))
        plan._prepare(function, leaves, tree)
        return plan

    if TYPE_CHECKING:  # written anew for every plan, by _callable_class

        def __call__(self, *leaves: Any, out: Any = None) -> Any: ...

    def _prepare(self, function: JitFunction, leaves: Sequence[Any], tree: Any) -> None:
        self._function = function
        self._tree = tree
        self._bound = tuple(TensorFacts.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        """What it was bound with: of tensors the facts alone, so that their memory is free to go."""
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._numbers = [index for index, leaf in enumerate(leaves) if type(leaf) in (int, float)]
        tensors = [leaves[index] for index in self._places]
        self._facts: list[TensorFacts] = [self._bound[index] for index in self._places]
        self._addresses = [facts.remainder for facts in self._facts] if _aligned(tensors) else []
        self._needs_grad = any(tensor.requires_grad for tensor in tensors)
        self._entry, _ = function._resolve(leaves, tree)
        self._out_entries: dict[Any, Any] = {}
        self._hot: tuple[Any, ...] | None = None
        if self._is_simple(self._entry) and not function._static_numbers:
            self._hot = (layout_check(tensors), self._entry.launch, *self._addresses)
        self._hot_out: tuple[Any, ...] | None = None

    def _is_simple(self, entry: Any) -> bool:
        """Whether the launch needs no check but of the arguments."""
        return not entry.captured and not entry.guards and not self._needs_grad

    @property
    def kernels(self) -> tuple[str, ...]:
        """Keys of the compiled kernels this plan launches, in order."""
        built = self._entry.specialization.built(self._entry.lowered, pipeline.default_store())
        return tuple(kernel.key for kernel in built)

    # ----------------------------------------------------------------------------------------------- the slow way

    def _launch(self, leaves: Sequence[Any], out: Any) -> Any:
        """A call that the generated fast path did not take: everything is checked."""
        leaves = [leaf for leaf in leaves if leaf is not _MISSING]
        if len(leaves) != len(self._bound):
            raise TypeError(f"the plan of {self._function.name} takes {len(self._bound)} arguments, got {len(leaves)}")
        tensors = [leaves[index] for index in self._places]
        for place, (leaf, bound) in enumerate(zip(leaves, self._bound, strict=True)):
            if isinstance(bound, TensorFacts):
                self._refuse_other(place, leaf, bound)
            elif type(leaf) is not type(bound) or (place not in self._numbers and leaf != bound):
                raise ValueError(
                    f"argument {place} of the plan of {self._function.name} is {leaf!r}, and the plan was bound with "
                    f"{bound!r}; bind again, or call the function itself"
                )
        self._function._check(leaves)
        if self._hot is not None and has_repeated(tensors):
            self._hot = (layout_check(tensors), *self._hot[1:])
        changed = [i for i in self._numbers if leaves[i] != self._bound[i]]
        if changed and self._function._static_numbers:
            raise ValueError(
                f"argument {changed[0]} of the plan of {self._function.name} is {leaves[changed[0]]!r}, and the plan "
                f"was bound for {self._bound[changed[0]]!r}; bind again, or call the function itself"
            )
        outputs = _outputs(out)
        entry = self._entry if out is None else self._with_out(leaves, tensors, outputs)
        captured = entry.captured_tensors()
        if captured is None:
            entry, captured = self._function._resolve(leaves, self._tree, outputs or None)
            if out is None:
                self._entry = entry
        everything = [*tensors, *captured]
        numbers = [leaves[index] for index in self._numbers]
        addresses = [tensor.data_ptr() for tensor in everything]
        result = entry.launch(*everything, *addresses, *numbers, *outputs, *(o.data_ptr() for o in outputs))
        return result if out is None else out

    def _refuse_other(self, place: int, tensor: Any, bound: TensorFacts) -> None:
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise TypeError(f"argument {place} of the plan of {self._function.name} is {kind}, not a tensor")
        facts = TensorFacts.of(tensor)
        if facts != bound:
            raise ValueError(
                f"argument {place} of the plan of {self._function.name} is {facts}; "
                f"the plan was bound for {bound}. Bind again for such arguments, or call the function itself"
            )

    # ------------------------------------------------------------------------------------------------------- out=

    def _with_out(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> Any:
        """The entry that writes into tensors laid out as ``out``."""
        key = tuple(map(TensorFacts.of, out))
        entry = self._out_entries.get(key)
        if entry is None:
            self._check_out(out)
            entry, _ = self._function._resolve(leaves, self._tree, out)
            self._out_entries[key] = entry
        for tensor in out:
            if any(_overlaps_in_part(tensor, other) for other in [*tensors, *(o for o in out if o is not tensor)]):
                raise ValueError(
                    f"out= of {self._function.name} overlaps another tensor in part: "
                    "elements would be read after they were written; pass memory of its own"
                )
        beside = [entry.lowered.program.read_beside(position) for position in range(len(out))]
        for tensor, inputs in zip(out, beside, strict=True):
            place = next((i for i in sorted(inputs) if i < len(tensors) and _share_memory(tensor, tensors[i])), None)
            if place is not None:
                raise ValueError(
                    f"out= of {self._function.name} lies where its input {place} does, which a matrix product or a "
                    "later kernel still reads once the result is being written; pass memory of its own"
                )
        if len(out) == 1 and self._hot is not None and self._is_simple(entry) and not out[0].requires_grad:
            check = layout_check([*tensors, out[0]])
            ends = [key[0].extent, *(facts.extent for facts in self._facts)]
            alike = [facts[:3] == key[0][:3] and place not in beside[0] for place, facts in enumerate(self._facts)]
            remainders = [*self._addresses, key[0].remainder] if _aligned(tensors) else []
            self._hot_out = (check, entry.launch, *ends, *alike, *remainders)
        return entry

    def _check_out(self, out: Sequence[torch.Tensor]) -> None:
        lowered = self._entry.lowered
        program, name = lowered.program, self._function.name
        if any(not isinstance(output, int) for output in program.outputs) or program.mutated:
            raise UnsupportedError(
                f"{name}: out= with a function that returns a view of an argument or updates one is not supported"
            )
        if list(program.outputs) != list(range(len(out))):
            raise ValueError(f"{name} returns {len(program.outputs)} tensors; out= has {len(out)}")
        first = len(program.inputs) + len(program.temporaries)
        device = self._facts[0].device
        for position, tensor in enumerate(out):
            sizes = lowered.memories[first + position].view.sizes
            dtype = program.results[position].dtype
            if tuple(tensor.shape) != sizes or str(tensor.dtype) != f"torch.{dtype}" or tensor.device != device:
                raise ValueError(
                    f"out= of {name} is {TensorFacts.of(tensor)}; the result is torch.{dtype} {sizes} on {device}. "
                    "Pass such a tensor"
                )
            if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ValueError(f"out= of {name} is an expanded tensor: several of its elements share memory")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"out= of {name} requires grad; detach it")


def _outputs(out: Any) -> list[torch.Tensor]:
    outputs = [] if out is None else [out] if isinstance(out, torch.Tensor) else list(out)
    for tensor in outputs:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"out= is a tensor, or a tuple of tensors, not {type(tensor).__name__}")
    return outputs


def _aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether addresses matter: to a GPU's 16-byte accesses they do; the CPU's take any."""
    return any(tensor.device.type != "cpu" for tensor in tensors)


def _overlaps_in_part(written: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two share memory without being laid out alike (an element updated in its own place is fine)."""
    alike = written.stride() == other.stride() and written.shape == other.shape and written.dtype == other.dtype
    return not (alike and written.data_ptr() == other.data_ptr()) and _share_memory(written, other)


def _share_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    start, begin = left.data_ptr(), right.data_ptr()
    return start < begin + TensorFacts.of(right).extent and begin < start + TensorFacts.of(left).extent


# ----------------------------------------------------------------------------------------------------- the fast way


def _callable_class(name: str, leaves: Sequence[Any], tokens: Sequence[Any] = ()) -> type[LaunchPlan]:
    """A ``LaunchPlan`` whose ``__call__`` is written for these arguments: check, launch, return."""
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    numbers = [index for index, leaf in enumerate(leaves) if type(leaf) in (int, float)]
    arguments = [f"a{index}" for index in range(len(leaves))]
    pointers = [f"p{index}" for index in tensors]
    remain = [f"r{index}" for index in tensors] if _aligned([leaves[index] for index in tensors]) else []
    outlying = ["ro"] if remain else []
    aligned = [f"p{index} & 15 == r{index}" for index in tensors] if remain else []
    out_aligned = [*aligned, "o & 15 == ro"] if remain else []
    if remain and not any(leaves[index].data_ptr() & 15 for index in tensors):  # one question for all
        aligned = [f"not ({' | '.join(pointers)}) & 15"]
        out_aligned = [f"({' | '.join([*pointers, 'o'])}) & 15 == ro"]
    given = ", ".join([*(f"a{i}" for i in tensors), *pointers, *(f"a{i}" for i in numbers)])
    checked = ", ".join(f"a{i}" for i in tensors)
    # Memory of its own, or exactly an input's: then an element is read before it is written.
    ends, alike = [f"e{i}" for i in tensors], [f"s{i}" for i in tensors]
    apart = [f"(o >= p{i} + e{i} or o + eo <= p{i} or s{i} and o == p{i})" for i in tensors]
    fixed = {index: leaf for index, leaf in enumerate(leaves) if index not in tensors and index not in numbers}
    alike_values = [*(f"type(a{i}) is k{i}" for i in numbers), *(f"a{i} is v{i}" for i in fixed)]
    ready = " and ".join(["hot is not None", "not more", *alike_values])
    text = "\n".join(
        [
            *_header(arguments, tokens),
            "    try:",
            *(f"        p{i} = a{i}.data_ptr()" for i in tensors),
            "        pass",
            "    except AttributeError:",
            f"        return self._launch(({', '.join([*arguments, '*more'])},), out)",
            "    if out is None:",
            "        hot = self._hot",
            f"        if {ready}:",
            f"            {', '.join(['check', 'launch', *remain])} = hot",
            f"            if {' and '.join([f'check({checked})', *aligned])}:",
            f"                return launch({given})",
            "    else:",
            "        hot = self._hot_out",
            f"        if {ready} and type(out) is Tensor:",
            f"            {', '.join(['check', 'launch', 'eo', *ends, *alike, *remain, *outlying])} = hot",
            "            o = out.data_ptr()",
            f"            if {' and '.join([f'check({checked}, out)', *out_aligned, *apart])}:",
            f"                launch({given}, out, o)",
            "                return out",
            f"    return self._launch(({', '.join([*arguments, '*more'])},), out)",
            "",
        ]
    )
    names: dict[str, Any] = {"Tensor": torch.Tensor, "missing": _MISSING, "refuse": _refuse_weight}
    names |= {f"w{index}": token for index, token in enumerate(tokens)}
    names |= {f"k{index}": type(leaves[index]) for index in numbers} | {f"v{i}": leaf for i, leaf in fixed.items()}
    path = f"<jitgen plan {name} {len(leaves)}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec"), names)
    call: Callable[..., Any] = names["__call__"]
    return type("LaunchPlan", (LaunchPlan,), {"__call__": call, "__doc__": LaunchPlan.__doc__})


def _header(arguments: Sequence[str], tokens: Sequence[Any]) -> list[str]:
    """The first lines of ``__call__``: its parameters, and quantised weights among them taken tokens."""
    if not tokens:
        return [f"def __call__({', '.join(['self', *(f'{a}=missing' for a in arguments)])}, *more, out=None):"]
    names = iter(arguments)
    parameters, lines = [], []
    for index, token in enumerate(tokens):
        if token is None:
            parameters.append(next(names))
            continue
        parts = [next(names) for _ in find(token.format).part_names]
        parameters.append(f"q{index}")
        lines += [
            f"    if getattr(q{index}, 'token', None) is not w{index}: refuse({index}, q{index}, w{index})",
            f"    {', '.join(parts)} = q{index}.parts",
        ]
    return [f"def __call__({', '.join(['self', *(f'{p}=missing' for p in parameters)])}, *more, out=None):", *lines]


def _refuse_weight(place: int, given: Any, token: Any) -> None:
    raise ValueError(
        f"argument {place} of the plan is {given!r:.200}; the plan was bound for a quantised weight of {token}. "
        "Bind again for such a weight, or call the function itself"
    )
