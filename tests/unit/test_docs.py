"""README and docs: code blocks run, links lead somewhere, and generated tables are as they are generated."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench import chart, markdown
from jitgen import _data, console, errors, settings
from jitgen.cli.group import jitgen as command_line
from jitgen.compilers import host
from jitgen.quant import describe

CHECKOUT = _data.checkout_directory()
if CHECKOUT is None:
    pytest.skip("needs the checkout", allow_module_level=True)
MEASURED = CHECKOUT / "docs" / "measured"
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(Path(str(CHECKOUT))))


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """Line and text of every block of a page in one of ``languages``."""
    text = page.read_text()
    for found in FENCED.finditer(text):
        if found[1] in languages:
            yield text[: found.start()].count("\n") + 2, found[2]


# -------------------------------------------------------------------------------------------------------- code blocks


@pytest.fixture
def own_logging() -> Iterator[None]:
    """A page configures logging for itself alone: where a miss is logged, it is compared with 2,000 stored plans."""
    configured = [(logger, logger.level, [*logger.handlers]) for logger in (logging.getLogger(), console.logger)]
    yield
    for logger, level, handlers in configured:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_every_block_is_of_a_language_that_is_checked() -> None:
    found = {language for page in PAGES for language, _ in FENCED.findall(page.read_text())}
    assert found <= {"", "python", "sh"}


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "python"))], ids=name_of)
@pytest.mark.usefixtures("own_logging")
def test_its_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the top of the page to its end, in one namespace and an empty directory."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, text in blocks(page, "python"):
        # With the page's line numbers and its text for the lines of functions, which a trace names.
        source = tmp_path / f"{page.stem}.{line}.py"
        source.write_text("\n" * (line - 1) + text)
        exec(compile(source.read_text(), str(source), "exec"), namespace)


RUN = (["doctor"], ["cache", "path"], ["cache", "ls"], ["cache", "verify"])
"""Commands that are run; of others the arguments are parsed."""
UNCHECKED = {"pip", "python", "vllm"}
"""Programs whose arguments are not looked at."""


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for first, text in blocks(page, "sh"):
            for number, line in enumerate(text.replace("\\\n", " ").splitlines(), first):
                if line.strip() and not line.startswith("#"):
                    yield f"{name_of(page)}:{number}", line


def words_of(line: str) -> list[str]:
    """The program and its arguments, without comments and without the variables set in front of it."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        assert (name := words[0].partition("=")[0]) in settings.SETTINGS, f"no setting {name}"
        words = words[1:]
    return words


@pytest.mark.parametrize(("where", "line"), [pytest.param(*command, id=command[0]) for command in commands()])
def test_its_commands_exist(where: str, line: str, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = words_of(line)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (Path(str(CHECKOUT)) / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets)
    elif program == "jitgen":
        monkeypatch.chdir(own_store.parent)
        for word in arguments:  # the files that an argument may have to name
            if re.fullmatch(r"[\w-]+\.\w+", word):
                Path(word).touch()
        if arguments in RUN:
            done = CliRunner().invoke(command_line, arguments)
            assert done.exit_code == 0, done.output
        else:
            parse(command_line, arguments)
    else:
        assert program in UNCHECKED


def parse(command: click.Command, arguments: list[str], context: click.Context | None = None) -> None:
    """Parse ``arguments`` as ``command`` would; a click.UsageError if it would refuse them."""
    made = command.make_context(command.name, list(arguments), parent=context)
    if isinstance(command, click.Group):
        name, inner, rest = command.resolve_command(made, [*made._protected_args, *made.args])
        assert inner is not None, name
        parse(inner, rest, made)


# ---------------------------------------------------------------------------------------------------- links and tables


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_its_links_lead_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


def test_readme_is_short_and_leads_to_every_page() -> None:
    readme = PAGES[0].read_text()
    assert readme.count("\n") <= 150  # two minutes of reading
    assert max(map(len, readme.splitlines())) <= 120
    reached, ahead = set(), [PAGES[0]]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text())
        found = (Path(os.path.normpath(page.parent / link)) for link in links if "://" not in link)
        ahead += [page for page in found if page not in reached]
    assert reached >= set(PAGES)


def test_the_table_of_formats_is_as_generated() -> None:
    page = (CHECKOUT / "docs" / "formats.md").read_text()
    assert page == describe.with_tables(page), "python -m jitgen.quant.describe docs/formats.md"


def test_measured_pages_are_as_generated() -> None:
    """``python -m bench.markdown docs/measured`` writes them."""
    for name, content in markdown.pages(MEASURED).items():
        assert (MEASURED / name).read_text() == content, name


def test_headline_figures_are_those_of_the_chart() -> None:
    readme = PAGES[0].read_text()
    for row in chart.figures(MEASURED):
        assert f"| {' | '.join(row)} |" in readme


def test_every_setting_has_its_row() -> None:
    page = (PAGES[0].parent / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `(JITGEN_\w+)` \| .*? \| (.*) \|$", page, re.MULTILINE)
    assert dict(rows) == {setting.name: setting.doc for setting in settings.SETTINGS.values()}


def test_every_error_has_its_row() -> None:
    page = (PAGES[0].parent / "docs" / "settings.md").read_text()
    named = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    public = {name for name in named if issubclass(getattr(errors, name), errors.JitgenError)}
    assert set(re.findall(r"^\| `([A-Z][A-Za-z]+)` \|", page, re.MULTILINE)) == public
