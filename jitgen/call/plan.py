"""``LaunchPlan``: the launch of one signature, which a call takes without a look-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen.call import warm
from jitgen.call.opaque import opaque
from jitgen.call.outputs import check_distinct, check_outputs, copy_results, may_be_written, outputs_of
from jitgen.call.resolver import BoundLaunch, Resolver
from jitgen.call.signature import check
from jitgen.errors import UnsupportedError
from jitgen.quant.formats import find
from jitgen.runtime.generated import define
from jitgen.runtime.guards import TensorFacts, has_repeated, layout_check
from jitgen.store.default import default_store
from jitgen.trace import autocast
from jitgen.trace.readable import why_unreadable

_MISSING = object()
"""Stands for an argument that a call leaves out."""


class LaunchPlan:
    """The launch plan of one signature: ``plan(*args, out=None)``, made by ``JitFunction.bind``.

    Arguments must have the shapes, strides, dtypes, device and (on a GPU) the alignment to 16 bytes that the plan was
    bound with; a tensor that differs is a ValueError, never a wrong launch. Numbers may differ, except where the trace
    needed their value. ``out`` is a tensor, or a tuple of tensors for a function with several results, into which the
    results are written; it may have any strides, and may share memory with arguments and captured tensors. Kernels
    write to it directly where each of its elements shares memory at most with the element of an input that they read
    for it; elsewhere the results are computed in other memory and copied.
    """

    def __new__(
        cls, resolver: Resolver, leaves: Sequence[Any], tree: Any = None, tokens: Sequence[Any] = ()
    ) -> LaunchPlan:
        """A plan of ``leaves``.

        Args:
            tokens: for each argument the token of a quantised weight, whose tensors are leaves, or None; empty where
                the plan is called with the leaves.
        """
        plan = super().__new__(_callable_class(resolver.name, leaves, tokens))
        plan._prepare(resolver, leaves, tree)
        return plan

    function: Any = None
    """What ``bind`` was called on: the plan of a method keeps its instance alive, as the method does."""

    if TYPE_CHECKING:  # _callable_class writes one for every plan

        def __call__(self, *leaves: Any, out: Any = None) -> Any: ...

    def _prepare(self, resolver: Resolver, leaves: Sequence[Any], tree: Any) -> None:
        check(resolver.name, leaves)
        self._resolver = resolver
        self._tree = tree
        self._bound = tuple(TensorFacts.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        """What it was bound with: the facts alone of tensors, so that their memory can be freed."""
        self._tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._number_indices = [index for index, leaf in enumerate(leaves) if type(leaf) in (int, float)]
        tensors = [leaves[index] for index in self._tensor_indices]
        self._facts: list[TensorFacts] = [self._bound[index] for index in self._tensor_indices]
        self._remainders = [facts.remainder for facts in self._facts] if _addresses_matter(tensors) else []
        self._needs_grad = any(tensor.requires_grad for tensor in tensors)
        found, _ = resolver.resolve(leaves, tree)
        self._bound_launch = found
        self._found_by_out: dict[Any, BoundLaunch] = {(autocast.settings(), None): found}
        """The launches by the state of autocast and the facts of the outputs that the caller allocates, None where
        jitgen does."""
        self._last: tuple[Any, ...] | None = None
        if self._needs_no_checks(found) and not resolver.static_numbers:
            self._last = (layout_check(tensors), found.launch, *self._remainders)
        self._last_out: tuple[Any, ...] | None = None

    def _needs_no_checks(self, found: BoundLaunch) -> bool:
        """Whether equal arguments suffice for the launch."""
        return found.depends_on_arguments_alone and not self._needs_grad

    @property
    def kernels(self) -> tuple[str, ...]:
        """Keys of the compiled kernels this plan launches, in order."""
        found = self._bound_launch
        built = found.specialization.built(found.lowered, default_store())
        return tuple(kernel.key for kernel in built)

    # ---------------------------------------------------------------------------------------------- calls with checks

    def _launch(self, leaves: Sequence[Any], out: Any) -> Any:
        """A call that the generated ``__call__`` did not launch: everything is checked."""
        leaves = [leaf for leaf in leaves if leaf is not _MISSING]
        name = self._resolver.name
        if len(leaves) != len(self._bound):
            raise TypeError(f"the plan of {name} takes {len(self._bound)} arguments, got {len(leaves)}")
        tensors = [leaves[index] for index in self._tensor_indices]
        for index, (leaf, bound) in enumerate(zip(leaves, self._bound, strict=True)):
            if isinstance(bound, TensorFacts):
                self._check_tensor(index, leaf, bound)
            elif type(leaf) is not type(bound) or (index not in self._number_indices and leaf != bound):
                raise ValueError(
                    f"argument {index} of the plan of {name} is {leaf!r}, and the plan was bound with "
                    f"{bound!r}; bind again, or call the function itself"
                )
        check(name, leaves)
        if self._last is not None and has_repeated(tensors):
            self._last = (layout_check(tensors), *self._last[1:])
        changed = [index for index in self._number_indices if leaves[index] != self._bound[index]]
        if changed and self._resolver.static_numbers:
            raise ValueError(
                f"argument {changed[0]} of the plan of {name} is {leaves[changed[0]]!r}, and the plan "
                f"was bound for {self._bound[changed[0]]!r}; bind again, or call the function itself"
            )
        if out is None:
            return self._start(*self._find(leaves, None), leaves, tensors, ())
        outputs = outputs_of(out)
        check_distinct(name, outputs)
        found, captured = self._find(leaves, outputs)
        if may_be_written(outputs, [*tensors, *captured], found.lowered.laid_out.read_elsewhere):
            self._start(found, captured, leaves, tensors, outputs)
        else:
            copy_results(self._start(*self._find(leaves, None), leaves, tensors, ()), outputs)
        return out

    def _start(
        self,
        found: BoundLaunch,
        captured: Sequence[torch.Tensor],
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
    ) -> Any:
        inputs, numbers = [*tensors, *captured], [leaves[index] for index in self._number_indices]
        addresses = [tensor.data_ptr() for tensor in inputs]
        return found.launch(*inputs, *addresses, *numbers, *out, *(tensor.data_ptr() for tensor in out))

    def _check_tensor(self, index: int, tensor: Any, bound: TensorFacts) -> None:
        name = self._resolver.name
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"argument {index} of the plan of {name} is {type(tensor).__name__}, not a tensor")
        facts = TensorFacts.of(tensor)
        if facts != bound:
            raise ValueError(
                f"argument {index} of the plan of {name} is {facts}; "
                f"the plan was bound for {bound}. Bind again for such arguments, or call the function itself"
            )

    def _find(
        self, leaves: Sequence[Any], out: Sequence[torch.Tensor] | None
    ) -> tuple[BoundLaunch, Sequence[torch.Tensor]]:
        """The launch that writes into tensors laid out as ``out``, which is checked, and the captured tensors."""
        key = autocast.settings(), None if out is None else tuple(map(TensorFacts.of, out))
        found = self._found_by_out.get(key)
        for tensor in out or ():
            if not tensor.data_ptr() and (unreadable := why_unreadable(tensor)) is not None:
                raise UnsupportedError(f"out= of {self._resolver.name}: {unreadable}")
        captured = found.captured_tensors() if found is not None else None
        if found is None or captured is None:
            if out is not None:
                device = self._facts[0].device if self._facts else torch.device("cpu")
                check_outputs(self._resolver.name, self._find(leaves, None)[0].lowered, device, out)
            found, captured = self._resolver.resolve(leaves, self._tree, out or ())
            self._found_by_out[key] = found
        plain = self._last is not None and self._needs_no_checks(found)
        if plain and out is not None and len(out) == 1 and not out[0].requires_grad:
            self._last_out = self._remembered_with_out(found, leaves, out[0])
        return found, captured

    def _remembered_with_out(self, found: BoundLaunch, leaves: Sequence[Any], out: torch.Tensor) -> tuple[Any, ...]:
        """What ``_callable_class`` unpacks in a call with ``out=``."""
        tensors, facts = [leaves[index] for index in self._tensor_indices], TensorFacts.of(out)
        (read_elsewhere,) = found.lowered.laid_out.read_elsewhere
        may_be_out = [
            tensor[:3] == facts[:3] and index not in read_elsewhere for index, tensor in enumerate(self._facts)
        ]
        extents = [facts.extent, *(tensor.extent for tensor in self._facts)]
        remainders = [*self._remainders, facts.remainder] if _addresses_matter(tensors) else []
        return layout_check([*tensors, out]), found.launch, *extents, *may_be_out, *remainders


def _addresses_matter(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a launch is bound for the alignment of its tensors, as a GPU's 16-byte accesses need it."""
    return any(tensor.device.type != "cpu" for tensor in tensors)


