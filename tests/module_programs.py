"""Random small modules whose forward is a program of layers, blocks that are computed again, and modes, as text.

    block   := h = layer(h) | h = h + layer(h) | h = h * gate(h) | an update in place of a new tensor | a side result
             | with torch.no_grad(): ... | with torch.autocast(...): ... | h = checkpoint(..., h)
             | h = h + h.detach() | views: chunk, cat, transpose, roll

``ModuleProgram`` is a module with a ``forward`` of that text; ``trained`` is all that a caller can tell of some steps.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
WIDTH = 12

LAYERS = ("self.linear", "self.norm", "self.tied", "self.deep", "F.gelu", "F.silu", "torch.tanh", "torch.sigmoid")
LAYERS += ("self.attend", "self.gated", "self.convolve", "self.rows")
LINES = (
    "h = {layer}(h)",
    "h = {layer}(h)",
    "h = h + {layer}(h)",
    "h = h + {layer}({other}(h))",
    "h = h * torch.sigmoid({layer}(h))",
    "h = checkpoint({layer}, h, use_reentrant=False)",
    "h = h + checkpoint(self.deep, {layer}(h), use_reentrant=False)",
    "h = checkpoint(lambda t: {layer}({other}(t)) + t, h, use_reentrant=False)",
    "h = checkpoint(self.scaled, h, side[-1], use_reentrant=False)",
    "with torch.no_grad(): side.append({layer}(h))",
    "with torch.no_grad(): h = h + {layer}(h).detach()",
    "with torch.no_grad(): self.seen.add_(h.mean(tuple(range(h.dim() - 1))))",
    "with torch.enable_grad(): h = {layer}(h)",
    "h = h + h.detach() * 0.5",
    "h = h - {layer}(h.detach())",
    "t = {layer}(h); h = h.clone(); h[..., 0] = t[..., 1]",
    "h = h.clone(); h[:, 1:].mul_(0.5)",
    "h = {layer}(h) + side[-1]",
    "side.append(h * 0.5)",
    "p, q = h.chunk(2, -1); h = torch.cat([q * p.sigmoid(), p], -1)",
    "h = h.transpose(0, 1).contiguous().roll(1, 0).transpose(0, 1)",
    "h = h + {layer}(h.flip(1))",
    "h = F.relu(h + 0.1, inplace=True)",
    "h = h + self.seen",
    "h = h / h.norm(dim=-1, keepdim=True).clamp_min(0.5)",
    "h = h + torch.where(h > 0, {layer}(h), h * 0.1)",
    "h = torch.utils.checkpoint.checkpoint_sequential(self.stack, 2, h, use_reentrant=False)",
)
AUTOCAST = (
    "with torch.autocast('cpu', torch.bfloat16): h = {layer}(h).to(h.dtype)",
    "with torch.autocast('cpu', torch.bfloat16): h = h + checkpoint(self.deep, h, use_reentrant=False)",
    "with torch.autocast('cpu', torch.bfloat16), torch.no_grad(): side.append({layer}(h).to(h.dtype))",
    "with torch.autocast('cpu', torch.bfloat16):\n"
    "        p = {layer}(h)\n"
    "        with torch.autocast('cpu', enabled=False): h = h + self.linear(p.to(h.dtype))",
    "h = checkpoint(self.half, h, use_reentrant=False)",
)


class Base(nn.Module):
    """What the lines of a program call."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.linear.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.deep = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))
        self.stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.SiLU())
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.batch = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def attend(self, h: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def gated(self, h: Tensor) -> Tensor:
        left, right = self.up(h).chunk(2, -1)
        return F.silu(left) * right

    def convolve(self, h: Tensor) -> Tensor:
        return self.convolution(h.transpose(1, 2)).transpose(1, 2)

    def rows(self, h: Tensor) -> Tensor:
        return self.batch(h.transpose(1, 2)).transpose(1, 2)

    def scaled(self, h: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(self.linear(h)) * other.mean(-1, keepdim=True)

    def half(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.deep(h).to(h.dtype)


def module_program(seed: int, autocast: bool = False, length: int = 7) -> tuple[Base, str]:
    """The module of ``seed`` and the text of its forward. Without ``autocast`` it is of float64."""
    draw = random.Random(seed)
    lines = ["side = [h * 2]"]
    for _ in range(draw.randint(3, length)):
        line = draw.choice(AUTOCAST if autocast and draw.random() < 0.4 else LINES)
        # A checkpoint in eager torch updates the running statistics twice.
        layers = [layer for layer in LAYERS if "checkpoint" not in line or layer != "self.rows"]
        lines.append(line.format(layer=draw.choice(layers), other=draw.choice(layers)))
        if draw.random() < 0.08:
            lines.append("torch._dynamo.graph_break()")
    lines.append(
        draw.choice(("return h", "return h, side[-1]", "return {'h': h, 'side': side}", "return h.sum(-1), h"))
    )
    text = "\n".join(["def forward(self, h):", *(f"    {line}" for line in lines)])
    names: dict[str, Any] = {"torch": torch, "F": F, "checkpoint": checkpoint}
    exec(compile(text, f"<module program {seed}>", "exec"), names)
    torch.manual_seed(seed)
    module = type("ModuleProgram", (Base,), {"forward": names["forward"]})()
    return module.to(torch.float32 if autocast else torch.float64), text


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a result."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in (value.values() if isinstance(value, dict) else value) for t in tensors_of(v)]


def trained(module: Base, call: Any, seed: int, steps: int = 2) -> list[Tensor]:
    """Results, gradients and buffers of some steps, and the results of an evaluation."""
    generator = torch.Generator().manual_seed(seed)
    dtype = module.linear.weight.dtype
    seen: list[Tensor] = []
    for step in range(steps):
        x = torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(step == 0)
        results = tensors_of(call(x))
        loss: Any = sum((r * r).mean() * (n + 1) for n, r in enumerate(results) if r.requires_grad)
        if isinstance(loss, Tensor):
            loss.backward()
        seen += [r.detach().clone() for r in results]
        seen += [torch.zeros(()) if t.grad is None else t.grad.clone() for t in (x, *module.parameters())]
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.05 * parameter.grad)
                    parameter.grad = None
        seen += [b.clone() for b in module.buffers()]
    module.eval()
    x = torch.randn(3, 5, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        return seen + [r.clone() for r in tensors_of(call(x))]


def difference(seed: int, backend: str) -> str | None:
    """What is wrong of the module of ``seed`` compiled for ``backend``: beside eager torch in float64 to rounding, and
    under autocast, in one step, beside float64 at most four times what eager torch is."""
    autocast = seed % 2 == 1
    module, text = module_program(seed, autocast)
    steps = 1 if autocast else 2

    def seen(module: Base, backend: str | None) -> list[Tensor]:
        mine = copy.deepcopy(module)
        return trained(mine, mine if backend is None else torch.compile(mine, backend=backend), seed, steps)

    found, eager = seen(module, backend), seen(module, None)
    exact = seen(module.double(), None) if autocast else eager
    if len(found) != len(eager):
        return f"{len(found)} tensors, not {len(eager)}\n{text}"
    for number, (mine, theirs, right) in enumerate(zip(found, eager, exact, strict=True)):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"tensor {number} is {mine.dtype} of {tuple(mine.shape)}, not {theirs.dtype}\n{text}"
        size = max(float(right.double().abs().max()), 1.0)
        error, allowed = float((mine.double() - right.double()).abs().max()), 1e-10 * size
        if autocast:
            allowed = 4 * float((theirs.double() - right.double()).abs().max()) + size * 2**-7
        if not error <= allowed:
            return f"tensor {number} of {len(eager)} is off by {error:.3g}, of {size:.3g}\n{text}"
    return None
