"""Provides the Jinja environment, and rendering that records which template line each generated line came from.

Delimiters are chosen so that a template reads, highlights and formats as its own language: ``${x}`` prints, lines that
start with ``//%`` (``#%`` in Triton) are statements, ``<# #>`` comments. ``{``, ``{%`` and ``{{`` stay plain text,
which inline PTX and nested braces need. A name that is not defined is an error (StrictUndefined). What a template
prints into a comment goes through the filter ``comment`` (``codegen/text.py``).

Before rendering, a mark that names the line is added to the end of each template line; a printed expression has a mark
with the user's line. ``render`` strips the marks and returns them as ``Origin``s, by which a compiler error in line 57
is reported as "elementwise/elementwise.cpp.j2:31, your expression at model.py:12". Rendering is deterministic: neither
a time nor a path is printed.

Neighbours: ``kernel/render.py`` and each family's own ``render.py`` call ``kernel_source``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitgen._data import templates_directory
from jitgen.codegen.text import comment, entry_name
from jitgen.errors import CompileError, SourceLine
from jitgen.spec import KernelSource, Target

if TYPE_CHECKING:
    import jinja2

_STATEMENT = {"cpp": "//%", "cuda": "//%", "triton": "#%"}
_TEMPLATE_MARK = re.compile("\x01([^\x02]*)\x02")
_USER_MARK = re.compile("\x03([^\x04]*)\x04")
ENTRY_MARK = "\x05"
"""Stands for the entry symbol while a source is rendered; the symbol follows from the rest of it."""


def user_mark(location: str | None) -> str:
    """Returns a mark for a template to print in a generated line that computes the user's expression at
    ``location``."""
    if not location:
        return ""
    # A file's name may hold anything; a control character would end the mark, and a line feed the line.
    name = location if location.isprintable() else "".join(c if c.isprintable() else "?" for c in location)
    return f"\x03{name}\x04"


@dataclass(frozen=True)
class Origin:
    """Records the template line and the user's line (as ``file:line``) that a generated line came from; None if
    unknown."""

    template: str | None = None
    user: str | None = None


@dataclass(frozen=True)
class Rendered:
    """Holds generated text, and the origin of each of its lines."""

    text: str
    origins: tuple[Origin, ...]

    def explain(self, error: CompileError, path: str | None = None) -> CompileError:
        """Adds to ``error`` the template line and the user's line of each failing line.

        Args:
            path: the file that the source has been written to, for the user to read.
        """
        lines = []
        for line in error.lines:
            origin = self.origins[line.line - 1] if 0 < line.line <= len(self.origins) else Origin()
            lines.append(SourceLine(line.line, line.text, line.message, origin.template, origin.user))
        message = str(error.args[0]).split("\n", 1)[0]
        return CompileError(message, path=path or error.path, log=error.log, lines=tuple(lines))


def family_folder(name: str) -> Path:
    """Returns the directory with the templates of jitgen's own family ``name``."""
    return templates_directory() / name


def _common_folder() -> Path:
    """Returns the directory with the templates and headers that several families use."""
    return templates_directory() / "common"


@cache
def environment(language: str, folder: Path) -> jinja2.Environment:
    """Returns the environment for the templates in ``folder`` and those that all families share."""
    import jinja2
    from jinja2.ext import Extension

    statement = _STATEMENT[language]

    class LineMarks(Extension):
        def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
            marked, location = [], f"{Path(filename).parent.name}/{name}" if filename else str(name)
            for number, line in enumerate(source.split("\n"), 1):
                ends_comment = line.rstrip().endswith("#>") and "<#" not in line
                silent = line.lstrip().startswith((statement, "<#", "<%")) or not line.strip() or ends_comment
                marked.append(line if silent else f"{line}\x01{location}:{number}\x02")
            return "\n".join(marked)

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _common_folder()]),
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
        auto_reload=not _is_ours(folder),
        autoescape=False,
    )
    made.filters["comment"] = comment
    return made


def render(language: str, folder: Path, template: str, context: dict[str, Any]) -> Rendered:
    """Renders ``template`` of ``folder``; CompileError names the template and its line."""
    import jinja2

    try:
        marked = environment(language, folder).get_template(template).render(context)
    except jinja2.TemplateSyntaxError as error:
        raise CompileError(f"template {folder.name}/{error.name}:{error.lineno}: {error.message}") from error
    except jinja2.TemplateNotFound as error:
        raise CompileError(f"there is no template {error.name} in {folder}") from error
    except jinja2.UndefinedError as error:
        raise CompileError(f"template {folder.name}/{template}:{_failing_line(error, template)}: {error}") from error
    lines, origins = [], []
    for line in marked.split("\n"):
        template_mark, user = _TEMPLATE_MARK.search(line), _USER_MARK.search(line)
        lines.append(_USER_MARK.sub("", _TEMPLATE_MARK.sub("", line)).rstrip())
        origins.append(Origin(template_mark and template_mark.group(1), user and user.group(1)))
    return Rendered("\n".join(lines), tuple(origins))


def _failing_line(error: BaseException, template: str) -> int | str:
    """Returns the template line at which an exception was raised: Jinja rewrites tracebacks to template lines."""
    line: int | str = "?"
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == Path(template).name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def header(name: str, folder: Path | None = None) -> str:
    """Returns the text of a static header, by its include name: the family's own in ``folder``, else the common one."""
    if folder is None or _is_ours(folder):
        return _read_once(name, folder)
    own = folder / "include" / name
    return own.read_text() if own.is_file() else _read_once(name, None)


