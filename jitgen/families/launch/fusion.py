"""Decides which pointwise operations before and behind a user's kernel are computed in it.

What is computed pointwise of a result and of tensors that do not depend on the launch is computed where the result is
stored; the values among it that anything else reads are stored there. An operand that is computed pointwise, for this
launch alone, is computed where it is loaded, if that is cheap enough to be done again at each load. A result that held
values before the launch stays as it is, since the kernel need not store all of its elements.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitgen.codegen.c_text.definition import definition_of
from jitgen.codegen.c_text.hooks import EPILOGUE, PROLOGUE, hook_refusal
from jitgen.device import Device
from jitgen.families.family import Partition, Question
from jitgen.families.launch import NAME, accumulators, splices
from jitgen.families.launch.layout import parameter_of
from jitgen.ir import symbols
from jitgen.ir.attributes import CHANNELS_LAST, KernelText
from jitgen.ir.graph import Node, Shape, topological, walked
from jitgen.ir.index import Index
from jitgen.ir.launches import TENSOR, TRITON
from jitgen.ir.nodes import IOTA, LAUNCH, VIEW
from jitgen.ir.ops import flops_of
from jitgen.ir.program import Decision
from jitgen.kernel.operands import item_size

MOST_OPERATIONS = 64
"""Operations that a rule has at most, so that a kernel is compiled in seconds."""
MOST_TENSORS = 12
"""Tensors that a rule reads at most."""
MOST_STORED = 3
"""Values of a rule that are stored at most."""
FLOPS_OF_A_LOAD = 32
"""Operations that a kernel may do at each element it loads. One with products loads an element once for each of many
tiles: there it is ``FLOPS_OF_A_TILE``."""
FLOPS_OF_A_TILE = 4
"""Operations that a kernel with products may do at each element it loads."""
_NARROW_ELEMENTS = 2**31
"""Elements of a tensor from which on an offset needs 64 bits."""


@dataclass(frozen=True)
class Spliced(Question):
    """Asks whether a pointwise rule is computed in a user's kernel.

    Attributes:
        where: the parameter, and whether it is loaded or stored there.
        refusal: why not; empty where nothing is against it.
        elements: of the tensor.
        sums: of a product that a thread of the kernel holds when it stores.
        flops, moved: operations of an element, and bytes that a kernel of its own moves for it.
    """

    placements = ("in the kernel that you wrote", "a kernel of its own")
    where: str
    refusal: str
    elements: Any
    sums: int = 0
    flops: int = 0
    moved: int = 0

    def __str__(self) -> str:
        return f"what is computed {self.where}"

    def decide(self, device: Device) -> Decision:
        """Returns whether it is."""
        if self.refusal:
            return Decision(False, self.refusal)
        if self.elements >= _NARROW_ELEMENTS:
            return Decision(False, "the tensor's offsets need 64 bits")
        if self.sums >= accumulators.MANY:
            within = self.elements * self.flops / (device.rates.vector * accumulators.SHARE_OF_VECTOR)
            apart = self.elements * self.moved / device.rates.memory + device.rates.launch
            if within > apart:
                return Decision(
                    False,
                    f"its {self.flops} operations an element, behind a product of which each thread holds {self.sums} "
                    f"sums, would take about {within * 1e6:.0f} us, and a kernel of its own {apart * 1e6:.0f} us",
                )
        return Decision(True, "the kernel uses the pointer for nothing else")


def _asked(node: Node, number: int, kind: str, refusal: str, partition: Partition, rule: Sequence[Node] = ()) -> bool:
    """Returns whether a rule stands at the loads, or the stores, of an operand of the launch ``node``.

    Args:
        rule: of one that is stored, its nodes.
    """
    own = node.attrs.kernel
    parameter = parameter_of(node.attrs, number)
    tensors = [name for name, how, value in node.attrs.parameters if how == TENSOR and value == number]
    if not refusal and len(tensors) > 1:
        refusal = f"it gets the tensor as {' and '.join(tensors)}"
    refusal = refusal or refusal_in(own, parameter, kind)
    where = "behind" if kind == splices.STORE else "before"
    elements = symbols.product(node.inputs[number].shape)
    question = Spliced(f"{where} {parameter} of {own.entry}", refusal, elements)
    if rule and not refusal:
        leaves = {leaf for other in rule for child in other.inputs if child not in rule for leaf in _tensors_of(child)}
        of_size = [leaf for leaf in leaves if leaf.shape == rule[-1].shape]
        moved = sum(item_size(one.dtype) for one in (rule[0], rule[-1], *of_size))
        flops, sums = sum(flops_of(one.op) for one in rule), accumulators.sums_of_a_thread(node.attrs)
        question = replace(question, sums=sums, flops=flops, moved=moved)
    return partition.decide(NAME, question).fused


def refusal_in(own: KernelText, parameter: str, kind: str) -> str:
    """Explains why no rule may stand at the loads, or stores, of ``parameter``; empty if one may."""
    if own.language == TRITON:
        return splices.refusal(own.text, own.entry, parameter, kind)
    definition = definition_of(own.text, own.entry, language=own.language)
    hook = PROLOGUE if kind == splices.LOAD else EPILOGUE
    defined = [f"#define {flag[2:].replace('=', ' ', 1)}" for flag in own.flags if flag.startswith("-D")]
    return hook_refusal(definition, parameter, hook, [*dict(own.headers).values(), *defined])


# -------------------------------------------------------------------------------------------------- behind a result


def stored_values(result: Node, siblings: Sequence[Node], index: Index, partition: Partition) -> list[Node]:
    """Returns the values that the kernel stores in place of ``result``: that itself, where nothing is computed in it.

    Args:
        siblings: all results of the launch.
        index: of all values of the graph.
    """
    rule = _rule(result, siblings, index)
    if not any(node.kind.is_pointwise for node in rule):
        return [result]
    stored = _read_elsewhere(rule, index)
    refusal = ""
    if result.attrs.result not in result.attrs.unset:
        refusal = "the tensor had values before, and the kernel need not store all elements"
    elif result.dtype.startswith("float8"):
        refusal = f"its elements are {result.dtype}"
    elif len(stored) > MOST_STORED:
        refusal = f"{len(stored)} of its values are read elsewhere"
    if _asked(result, result.attrs.result, splices.STORE, refusal, partition, rule):
        return stored
    return [result]


def _rule(result: Node, siblings: Sequence[Node], index: Index) -> list[Node]:
    """Returns ``result`` and what is computed pointwise of it, each after what it is computed of; in its own shape, or
    in one other of as many elements, which have the same offsets."""
    rule = [result]
    known = {result}
    tensors: set[Node] = set()
    shape: Shape | None = None
    for node in index.order:
        if not known.intersection(node.inputs) or node in known:
            continue
        if keeps_offsets(node) and not node.inputs[0].kind.is_pointwise:
            rule.append(node)
            known.add(node)
            continue
        others = [child for child in node.inputs if child not in known]
        joins = node.kind.is_pointwise and node.shape == (shape or node.shape) and node.attrs != CHANNELS_LAST
        joins = joins and all(child.shape == node.shape for child in node.inputs if child in known)
        joins = joins and not any(index.depends(child, on) for child in others for on in siblings)
        read = tensors | {leaf for child in others for leaf in _tensors_of(child)}
        if joins and len(read) <= MOST_TENSORS and len(rule) < MOST_OPERATIONS:
            rule.append(node)
            known.add(node)
            tensors, shape = read, node.shape
    return rule


def keeps_offsets(node: Node) -> bool:
    """Returns whether ``node`` is a view whose elements have the offsets of its source's, where that is row-major."""
    return node.kind is VIEW and node.attrs.kind in ("reshape", "squeeze", "unsqueeze")


