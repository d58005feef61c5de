"""README's chart: how many times a peer's time is jitgen's, for five measured cases, as an SVG without dependencies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from bench.measurement import duration


@dataclass(frozen=True)
class Headline:
    """A measured case: where it stands, eager torch's name there, and that of the fastest other peer."""

    case: str
    file: str
    name: str
    backend: str
    eager: str
    peer: str
    dtype: str = "bfloat16"

    @property
    def device(self) -> str:
        return {"h200": "H200", "cpu": "CPU"}[self.file.partition("-")[0]]


HEADLINES = (
    Headline("SwiGLU, int4, 1 row", "h200-products", "8B swiglu int4, M=1", "cuda", "F.linear", "int4pack_mm"),
    Headline("linear, int4, 16 rows", "h200-products", "8B gate_up int4, M=16", "cuda", "F.linear", "humming"),
    Headline("RMSNorm, 8192 rows of 4096", "h200-rows", "rms_norm, rows of 4096", "cuda", "eager", "torch.compile"),
    Headline("linear, int4, 16 rows", "cpu-products", "linear int4, M=16", "cpp", "F.linear", "int4pack_mm"),
    Headline("softmax, rows of 4096", "cpu", "softmax, rows of 4096", "cpp", "eager", "torch.compile"),
)

Bars = tuple[str, tuple[tuple[str, float], ...]]
"""A label, and the name and length of each of its bars."""


def _measured(headline: Headline, directory: Path) -> Mapping[str, Any]:
    """The row of ``headline`` in the file of ``directory`` that has it."""
    rows = json.loads((directory / f"{headline.file}.json").read_text())["measurements"]
    wanted = (headline.name, headline.dtype, headline.backend)
    (row,) = (row for row in rows if (row["name"], row["dtype"], row["backend"]) == wanted)
    return row


def figures(directory: Path) -> list[tuple[str, ...]]:
    """README's table of ``HEADLINES``: case, device, jitgen's time, and the peers' as multiples of it."""
    lines: list[tuple[str, ...]] = []
    for headline in HEADLINES:
        row = _measured(headline, directory)
        eager, peer = (f"{row['ratios'][name]:.2f} x ({name})" for name in (headline.eager, headline.peer))
        lines.append((headline.case, headline.device, duration(row["seconds"]["jitgen"]), eager, peer))
    return lines


def headline(directory: Path) -> str:
    """README's chart of ``HEADLINES``."""
    groups = []
    for headline in HEADLINES:
        ratios = _measured(headline, directory)["ratios"]
        bars = tuple((peer, ratios[peer]) for peer in (headline.eager, headline.peer))
        groups.append((f"{headline.device}: {headline.case}", bars))
    return bars_svg("A peer's time, as a multiple of jitgen's", groups)


BAR, GAP, LEFT, WIDTH = 15, 14, 320, 760
COLOURS = ("#7a8ca3", "#d9822b", "#4c8c6b", "#8a63a8", "#b5495b", "#3f7fbf")


LONGEST = 12.0
"""A longer bar is cut, or the others could not be compared; its number is there."""


def bars_svg(title: str, groups: Sequence[Bars]) -> str:
    """Horizontal bars in groups, with a line at 1, where a peer is as fast as jitgen."""
    left = max(LEFT, 7 * max(len(label) for label, _ in groups) + 10)  # 7 px a character
    width = WIDTH + left - LEFT
    scale = (WIDTH - LEFT - 130) / min(LONGEST, max(value for _, bars in groups for _, value in bars))
    height = 40 + sum(len(bars) * BAR + GAP for _, bars in groups)
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    top = 34
    for label, bars in groups:
        text.append(
            f'<text x="{left - 10}" y="{top + len(bars) * BAR / 2 + 4:g}" text-anchor="end">{escape(label)}</text>'
        )
        for (name, value), colour in zip(bars, cycle(COLOURS), strict=False):
            length = min(value, LONGEST) * scale
            text.append(f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            shown = f"{'… ' if value > LONGEST else ''}{value:.2f}  {escape(name)}"
            text.append(f'<text x="{left + length + 6:.1f}" y="{top + BAR - 4}" font-size="12">{shown}</text>')
            top += BAR
        top += GAP
    one = left + scale
    text.append(
        f'<line x1="{one:.1f}" y1="30" x2="{one:.1f}" y2="{height - 8}" stroke="#000000" stroke-dasharray="3 3"/>'
    )
    return "\n".join((*text, "</svg>", ""))
