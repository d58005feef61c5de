"""Claims attention, with the pointwise work after it and the row values that its kernel stores too.

An attention region iterates over ``(lead..., m, e)``: batch and heads, rows of the query, columns of the value. The
keys ``n`` and the depth ``d`` are inner and sequential. Its stages are ``contract over d, map, reduce over n, contract
over n, map``. ``claim`` finds it in these steps:

1. ``match.py`` recognises products as attention; ``Partition.decide`` is asked about each, with what speaks against it.
2. One that is behind another operation than pointwise ones and views is materialized, with what follows it pointwise.
3. The others become stores: views after the result are undone, and what multiplies the probabilities of a row
   multiplies the result instead. Results that are values of the same rows (log-sum-exp) become stores beside it.
4. Heads that share keys, repeated by ``repeat_interleave`` or the like, become a dimension of their own, along which
   keys and values have stride 0.
5. Operands are tensors; what is not is materialized, except a query that is computed pointwise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.device import Device
from jitgen.families.attention.forward import NAME
from jitgen.families.attention.forward.match import Attention, matched, obstacle, row_reductions, spread_rows
from jitgen.families.attention.forward.results import last_of, undone
from jitgen.families.family import Claim, Partition, Question
from jitgen.ir.analysis import at_own_coordinates
from jitgen.ir.exponentials import exponential_behind
from jitgen.ir.graph import Movement, Node, kinds_of, topological, walked
from jitgen.ir.index import Index, Reach
from jitgen.ir.nodes import CONTRACT, EXP, EXP2, VIEW
from jitgen.ir.program import Decision
from jitgen.ir.regions import Region, Store
from jitgen.ir.views import Mover

MOST_DEPTH, MOST_WIDTH = 576, 512
"""The largest D and E of a kernel, those of DeepSeek's latent keys: a tile of keys and values is in the cache, or in
registers, as a whole."""
MOST_CUDA_DEPTH = 256
"""The same for the cuda dialect, whose sums are in the registers of one warpgroup."""


@dataclass(frozen=True)
class Fusion(Question):
    """Asks whether an attention is one kernel (``Partition.decide``).

    Attributes:
        rows, keys, depth, width: M, N, D and E. Sizes are symbolic until ``at`` makes them numbers.
        dtypes: of the keys and of the values.
        operations: of the rule of scores.
        obstacle: what makes it impossible whatever the sizes; empty where nothing does.
    """

    placements = ("one kernel", "products and a softmax")
    rows: Any
    keys: Any
    depth: Any
    width: Any
    dtypes: tuple[str, str]
    operations: tuple[str, ...]
    obstacle: str

    def __str__(self) -> str:
        rule = f", scores by {', '.join(self.operations)}" if self.operations else ""
        return f"attention of {self.rows} rows to {self.keys} keys, {self.depth} deep, {self.width} wide{rule}"


def decide(question: Any, device: Device) -> Decision:
    """Decides whether the device's dialect computes ``question``, a ``Fusion`` or a ``Reading``, in one kernel."""
    if not isinstance(question, Fusion):
        from jitgen.families.attention.forward.reading import reads_computed

        return reads_computed(question, device)
    if question.obstacle:
        return Decision(False, question.obstacle)
    if question.width == 0:
        return Decision(False, "values of no width leave only what is computed beside them")
    if device.dialect == "cuda":
        against = _cuda_obstacle(question, device)
        return Decision(not against, against or "scores and probabilities stay in the kernel", bool(against))
    if question.depth > MOST_DEPTH or question.width > MOST_WIDTH:
        return Decision(False, f"keys of more than {MOST_DEPTH} elements, or values of more than {MOST_WIDTH}")
    if device.dialect == "triton" and question.dtypes[1] == "float64":
        return Decision(False, "float64 has no tensor cores")
    return Decision(True, "scores and probabilities stay in the kernel")


def _cuda_obstacle(question: Fusion, device: Device) -> str:
    """Explains why the cuda dialect has no kernel for ``question``; empty if it has one."""
    if device.target.arch != "sm_90a":
        return f"the cuda dialect has an attention kernel for sm_90a, not for {device.target}; backend='triton' has one"
    if device.batch_invariant:
        return (
            "in the cuda dialect's kernel a row's tiles of keys and its rescaling depend on the rows that come with it"
        )
    if not set(question.dtypes) <= {"bfloat16", "float16"}:
        return "the cuda dialect's kernel takes keys and values of 16 bits; backend='triton' has one for float32"
    if max(question.depth, question.width) > MOST_CUDA_DEPTH:
        return f"heads of more than {MOST_CUDA_DEPTH} elements; backend='triton' takes up to {MOST_WIDTH}"
    return ""


