"""A model of equal blocks, small enough for tests of whole models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 2.0


class Block(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.index = index
        self.kind = "gelu"
        self.options = {"shift": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x)) * SCALE + self.options["shift"]
        y = F.gelu(y) if self.kind == "gelu" else y.tanh()
        return x + self.down(y)


class Net(nn.Module):
    def __init__(self, block: type[Block] = Block, count: int = 4):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layers = nn.ModuleList(map(block, range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x
