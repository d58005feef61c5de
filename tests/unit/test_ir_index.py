"""The index of a graph, against answers that walk the graph for each question."""

from __future__ import annotations

import itertools
import random

import pytest

from jitgen.ir.analysis import varying, varying_dims
from jitgen.ir.graph import Builder, Guard, Node, equal_sizes, topological
from jitgen.ir.index import Index, Reach
from jitgen.ir.symbols import Expr, symbol
from jitgen.ir.views import Mover


def _random_nodes(seed: int, count: int = 40) -> tuple[Builder, list[Node]]:
    """Nodes of a random graph, each after its inputs."""
    builder, chosen = Builder(), random.Random(seed)
    nodes = [builder.make("input", (), "float32", (7, 5), (number,)) for number in range(3)]
    while len(nodes) < count:
        x, y = chosen.choices(nodes[-8:], k=2)
        op = chosen.choice(("add", "mul", "exp", "reduce"))
        if op == "reduce":
            row = builder.make("reduce", (x,), "float32", (7, 1), ("sum", (1,)))
            nodes.append(builder.make("view", (row,), "float32", (7, 5), ("expand",)))
        else:
            nodes.append(builder.make(op, (x,) if op == "exp" else (x, y), "float32", (7, 5)))
    return builder, nodes


@pytest.mark.parametrize("seed", range(8))
def test_dependencies_and_users_are_those_of_a_walk(seed: int) -> None:
    builder, nodes = _random_nodes(seed)
    index = Index(nodes[-6:-3])
    assert list(index.order) == topological(nodes[-6:-3])
    outside = builder.make("add", (nodes[-1], nodes[-4]), "float32", (7, 5))
    for node, other in itertools.product((*nodes, outside), repeat=2):
        assert index.depends(node, other) == (other in topological([node]))
    for node in index.order:
        assert index.users[node] == [user for user in index.order for child in user.inputs if child is node]


@pytest.mark.parametrize("seed", range(8))
def test_a_reach_is_what_paths_without_stops_lead_to(seed: int) -> None:
    builder, nodes = _random_nodes(seed)
    index = Index(nodes[-4:])
    source, *stops = random.Random(seed).sample(list(index.order), 6)
    reach = Reach(index, [source], lambda node: node is source, lambda node: node in stops)
    outside = builder.make("mul", (nodes[-1], nodes[-2]), "float32", (7, 5))

    def is_reached(node: Node) -> bool:
        return node not in stops and (node is source or any(map(is_reached, node.inputs)))

    for node in (*index.order, outside):
        assert (node in reach) == is_reached(node)


@pytest.mark.parametrize("seed", range(4))
def test_a_node_tells_its_operations_and_the_dimensions_it_varies_along(seed: int) -> None:
    _, nodes = _random_nodes(seed)
    for node in nodes:
        order = topological([node])
        assert node.kinds == {each.kind for each in order}
        assert varying_dims(node) == varying(order)[id(node)]


def test_what_has_nothing_behind_it_is_not_walked_again() -> None:
    builder = Builder()
    tested: list[Node] = []

    def is_exp(node: Node) -> bool:
        tested.append(node)
        return node.op == "exp"

    node = leaf = builder.make("input", (), "float32", (7,), (0,))
    for _ in range(20):
        node = builder.make("neg", (node,), "float32", (7,))
    mover = Mover(builder)
    assert not mover.any_behind([node], is_exp)
    assert len(tested) == 21
    further = builder.make("log", (node,), "float32", (7,))
    assert not mover.any_behind([further], is_exp)
    assert tested[21:] == [further]
    assert mover.any_behind([builder.make("exp", (leaf,), "float32", (7,))], is_exp)
    assert mover.any_behind(
        [builder.make("add", (further, builder.make("exp", (leaf,), "float32", (7,))), "float32", (7,))], is_exp
    )


@pytest.mark.parametrize("seed", range(5))
def test_what_is_behind_another_of_several_values(seed: int) -> None:
    _, nodes = _random_nodes(seed)
    values = [*random.Random(seed).choices(nodes, k=8), nodes[-1], nodes[-1]]
    is_behind_another = Index(values).behind_several(values)
    for number, value in enumerate(values):
        others = topological([*values[:number], *values[number + 1 :]])
        for on in nodes:
            assert is_behind_another(value, on) == (on in others)


@pytest.mark.parametrize("seed", range(5))
def test_equal_sizes_have_one_representative(seed: int) -> None:
    """A class of sizes has its number, or else its first size by name."""
    choose = random.Random(seed)
    names = [f"s{number}_0" for number in range(9)]
    pairs = [choose.sample(names, 2) for _ in range(6)]
    numbered = choose.choice(names)
    guards = [Guard(Expr("eq", (symbol(left), symbol(right)), "bool"), True) for left, right in pairs]
    guards.insert(choose.randrange(7), Guard(Expr("eq", (symbol(numbered), 5), "bool"), True))
    classes = [{name} for name in names]
    for left, right in pairs:
        joined = set().union(*(each for each in classes if left in each or right in each))
        classes = [each for each in classes if each.isdisjoint(joined)] + [joined]
    equal = equal_sizes(guards, names)
    for each in classes:
        wanted = 5 if numbered in each else symbol(min(each))
        assert {equal.get(name, symbol(name)) for name in each} == {wanted}
