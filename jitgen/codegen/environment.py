"""The Jinja environment, and rendering that remembers where each generated line came from.

Delimiters are chosen so that a template reads, highlights and formats as its own language: ``${x}`` prints, lines
that start with ``//%`` (``#%`` in Triton) are statements, ``<# #>`` comments. ``{``, ``{%`` and ``{{`` stay plain text,
which inline PTX and nested braces need. A name that is not defined is an error (StrictUndefined).

Every template line ends in an invisible mark naming it; a printed expression carries a mark of the user's line. Marks
are stripped after rendering and become the ``LineMap`` by which a compiler's complaint about line 57 is told as
"cpp/elementwise.cpp.j2 line 31, your expression at model.py line 12". Rendering is deterministic: no time, no path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitgen._data import templates_directory
from jitgen.errors import CompileError, SourceLine
from jitgen.spec import KernelSource, Target

if TYPE_CHECKING:
    import jinja2

_STATEMENT = {"cpp": "//%", "cuda": "//%", "triton": "#%"}
_TEMPLATE_MARK = re.compile("\x01([^\x02]*)\x02")
_USER_MARK = re.compile("\x03([^\x04]*)\x04")


def user_mark(location: str | None) -> str:
    """Text that, printed in a template, ties its generated line to the user's ``location``."""
    return f"\x03{location}\x04" if location else ""


@dataclass(frozen=True)
class Origin:
    """Where a generated line came from."""

    template: str | None = None
    user: str | None = None


@dataclass(frozen=True)
class Rendered:
    """Generated text and, for each of its lines, the origin."""

    text: str
    origins: tuple[Origin, ...]

    def explain(self, error: CompileError, path: str | None = None) -> CompileError:
        """``error`` with the template line and the user's line of each failing line filled in.

        ``path`` is where the source can be read.
        """
        lines = []
        for line in error.lines:
            origin = self.origins[line.line - 1] if 0 < line.line <= len(self.origins) else Origin()
            lines.append(SourceLine(line.line, line.text, line.message, origin.template, origin.user))
        message = str(error.args[0]).split("\n", 1)[0]
        return CompileError(message, path=path or error.path, log=error.log, lines=tuple(lines))


@cache
def environment(language: str) -> jinja2.Environment:
    """The environment of the templates in ``templates/<language>/``."""
    import jinja2
    from jinja2.ext import Extension

    statement = _STATEMENT[language]

    class LineMarks(Extension):
        def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
            marked = []
            for number, line in enumerate(source.split("\n"), 1):
                silent = line.lstrip().startswith((statement, "<#", "<%")) or not line.strip()
                marked.append(line if silent else f"{line}\x01{language}/{name}:{number}\x02")
            return "\n".join(marked)

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_directory() / language),
        extensions=[LineMarks],
        undefined=jinja2.StrictUndefined,
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        line_statement_prefix=statement,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
        autoescape=False,
    )


def render(language: str, template: str, context: dict[str, Any]) -> Rendered:
    """Render ``templates/<language>/<template>``; CompileError names the template and its line."""
    import jinja2

    try:
        marked = environment(language).get_template(template).render(context)
    except jinja2.TemplateSyntaxError as error:
        raise CompileError(f"template {language}/{error.name}:{error.lineno}: {error.message}") from error
    except jinja2.TemplateNotFound as error:
        raise CompileError(f"there is no template {language}/{error.name} in {templates_directory()}") from error
    except jinja2.UndefinedError as error:
        raise CompileError(f"template {language}/{template}:{_failing_line(error, template)}: {error}") from error
    lines, origins = [], []
    for line in marked.split("\n"):
        template_mark, user = _TEMPLATE_MARK.search(line), _USER_MARK.search(line)
        lines.append(_USER_MARK.sub("", _TEMPLATE_MARK.sub("", line)).rstrip())
        origins.append(Origin(template_mark and template_mark.group(1), user and user.group(1)))
    return Rendered("\n".join(lines), tuple(origins))


def _failing_line(error: BaseException, template: str) -> int | str:
    """The template line an exception was raised at: Jinja rewrites tracebacks to template lines."""
    line: int | str = "?"
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == Path(template).name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


@cache
def header(language: str, name: str) -> str:
    """The text of a static header, by its include name."""
    return (templates_directory() / language / "include" / name).read_text()


_FUNCTION = re.compile(r"^@.*\ndef (\w+)\(.*(?:\n(?:[ \t)].*)?)*", re.MULTILINE)


@cache
def _functions(header_text: str) -> dict[str, str]:
    """The decorated functions of a Python header by name.

    Not by ``ast``: CPython 3.11 counts the depth of all threads' trees together, and where Triton parses in another
    thread meanwhile it may raise SystemError (github.com/python/cpython/issues/106905).
    """
    return {found[1]: found[0].rstrip() for found in _FUNCTION.finditer(header_text)}


def select_functions(header_text: str, used_in: str) -> str:
    """The functions of a Python header that the text ``used_in`` names, and those they call, in the header's order."""
    texts = _functions(header_text)
    wanted: set[str] = set()
    waiting = [used_in]
    while waiting:
        names = set(re.findall(r"\b[A-Za-z_]\w*\b", waiting.pop())) & texts.keys() - wanted
        wanted |= names
        waiting += [texts[name] for name in names]
    return "\n\n\n".join(text for name, text in texts.items() if name in wanted)


_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](jitgen/[^>"]+)[>"]', re.MULTILINE)


def headers(language: str, text: str) -> tuple[tuple[str, str], ...]:
    """(include name, text) of every static header of ours ``text`` includes, directly or not, in a fixed order."""
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(text)
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            found[name] = header(language, name)
            waiting += _INCLUDE.findall(found[name])
    return tuple(sorted(found.items()))


def entry_name(kernel: str) -> str:
    """The symbol of the kernel of this name: the name, made an identifier."""
    return "jitgen_" + re.sub(r"\W+", "_", kernel).strip("_")


def kernel_source(
    name: str,
    language: str,
    template: str,
    compiler: str,
    target: Target,
    values: dict[str, Any],
    options: dict[str, Any],
) -> tuple[KernelSource, Rendered]:
    """The end of every family's render: the source ``template`` gives for ``values``, and where its lines are from."""
    rendered = render(language, template, values)
    source = KernelSource(
        name=name,
        language=language,
        compiler=compiler,
        target=target,
        text=rendered.text,
        headers=headers(language, rendered.text),
        options=tuple(sorted(options.items())),
        template=f"{language}/{template}",
    )
    return source, rendered
