"""The plots of ``jitgen bench --plot``: what a run measured, as SVG files without dependencies.

==========================  ============================================================================================
``bars-<group>.svg``        each case of a group: the peers' times as multiples of jitgen's
``intensity-<backend>.svg`` the repeated multiply: operations a second over operations a byte, for jitgen and its peers
``sweep-<kind>.svg``        a kind of random sizes: the best peer's time as a multiple of jitgen's, over M
==========================  ============================================================================================

A measurement is a row as ``Measurement.to_json`` has it, so a run's JSON file can be plotted later. Neighbour:
``chart.py`` draws the bars, here and in README.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import Any

from bench.chart import COLOURS, Bars, bars_svg

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 430, 70, 150, 40, 50
FEW, MANY = (47, 111, 179), (217, 130, 43)
"""The colours, in RGB, of the least and the greatest K/N of a sweep."""
Row = Mapping[str, Any]


def plots(rows: Sequence[Row]) -> dict[str, str]:
    """File name -> SVG, for each plot that these measurements have something for."""
    made: dict[str, str] = {}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    for group, found in groups.items():
        if group == "intensity":
            made |= _intensities(found)
        elif group == "sweep":
            made |= _sweeps(found)
        elif bars := [_bars(row) for row in found if row["ratios"]]:
            made[f"bars-{group}.svg"] = bars_svg(f"{group}: a peer's time, as a multiple of jitgen's", bars)
    return made


def panels(pictures: Sequence[str], across: int = 2) -> str:
    """Pictures of ``Axes`` beside and below each other, as one."""
    down = -(-len(pictures) // across)
    size = f'viewBox="0 0 {WIDTH * across} {HEIGHT * down}"'
    text = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    for index, picture in enumerate(pictures):
        y, x = divmod(index, across)
        where = f'<svg x="{x * WIDTH}" y="{y * HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        text.append(picture.strip().replace("<svg", where, 1))
    return "\n".join((*text, "</svg>", ""))


def _bars(row: Row) -> Bars:
    words = (row["name"], row["dtype"], row["backend"])
    return " ".join(filter(None, words)), tuple(row["ratios"].items())


def _intensities(rows: Sequence[Row]) -> dict[str, str]:
    """One plot for each backend. The dashed line is the rate that a copy's bandwidth allows."""
    made = {}
    for backend, found in _by(rows, lambda row: row["backend"]).items():
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in found:
            for name, seconds in row["seconds"].items():
                if name != "copy_":
                    curves.setdefault(name, []).append((row["flops"] / row["moved"], row["flops"] / seconds / 1e9))
        axes = Axes("operations a byte", "GFLOP/s", [point for curve in curves.values() for point in curve])
        text = []
        copies = [row["moved"] / row["seconds"]["copy_"] / 1e9 for row in found if "copy_" in row["seconds"]]
        if copies:
            text.append(axes.bandwidth(max(copies)))
        for (name, curve), colour in zip(curves.items(), cycle(COLOURS[1:] + COLOURS[:1]), strict=False):
            text += axes.curve(name, sorted(curve), colour)
        made[f"intensity-{backend}.svg"] = axes.svg(f"Repeated multiply, {backend}", text)
    return made


def _sweeps(rows: Sequence[Row]) -> dict[str, str]:
    """One plot for each backend and kind. Of attention K is the depth of a head, and N the keys."""
    made = {}
    named = [row for row in rows if row["ratios"]]
    kinds = _by(named, lambda row: f"{row['backend']}-{row['name'].partition(':')[0]}")
    for kind, found in kinds.items():
        points = [(float(row["shape"][-3]), min(row["ratios"].values())) for row in found]
        ratios = [math.log2(row["shape"][-1] / row["shape"][-2]) for row in found]
        axes = Axes("M", "best peer's time / jitgen's", [*points, (points[0][0], 1.0)])
        text = [axes.level(1.0)]
        for row, (x, y), ratio in zip(found, points, ratios, strict=True):
            share = (ratio - min(ratios)) / ((max(ratios) - min(ratios)) or 1.0)
            colour = "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(FEW, MANY, strict=True))
            m, n, k = row["shape"][-3:]
            text.append(axes.dot(x, y, colour, f"{y:.2f}: M={m}, N={n}, K={k}"))
        for line, (label, end, shade) in enumerate((("least", min(ratios), FEW), ("greatest", max(ratios), MANY))):
            shown = f"{label} K/N: {float(f'{2**end:.2g}'):g}"
            text.append(axes.legend(line, shown, "#" + "".join(f"{part:02x}" for part in shade)))
        made[f"sweep-{kind}.svg"] = axes.svg(f"Random sizes, {kind.replace('-', ', ')}", text)
    return made


