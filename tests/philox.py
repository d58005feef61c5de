"""Philox 4x32-10 in Python integers (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011)."""

from __future__ import annotations

WORD = 2**32


def words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b // WORD) ^ c[1] ^ k[0], b % WORD, (a // WORD) ^ c[3] ^ k[1], a % WORD]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c[0], c[1], c[2], c[3]


def bits(index: int, seed: int, offset: int) -> int:
    """What the operation ``philox`` gives for int64 operands, as an unsigned number of 64 bits."""
    halves = [(number % WORD, (number // WORD) % WORD) for number in (offset, index, seed)]
    first, second, _, _ = words((*halves[0], *halves[1]), halves[2])
    return first | second << 32
