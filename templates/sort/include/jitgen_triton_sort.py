# Rows sorted by a program, by the order of ir/sorts.py of jitgen. Elements are compared together with their places in
# the row, of which no two are the same, so that the network, which is not stable by itself, has one right result. Room
# that no element takes has the place 2147483647, and comes last.
import triton
import triton.language as tl


# Whether x comes before y, and not only for its place. NaN is beyond every number.
@triton.jit
def precedes(x, y, DESCENDING: tl.constexpr):
    if DESCENDING:
        return (x > y) | ((x != x) & (y == y))
    else:
        return (x < y) | ((x == x) & (y != y))


# The other element of every pair along axis 1, which has two.
@triton.jit
def partner(x):
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        return (tl.sum(bits, 1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        return (tl.sum(bits, 1, keep_dims=True) - bits).to(tl.float64, bitcast=True)
    else:
        return (tl.sum(x, 1, keep_dims=True) - x).to(x.dtype)


# One step of a bitonic merge into runs of SPAN elements, every other one backward: elements APART are put in order.
@triton.jit
def exchanged(element, place, ROWS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, APART: tl.constexpr, DESCENDING: tl.constexpr):
    pairs: tl.constexpr = ROWS * TILE // (2 * APART)
    x = tl.reshape(element, [pairs, 2, APART])
    at = tl.reshape(place, [pairs, 2, APART])
    y = partner(x)
    other = partner(at)
    first = precedes(y, x, DESCENDING) | ((precedes(x, y, DESCENDING) == 0) & (other < at))
    first = tl.where((at == 2147483647) | (other == 2147483647), other < at, first)
    right = tl.arange(0, 2)[None, :, None] == 1
    backward = ((tl.arange(0, pairs)[:, None, None] * (2 * APART)) & (TILE - 1) & SPAN) != 0
    taken = first ^ right ^ backward
    x = tl.where(taken, y, x)
    at = tl.where(taken, other, at)
    return tl.reshape(x, [ROWS, TILE]), tl.reshape(at, [ROWS, TILE])


# Elements [ROWS, TILE] and their places, each row sorted by bitonic merges (Batcher, "Sorting networks and their
# applications", 1968).
@triton.jit
def sorted_rows(element, place, ROWS: tl.constexpr, TILE: tl.constexpr, LOG: tl.constexpr, DESCENDING: tl.constexpr):
    for merge in tl.static_range(1, LOG + 1):
        for step in tl.static_range(0, merge):
            element, place = exchanged(element, place, ROWS, TILE, 2**merge, 2 ** (merge - 1 - step), DESCENDING)
    return element, place