# ----------------------------------------------------------------------------------------------- calls without checks


def _callable_class(name: str, leaves: Sequence[Any], tokens: Sequence[Any]) -> type[LaunchPlan]:
    """A ``LaunchPlan`` whose ``__call__`` is generated for these arguments; ``warm.py`` shows its text."""
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    numbers = [index for index, leaf in enumerate(leaves) if type(leaf) in (int, float)]
    arguments = warm.Arguments(len(leaves), tensors, numbers)
    static = {index: leaf for index, leaf in enumerate(leaves) if index not in tensors and index not in numbers}
    same_values = [*(f"type(arg{i}) is kind{i}" for i in numbers), *(f"arg{i} is value{i}" for i in static)]
    ready = " and ".join(["last is not None", "not more", *same_values])
    launch_with_checks = f"self._launch(({', '.join([*arguments.all, '*more'])},), out)"
    text = warm.function_text(
        _header(arguments.all, tokens),
        arguments,
        unreadable="(AttributeError, RuntimeError)",
        inline=launch_with_checks,
        attempts=[
            "if out is None:",
            "    last = self._last",
            f"    if {ready}:",
            *(f"        {line}" for line in _attempt(arguments, leaves)),
            "else:",
            "    last = self._last_out",
            f"    if {ready} and type(out) is Tensor:",
            *(f"        {line}" for line in _attempt_with_out(arguments, leaves)),
        ],
        otherwise=launch_with_checks,
    )
    names: dict[str, Any] = {"Tensor": torch.Tensor, "missing": _MISSING, "refuse": _refuse_weight}
    names |= {f"token{index}": token for index, token in enumerate(tokens)}
    names |= {f"kind{index}": type(leaves[index]) for index in numbers}
    names |= {f"value{index}": leaf for index, leaf in static.items()}
    call: Callable[..., Any] = opaque(define("__call__", f"plan of {name}", text, names))
    return type("LaunchPlan", (LaunchPlan,), {"__call__": call, "__doc__": LaunchPlan.__doc__})


