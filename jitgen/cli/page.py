"""Renders the page of ``jitgen inspect``: what is known of a lowered function, as one HTML file that loads nothing
else.

``render`` collects facts and fills ``templates/cli/inspect.html``. Names and sources are the user's text, so that
template escapes all that it prints; source lines come as HTML from Pygments, which escapes them. Neighbours:
``page_graph.py`` lays out the graph, ``page_rates.py`` has the roofs.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jitgen._data import data_directory
from jitgen.cli import page_graph, page_rates
from jitgen.codegen.environment import Origin
from jitgen.errors import JitgenError
from jitgen.inspect import Lowered
from jitgen.ir.graph import topological
from jitgen.schedule import chips
from jitgen.spec import Target

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATE = "inspect.html"
CODE_KINDS = ("ptx", "sass", "asm", "amdgcn")


@dataclass(frozen=True)
class File:
    """Represents a file that lines link to: ``anchor`` precedes the numbers of its lines in their ids. Lines are
    HTML."""

    name: str
    anchor: str
    lines: tuple[tuple[int, Markup], ...]

    def link(self, line: int) -> str | None:
        return f"{self.anchor}-{line}" if any(number == line for number, _ in self.lines) else None


@dataclass(frozen=True)
class Compiled:
    """Holds what compiling brought: per kernel the resources, and the code by kind; or why there is none."""

    report: tuple[Mapping[str, Any], ...] = ()
    code: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()


def render(name: str, function: Any, lowered: Sequence[Lowered], compile: bool = True) -> tuple[str, list[str]]:
    """Returns the page, and what could not be found out.

    Args:
        name: of the function, for the title.
        function: the user's function.
        lowered: for each target, the function lowered for the same arguments.
        compile: whether to compile the kernels, for their resources and code.
    """
    origins = [
        origin for one in lowered for number in _numbers(one) for origin in one.lowered.render(number)[1].origins
    ]
    nodes = [node for one in lowered for node in topological(one.lowered.graph.results)]
    users = _user_files(function, [o.user for o in origins] + [node.location for node in nodes])
    templates = _template_files([origin.template for origin in origins])
    problems: list[str] = []
    targets = []
    for position, one in enumerate(lowered):
        compiled = _compiled(one) if compile else Compiled(problems=("not compiled",))
        problems += [f"{one.target}: {problem}" for problem in compiled.problems if compile]
        targets.append(
            {
                "name": one.target,
                "key": one.key,
                "anchor": f"target-{position}",
                "explanation": one.explain(),
                "sizes": _sizes(one),
                "drawing": page_graph.draw(one.lowered.graph),
                "kernels": [_kernel(one, number, compiled) for number in _numbers(one)],
                "code": compiled.code,
                "problems": compiled.problems,
            }
        )

    def link(files: Mapping[str, File], location: str | None) -> str | None:
        file, line = _split(location)
        return files[file].link(line) if file in files else None

    text = (
        _environment()
        .get_template(TEMPLATE)
        .render(
            name=name,
            targets=targets,
            users=users,
            templates=templates,
            graph=page_graph,
            roofs=page_rates,
            user_link=lambda location: link(users, location),
            template_link=lambda location: link(templates, location),
            short=lambda location: location.rpartition("/")[2] if location else "",
        )
    )
    return text, problems


def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_directory("templates") / "cli"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _numbers(lowered: Lowered) -> range:
    return range(len(lowered.lowered.program.kernels))


def _kernel(lowered: Lowered, number: int, compiled: Compiled) -> dict[str, Any]:
    source, rendered = lowered.lowered.render(number)
    work = lowered.lowered.work(number)
    target = Target.parse(lowered.target)
    report = compiled.report[number] if compiled.report else {}
    lines = _coloured(source.template.removesuffix(".j2"), rendered.text.rstrip("\n").split("\n"))
    launch = lowered.lowered.launch(number)
    return {
        "name": source.described,
        "template": source.template,
        "lines": list(enumerate(zip(lines, (*rendered.origins, *[Origin()] * len(lines)), strict=False), 1)),
        "work": work,
        # A processor's kernels have no such resources.
        "resources": [(label, report.get(field)) for field, label in _RESOURCES if target.kind != "cpu"],
        "launch": None if target.kind == "cpu" else launch,
        "toolchain": report.get("toolchain"),
        "intensity": work.flops / work.moved if work.moved else None,
        "roofs": [(page_rates.roofline(chip, work.moved, work.flops), chip) for chip in chips.chips(target)],
    }


def _sizes(lowered: Lowered) -> str:
    """Lists the tensors for which bytes and FLOPs are computed, if a symbolic size stands for a number."""
    inputs = lowered.lowered.graph.inputs
    return ", ".join(
        f"{spec.dtype}[{', '.join(map(str, memory.view.sizes))}]"
        for spec, memory in zip(inputs, lowered.lowered.memories, strict=False)
    )


_RESOURCES = (
    ("registers", "registers of a thread"),
    ("spill_bytes", "spilled, bytes of a thread"),
    ("shared_bytes", "shared memory of a block, bytes"),
)


def _compiled(lowered: Lowered) -> Compiled:
    """Returns the resources and code of the kernels, if this machine has the tools for them."""
    try:
        executable = lowered.compile()
    except JitgenError as error:
        return Compiled(problems=(str(error),))
    report: tuple[Mapping[str, Any], ...] = ()
    code: tuple[tuple[str, str], ...] = ()
    problems = []
    try:
        report = executable.report
    except JitgenError as error:
        problems.append(f"no resources: {error}")
    try:
        asm = executable.asm
        code = tuple((kind, text) for kind in CODE_KINDS if kind in asm and isinstance(text := asm[kind], str))
    except JitgenError as error:
        problems.append(f"no machine code: {error}")
    return Compiled(report, code, tuple(problems))


# ------------------------------------------------------------------------------------------------------ files and lines


def _coloured(name: str, lines: Sequence[str]) -> list[Markup]:
    """Renders ``lines`` as HTML, with the classes of Pygments' tokens, in the language of the file ``name``."""
    from markupsafe import Markup
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import CppLexer, PythonLexer

    lexer = (PythonLexer if name.endswith(".py") else CppLexer)(stripnl=False, ensurenl=False)
    made = highlight("\n".join(lines), lexer, HtmlFormatter(nowrap=True)).rstrip("\n").split("\n")
    return [Markup(line) for line in (*made, *[""] * (len(lines) - len(made)))]


