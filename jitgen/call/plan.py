"""Defines ``LaunchPlan``, the launch of one signature, which a call takes without a look-up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from jitgen.call import observers, plan_text
from jitgen.call.bound import BoundLaunch
from jitgen.call.outputs import (
    check_distinct,
    check_outputs,
    copy_results,
    described_results,
    may_be_written,
    outputs_of,
)
from jitgen.call.plan_text import MISSING, PlanFacts, exact
from jitgen.call.resolver import Resolver, after_capture
from jitgen.call.signature import Call, check, is_object
from jitgen.call.specialization import guarded
from jitgen.call.table import LaunchTable
from jitgen.errors import UnsupportedError
from jitgen.runtime import inference
from jitgen.runtime.guards import TensorFacts, has_repeated, layout_check
from jitgen.store.default import default_store
from jitgen.trace import autocast
from jitgen.trace.journal import changes_stay
from jitgen.trace.readable import refuse_tangents, why_unreadable


class LaunchPlan:
    """Launches one signature: ``plan(*args, out=None)``, made by ``JitFunction.bind``.

    Arguments must have the shapes, strides, dtypes, device and (on a GPU) the alignment to 16 bytes that the plan was
    bound with; a tensor that differs is a ValueError, never a wrong launch. Numbers may differ, except where the trace
    needed their value. ``out`` is a tensor, or a tuple of tensors for a function with several results, into which the
    results are written; it may have any strides, and may share memory with arguments and captured tensors. Kernels
    write to it directly where each of its elements shares memory at most with the element of an input that they read
    for it; elsewhere the results are computed in other memory and copied.
    """

    def __new__(
        cls,
        resolver: Resolver,
        call: Call,
        tokens: Sequence[Any] = (),
        elsewhere: Callable[[tuple[Any, ...], Any], Any] | None = None,
    ) -> LaunchPlan:
        """Makes a plan for calls like ``call``, which was checked.

        Args:
            tokens: for each argument the token of a quantised weight, whose tensors are leaves, or None; empty where
                the plan is called with the leaves.
            elsewhere: takes the arguments and ``out`` of a call that the generated ``__call__`` does not launch; by
                default every fact of that call is checked.
        """
        bound, _ = resolver.resolve(call)
        facts = PlanFacts(call.leaves, tokens, by_value=bool(resolver.static_numbers))
        generated = plan_text.make_call(resolver.name, facts)
        made = type("LaunchPlan", (LaunchPlan,), {"__call__": generated, "__doc__": LaunchPlan.__doc__})
        plan: LaunchPlan = super().__new__(made)
        if elsewhere is not None:
            plan._elsewhere = elsewhere  # type: ignore[assignment, method-assign]
        plan._prepare(resolver, bound, facts, call.tree)
        return plan

    function: Any = None
    """The function that ``bind`` was called on; the plan of a method keeps its instance alive, as the method does."""

    if TYPE_CHECKING:  # plan_text.py writes one for every plan

        def __call__(self, *leaves: Any, out: Any = None) -> Any: ...

    def _prepare(self, resolver: Resolver, bound: BoundLaunch, facts: PlanFacts, tree: Any) -> None:
        self._resolver = resolver
        self._tree = tree
        self._tokens = tuple(facts.tokens)
        self._bound = tuple(
            TensorFacts.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in facts.leaves
        )
        """The call it was bound with, as facts without tensors, so that their memory can be freed."""
        self._number_indices = facts.numbers
        self._by_value = facts.by_value
        tensors = [facts.leaves[index] for index in facts.tensors]
        self._tensor_facts: list[TensorFacts] = [self._bound[index] for index in facts.tensors]
        self._addresses_matter = facts.addresses_matter
        self._bound_launch = bound
        self._launches: LaunchTable[BoundLaunch] = LaunchTable()
        """The launches, by the state of autocast and the facts of the outputs that the caller allocates (None if jitgen
        does)."""
        self._needs_grad = any(tensor.requires_grad for tensor in tensors)
        self._last: tuple[Any, ...] | None = None
        self._last_out: tuple[Any, ...] | None = None
        self._launches.add(_key(None), bound)
        self._try_next(bound, tensors, None)

    def _try_next(
        self, bound: BoundLaunch, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> None:
        """Makes ``bound`` the launch that the next call tries."""
        remainders = [tensor.remainder for tensor in self._tensor_facts] if self._addresses_matter else []
        current = bound.current(self._needs_grad)
        if out is None:
            self._last = (layout_check(tensors), bound.launch, current, *remainders)
        elif len(out) == 1 and not out[0].requires_grad:
            written, (read_elsewhere,) = TensorFacts.from_tensor(out[0]), bound.lowered.laid_out.read_elsewhere
            extents = [written.extent, *(tensor.extent for tensor in self._tensor_facts)]
            may_be_out = [t[:3] == written[:3] and i not in read_elsewhere for i, t in enumerate(self._tensor_facts)]
            remainders += [written.remainder] if self._addresses_matter else []
            check = layout_check([*tensors, out[0]])
            self._last_out = (
                *(check, bound.launch, current, bound.captured_extents),
                *(*extents, *may_be_out, *remainders),
            )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the launch plan of {self._resolver.name} is neither copied nor pickled: it holds addresses of this "
            "process; copy the function, and bind again"
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """Returns the keys of the compiled kernels that this plan launches, in order."""
        bound = self._bound_launch
        built = bound.specialization.built(bound.lowered, default_store())
        return tuple(kernel.key for kernel in built)

    # ---------------------------------------------------------------------------------------------- calls with checks

    def _elsewhere(self, values: tuple[Any, ...], out: Any) -> Any:
        """Makes a call that the generated ``__call__`` did not launch."""
        leaves: list[Any] = []
        for index, value in enumerate(values):
            token = self._tokens[index] if index < len(self._tokens) else None
            stored: Any = getattr(value, "stored", None)
            if token is not None and getattr(stored, "token", None) is not token:
                raise ValueError(
                    f"argument {index} of the plan is {value!r:.200}; the plan was bound for a quantised weight of "
                    f"{token}. Bind again for such a weight, or call the function itself"
                )
            leaves += [value] if token is None else stored.tensors
        return self.launch(leaves, out)

    def launch(self, leaves: Sequence[Any], out: Any) -> Any:
        """Makes a call with all checks, given the leaves of its arguments."""
        leaves = [leaf for leaf in leaves if leaf is not MISSING]
        name = self._resolver.name
        observers.refuse_proxies(name)
        if len(leaves) != len(self._bound):
            raise TypeError(f"the plan of {name} takes {len(self._bound)} arguments, got {len(leaves)}")
        for index, (leaf, bound) in enumerate(zip(leaves, self._bound, strict=True)):
            varies = index in self._number_indices and not self._by_value
            if isinstance(bound, TensorFacts):
                self._check_tensor(index, leaf, bound)
            elif type(leaf) is not type(bound) or (
                not varies and not is_object(type(leaf)) and exact(leaf) != exact(bound)
            ):
                raise ValueError(
                    f"argument {index} of the plan of {name} is {leaf!r}, and the plan was bound with "
                    f"{bound!r}; bind again, or call the function itself"
                )
        return self.run(check(name, leaves, self._tree), out)

    def run(self, call: Call, out: Any) -> Any:
        """Makes a call that was checked, and that differs from the bound one in ``out`` alone."""
        name = self._resolver.name
        if self._last is not None and has_repeated(call.tensors):
            self._last = (layout_check(call.tensors), *self._last[1:])
        if out is None:
            with changes_stay():
                return self._start(*self._find(call, None), call, ())
        outputs = outputs_of(out)
        check_distinct(name, outputs)
        for tensor in outputs:  # a layout check tells such tensors from others
            inference.refuse(f"the plan of {name}", tensor)
        direct = self._find(call, outputs) if self._writes_results() else None
        if direct and may_be_written(outputs, [*call.tensors, *direct[1]], direct[0].lowered.laid_out.read_elsewhere):
            self._start(*direct, call, outputs)
        else:
            copy_results(name, self._start(*self._find(call, None), call, ()), call.device, outputs)
        return out

    def _writes_results(self) -> bool:
        """Returns whether kernels can write to ``out=``, which they cannot if a call has further results that the
        function keeps, or if zones around its results are checked."""
        bound = self._bound_launch
        if bound.specialization.traced.changes is not None or any(map(guarded, bound.lowered.program.kernels)):
            return False
        return described_results(self._resolver.name, bound.lowered) is not None

    def _start(
        self, bound: BoundLaunch, captured: Sequence[torch.Tensor], call: Call, out: Sequence[torch.Tensor]
    ) -> Any:
        inputs = [*call.tensors, *captured]
        refuse_tangents(self._resolver.name, (*inputs, *out))
        addresses = [tensor.data_ptr() for tensor in inputs]
        return bound.launch(*inputs, *addresses, *call.numbers, *out, *(tensor.data_ptr() for tensor in out))

    def _check_tensor(self, index: int, tensor: Any, bound: TensorFacts) -> None:
        name = self._resolver.name
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"argument {index} of the plan of {name} is {type(tensor).__name__}, not a tensor")
        if tensor.is_nested:
            raise UnsupportedError(f"argument {index} of the plan of {name}: {why_unreadable(tensor)}")
        facts = TensorFacts.from_tensor(tensor)
        if facts != bound:
            raise ValueError(
                f"argument {index} of the plan of {name} is {facts}; "
                f"the plan was bound for {bound}. Bind again for such arguments, or call the function itself"
            )

    def _find(self, call: Call, out: Sequence[torch.Tensor] | None) -> tuple[BoundLaunch, Sequence[torch.Tensor]]:
        """Finds the launch that writes into tensors laid out as ``out``, which was checked, and the captured
        tensors."""
        for tensor in out or ():
            if not tensor.data_ptr() and (unreadable := why_unreadable(tensor)) is not None:
                raise UnsupportedError(f"out= of {self._resolver.name}: {unreadable}")
        key = _key(out)
        known = self._launches.fitting(key, call.leaves)
        if known is None:
            if out is not None:
                name, lowered = self._resolver.name, self._find(call, None)[0].lowered
                check_outputs(name, described_results(name, lowered) or [], call.device, out)
            known = after_capture(functools.partial(self._resolved, key, call, out or ()))
        self._try_next(known[0], call.tensors, out)
        return known

    def _resolved(self, key: Any, call: Call, out: Sequence[torch.Tensor]) -> tuple[BoundLaunch, list[torch.Tensor]]:
        """Resolves a new call, and remembers how it is launched."""
        known = self._resolver.resolve(call, out)
        self._launches.add(key, known[0])
        return known


def _key(out: Sequence[torch.Tensor] | None) -> Any:
    return autocast.settings(), None if out is None else tuple(map(TensorFacts.from_tensor, out))
