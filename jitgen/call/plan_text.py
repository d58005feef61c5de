"""Generates the ``__call__`` of a ``LaunchPlan`` (``plan.py``) for the kinds of its arguments: see ``warm.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from jitgen.call import observers, warm
from jitgen.call.signature import is_object
from jitgen.codegen.python import block
from jitgen.errors import UnsupportedError
from jitgen.frames import opaque
from jitgen.quant.formats import find

MISSING = object()
"""Stands for an argument that a call leaves out."""


@dataclass(frozen=True)
class PlanFacts:
    """Holds what the text of a plan depends on.

    Attributes:
        leaves: the arguments it is bound for.
        tokens: for each argument the token of a quantised weight, whose tensors are leaves, or None; empty where the
            plan is called with the leaves.
        by_value: whether numbers must have the value they were bound with.
    """

    leaves: Sequence[Any]
    tokens: Sequence[Any]
    by_value: bool

    @property
    def tensors(self) -> list[int]:
        return [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def numbers(self) -> list[int]:
        return [index for index, leaf in enumerate(self.leaves) if type(leaf) in (int, float)]

    @property
    def static(self) -> list[int]:
        """Lists the arguments that must be what they were; objects are guarded where the launch is looked for."""
        varying = {*self.tensors, *(() if self.by_value else self.numbers)}
        varying |= {index for index, leaf in enumerate(self.leaves) if is_object(type(leaf))}
        return [index for index in range(len(self.leaves)) if index not in varying]

    @property
    def addresses_matter(self) -> bool:
        """Returns whether a launch is bound for the alignment of its tensors, as a GPU's 16-byte accesses need it."""
        return any(self.leaves[index].device.type != "cpu" for index in self.tensors)

    @property
    def all_aligned(self) -> bool:
        return not any(self.leaves[index].data_ptr() & 15 for index in self.tensors)

    @property
    def arguments(self) -> warm.Arguments:
        return warm.Arguments(len(self.leaves), self.tensors, self.numbers)


def exact(value: Any) -> Any:
    """Returns a key for ``value`` that tells signed zeros apart, and for which a NaN equals itself."""
    return value.hex() if type(value) is float else value


def make_call(name: str, facts: PlanFacts) -> Callable[..., Any]:
    """Generates ``(self, *arguments, out=None) -> results``.

    It launches what the plan remembers where the call fits that, and calls ``self._elsewhere`` where it does not.
    ``self._last`` is (layout check, launch, what must be asked at each call, *remainders of addresses by 16, on a GPU),
    and ``self._last_out`` (layout check of the tensors and ``out``, launch, what must be asked, bytes that captured
    tensors span, that ``out`` and the arguments do, *whether each argument may be ``out``, *remainders).
    """
    arguments = facts.arguments
    parameters, unpacking = _parameters(facts)
    elsewhere = f"self._elsewhere(({', '.join([*parameters, '*more'])},), out)"
    same = [f"type(arg{i}) is kind{i}" for i in facts.numbers]
    same += [f"(arg{i} is value{i} or type(arg{i}) is kind{i} and exact(arg{i}) == value{i})" for i in facts.static]
    ready = " and ".join(["last is not None", "not more", *same])
    optional = [f"{parameter}=missing" for parameter in parameters]
    unpack: list[str] = []
    for index, tensors in unpacking.items():
        stored = f"stored{index}"
        unpack += [f"{stored} = getattr({parameters[index]}, 'stored', None)"]
        unpack += [f"if {stored} is None or {stored}.token is not token{index}: return {elsewhere}"]
        unpack += [f"{', '.join(tensors)} = {stored}.tensors"]
    ready_for_out = f"{ready} and type(out) is Tensor and not out.is_nested"
    function = warm.function(
        "__call__",
        ["self", *optional, "*more", "out=None"],
        unpack,
        arguments,
        unreadable="(AttributeError, RuntimeError, UnsupportedError)",
        inline=elsewhere,
        attempts=[
            *block("if out is None:", ["last = self._last", *block(f"if {ready}:", _attempt(facts))]),
            *block("else:", ["last = self._last_out", *block(f"if {ready_for_out}:", _attempt_with_out(facts))]),
        ],
        otherwise=elsewhere,
    )
    names: dict[str, Any] = {"Tensor": torch.Tensor, "missing": MISSING, "UnsupportedError": UnsupportedError}
    names |= {"exact": exact, "data_ptr": torch.Tensor.data_ptr, "disjoint": _disjoint}
    names |= {"forward_ad": forward_ad, "modes": observers.modes, "is_recording": observers.is_recording}
    names |= {f"token{index}": token for index, token in enumerate(facts.tokens)}
    names |= {f"kind{index}": type(facts.leaves[index]) for index in (*facts.numbers, *facts.static)}
    names |= {f"value{index}": exact(facts.leaves[index]) for index in facts.static}
    call: Callable[..., Any] = opaque(function.define(f"plan of {name}", names))
    return call


def _parameters(facts: PlanFacts) -> tuple[list[str], dict[int, list[str]]]:
    """Returns the parameters, and the leaves of each quantised weight by the weight's index."""
    names = iter(facts.arguments.all)
    if not facts.tokens:
        return list(names), {}
    parameters, unpacking = [], {}
    for index, token in enumerate(facts.tokens):
        if token is not None:
            unpacking[index] = [next(names) for _ in find(token.format).tensor_names]
        parameters.append(next(names) if token is None else f"weight{index}")
    return parameters, unpacking


def _attempt(facts: PlanFacts) -> list[str]:
    """Returns the lines that launch into new memory."""
    arguments, remainders = facts.arguments, _remainder_names(facts)
    aligned = [f"{a} & 15 == {r}" for a, r in zip(arguments.addresses, remainders, strict=False)]
    if remainders and facts.all_aligned:  # one comparison for all
        aligned = [f"not ({' | '.join(arguments.addresses)}) & 15"]
    return warm.launch_if_same("last", remainders, arguments.tensor_names, [*arguments.addresses, *aligned], arguments)


def _attempt_with_out(facts: PlanFacts) -> list[str]:
    """Returns the lines that launch into ``out``."""
    arguments, remainders = facts.arguments, _remainder_names(facts)
    aligned = [f"{a} & 15 == {r}" for a, r in zip(arguments.addresses, remainders, strict=False)]
    if remainders:
        aligned += ["out_address & 15 == out_remainder"]
        remainders += ["out_remainder"]
        if facts.all_aligned:
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
        ["captured_extents", "out_extent", *extents, *may_be_out, *remainders],
        [*arguments.tensor_names, "out"],
        [*arguments.addresses, "out_address", *aligned, *no_overlap],
        arguments,
        out=["out", "out_address"],
        captured_condition="disjoint(out_address, out_extent, captured_addresses, captured_extents)",
    )
    return ["out_address = out.data_ptr()", *attempt]


def _remainder_names(facts: PlanFacts) -> list[str]:
    return [f"remainder{index}" for index in facts.tensors] if facts.addresses_matter else []


def _disjoint(address: int, extent: int, addresses: Sequence[int], extents: Sequence[int]) -> bool:
    """Returns whether ``extent`` bytes at ``address`` overlap none of the ranges at ``addresses``."""
    for other, span in zip(addresses, extents, strict=True):
        if address < other + span and other < address + extent:
            return False
    return True
