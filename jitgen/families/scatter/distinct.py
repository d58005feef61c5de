"""Proves that the values of a scatter choose distinct elements, so that no order among them matters.

A thread then has one value, as in any pointwise kernel, which is how the last family of the registry computes the
scatter: an append to a cache is one region beside others. Where indices are data, it is not known, except along
dimensions with one value (a decoder's step).

An index is *consecutive* along a dimension where it is a position there plus what does not vary along it. Modulo a
number that is no less than the dimension's size, consecutive integers stay distinct: a ring buffer. So do they where
negative ones count from the end.
"""

from __future__ import annotations

from jitgen.families.family import Partition
from jitgen.ir import symbols
from jitgen.ir.analysis import varying_dims
from jitgen.ir.graph import Node
from jitgen.ir.nodes import CAST, IOTA
from jitgen.ir.symbols import Size


def is_distinct(node: Node, partition: Partition) -> bool:
    """Returns whether no two values of the scatter ``node`` choose one element. What it takes of sizes becomes a
    guard."""
    _, value, *indices = node.inputs
    coordinates = node.attrs.coordinates
    unresolved = {dim for dim, size in enumerate(value.shape) if dim not in coordinates and size != 1}
    while unresolved:
        distinct = None
        for index in indices:
            # Beside dimensions whose positions the other indices tell, an index that varies along one more tells that.
            own = varying_dims(index) & unresolved
            if len(own) == 1 and _is_injective(index, min(own), value.shape[min(own)], partition):
                distinct = own
        if distinct is None:
            return False
        unresolved -= distinct
    return True


def _is_injective(index: Node, dim: int, size: Size, partition: Partition) -> bool:
    """Returns whether different positions along ``dim``, of ``size``, give different values of ``index``."""
    index = _uncast(index)
    if _is_consecutive(index, dim):
        return True
    if index.op == "remainder":
        inner, modulus = index.inputs
        return _is_consecutive(inner, dim) and _is_at_most(size, modulus, partition)
    if index.op == "where":  # negative ones from the end
        condition, wrapped, plain = index.inputs
        if condition.op == "lt" and wrapped.op == "add" and wrapped.inputs[0] is plain is condition.inputs[0]:
            inner = _uncast(plain)
            if inner.op == "remainder" and inner.inputs[1].kind.is_number:  # by a size: none is negative
                return _is_injective(inner, dim, size, partition)
            return _is_consecutive(plain, dim) and _is_at_most(size, wrapped.inputs[1], partition)
    return False


def _is_consecutive(node: Node, dim: int) -> bool:
    node = _uncast(node)
    if node.op in ("add", "sub"):
        left, right = node.inputs
        if not _varies(right, dim):
            return _is_consecutive(left, dim)
        return node.op == "add" and not _varies(left, dim) and _is_consecutive(right, dim)
    # Any views but a reshape keep an iota's steps alike, and they are no zeros where it varies.
    movements = [attrs for attrs, _ in node.movements]
    in_steps_of_one = all(kind != "reshape" and (kind != "slice" or rest[-1] == 1) for kind, *rest in movements)
    return node.under_views.kind is IOTA and in_steps_of_one and _varies(node, dim)


def _varies(node: Node, dim: int) -> bool:
    return dim in varying_dims(node)


def _uncast(node: Node) -> Node:
    """Returns ``node`` before a cast from one integer to a wider one, which keeps values apart."""
    while node.kind is CAST and node.dtype == "int64" and node.inputs[0].dtype in ("int32", "int64"):
        node = node.inputs[0]
    return node


def _is_at_most(size: Size, bound: Node, partition: Partition) -> bool:
    """Returns whether ``size`` is no more than the number ``bound``, which then is a guard."""
    if not bound.kind.is_number:
        return False
    return partition.mover.decide(symbols.compare("le", size, bound.attrs.value))