def _split(location: str | None) -> tuple[str, int]:
    """Splits ``"model.py:12"`` into file and line; line 0 if ``location`` names none."""
    file, _, line = (location or "").rpartition(":")
    return (file, int(line)) if line.isdigit() else (location or "", 0)


def _user_files(function: Any, locations: Sequence[str | None]) -> dict[str, File]:
    """Returns the function's own text, and of other files (and the rest of its own) the lines that ``locations`` name,
    by file name."""
    wanted: dict[str, dict[int, str]] = {}
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(function))
        file = inspect.unwrap(function).__code__.co_filename
        wanted[file] = {number: line.rstrip("\n") for number, line in enumerate(lines, first)}
    except (OSError, TypeError, AttributeError):  # written in C, or typed into a prompt
        pass
    for location in locations:
        file, line = _split(location)
        if line:
            wanted.setdefault(file, {}).setdefault(line, linecache.getline(file, line).rstrip("\n"))
    return _files("user", wanted)


def _template_files(locations: Sequence[str | None]) -> dict[str, File]:
    """Returns jitgen's templates that ``locations`` name, by name, without those of families from outside."""
    root = data_directory("templates")
    wanted = {}
    for name in sorted({_split(location)[0] for location in locations if location}):
        if (root / name).is_file():
            wanted[name] = dict(enumerate((root / name).read_text().splitlines(), 1))
    return _files("template", wanted)


def _files(kind: str, texts: Mapping[str, Mapping[int, str]]) -> dict[str, File]:
    return {
        name: File(name, f"{kind}-{number}", tuple(zip(sorted(lines), _html(name, lines), strict=True)))
        for number, (name, lines) in enumerate(texts.items())
    }


def _html(name: str, lines: Mapping[int, str]) -> list[Markup]:
    return _coloured(name.removesuffix(".j2") if name.endswith(".j2") else ".py", [lines[at] for at in sorted(lines)])