def _attempt(arguments: warm.Arguments, leaves: Sequence[Any]) -> list[str]:
    """The lines that launch into new memory."""
    remainders = _remainder_names(arguments, leaves)
    aligned = [f"{a} & 15 == {r}" for a, r in zip(arguments.addresses, remainders, strict=False)]
    if remainders and _all_aligned(arguments, leaves):  # one comparison for all
        aligned = [f"not ({' | '.join(arguments.addresses)}) & 15"]
    conditions = [*arguments.addresses, *aligned]
    return warm.launch_if_same("last", remainders, arguments.tensor_names, conditions, arguments.launched)


def _attempt_with_out(arguments: warm.Arguments, leaves: Sequence[Any]) -> list[str]:
    """The lines that launch into ``out``."""
    remainders = _remainder_names(arguments, leaves)
    aligned = [f"{a} & 15 == {r}" for a, r in zip(arguments.addresses, remainders, strict=False)]
    if remainders:
        aligned += ["out_address & 15 == out_remainder"]
        remainders += ["out_remainder"]
        if _all_aligned(arguments, leaves):
            aligned = [f"({' | '.join([*arguments.addresses, 'out_address'])}) & 15 == out_remainder"]
    extents = [f"extent{index}" for index in arguments.tensors]
    may_be_out = [f"may_be_out{index}" for index in arguments.tensors]
    # Memory that no input has, or exactly an input's: then an element is read before it is written.
    no_overlap = [
        f"(out_address >= {address} + {extent} or out_address + out_extent <= {address}"
        f" or {may_be} and out_address == {address})"
        for address, extent, may_be in zip(arguments.addresses, extents, may_be_out, strict=True)
    ]
    attempt = warm.launch_if_same(
        "last",
        ["out_extent", *extents, *may_be_out, *remainders],
        [*arguments.tensor_names, "out"],
        [*arguments.addresses, "out_address", *aligned, *no_overlap],
        [*arguments.launched, "out", "out_address"],
        result="out",
    )
    return ["out_address = out.data_ptr()", *attempt]


def _remainder_names(arguments: warm.Arguments, leaves: Sequence[Any]) -> list[str]:
    matter = _addresses_matter([leaves[index] for index in arguments.tensors])
    return [f"remainder{index}" for index in arguments.tensors] if matter else []


def _all_aligned(arguments: warm.Arguments, leaves: Sequence[Any]) -> bool:
    return not any(leaves[index].data_ptr() & 15 for index in arguments.tensors)


def _header(arguments: Sequence[str], tokens: Sequence[Any]) -> list[str]:
    """The first lines of ``__call__``: its parameters, and quantised weights among them unpacked."""
    names = iter(arguments)
    parameters, lines = [], []
    for index, token in enumerate(tokens):
        if token is None:
            parameters.append(next(names))
            continue
        tensors = [next(names) for _ in find(token.format).part_names]
        weight = f"weight{index}"
        parameters.append(weight)
        lines += [
            f"    if getattr({weight}, 'token', None) is not token{index}: refuse({index}, {weight}, token{index})",
            f"    {', '.join(tensors)} = {weight}.parts",
        ]
    if not tokens:
        parameters = list(arguments)
    optional = [f"{parameter}=missing" for parameter in parameters]
    return [f"def __call__({', '.join(['self', *optional])}, *more, out=None):", *lines]


def _refuse_weight(index: int, argument: Any, token: Any) -> None:
    raise ValueError(
        f"argument {index} of the plan is {argument!r:.200}; the plan was bound for a quantised weight of {token}. "
        "Bind again for such a weight, or call the function itself"
    )
