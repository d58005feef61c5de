"""Says which integers a kernel that a user wrote gets where schedules are timed: those of the recorded call, or what
the user states.

No rule of ``trial_inputs`` can tell what such a kernel makes of an integer: with lengths of 0 it has no work, and other
numbers may lead it outside of its tensors. So the integers of a recorded call are in its entry of a manifest, in the
member ``integers``, which is absent without any: pairs of the number of an input and its elements, row-major. What
``jitgen tune --integers`` states takes their place as ``{"least": 1, "most": 4096}``, from which elements are drawn.
Schedules are timed at the sizes of a recorded call alone, since nobody can tell either which sizes such a kernel takes
to be equal (``tune._problems_of``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from jitgen.deploy import trial_inputs
from jitgen.deploy.trial_inputs import INDICES, Filler
from jitgen.errors import UnsupportedError
from jitgen.ir import graph as graphs
from jitgen.ir.graph import Graph, Node, topological, walked
from jitgen.ir.launches import TENSOR
from jitgen.ir.nodes import CAST, INPUT, LAUNCH, VIEW
from jitgen.spec import DTYPES

MOST_RECORDED = 2**15
"""Elements of an input that are recorded at most: larger ones, such as packed codes, would swell a manifest."""

LARGEST = 2**63 - 1
"""The largest integer that torch takes as the end of what it draws from: as such it is not drawn itself."""

Range = tuple[int, int]
"""The least and the largest of the integers that are drawn."""


def of_call(graph: Graph, tensors: Sequence[Any]) -> list[list[Any]]:
    """Returns the member ``integers`` of a call's entry.

    Args:
        graph: as it was traced.
        tensors: for every input its tensor, or what else describes it: of that nothing is recorded.
    """
    numbers = {
        node.attrs.number
        for launch in _launches(graph)
        for node in walked(launch.inputs, lambda node: node.inputs if node.dtype in INDICES else ())
        if node.kind is INPUT and node.dtype in INDICES
    }
    return [
        [number, tensors[number].detach().reshape(-1).tolist()]
        for number in sorted(numbers)
        if number < len(tensors)
        and isinstance(tensors[number], torch.Tensor)
        and tensors[number].device.type != "meta"
        and tensors[number].numel() <= MOST_RECORDED
    ]


def names(graph: Graph) -> Iterator[tuple[str, int]]:
    """Yields the parameters of users' kernels that get integer inputs of ``graph`` as they are, each with the number of
    the input."""
    for launch in _launches(graph):
        for name, how, operand in launch.attrs.parameters:
            node = launch.inputs[operand] if how == TENSOR else launch
            while node.kind in (VIEW, CAST):
                node = node.inputs[0]
            if node.kind is INPUT and node.dtype in INDICES:
                yield name, node.attrs.number


def stated(entry: Mapping[str, Any], graph: Graph, ranges: Mapping[str, Range]) -> Mapping[str, Any]:
    """Returns ``entry``, of ``graph``, with these ``ranges`` of parameters by name.

    Raises:
        UnsupportedError: a range has numbers that the dtype of its input has not.
    """
    integers = dict(entry.get("integers", ()))
    for name, number in names(graph):
        if name in ranges:
            (least, most), dtype = ranges[name], graph.inputs[number].dtype
            limits = torch.iinfo(DTYPES[dtype])
            if least < limits.min or most > limits.max:
                raise UnsupportedError(
                    f"{name}={least}..{most} are no integers of {dtype}, which {entry['name']} takes"
                )
            integers[number] = {"least": least, "most": most}
    return {**entry, "integers": [[number, integers[number]] for number in sorted(integers)]} if integers else entry


def has_own_kernels(entry: Mapping[str, Any]) -> bool:
    """Returns whether a kernel that a user wrote is launched in the graph of ``entry``."""
    return any(node["op"] == LAUNCH.name for node in entry["graph"]["nodes"])


def undecided(entry: Mapping[str, Any]) -> list[str]:
    """Returns the parameters of kernels that users wrote whose integers are 0 because nobody has said what they are."""
    if not has_own_kernels(entry):
        return []
    graph, decided = graphs.from_json(entry["graph"]), fillers(entry)
    zeros = trial_inputs.undecided(graph, entry["environment"])
    return [name for name, number in names(graph) if number in zeros and number not in decided]


def fillers(entry: Mapping[str, Any]) -> dict[int, Filler]:
    """Returns, by the numbers of inputs of ``entry``, what fills them with what was recorded or stated."""
    return {
        number: _drawn(values["least"], values["most"]) if isinstance(values, dict) else _recorded(values)
        for number, values in entry.get("integers", ())
    }


def _launches(graph: Graph) -> Iterator[Node]:
    return (node for node in topological(graph.results) if node.kind is LAUNCH)


def _drawn(least: int, most: int) -> Filler:
    if least == most:
        return lambda tensor, _: tensor.fill_(least)
    return lambda tensor, generator: tensor.random_(least, min(most + 1, LARGEST), generator=generator)


def _recorded(values: Sequence[int]) -> Filler:
    return lambda tensor, _: tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))
