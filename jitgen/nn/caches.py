"""Defines ``KVCache`` and ``PagedKVCache``: a decoder's keys and values, whose methods are generated kernels.

A step of a layer is ``append`` and ``attend``; after the last layer, ``advance`` says that the tokens are there. The
lengths are in memory on the device and no method reads them on the host, so that a captured CUDA graph of a step serves
every length. A function of one's own that does more in one kernel (rotate, split, append) takes the buffers as
arguments and calls ``jitgen.nn.functional`` within ``@jitgen.jit``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jitgen.call.function import JitFunction
from jitgen.nn import functional
from jitgen.quant.codes import CODES, SIGNED

_QUANTIZED = tuple(CODES[name].dtype for name in SIGNED)


def _write(keys: Any, values: Any, k: Any, v: Any, start: Any, ring: bool) -> None:
    functional.append(keys, k.to(keys.dtype), start, ring)
    functional.append(values, v.to(values.dtype), start, ring)


def _write_codes(keys: Any, values: Any, of_keys: Any, of_values: Any, k: Any, v: Any, start: Any, ring: bool) -> None:
    for codes, scales, new in ((keys, of_keys, k), (values, of_values, v)):
        made, scale = functional.quantized(new, codes.dtype)
        functional.append(codes, made, start, ring)
        functional.append(scales, scale, start, ring)


def _attend(q: Any, keys: Any, values: Any, start: Any, window: Any, ring: bool, scale: Any) -> Any:
    return functional.attend(q, keys.to(q.dtype), values.to(q.dtype), start, window=window, ring=ring, scale=scale)


def _attend_codes(
    q: Any, keys: Any, values: Any, of_keys: Any, of_values: Any, start: Any, window: Any, ring: bool, scale: Any
) -> Any:
    k = functional.dequantized(keys, of_keys, q.dtype)
    v = functional.dequantized(values, of_values, q.dtype)
    return functional.attend(q, k, v, start, window=window, ring=ring, scale=scale)


def _require_same(keys: Any, values: Any, k: Any, v: Any) -> None:
    """Raises ValueError if keys and values differ in more than the last size. Traced, it is a guard: places are
    shared."""
    if keys.shape[:3] != values.shape[:3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} are of different tokens")


def _write_pages(keys: Any, values: Any, k: Any, v: Any, table: Any, start: Any) -> None:
    _require_same(keys, values, k, v)
    page, slot = functional.slots_in_pages(table, start, k.shape[2], keys.shape[2])
    functional.append_pages(keys, k.to(keys.dtype), page, slot)
    functional.append_pages(values, v.to(values.dtype), page, slot)


def _write_page_codes(
    keys: Any, values: Any, of_keys: Any, of_values: Any, k: Any, v: Any, table: Any, start: Any
) -> None:
    _require_same(keys, values, k, v)
    _require_same(keys, of_keys, k, v)
    _require_same(keys, of_values, k, v)
    page, slot = functional.slots_in_pages(table, start, k.shape[2], keys.shape[2])
    for codes, scales, new in ((keys, of_keys, k), (values, of_values, v)):
        made, scale = functional.quantized(new, codes.dtype)
        functional.append_pages(codes, made, page, slot)
        functional.append_pages(scales, scale, page, slot)


def _attend_pages(q: Any, keys: Any, values: Any, table: Any, start: Any, window: Any, scale: Any) -> Any:
    k, v = functional.paged(keys, table).to(q.dtype), functional.paged(values, table).to(q.dtype)
    return functional.attend(q, k, v, start, window=window, scale=scale)


def _attend_page_codes(
    q: Any, keys: Any, values: Any, of_keys: Any, of_values: Any, table: Any, start: Any, window: Any, scale: Any
) -> Any:
    k = functional.dequantized(functional.paged(keys, table), functional.paged(of_keys, table), q.dtype)
    v = functional.dequantized(functional.paged(values, table), functional.paged(of_values, table), q.dtype)
    return functional.attend(q, k, v, start, window=window, scale=scale)


class _Cache(torch.nn.Module):
    """Provides what both caches have.

    Buffers:
        keys, values: in the dtype of the cache.
        key_scales, value_scales: float32, one for each token and head; None where keys are no codes.
        lengths: (B) int64, the tokens of each sequence before the current step.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    lengths: torch.Tensor

    def __init__(
        self,
        batch: int,
        shape: tuple[int, int, int],
        depth: int,
        value_depth: int | None,
        dtype: torch.dtype,
        device: Any,
        backend: str | None,
    ):
        super().__init__()
        if not dtype.is_floating_point and dtype not in _QUANTIZED:
            raise ValueError(f"a cache keeps floats, or codes of {', '.join(map(str, _QUANTIZED))}, not {dtype}")
        width = depth if value_depth is None else value_depth
        self.register_buffer("keys", torch.zeros((*shape, depth), dtype=dtype, device=device))
        self.register_buffer("values", torch.zeros((*shape, width), dtype=dtype, device=device))
        is_quantized = dtype in _QUANTIZED
        for name in ("key_scales", "value_scales"):
            self.register_buffer(name, torch.ones(shape, device=device) if is_quantized else None)
        self.register_buffer("lengths", torch.zeros(batch, dtype=torch.int64, device=device))
        self._backend = backend
        self._functions: dict[Any, JitFunction] = {}

    def _call(self, function: Callable[..., Any], *args: Any, default: str | None = None) -> Any:
        """Returns ``function`` by the backend that the user asked for, else by ``default``; None means that of
        ``jitgen.jit``."""
        backend = self._backend or default
        if (function, backend) not in self._functions:
            self._functions[function, backend] = JitFunction(function, backend=backend)
        return self._functions[function, backend](*args)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns the keys and values, with their scales if there are any."""
        scales = () if self.key_scales is None or self.value_scales is None else (self.key_scales, self.value_scales)
        return (self.keys, self.values, *scales)

    def _append(self, function: Callable[..., Any], k: torch.Tensor, v: torch.Tensor, *args: Any) -> None:
        heads, wanted = self.keys.shape[1], (self.keys.shape[3], self.values.shape[3])
        for name, new, depth in (("k", k, wanted[0]), ("v", v, wanted[1])):
            if new.dim() != 4 or (*new.shape[:2], new.shape[3]) != (len(self.lengths), heads, depth):
                raise ValueError(
                    f"{name} is {tuple(new.shape)}, but the cache has {len(self.lengths)} sequences and {heads} heads "
                    f"of {depth} elements: ({len(self.lengths)}, {heads}, tokens, {depth})"
                )
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"k has {k.shape[2]} tokens and v {v.shape[2]}: {tuple(k.shape)} and {tuple(v.shape)}")
        self._require_room(k.shape[2])
        try:
            self._call(function, *self._tensors(), k, v, *args, default="triton" if self.keys.is_cuda else None)
        except IndexError as error:
            raise IndexError(f"{k.shape[2]} more tokens do not fit: {self._room()} ({error})") from error

    def _require_room(self, tokens: int) -> None:
        """Raises ValueError if no state of the cache has places for so many tokens at once."""

    def _room(self) -> str:
        """Says how many tokens there may be, and what makes them more."""
        raise NotImplementedError

    def advance(self, tokens: int = 1) -> None:
        """Counts ``tokens`` appended ones, after all layers that share ``lengths`` have read them."""
        self.lengths += tokens

    def reset(self) -> None:
        """Forgets all tokens."""
        self.lengths.zero_()


class KVCache(_Cache):
    """Holds keys and values, each sequence in places of its own.

    Args:
        batch, heads, length, depth: B, heads of keys, positions and elements of a key.
        value_depth: elements of a value, where they are others.
        dtype: of what is kept; int8 and float8 are codes, with a scale for each token and head.
        window: positions that a row sees at most, its own included. Then the cache is a ring buffer of ``window`` - 1
            positions and the tokens of a step, and ``length`` counts for nothing.
        tokens: with a window, tokens of a step at most.
        backend: of the kernels, as for ``jitgen.jit``.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        length: int,
        depth: int,
        *,
        value_depth: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        window: int | None = None,
        tokens: int = 1,
        backend: str | None = None,
    ):
        slots = length if window is None else window - 1 + tokens
        super().__init__(batch, (batch, heads, slots), depth, value_depth, dtype, device, backend)
        self.window = window

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes ``k`` (B, heads, T, depth) and ``v`` behind the tokens that are there; ``advance`` counts them.

        Raises:
            ValueError: shapes other than the cache's; more tokens than a ring buffer keeps beside its window.
            IndexError: on the CPU, more tokens than the cache has positions for. A kernel on a GPU leaves out those
                that have no place, because the lengths are not read on the host.
        """
        function = _write if self.key_scales is None else _write_codes
        self._append(function, k, v, self.lengths, self.window is not None)

    def _require_room(self, tokens: int) -> None:
        if self.window is not None and tokens > self.keys.shape[2] - self.window + 1:
            raise ValueError(
                f"{tokens} tokens at once, but the ring buffer has {self.keys.shape[2] - self.window + 1} places "
                "beside its window; make it with a larger tokens="
            )

    def _room(self) -> str:
        return f"a sequence of the cache has {self.keys.shape[2]} positions; make it with a larger length"

    def attend(self, q: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Computes causal attention (B, H, T, E) of ``q`` (B, H, T, depth), the tokens that were appended last."""
        function = _attend if self.key_scales is None else _attend_codes
        ring = self.window is not None
        return self._call(function, q, *self._tensors(), self.lengths, self.window, ring, scale)


