"""A GPT of characters, trained from scratch on the documentation and the licence that ship with Python.

It trains three times from the same weights on the same batches: in eager torch, with its parts decorated by
``jitgen.jit``, and whole through ``torch.compile(model, backend="jitgen")``. Gradients of the generated kernels are
generated kernels too. It prints losses, the time of a step and samples, and draws the losses as a PNG. Some minutes
on two cores where no kernel is in the store.

    python examples/15_train_char_gpt.py [--steps 400] [--device cuda] [--out char_gpt.png]

Shows: gradients without writing any, decorated functions in a training loop, and torch.compile over the whole of it.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jitgen


def attention(x: Tensor, norm: Tensor, qkv: Tensor, out: Tensor, heads: int) -> Tensor:
    batch, length, width = x.shape
    q, k, v = F.linear(F.layer_norm(x, (width,), norm), qkv).chunk(3, -1)
    q, k, v = (part.view(batch, length, heads, width // heads).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + F.linear(mixed.transpose(1, 2).reshape(batch, length, width), out)


def mlp(x: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (x.shape[-1],), norm), up)), down)


def head(x: Tensor, norm: Tensor, table: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, (x.shape[-1],), norm), table)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Sizes:
    width: int = 128
    layers: int = 3
    heads: int = 4
    length: int = 64
    batch: int = 16


DEFAULTS = {"cpu": Sizes(), "cuda": Sizes(width=768, layers=8, heads=12, length=256, batch=32)}


EVERY = 50
"""Steps between two lines of progress."""
Parts = tuple[Callable[..., Tensor], ...]
"""The functions above, decorated or not."""


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, parts: Parts):
        super().__init__()
        self.heads, (self.attention, self.mlp, *_), width = sizes.heads, parts, sizes.width
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (
            nn.Parameter(0.02 * torch.randn(shape))
            for shape in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, self.norms[0], self.qkv, self.out, self.heads)
        return self.mlp(x, self.norms[1], self.up, self.down)


class CharGPT(nn.Module):
    def __init__(self, characters: int, sizes: Sizes, parts: Parts):
        super().__init__()
        self.sizes = sizes
        *_, self.head, self.loss_of = parts
        self.tokens = nn.Parameter(0.02 * torch.randn(characters, sizes.width))
        self.places = nn.Parameter(0.02 * torch.randn(sizes.length, sizes.width))
        self.layers = nn.ModuleList(Layer(sizes, parts) for _ in range(sizes.layers))
        self.norm = nn.Parameter(torch.ones(sizes.width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x, self.norm, self.tokens)


def corpus() -> str:
    """The text: Python's language reference as ``help()`` shows it, and its licence where that is installed."""
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    parts = [*topics.values(), licence.read_text(errors="ignore") if licence.exists() else ""]
    return re.sub(r"[^\x20-\x7e\n]", "", "\n".join(parts))


@dataclass
class Run:
    """One training: losses of its steps, the median time of one in seconds, that of the first, and the model."""

    losses: list[float]
    seconds: float
    first: float
    model: CharGPT

    @property
    def final(self) -> float:
        """The mean of the last tenth of the losses."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


def train(way: str, data: Tensor, characters: int, sizes: Sizes, steps: int, device: str = "cpu") -> Run:
    """Train ``"eager"``, with ``"jit"`` or through ``"compile"``, from the same weights on the same batches."""
    parts: Parts = attention, mlp, head, loss_of
    torch.manual_seed(0)
    model = CharGPT(characters, sizes, tuple(map(jitgen.jit, parts)) if way == "jit" else parts)
    model.to(device)

    def step_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return model.loss_of(model(tokens), targets)

    if way == "compile":
        from jitgen.dynamo.backend import compile_graph  # backend="jitgen", where jitgen is installed

        step_loss = torch.compile(step_loss, backend=compile_graph)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    losses, times = [], []
    for _ in range(steps):
        starts = torch.randint(len(data) - sizes.length - 1, (sizes.batch,), generator=generator)
        rows = torch.stack([data[start : start + sizes.length + 1] for start in starts.tolist()]).to(device)
        begin = time.perf_counter()
        loss = step_loss(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
        if len(losses) % EVERY == 0:
            print(f"{way:8} step {len(losses):4}: loss {losses[-1]:.3f}", flush=True)
    return Run(losses, statistics.median(times), times[0], model)


@torch.no_grad()
def sample(model: CharGPT, characters: str, start: str, count: int) -> str:
    """``start`` continued by ``count`` characters that the model draws."""
    generator = torch.Generator().manual_seed(2)
    tokens = [characters.index(character) for character in start]
    for _ in range(count):
        window = torch.tensor([tokens[-model.sizes.length :]], device=model.tokens.device)
        chances = torch.softmax(model(window)[0, -1].cpu() / 0.8, -1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return "".join(characters[token] for token in tokens)


def draw(runs: dict[str, Run], path: Path) -> bool:
    """The losses as a PNG; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (way, run), style in zip(runs.items(), ("-", "--", ":"), strict=True):
        axes.plot(run.losses, style, label=f"{way}: {run.seconds * 1e3:.0f} ms a step")
    axes.set(xlabel="step", ylabel="loss, nats a character", title="A GPT of characters on Python's documentation")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return True


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", choices=DEFAULTS, default="cpu")
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--sample", type=int, default=200, help="characters of the sample")
    parser.add_argument("--out", type=Path, default=Path("char_gpt.png"))
    options = parser.parse_args(arguments)
    asked = {name: getattr(options, name) for name in ("width", "layers", "batch") if getattr(options, name)}
    sizes = replace(DEFAULTS[options.device], **asked)
    text = corpus()
    characters = "".join(sorted(set(text)))
    data = torch.tensor([characters.index(character) for character in text])
    print(
        f"{len(text):,} characters of {len(characters)} kinds; {options.steps} steps of {sizes.batch} x {sizes.length}"
    )
    runs = {}
    for way in ("eager", "jit", "compile"):
        runs[way] = run = train(way, data, len(characters), sizes, options.steps, options.device)
        ratio, tokens = runs["eager"].seconds / run.seconds, sizes.batch * sizes.length / run.seconds
        print(
            f"{way:8} loss {run.final:.3f}, {run.seconds * 1e3:.1f} ms a step, {tokens:,.0f} characters a second "
            f"({ratio:.2f} x eager's speed); first step {run.first:.1f} s"
        )
    print(jitgen.report(runs["compile"].model))
    print(f"drawn: {options.out}" if draw(runs, options.out) else "pip install matplotlib draws the losses")
    print(sample(runs["compile"].model, characters, "The ", options.sample))
    return runs


if __name__ == "__main__":
    main(sys.argv[1:])
