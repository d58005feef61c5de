"""README's chart: how many times a peer's time is jitgen's, for five measured cases, as an SVG without dependencies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path


@dataclass(frozen=True)
class Headline:
    """A bar for eager torch's float product or function, and one for the fastest other peer that was measured."""

    label: str
    file: str
    name: str
    dtype: str
    backend: str
    eager: str
    peer: str


HEADLINES = (
    Headline(
        "SwiGLU, int4 weights, 1 row",
        "h200-products",
        "8B swiglu int4, M=1",
        "bfloat16",
        "cuda",
        "F.linear",
        "int4pack_mm",
    ),
    Headline(
        "Linear, int4 weights, 16 rows",
        "h200-products",
        "8B gate_up int4, M=16",
        "bfloat16",
        "cuda",
        "F.linear",
        "humming",
    ),
    Headline(
        "RMSNorm, 8192 rows of 4096",
        "h200-rows",
        "rms_norm, rows of 4096",
        "bfloat16",
        "cuda",
        "eager",
        "torch.compile",
    ),
    Headline(
        "Linear, int4 weights, 16 rows",
        "cpu-products",
        "linear int4, M=16",
        "bfloat16",
        "cpp",
        "F.linear",
        "int4pack_mm",
    ),
    Headline("Softmax, rows of 4096", "cpu", "softmax, rows of 4096", "float32", "cpp", "eager", "torch.compile"),
)
DEVICES = {"h200": "H200", "cpu": "CPU"}

Bars = tuple[str, tuple[tuple[str, float], ...]]
"""A label, and the name and length of each of its bars."""


def ratios(directory: Path) -> list[Bars]:
    """The bars of ``HEADLINES``, read from the files of ``directory``."""
    found: list[Bars] = []
    for headline in HEADLINES:
        rows = json.loads((directory / f"{headline.file}.json").read_text())["measurements"]
        wanted = (headline.name, headline.dtype, headline.backend)
        (row,) = (row for row in rows if (row["name"], row["dtype"], row["backend"]) == wanted)
        device = DEVICES[headline.file.partition("-")[0]]
        bars = tuple((peer, row["ratios"][peer]) for peer in (headline.eager, headline.peer))
        found.append((f"{device}: {headline.label}, {headline.dtype}", bars))
    return found


def headline(directory: Path) -> str:
    return bars_svg("A peer's time, as a multiple of jitgen's", ratios(directory))


BAR, GAP, LEFT, WIDTH = 15, 14, 320, 760
COLOURS = ("#7a8ca3", "#d9822b")


def bars_svg(title: str, groups: Sequence[Bars]) -> str:
    """Horizontal bars in groups of two, with a line at 1, where a peer is as fast as jitgen."""
    scale = (WIDTH - LEFT - 130) / max(value for _, bars in groups for _, value in bars)
    height = 40 + sum(len(bars) * BAR + GAP for _, bars in groups)
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    top = 34
    for label, bars in groups:
        text.append(
            f'<text x="{LEFT - 10}" y="{top + len(bars) * BAR / 2 + 4:g}" text-anchor="end">{escape(label)}</text>'
        )
        for (name, value), colour in zip(bars, COLOURS, strict=True):
            length = value * scale
            text.append(f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            shown = f"{value:.2f}  {escape(name)}"
            text.append(f'<text x="{LEFT + length + 6:.1f}" y="{top + BAR - 4}" font-size="12">{shown}</text>')
            top += BAR
        top += GAP
    one = LEFT + scale
    text.append(
        f'<line x1="{one:.1f}" y1="30" x2="{one:.1f}" y2="{height - 8}" stroke="#000000" stroke-dasharray="3 3"/>'
    )
    return "\n".join((*text, "</svg>", ""))