@cache
def _is_ours(path: Path) -> bool:
    """Returns whether ``path`` is a template or header of jitgen, and so as it was when jitgen was imported. What
    belongs to a family outside may be edited meanwhile, and that family's fingerprint changes with it."""
    return path.is_relative_to(templates_directory())


@cache
def _read_once(name: str, folder: Path | None) -> str:
    own = folder / "include" / name if folder is not None else None
    return (own if own is not None and own.is_file() else _common_folder() / "include" / name).read_text()


_FUNCTION = re.compile(r"^@.*\ndef (\w+)\(.*(?:\n(?:[ \t)].*)?)*", re.MULTILINE)


@cache
def _functions(header_text: str) -> dict[str, str]:
    """Returns the text of each decorated function of a Python header, by name.

    A regular expression finds them because ``ast`` may raise SystemError while Triton parses in another thread: CPython
    3.11 has one recursion counter for the trees of all threads (github.com/python/cpython/issues/106905).
    """
    return {match[1]: match[0].rstrip() for match in _FUNCTION.finditer(header_text)}


def select_functions(header_text: str, used_in: str) -> str:
    """Returns the functions of a Python header that the text ``used_in`` calls, directly or not, in the header's
    order."""
    texts = _functions(header_text)
    wanted: set[str] = set()
    waiting = [used_in]
    while waiting:
        names = set(re.findall(r"\b[A-Za-z_]\w*\b", waiting.pop())) & texts.keys() - wanted
        wanted |= names
        waiting += [texts[name] for name in names]
    return "\n\n\n".join(text for name, text in texts.items() if name in wanted)


_COMMENT = re.compile(r"(^| {2,})#.*", re.MULTILINE)


def _triton_headers(folder: Path) -> str:
    """Returns the text of the static headers in Triton: the common one, and those of a family's ``folder``."""
    names = ["jitgen_triton.py", *sorted(path.name for path in (folder / "include").glob("*.py"))]
    return "\n".join(header(name, folder) for name in names)


def _is_static_header(name: str, folder: Path) -> bool:
    return any((directory / "include" / name).is_file() for directory in (folder, _common_folder()))


_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


@lru_cache(512)
def _included(text: str) -> tuple[str, ...]:
    return tuple(_INCLUDE.findall(text))


def headers(folder: Path, text: str) -> tuple[tuple[str, str], ...]:
    """Returns (include name, text) of every static header of ours ``text`` includes, directly or not, in a fixed order.

    Ours are those under ``jitgen/``, and what lies in the ``include`` of ``folder``, a family's, or of the common
    folder, under any name.
    """
    texts: dict[str, str] = {}
    waiting = [*_included(text)]
    while waiting:
        name = waiting.pop(0)
        if name not in texts and (name.startswith("jitgen/") or _is_static_header(name, folder)):
            texts[name] = header(name, folder)
            waiting += _included(texts[name])
    return tuple(sorted(texts.items()))


def packages(text: str, headers: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the packages of ``find_headers`` (``compilers/nvrtc.py``) that ``text`` or one of ``headers`` includes
    from."""
    ours = dict(headers)
    included = [name for content in (text, *ours.values()) for name in _included(content) if name not in ours]
    prefixes = {"nvidia-cutlass": ("cute/", "cutlass/"), "cuda": ("cuda/",)}
    return tuple(package for package, known in prefixes.items() if any(name.startswith(known) for name in included))


def kernel_source(
    family: str,
    kernel: str,
    language: str,
    folder: Path,
    template: str,
    compiler: str,
    target: Target,
    values: dict[str, Any],
    options: dict[str, Any],
    own: tuple[tuple[tuple[str, str], ...], tuple[str, ...]] = ((), ()),
) -> tuple[KernelSource, Rendered]:
    """Renders ``template`` with ``values``: the source, and the line origins. Every family's ``render`` ends here.

    Args:
        family: the name of the kernel's family, with which its entry symbol begins.
        kernel: its name, which messages say and the source does not.
        folder: the directory with the family's templates and headers.
        compiler: the compiler of the route (``compilers/routes.py``).
        values: what the template reads; ``ENTRY_MARK`` stands for the entry symbol, here and in ``options``. Templates
            in Triton, whose kernels are one file, also read ``include``: the functions of static headers they call.
        options: the ``KernelSource`` options: what changes the binary besides the text.
        own: the headers and the packages of a kernel that a user wrote.
    """
    if language == "triton":
        called = render(language, folder, template, values | {"include": ""}).text
        values = values | {"include": select_functions(_triton_headers(folder), _COMMENT.sub("", called))}
    marked = render(language, folder, template, values)
    name = entry_name(family, [marked.text, sorted(options.items())])
    rendered = Rendered(_named(marked.text, name), marked.origins)
    own_headers, own_packages = own
    included = tuple(sorted((dict(headers(folder, rendered.text)) | dict(own_headers)).items()))
    source = KernelSource(
        name=name,
        kernel=kernel,
        language=language,
        compiler=compiler,
        target=target,
        text=rendered.text,
        headers=included,
        packages=tuple(dict.fromkeys((*packages(rendered.text, included), *own_packages))),
        options=tuple(sorted(_named(options, name).items())),
        template=f"{folder.name}/{template}",
    )
    return source, rendered


def _named(value: Any, name: str) -> Any:
    """Returns ``value``, text or JSON of text, with ``name`` in place of ``ENTRY_MARK``."""
    if isinstance(value, str):
        return value.replace(ENTRY_MARK, name)
    if isinstance(value, dict):
        return {key: _named(item, name) for key, item in value.items()}
    return [_named(item, name) for item in value] if isinstance(value, list) else value