def _by(rows: Iterable[Row], key: Any) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


class Axes:
    """Two logarithmic axes around points, and what is drawn between them."""

    def __init__(self, across: str, up: str, points: Sequence[tuple[float, float]]):
        self._names = across, up
        self._x = _range([x for x, _ in points])
        self._y = _range([y for _, y in points])

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a point."""
        shares = [(math.log10(v) - low) / (high - low) for v, (low, high) in ((x, self._x), (y, self._y))]
        return LEFT + shares[0] * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - shares[1] * (HEIGHT - TOP - BOTTOM)

    def dot(self, x: float, y: float, colour: str, title: str) -> str:
        cx, cy = self.at(x, y)
        return f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{colour}"><title>{escape(title)}</title></circle>'

    def curve(self, name: str, points: Sequence[tuple[float, float]], colour: str) -> list[str]:
        """A line through ``points``, named at its end."""
        pixels = [self.at(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        x, y = pixels[-1]
        return [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            *(self.dot(*point, colour, f"{name}: {point[1]:.3g} at {point[0]:.3g}") for point in points),
            f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">{escape(name)}</text>',
        ]

    def bandwidth(self, rate: float) -> str:
        """The line y = ``rate`` x, in GB/s, as far as it lies between the axes."""
        low = max(self._x[0], self._y[0] - math.log10(rate))
        high = min(self._x[1], self._y[1] - math.log10(rate))
        if low >= high:
            return ""
        x, y = self.at(10**high, rate * 10**high)
        label = f'<text x="{x + 6:.1f}" y="{y - 5:.1f}" font-size="12">bandwidth of a copy: {rate:.3g} GB/s</text>'
        return self._dashed(*((10**x, rate * 10**x) for x in (low, high))) + label

    def level(self, y: float) -> str:
        return self._dashed(*((10**x, y) for x in self._x))

    def _dashed(self, start: tuple[float, float], end: tuple[float, float]) -> str:
        (x1, y1), (x2, y2) = self.at(*start), self.at(*end)
        place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        return f'<line {place} stroke="#000000" stroke-dasharray="4 4"/>'

    def legend(self, line: int, text: str, colour: str) -> str:
        x, y = WIDTH - RIGHT + 14, TOP + 12 + 18 * line
        shown = f'<text x="{x + 10}" y="{y + 4}" font-size="12">{escape(text)}</text>'
        return f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>{shown}'

    def svg(self, title: str, drawn: Sequence[str]) -> str:
        """The whole picture."""
        text = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
            ' font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="24" font-weight="bold">{escape(title)}</text>',
        ]
        for value in _ticks(self._x):
            x, _ = self.at(value, 10 ** self._y[0])
            text.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e3e6ea"/>')
            text.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
        for value in _ticks(self._y):
            _, y = self.at(10 ** self._x[0], value)
            text.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e3e6ea"/>')
            text.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        middle, across, up = (LEFT + WIDTH - RIGHT) / 2, *map(escape, self._names)
        text.append(f'<text x="{middle:g}" y="{HEIGHT - 12}" text-anchor="middle">{across}</text>')
        text.append(f'<text x="16" y="{HEIGHT / 2:g}" text-anchor="middle" transform="rotate(-90 16 {HEIGHT / 2:g})">')
        return "\n".join((*text, f"{up}</text>", *filter(None, drawn), "</svg>", ""))


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest power of ten that an axis shows, with a little room."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.05 * (high - low), 0.05)
    return low - room, high + room


def _ticks(ends: tuple[float, float]) -> list[float]:
    """Powers of ten between ``ends``, and 2 and 5 times those where there are few."""
    powers = range(math.floor(ends[0]), math.ceil(ends[1]) + 1)
    steps = (1, 2, 5) if ends[1] - ends[0] < 2.5 else (1,)
    values = [step * 10.0**power for power in powers for step in steps]
    return [value for value in values if ends[0] <= math.log10(value) <= ends[1]]