def rewrite_values(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Rewrites attention in ``values`` to the spelling that ``match.py`` knows; see ``spellings.py``."""
    if not has_exponentials(values, partition.mover):
        return values
    from jitgen.families.attention.forward.spellings import respelt

    images = respelt(values, partition.mover)
    return [images[id(value)] for value in values]


def has_exponentials(values: Sequence[Node], mover: Mover) -> bool:
    """Returns whether ``values`` have a product of exponentials, without which there is no attention in them."""
    kinds = kinds_of(values)
    if CONTRACT not in kinds or kinds.isdisjoint((EXP, EXP2)):
        return False
    return mover.any_behind(values, _is_product_of_exponentials)


def _is_product_of_exponentials(node: Node) -> bool:
    return node.kind is CONTRACT and exponential_behind(node.inputs[0])


def claim(values: Sequence[Node], partition: Partition) -> Claim:
    """Claims attention regions for those of ``values`` that end in one; the others are left with attention
    materialized."""
    mover = partition.mover
    if not has_exponentials(values, mover):
        return Claim([], values)
    index, fused = _with_hidden_in_memory(values, partition)
    if not fused:
        return Claim([], index.roots)
    from jitgen.families.attention.forward.region import region_of

    regions: list[Region] = []
    rest: list[Node | None] = list(index.roots)
    for attention in fused:
        stores, row_stores = [], []
        for position, value in enumerate(index.roots):
            store = undone(position, value, attention, index, mover) if index.depends(value, attention.result) else None
            row = _row_store(position, value, attention, index, mover) if store is None else None
            stores += [store] if store else []
            row_stores += [row] if row else []
            rest[position] = None if store or row else rest[position]
        regions.append(region_of(attention, stores, row_stores, partition))
    return Claim(regions, rest)


def plan(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Reads what follows hidden attention from temporaries, before values are stored for products: each of these would
    have all attention behind it again. Where products with exponentials of products are no attention, such as those of
    gradients, other families are to claim first."""
    if not has_exponentials(values, partition.mover):
        return values
    respelt = rewrite_values(values, partition)
    if _has_other_products(Index(respelt)):
        return values
    index, fused = _with_hidden_in_memory(respelt, partition)
    return _with_rows_beside(index, fused, partition)


def _with_rows_beside(index: Index, attentions: Sequence[Attention], partition: Partition) -> Sequence[Node]:
    """Stores values of rows, such as those that a backward reads, by the kernel of the attention whose result is in a
    temporary; by themselves they would be a product and a reduction of all scores."""
    temporaries, memo = partition.temporaries, dict[int, Node]()
    for attention in attentions:
        stored = [value for value in index.roots if value is attention.result and temporaries.get(value) is not None]
        rows = [value for value in index.roots if temporaries.get(value) is None and id(value) not in memo]
        rows = [value for value in rows if _row_store(0, value, attention, index, partition.mover) is not None]
        if stored and rows:
            memo |= zip(map(id, rows), temporaries.materialize_together([stored[0], *rows])[1:], strict=True)
    return [memo.get(id(value), value) for value in index.roots]


def _has_other_products(index: Index) -> bool:
    """Returns whether a product that is no attention has an operand that is computed from an exponential of a product
    by pointwise operations and views."""
    products: set[Node] = set()  # and what is computed from these so
    powers: set[Node] = set()
    for node in index.order:
        if node.kind is CONTRACT:
            if not powers.isdisjoint(node.inputs) and matched(node) is None:
                return True
            products.add(node)
        elif node.kind.is_pointwise or node.kind is VIEW:
            if not products.isdisjoint(node.inputs):
                products.add(node)
            if not powers.isdisjoint(node.inputs) or (node.kind in (EXP, EXP2) and node in products):
                powers.add(node)
    return False


def _with_hidden_in_memory(values: Sequence[Node], partition: Partition) -> tuple[Index, list[Attention]]:
    """Makes ``values`` read temporaries where attention is hidden in them; returns them, with the attention that they
    end in."""
    index, mover = Index(values), partition.mover
    while True:
        matches = [attention for node in index.order if (attention := matched(node)) is not None]
        fused = [
            attention_ for attention_ in matches if partition.decide(NAME, fusion_of(attention_, index, mover)).fused
        ]
        memo = _hidden_in_memory(index, fused, len(fused) == len(matches), partition)
        if not memo:
            return index, fused
        index = Index([mover.substituted(node, memo) for node in index.roots])


def _materialized(nodes: Sequence[Node], partition: Partition) -> list[Node]:
    """Materialises ``nodes``: what follows an attention, and values of its rows that its kernel stores too."""
    return partition.temporaries.materialize_together(nodes) if len(nodes) > 1 else [partition.materialize(nodes[0])]


def _hidden_in_memory(
    index: Index, attentions: Sequence[Attention], all_fused: bool, partition: Partition
) -> dict[int, Node]:
    """Materialises what follows attention that is hidden in ``index``; returns the temporaries, and what nodes on the
    way have become, by the ids of what they replace.

    With a temporary in it a graph is another one, in which attention is looked for anew. Where what is materialized has
    nothing of the attention that remains, that is the same then, and the whole chain that a decoder is takes one walk.

    Args:
        found: the attention that becomes kernels.
        all_fused: whether ``index`` has no other attention.
    """
    memo: dict[int, Node] = {}
    mover = partition.mover
    while (hidden := _first_hidden(index, attentions, mover)) is not None:
        attention, last = hidden
        rows = [value for value in index.roots if value is not last and not index.depends(value, attention.result)]
        rows = [value for value in rows if _row_store(0, value, attention, index, mover) is not None]
        values = [mover.substituted(value, memo) for value in (last, *rows)]
        memo |= zip(map(id, (last, *rows)), _materialized(values, partition), strict=True)
        first, *attentions = attentions
        if not all_fused or attention is not first or any(_meets(other, first, last, index) for other in attentions):
            break
    return memo


def _meets(attention: Attention, before: Attention, last: Node, index: Index) -> bool:
    """Returns whether ``last``, what follows ``before``, has any of ``attention`` in it, or ``before`` is in its
    scores."""
    own = at_own_coordinates(attention.scores, CONTRACT)
    return index.depends(last, attention.product) or any(product is before.result for product in own)


def fusion_of(attention: Attention, index: Index, mover: Mover) -> Fusion:
    """Asks the question about ``attention``, where the roots of ``index`` are computed."""
    ends, stops = _ends(attention, index, mover)
    against = obstacle(attention, index, ends, stops) or _stray_row_value(attention, index, ends, stops, mover) or ""
    rows, keys, width, depth = (
        *attention.scores.shape[-2:],
        attention.result.shape[-1],
        attention.product.inputs[0].shape[-1],
    )
    inner = topological([attention.scores], leaves={CONTRACT})
    operations = tuple(node.op for node in inner if node.kind.is_pointwise)
    dtypes = (attention.product.inputs[1].dtype, attention.result.inputs[1].dtype)
    return Fusion(rows, keys, depth, width, dtypes, operations, against)


def _ends(attention: Attention, index: Index, mover: Mover) -> tuple[list[Node], set[Node]]:
    """Lists what this attention region writes: the results that end in it, with trailing views undone, or its
    temporary. Also these as ``index`` has them."""
    ends, stops = [], set()
    for value in index.roots:
        if not index.depends(value, attention.result):
            continue
        store, last = undone(0, value, attention, index, mover), value
        if store is None:
            last = last_of(attention, index, (), mover)
            store = undone(0, last, attention, index, mover)
        ends.append(last if store is None else store.value)
        stops.add(last)
    return ends, stops


# -------------------------------------------------------------------------------------------------- values of the rows


def _row_reach(attention: Attention, index: Index, stops: Collection[Node] = ()) -> Reach:
    """Returns what is computed from a maximum or sum of the rows of ``attention`` otherwise than through its result, or
    through the nodes ``stops``."""
    sources = row_reductions(attention, index)
    return Reach(index, sources, attention.is_row_reduction, lambda node: node is attention.result or node in stops)


def _row_store(position: int, value: Node, attention: Attention, index: Index, mover: Mover) -> Store | None:
    """Makes the store of ``value``, computed pointwise from row values of ``attention``, in the shape (lead..., M, 1);
    None if it is something else."""
    column = (*attention.scores.shape[:-1], 1)
    movements: tuple[Movement, ...] = ()
    if value.shape == column[:-1]:
        movements = ((("unsqueeze", len(value.shape)), column),)
        value = mover.move(value, *movements[0])
    if (
        value.shape != column
        or index.depends(value, attention.result)
        or value not in (reach := _row_reach(attention, index))
    ):
        return None
    # Down to the reductions, which no view may be in front of.
    for node in walked([value], lambda node: () if attention.is_row_reduction(node) else node.inputs):
        if not (node.kind.is_pointwise or attention.is_row_reduction(node)) and node in reach:
            return None
    return Store(position, value, movements)


def _stray_row_value(
    attention: Attention, index: Index, ends: Sequence[Node], stops: Collection[Node], mover: Mover
) -> str | None:
    """Explains why ``attention`` is no kernel if something besides its ends, and its row results, uses a value of its
    rows."""
    reach = _row_reach(attention, index, stops)
    behind = [value for value in index.roots if value in reach]
    whole = all(undone(0, end, attention, index, mover) is not None for end in ends)
    # Other views of a row's value than to spread it along the result, which the kernel does not compute.
    whole = whole and not any(end in _row_reach(attention, index, spread_rows(end, attention)) for end in ends)
    if whole and not behind:
        return None
    # They are stores beside the result, or temporaries beside it where the result is one.
    if whole and ends and all(_row_store(0, value, attention, index, mover) is not None for value in behind):
        return None
    reach = _row_reach(attention, index)
    used = behind or any(end in reach for end in ends)
    return "a maximum or sum of its rows is used by another kernel" if used else None


def _first_hidden(index: Index, attentions: Sequence[Attention], mover: Mover) -> tuple[Attention, Node] | None:
    """Returns what to materialize first: an attention that is no result by pointwise operations and views alone, and
    what follows it; None if all are. Of several in one result the first stays."""
    taken: set[Node] = set()
    for attention in attentions:
        ends = [value for value in index.roots if index.depends(value, attention.result)]
        if taken.isdisjoint(ends) and all(undone(0, end, attention, index, mover) is not None for end in ends):
            taken.update(ends)
            continue
        return attention, last_of(attention, index, attentions, mover)
    return None
