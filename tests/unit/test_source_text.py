"""What is printed into a generated source beside numbers: names and comments that cannot become code."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import tokenize
from pathlib import Path
from typing import Any

import jitgen_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jitgen
from jitgen import console, pipeline
from jitgen._data import templates_directory
from jitgen.codegen import environment
from jitgen.codegen.text import (
    COMMENT_LENGTH,
    NAME_LENGTH,
    comment,
    entry_name,
    function_name,
    is_function_name,
)
from jitgen.compilers import host
from jitgen.families import registry

NAMES = (
    "<lambda>",
    "",
    "_",
    "class",
    "1st",
    "a.b",
    "a\nb",
    "a\r#include <x>\n",
    "q\"uo'te",
    "ends\\",
    "ends??/",
    "*/ code /*",
    "größe",
    "функция",
    "\ud800",
    "nul\x00",
    "\x03mark\x04",
    "a\u2028b\x85c",
    "${7 * 7}",
    "x" * 10_000,
    "x" * 9_999 + "y",
    'h\nimport os; os.system("touch ran")\n#',
    "h\n__attribute__((constructor)) static void run() { __builtin_trap(); }\n//",
)
TARGETS = {"cpp": "x86-64-v3", "cuda": "sm_90a", "triton": "gfx942"}

texts = st.text() | st.text(alphabet="?/\\*\n\r \t#ab\x85\u2028\x0b\x0c\x1c") | st.sampled_from(NAMES)


# ----------------------------------------------------------------------------------------------------------- comments


@given(texts)
def test_a_comment_is_one_line_of_printable_ascii(text: str) -> None:
    plain = comment(text)
    assert re.fullmatch(r"[ -~]*", plain)
    assert len(plain) <= 2 * COMMENT_LENGTH
    assert not plain.endswith(("\\", " "))
    assert "??/" not in plain
    assert "*/" not in plain


@given(texts)
def test_code_follows_a_comment(text: str) -> None:
    tokens = list(tokenize.generate_tokens(io.StringIO(f"# {comment(text)}\nx\n").readline))
    assert [token.string for token in tokens if token.type == tokenize.NAME] == ["x"]


@pytest.mark.parametrize("text", ["jitgen 0.1.0: gate, template cuda/gemm.cu.j2", "(s0_0, (s0_1 // 2)) as 2", "7"])
def test_ordinary_text_is_as_it_was(text: str) -> None:
    assert comment(text) == text


COMMENTS = {"cpp": r"//(?!%)|/\*", "triton": r"(?<!<)#(?![%>])"}
PRINTED = re.compile(r"\$\{[^}]*\}")


def printed_into_comments(language: str, template: str) -> list[str]:
    """The expressions that a template prints into comments, as ``${expression}``."""
    found = []
    for line in template.splitlines():
        start = re.search(COMMENTS[language], PRINTED.sub(lambda printed: "$" * len(printed[0]), line))
        found += PRINTED.findall(line[start.start() :]) if start else []
    return found


def test_every_comment_of_a_template_goes_through_the_filter() -> None:
    count = 0
    for path in templates_directory().rglob("*.j2"):
        language = "triton" if path.name.endswith(".py.j2") else "cpp"
        for expression in printed_into_comments(language, path.read_text()):
            assert expression.endswith(" | comment}"), f"{path} prints {expression} into a comment; add | comment"
            count += 1
    assert count >= 20


# -------------------------------------------------------------------------------------------------------------- names


@given(texts)
def test_a_name_is_a_short_identifier(text: str) -> None:
    name = function_name(text)
    assert is_function_name(name)
    assert function_name(name) == name
    assert len(name) <= NAME_LENGTH
    assert (name == text) == is_function_name(text)


@given(texts, texts)
def test_an_entry_is_a_short_identifier(family: str, content: str) -> None:
    entry = entry_name(family, content)
    assert re.fullmatch(r"jitgen_[A-Za-z0-9_]*_[0-9a-f]{8}", entry, re.ASCII)
    assert len(entry) <= len("jitgen_") + NAME_LENGTH + 9
    assert entry == entry_name(family, content) != entry_name(family, content + "x")


@given(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,80}", fullmatch=True) | st.just("<lambda>"))
def test_ordinary_names_are_as_they_were(name: str) -> None:
    assert function_name(name) == name


def test_different_names_stay_different() -> None:
    names = [function_name(name) for name in NAMES]
    assert len(set(names)) == len(NAMES)


def test_kernels_of_one_program_have_different_entries() -> None:
    def two(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 0) @ x

    two.__name__ = "ü" * 500
    low = jitgen_cases.lowered(two, torch.randn(8, 8))
    entries = [low.render(number)[0].name for number in range(len(low.program.kernels))]
    assert len(set(entries)) == len(entries) > 1


# ------------------------------------------------------------------------------------------------ names of functions


def _function(name: Any) -> Any:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) * 2

    function.__name__ = name
    return function


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
@pytest.mark.quick(where=lambda name: NAMES.index(name) % 3 == 0)
def test_a_function_of_any_name_runs(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    function = _function(name)
    x, y = torch.randn(3, 8), torch.randn(8)
    jitted = jitgen.jit(function)
    torch.testing.assert_close(jitted(x, y), function(x, y))
    torch.testing.assert_close(jitted.bind(x, y)(x, y), function(x, y))
    for backend, target in TARGETS.items():
        source = jitted.lower(x, y, backend=backend, target=target).source
        assert source.isascii()
        assert "jitgen_" in source
        if backend == "triton":
            compile(source, "kernel.py", "exec")


def test_names_that_are_no_text() -> None:
    class Called:
        __name__ = 7

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    assert is_function_name(jitgen.jit(Called()).name)
    module = type("Odd\nmodule", (torch.nn.Module,), {"forward": lambda self, x: x + 1})()
    assert is_function_name(jitgen.jit(module).name)


@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_a_graph_of_any_name_renders_to_the_same_code(name: str, backend: str) -> None:
    """Where a graph did not come from a trace: a source does not have its name."""
    x, y = torch.randn(3, 8), torch.randn(8)
    low = jitgen_cases.lowered(_function("plain"), x, y, backend=backend, target=TARGETS[backend])
    (kernel,) = low.program.kernels
    source, _ = low.render(0)
    hostile = dataclasses.replace(kernel, name=name)
    arguments = (low.layouts[0], low.schedules[0], low.route.device, low.route.compiler)
    found, _ = registry.family_of(hostile).render(hostile, *arguments)
    assert (found.text, found.name) == (source.text, source.name)


# ------------------------------------------------------------------------------------------------ marks, logs, numbers


def test_a_file_name_ends_no_mark() -> None:
    mark = environment.user_mark("odd\x04\nname\u2028.py:3")
    assert re.fullmatch("\x03[^\x00-\x1f\u2028]*\x04", mark)
    assert environment.user_mark("model.py:12") == "\x03model.py:12\x04"
    assert environment.user_mark("größe.py:12") == "\x03größe.py:12\x04"


def test_logs_have_no_control_characters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", "1")
    console.log(1, "a\x1b[2Jb\r\n\tc\x9b\u202e")
    assert capsys.readouterr().err == "jitgen: a?[2Jb?\n\tc??\n"


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_scalars_that_are_not_finite_launch(value: float) -> None:
    def function(x: torch.Tensor, n: float) -> torch.Tensor:
        return x * (n * value + n)

    x = torch.randn(5)
    torch.testing.assert_close(jitgen.jit(function)(x, 2.0), function(x, 2.0), equal_nan=True)


def test_directories_and_commands_have_plain_names() -> None:
    """The entry is what names temporary directories, the compiler's seed and the operator of ``load_inline``."""
    from jitgen.compilers import load_inline

    low = jitgen_cases.lowered(_function("$(touch ran); `x` /../"), torch.randn(3, 8), torch.randn(8))
    source = pipeline.routes.prepare(low.render(0)[0])
    assert source.name.isidentifier()
    assert load_inline.operator_name(source).isidentifier()
    assert os.sep not in Path(source.name).name
