"""Draws a graph in layers: a node lies one layer below the lowest of its inputs (Sugiyama et al., 1981).

Positions are pixels of an SVG; the page's template draws them. Neighbour: ``page.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitgen.ir.graph import Graph, Node, topological

WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 176, 44, 18, 30, 10
MOST_NODES = 200
"""Nodes. A longer graph is a list, since nobody would follow the edges of a drawing."""
SWEEPS = 4
"""How often the order within the layers is improved, downwards and upwards each."""


@dataclass(frozen=True)
class Drawn:
    """Represents a node: its number in the list, position of its upper left corner, texts, and numbers of its
    inputs."""

    number: int
    x: float
    y: float
    op: str
    kind: str
    attrs: str
    location: str | None
    inputs: tuple[int, ...]
    result: bool


@dataclass(frozen=True)
class Drawing:
    """Holds nodes in topological order, the paths of the edges, and the size; no paths if it is a list only."""

    nodes: tuple[Drawn, ...]
    paths: tuple[str, ...]
    width: float
    height: float
    is_drawn: bool


def draw(graph: Graph) -> Drawing:
    """Draws ``graph``, or lists it if it has more than ``MOST_NODES`` nodes."""
    nodes = topological(graph.results)
    number = {id(node): position for position, node in enumerate(nodes)}
    inputs = [tuple(number[id(one)] for one in node.inputs) for node in nodes]
    drawn = len(nodes) <= MOST_NODES
    positions = _positions(inputs) if drawn else [(0.0, 0.0)] * len(nodes)
    results = {id(node) for node in graph.results}
    made = tuple(
        Drawn(position, x, y, node.op, _kind(node), _attrs(node), node.location, inputs[position], id(node) in results)
        for position, (node, (x, y)) in enumerate(zip(nodes, positions, strict=True))
    )
    paths = tuple(
        _path(positions[source], positions[user]) for user, sources in enumerate(inputs) for source in sources
    )
    width = max((x for x, _ in positions), default=0.0) + WIDTH + MARGIN
    height = max((y for _, y in positions), default=0.0) + HEIGHT + MARGIN
    return Drawing(made, paths if drawn else (), width, height, drawn)


def _kind(node: Node) -> str:
    return f"{node.dtype}[{', '.join(map(str, node.shape))}]"


def _attrs(node: Node) -> str:
    return ", ".join(map(str, node.attrs))


def _positions(inputs: Sequence[tuple[int, ...]]) -> list[tuple[float, float]]:
    """Returns the upper left corner of each node."""
    layer: list[int] = []
    for sources in inputs:
        layer.append(1 + max((layer[source] for source in sources), default=-1))
    users: list[list[int]] = [[] for _ in inputs]
    for user, sources in enumerate(inputs):
        for source in sources:
            users[source].append(user)
    # What has no inputs, such as a constant, lies just above the first of its users.
    for node, sources in enumerate(inputs):
        if not sources and users[node]:
            layer[node] = min(layer[user] for user in users[node]) - 1
    rows: list[list[int]] = [[] for _ in range(max(layer, default=-1) + 1)]
    for node, depth in enumerate(layer):
        rows[depth].append(node)
    across = [0.0] * len(inputs)
    for row in rows:
        _spread(row, across)
    for _ in range(SWEEPS):
        for order, neighbours in ((rows, inputs), (rows[::-1], users)):
            for row in order:
                wanted = {node: _mean([across[other] for other in neighbours[node]], across[node]) for node in row}
                row.sort(key=wanted.__getitem__)
                _spread(row, across)
    left = min(across, default=0.0)
    return [
        (round(MARGIN + (x - left) * (WIDTH + ACROSS), 1), float(MARGIN + depth * (HEIGHT + DOWN)))
        for x, depth in zip(across, layer, strict=True)
    ]


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _spread(row: Sequence[int], across: list[float]) -> None:
    """Spreads the nodes of a layer next to one another, about the middle."""
    for position, node in enumerate(row):
        across[node] = position - (len(row) - 1) / 2


def _path(source: tuple[float, float], user: tuple[float, float]) -> str:
    x, y = source[0] + WIDTH / 2, source[1] + HEIGHT
    to_x, to_y = user[0] + WIDTH / 2, user[1]
    return f"M{x:g},{y:g} C{x:g},{y + DOWN / 2:g} {to_x:g},{to_y - DOWN / 2:g} {to_x:g},{to_y:g}"
