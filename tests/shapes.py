"""Tensors that lie in memory in every way, and functions that move and update them in every way, for several tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

LENGTHS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 1000, 1023, 1024, 1025, 4097)


def leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, (list, tuple)) else [value]


def twin(value: Any, device: str = "cpu") -> Any:
    """A copy with the same strides, in memory of its own on ``device``."""
    if isinstance(value, (list, tuple)):
        return type(value)(twin(part, device) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage().clone()).to(device)
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def data(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


BROADCASTS = [
    ((4, 5), (5,)),
    ((4, 1), (1, 5)),
    ((3, 1, 5), (4, 1)),
    ((1,), (2, 3)),
    ((), (2, 3)),
    ((2, 1, 3, 1), (1, 4, 1, 5)),
    ((17, 1), (17, 33)),
    ((1, 1), (1, 1)),
]


def strided_cases() -> dict[str, torch.Tensor]:
    base = data(24, 40)
    image = data(2, 6, 4, 10)
    return {
        "contiguous": base[:6, :10].contiguous(),
        "rows of more": base[:6, :10],
        "every other column": base[:6, :20:2],
        "every other row": base[:12:2, :10],
        "transposed": base[:10, :6].t(),
        "expanded row": base[:1, :10].expand(6, 10),
        "expanded column": base[:6, :1].expand(6, 10),
        "expanded scalar": base[:1, :1].expand(6, 10),
        "overlapping windows": base.flatten().as_strided((6, 10), (1, 1)),
        "overlapping rows": base.flatten().as_strided((6, 10), (4, 1), 3),
        "column of a batch": image[0, :, :, 0].contiguous().as_strided((6, 10), (4, 0)),
        "unaligned": base.flatten()[1:61].view(6, 10),
    }


MOVEMENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda x: (x[1:], x[:, 2:5], x[..., -3:-1], x[::2, 1::3], x[1:100], x[5:2], x[-100:2]),
    "select": lambda x: (x[0], x[-1], x[:, 3], x[1, 2], x.select(1, -2)),
    "newaxis": lambda x: (x[None], x[:, None, 1:], x[..., None], x[None, ..., 2]),
    "narrow": lambda x: (x.narrow(0, 1, 2), x.narrow(1, -3, 2)),
    "chunk": lambda x: (*x.chunk(2, 1), *x.chunk(3), *x.chunk(5, -1), *x.chunk(100)),
    "split": lambda x: (*x.split(2), *x.split([1, 3, 4], 1), *x.split(3, 1), *torch.split(x, 100)),
    "unbind": lambda x: (*x.unbind(0), *x.unbind(1)),
    "iterate": lambda x: tuple(row * 2 for row in x),
    "reshape": lambda x: (x.reshape(-1), x.view(8, 4), x.reshape(2, 2, -1), x.flatten(), x.ravel(), x.view_as(x)),
    "reshape of transposed": lambda x: (
        x.t().reshape(-1),
        x.t().reshape(4, 8),
        x.t().flatten(),
        x.t().reshape(2, 4, 4),
    ),
    "unflatten": lambda x: (x.unflatten(1, (2, -1)), x.unflatten(0, (2, 2)), x.unflatten(-1, (4, 2)).flatten(1)),
    "squeeze": lambda x: (
        x[:1].squeeze(),
        x[:1].squeeze(0),
        x.squeeze(0),
        x[:1, :1].squeeze(1),
        x.unsqueeze(1).squeeze(),
    ),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)),
    "permute": lambda x: (x.t(), x.T, x.mT, x.transpose(0, 1), x.permute(1, 0), x.swapaxes(0, -1), x.movedim(0, 1)),
    "permute many": lambda x: (
        x.view(2, 2, 4, 2).permute(3, 0, 2, 1),
        x.view(2, 2, 4, 2).movedim((0, 1), (-1, -2)),
        x.view(2, 2, 8).transpose(0, 2).reshape(8, 4),
    ),
    "expand": lambda x: (
        x[None].expand(3, -1, -1),
        x[:1].expand(5, 8),
        x.unsqueeze(1).expand_as(x[:, None].expand(4, 3, 8)),
    ),
    "flip": lambda x: (x.flip(0), x.flip(1), x.flip(0, 1), x.flip((0, -1)), x.flip(0)[1:3, ::2]),
    "roll": lambda x: (x.roll(1, 0), x.roll(-3, 1), x.roll((1, 2), (0, 1)), x.roll(5), x.roll(0, 0), x.roll(100, 1)),
    "pad": lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 2, 1), value=-3.5), F.pad(x, (1, 1, 1, 1)), F.pad(x, (0, 0))),
    "repeat": lambda x: (x.repeat(2, 1), x.repeat(1, 3), x.repeat(2, 2, 2), x.tile(2), x.repeat(1, 1)),
    "repeat_interleave": lambda x: (x.repeat_interleave(3), x.repeat_interleave(2, 0), x.repeat_interleave(2, -1)),
    "cat": lambda x: (
        torch.cat([x, x]),
        torch.cat([x, x[:, :3], x[:, 5:]], 1),
        torch.cat([x[:0], x]),
        torch.cat([torch.cat([x, x], 1), torch.cat([x, x], 1)]),
        torch.hstack([x, x]),
        torch.vstack([x, x[0]]),
        torch.cat([torch.empty(0), x]),
    ),
    "stack": lambda x: (torch.stack([x, x]), torch.stack([x, x * 2], 1), torch.stack([x, x, x], -1)),
    "through cat": lambda x: (
        torch.cat([x, x * 2], 1)[:, 3:11],
        torch.cat([x, x]).t(),
        torch.cat([x, x], 1).reshape(-1),
        torch.cat([x, x], 0).flip(0),
        torch.cat([x, x], 1)[:, ::3],
        torch.cat([x, x], 1).view(4, 4, 4).transpose(0, 1),
        torch.cat([x, x], 1).repeat(2, 1),
        torch.cat([x, x], 1).sin() + torch.cat([x, -x], 1),
    ),
    "arange": lambda x: (
        torch.arange(8) * x,
        torch.arange(x.shape[1]) + x,
        torch.arange(4)[:, None] * x,
        torch.where(torch.arange(8) < 3, x, 0),
        torch.arange(1, 9, dtype=torch.float32).flip(0) - x,
        torch.arange(0, 16, 2) * x,
        torch.arange(0.0, 1.0, 0.125),
        torch.arange(10, 0, -3),
    ),
    "causal mask": lambda x: x.masked_fill(torch.arange(4)[:, None] < torch.arange(8), float("-inf")),
    "made": lambda x: (
        torch.zeros_like(x),
        torch.ones(3, 2),
        torch.full((2,), 2.5),
        torch.full((2, 2), 7),
        x.new_zeros(3),
        x.new_full((2, 1), 4),
        x.new_ones((2, 2), dtype=torch.int32),
        torch.full_like(x, 3, dtype=torch.float64),
        torch.tensor(2.5),
        torch.scalar_tensor(3.0) * x,
        torch.zeros(x.shape[0], x.size(1)),
        torch.cat([x, torch.zeros_like(x)], 1),
    ),
    "broadcast_tensors": lambda x: tuple(torch.broadcast_tensors(x[:1], x[:, :1])),
}
VIEW_ONLY = ("reshape", "permute many", "through cat")
"""Movements with a view() that torch refuses for other strides."""


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def iadd(x: torch.Tensor, y: torch.Tensor) -> None:
    x += y


def swap(x: torch.Tensor, y: torch.Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


IN_PLACE: dict[str, Callable[..., Any]] = {
    "add_": lambda x, y: x.add_(1),
    "iadd": iadd,
    "several": lambda x, y: (x.mul_(2).add_(y), x * 3),
    "sees the new value": lambda x, y: (x.add_(1), y + x)[1],
    "keeps the old value": lambda x, y: (x * 1, x.add_(1))[0],
    "both": lambda x, y: (x.add_(1), y.mul_(x))[1],
    "swap": swap,
    "reads itself backward": lambda x, y: x.copy_(x.flip(0)),
    "reads itself rolled": lambda x, y: (x.copy_(x.roll(1, 1)), None)[1],
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: (x.fill_(2.5), y.fill_(-1)),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ broadcast": lambda x, y: x.copy_(y[0]),
    "clamp_": lambda x, y: x.clamp_(-0.5, 0.5),
    "relu inplace": lambda x, y: (F.relu(x, inplace=True), x)[1],
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 0.0),
    "an intermediate": lambda x, y: (x * 2).add_(y).mul_(3),
    "result beside": lambda x, y: (x.sub_(y), y + 1),
}
