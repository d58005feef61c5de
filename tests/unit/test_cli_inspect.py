"""``jitgen inspect``: the page is whole, loads nothing, links where it says, and shows the user's text as text."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from jitgen import settings
from jitgen.cli.group import jitgen
from jitgen.cli.page_graph import HEIGHT, WIDTH, draw
from jitgen.cli.page_rates import bound
from jitgen.compilers import host, nvrtc
from jitgen.ir.graph import Builder, Graph
from jitgen.schedule.chips import CHIPS, Chip, chips
from jitgen.spec import Target

MODULE = """
import torch

def helper(x):
    return torch.relu(x)

def scores(x, w):
    y = helper(x @ w)  # <script>alert("comment")</script> & "quoted"
    return torch.softmax(y * 2, -1)

def product(x, w):
    return x @ w

def sneaky(x):
    return x * 2 + 1
sneaky.__name__ = sneaky.__qualname__ = "<script>alert('name')</script>"
"""
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects ids, links, whatever is loaded, and the texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.scripts: list[str] = []
        self.shown: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value or "")
            elif name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in ("href", "src", "srcset", "data", "action", "xlink:href"):
                self.loaded.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.shown.append(data)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    path = tmp_path / "inspected_model.py"
    path.write_text(MODULE)
    return path


def page_of(module: Path, function: str, *arguments: str) -> str:
    path = module.parent / "pages" / "out.html"
    result = CliRunner().invoke(jitgen, ["inspect", f"{module}:{function}", "--html", str(path), *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stdout.splitlines()[-1] == str(path)
    return path.read_text(encoding="utf-8")


def checked(text: str) -> Page:
    """The page, if it is well formed, loads nothing, and every one of its links leads to a place within it."""
    page = Page(text)
    assert all(address.startswith("data:") for address in page.loaded)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert all(link.startswith("#") for link in page.links)
    assert len(page.scripts) == 1
    return page


SPECS = ("--arg", "bf16[M,64]", "--arg", "bf16[64,32]")


def test_kernels_of_several_targets_link_to_the_users_and_the_templates_lines(module: Path) -> None:
    text = page_of(module, "scores", *SPECS, "--target", "sm_90a", "--target", "x86-64-v3", "--no-compile")
    page = checked(text)
    line = MODULE.splitlines().index("    return torch.relu(x)") + 1
    assert f"#user-0-{line}" in page.links  # a function that the user's calls, in the same file
    assert any(re.fullmatch(r"#template-\d+-\d+", link) for link in page.links)
    shown = "".join(page.shown)
    assert MODULE.splitlines()[line - 1] in shown
    assert '<script>alert("comment")</script> & "quoted"' in shown
    assert text.count('aria-label="the graph of the IR"') == 2
    assert "NVIDIA H200" in text
    assert "the rates of x86-64-v3 are not known" in shown
    assert "prefers-color-scheme: dark" in text


def test_a_name_is_shown_as_text(module: Path) -> None:
    page = checked(page_of(module, "sneaky", "--arg", "f32[M]", "--target", "sm_80", "--no-compile"))
    assert "<script>alert('name')</script>" in "".join(page.shown)
    assert "alert" not in page.scripts[0]


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
def test_shared_memory_is_that_of_a_launch(module: Path) -> None:
    arguments = ("--arg", "bf16[512,4096]", "--arg", "bf16[4096,4096]", "--target", "sm_90a", "--backend", "cuda")
    text = page_of(module, "product", *arguments)
    found = re.search(r"<th>shared memory of a block, bytes</th><td>(\d+)</td>", text)
    assert found is not None
    assert int(found[1]) > 48 << 10  # more than a kernel may have without asking when it is launched


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_assembly_is_folded_away(module: Path) -> None:
    text = page_of(module, "sneaky", "--arg", "f32[M]")
    checked(text)
    assert "<details><summary>asm</summary>" in text


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
def test_registers_are_the_compilers(module: Path) -> None:
    text = page_of(module, "sneaky", "--arg", "f32[M]", "--target", "sm_90a", "--backend", "cuda")
    checked(text)
    assert re.search(r"<th>registers of a thread</th><td>[1-9]\d*</td>", text)
    assert re.search(r"<th>launch</th><td>\d+ x 1 x 1 blocks of \d+ x 1 x 1 threads</td>", text)
    assert re.search(r"of a call with float32\[\d+\]", text)  # the size that M stands for
    assert "<details><summary>ptx</summary>" in text


def test_what_cannot_be_compiled_is_said_and_the_rest_is_there(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_STRICT", "1")
    text = page_of(module, "sneaky", "--arg", "f32[M]", "--target", "x86-64-v3")
    assert "nothing is compiled in strict mode" in "".join(checked(text).shown)
    assert "<th>toolchain</th><td>unknown</td>" in text


def test_a_long_graph_is_a_list(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitgen.cli.page_graph.MOST_NODES", 2)
    text = page_of(module, "sneaky", "--arg", "f32[M]", "--no-compile")
    page = checked(text)
    assert "the graph of the IR" not in text
    assert "<details open><summary>IR as a list" in text
    assert "#target-0-node-0" in page.links


def test_nodes_do_not_overlap_and_edges_point_down() -> None:
    builder = Builder()
    x, y = (builder.make("input", (), "float32", (4,), (number,)) for number in range(2))
    total = builder.make("add", (x, y), "float32", (4,))
    result = builder.make("mul", (builder.make("exp", (total,), "float32", (4,)), x), "float32", (4,))
    drawing = draw(Graph("f", (), (result,)))
    places = [(node.x, node.y) for node in drawing.nodes]
    for number, (x0, y0) in enumerate(places):
        assert all(abs(x1 - x0) >= WIDTH or abs(y1 - y0) >= HEIGHT for x1, y1 in places[number + 1 :])
    assert all(places[source][1] < node.y for node in drawing.nodes for source in node.inputs)
    assert len(drawing.paths) == 5
    assert [node.result for node in drawing.nodes] == [node.op == "mul" for node in drawing.nodes]


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_bounds_of_a_chip(chip: Chip) -> None:
    assert bound(chip, 10**6, 1).startswith("bound by memory:")
    assert bound(chip, 10**6, 10**12).startswith("bound by arithmetic")
    middle = int(1e6 * (chip.vector * chip.matrix) ** 0.5 / chip.bandwidth)
    assert "on matrix units" in bound(chip, 10**6, middle)
    assert all(chip in chips(Target.parse(name)) for name in chip.targets)


def _browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.mark.skipif(_browser() is None, reason="needs Chromium")
def test_a_browser_logs_no_error(module: Path, tmp_path: Path) -> None:
    page_of(module, "scores", *SPECS, "--target", "sm_90a", "--no-compile")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    # Nothing of the user's profile, and nothing from a network.
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--no-first-run", "--disable-quic", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update"]
    address = (tmp_path / "pages" / "out.html").as_uri() + "#template-0-1"
    done = subprocess.run([_browser() or "", *options, address], capture_output=True, text=True, timeout=60, check=True)
    assert ":CONSOLE" not in done.stderr
    assert '<details class="template" open' in done.stdout  # the script has run
