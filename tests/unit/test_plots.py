"""The plots of ``jitgen bench --plot``: SVG that parses, with a mark for everything that was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from bench import plots, suite
from bench.measurement import Measurement
from jitgen.cli.group import jitgen

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = Path(__file__).parents[2] / "docs" / "measured"


def product(m: int, n: int, k: int, ratio: float, format: str = "int4") -> Measurement:
    seconds = {"jitgen": 1e-5, "F.linear": 1e-5 * ratio, "slow & <odd>": 1e-4 * ratio}
    return Measurement("sweep", f"{format}: {n}x{k}, M={m}", "cuda", "cuda", "bfloat16", (m, n, k), seconds)


def circles(text: str) -> list[ElementTree.Element]:
    return [mark for mark in ElementTree.fromstring(text).iter(f"{SVG}circle") if mark.find(f"{SVG}title") is not None]


@pytest.mark.parametrize("path", sorted(MEASURED.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_measured_can_be_plotted(path: Path) -> None:
    rows = json.loads(path.read_text()).get("measurements", [])
    found = plots.plots(rows)
    for name, text in found.items():
        root = ElementTree.fromstring(text)
        assert root.tag == f"{SVG}svg"
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for mark in root.iter(f"{SVG}circle"):
            assert 0 < float(mark.attrib["cx"]) < width, name
            assert 0 < float(mark.attrib["cy"]) < height, name
    drawn = [mark for name, text in found.items() if name.startswith("sweep") for mark in circles(text)]
    assert len(drawn) == sum(row["group"] == "sweep" and bool(row["ratios"]) for row in rows)
    for group in {row["group"] for row in rows if row["group"] not in ("intensity", "sweep") and row["ratios"]}:
        bars = list(ElementTree.fromstring(found[f"bars-{group}.svg"]).iter(f"{SVG}rect"))[1:]
        assert len(bars) == sum(len(row["ratios"]) for row in rows if row["group"] == group)


def test_the_intensity_plot_has_a_point_for_each_repeat_and_subject() -> None:
    rows = json.loads((MEASURED / "cpu.json").read_text())["measurements"]
    rows = [row for row in rows if row["group"] == "intensity"]
    text = plots.plots(rows)["intensity-cpp.svg"]
    assert len(circles(text)) == sum(len(row["seconds"]) - ("copy_" in row["seconds"]) for row in rows)


def test_the_sweep_is_a_scatter_of_the_best_peer_coloured_by_k_over_n() -> None:
    cases = [(1, 4096, 64, 0.5), (300, 64, 4096, 2.0), (8192, 512, 512, 1.0)]
    rows = [product(*case).to_json() for case in cases] + [product(7, 64, 64, 1.0, "bfloat16").to_json()]
    found = plots.plots(rows)
    assert set(found) == {"sweep-cuda-int4.svg", "sweep-cuda-bfloat16.svg"}
    first, second, third = circles(found["sweep-cuda-int4.svg"])
    assert first.attrib["fill"] == "#{:02x}{:02x}{:02x}".format(*plots.FEW)
    assert second.attrib["fill"] == "#{:02x}{:02x}{:02x}".format(*plots.MANY)
    across = [float(mark.attrib["cx"]) for mark in (first, second, third)]
    assert (across[1] - across[0]) / (across[2] - across[0]) == pytest.approx(math.log(300, 8192), abs=1e-2)
    assert float(second.attrib["cy"]) < float(third.attrib["cy"]) < float(first.attrib["cy"])
    (one,) = circles(found["sweep-cuda-bfloat16.svg"])
    assert len(circles(plots.panels(list(found.values())))) == 4
    assert "1.00: M=7, N=64, K=64" in "".join(one.itertext())


def test_names_are_escaped() -> None:
    row = Measurement("rows", "<b> & c", "cpu", "cpp", "", (), {"jitgen": 1.0, "<peer> & co": 2.0}).to_json()
    shown = "".join(ElementTree.fromstring(plots.plots([row])["bars-rows.svg"]).itertext())
    assert "<b> & c cpp" in shown
    assert "<peer> & co" in shown


def test_the_command_writes_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> list[Measurement]:
        return [product(5, 64, 128, 1.5)]

    monkeypatch.setattr(suite, "run", run)
    folder = tmp_path / "plots" / "here"
    done = CliRunner().invoke(jitgen, ["bench", "--device", "cpu", "--quick", "--plot", str(folder), "sweep"])
    assert done.exit_code == 0, (done.output, done.exception)
    (path,) = folder.iterdir()
    assert len(circles(path.read_text())) == 1