class PagedKVCache(_Cache):
    """Holds keys and values in pages, which the table gives to sequences.

    Args:
        batch, heads, depth: as of ``KVCache``.
        pages, page_size: of the memory that the sequences share.
        blocks: pages of a sequence at most.
        value_depth, dtype, device, backend: as of ``KVCache``.

    Buffers:
        table: (B, blocks) int64, the page of each block of positions. The user fills it; no page belongs to two
            sequences that are appended to.
    """

    table: torch.Tensor

    def __init__(
        self,
        batch: int,
        heads: int,
        pages: int,
        page_size: int,
        blocks: int,
        depth: int,
        *,
        value_depth: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        backend: str | None = None,
    ):
        super().__init__(batch, (pages, heads, page_size), depth, value_depth, dtype, device, backend)
        self.register_buffer("table", torch.zeros((batch, blocks), dtype=torch.int64, device=device))

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes ``k`` (B, heads, T, depth) and ``v`` behind the tokens that are there; ``advance`` counts them.

        Raises:
            ValueError, IndexError: as of ``KVCache``.
        """
        function = _write_pages if self.key_scales is None else _write_page_codes
        self._append(function, k, v, self.table, self.lengths)

    def _room(self) -> str:
        pages, _, size, _ = self.keys.shape
        return (
            f"a sequence of the cache has {self.table.shape[1]} blocks of {size} positions and the table names "
            f"pages below {pages}; make it with more blocks, or mend the table"
        )

    def attend(self, q: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Computes causal attention (B, H, T, E) of ``q`` (B, H, T, depth), the tokens that were appended last."""
        function = _attend_pages if self.key_scales is None else _attend_page_codes
        return self._call(function, q, *self._tensors(), self.table, self.lengths, None, scale)