def _tensors_of(root: Node) -> set[Node]:
    """Returns the tensors that a rule reads for ``root``."""
    nodes = walked([root], _pointwise_operands)
    return {node for node in nodes if not (node.kind.is_pointwise or node.under_views.kind.is_number)}


def _pointwise_operands(node: Node) -> Sequence[Node]:
    return node.inputs if node.kind.is_pointwise else ()


def _read_elsewhere(rule: Sequence[Node], index: Index) -> list[Node]:
    """Returns the values of ``rule`` that are results of the graph, or that anything but the rule reads; the launch's
    result in place of a view of it."""
    own, roots = set(rule), set(index.roots)
    read = [node for node in rule if node in roots or any(user not in own for user in index.users[node])]
    return list(dict.fromkeys(node if node.kind.is_pointwise else rule[0] for node in read))


def is_result(node: Node) -> bool:
    """Returns whether ``node`` is a launch's result, or a view of one whose elements have the same offsets."""
    while keeps_offsets(node):
        node = node.inputs[0]
    return node.kind is LAUNCH


def is_fused(value: Node) -> bool:
    """Returns whether ``value`` is computed pointwise of a launch's result, perhaps in another shape of as many
    elements, and of tensors."""
    if sum(node.kind is LAUNCH for node in topological([value])) != 1:
        return False

    def is_known(node: Node) -> bool:
        return is_result(node) or node.kind.is_number or node.is_in_memory or node.under_views.kind is IOTA

    nodes = walked([value], lambda node: () if is_known(node) else node.inputs)
    return all(
        node.shape == value.shape if is_result(node) else is_known(node) or node.kind.is_pointwise for node in nodes
    )


# ------------------------------------------------------------------------------------------------- before an operand


def is_computed_at_loads(node: Node, number: int, users: Collection[Node], partition: Partition) -> bool:
    """Returns whether operand ``number`` of the launch ``node`` is computed where the kernel loads it.

    Args:
        users: what reads the operand in the graph.
    """
    operand = node.inputs[number]
    if operand.is_in_memory or not operand.kind.is_pointwise:
        return False
    launch = node.inputs, node.attrs._replace(result=-1)
    others = [
        user for user in users if user.kind is not LAUNCH or (user.inputs, user.attrs._replace(result=-1)) != launch
    ]
    computed = [node for node in walked([operand], _pointwise_operands) if node.kind.is_pointwise]
    flops = sum(flops_of(one.op) for one in computed)
    has_products = accumulators.has_products(node.attrs.kernel.text)
    most = FLOPS_OF_A_TILE if has_products else FLOPS_OF_A_LOAD
    tensors = _tensors_of(operand)
    refusal = ""
    if others:
        refusal = "something else reads it too"
    elif flops > most or len(computed) > MOST_OPERATIONS:
        refusal = f"it takes {flops} operations, which each load of an element would repeat"
    elif (
        operand.dtype.startswith("float8")
        or len(tensors) > MOST_TENSORS
        or not any(one.kind is not IOTA and one.under_views.kind is not IOTA for one in tensors)
    ):
        refusal = "its operands are too many, of 8-bit floats, or no tensors"
    return _asked(node, number, splices.LOAD, refusal, partition)
