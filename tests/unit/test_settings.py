"""Settings: one table, read when asked for, with errors that list what is valid."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from jitgen import settings
from jitgen.errors import SettingError


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*settings.SETTINGS, "CXX", "TRITON_INTERPRET"]:
        monkeypatch.delenv(name, raising=False)


def test_every_setting_has_a_default_and_a_line_of_help() -> None:
    for name, setting in settings.SETTINGS.items():
        assert name == setting.name
        assert name.startswith("JITGEN_")
        assert setting.doc
        assert settings.get(name) == setting.default


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, setting in settings.SETTINGS.items():
        monkeypatch.setenv(name, "")
        assert settings.get(name) == setting.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("JITGEN_CACHE_DIR", "/somewhere", "/somewhere"),
        ("JITGEN_CACHE_PATH", os.pathsep.join(["/a", "", "/b"]), ("/a", "/b")),
        ("JITGEN_CACHE_LIMIT", "1073741824", 2**30),
        ("JITGEN_CACHE_LIMIT", "500M", 500 * 2**20),
        ("JITGEN_CACHE_LIMIT", "20G", 20 * 2**30),
        ("JITGEN_CACHE_LIMIT", "1.5 GiB", 3 * 2**29),
        ("JITGEN_CACHE_LIMIT", "2kb", 2048),
        ("JITGEN_BACKEND", "triton", "triton"),
        ("JITGEN_STRICT", "1", True),
        ("JITGEN_STRICT", "Yes", True),
        ("JITGEN_STRICT", "off", False),
        ("JITGEN_DEBUG", "4", 4),
    ],
)
def test_values_are_parsed(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(name, text)
    assert settings.get(name) == value


@pytest.mark.parametrize(
    ("name", "text", "valid"),
    [
        ("JITGEN_BACKEND", "opencl", "auto, triton, cuda, cpp"),
        ("JITGEN_STRICT", "perhaps", "1, 0, true, false"),
        ("JITGEN_DEBUG", "6", "0 to 5"),
        ("JITGEN_DEBUG", "x", "0 to 5"),
        ("JITGEN_CACHE_LIMIT", "inf", "500M"),
        ("JITGEN_CACHE_LIMIT", "-5G", "500M"),
        ("JITGEN_CACHE_LIMIT", "plenty", "500M"),
        ("JITGEN_CPU_TARGET", "avx9", "x86-64-v2, x86-64-v3, x86-64-v4, generic"),
        ("JITGEN_CPU_TARGET", "cpu", "x86-64-v2, x86-64-v3, x86-64-v4, generic"),
        ("JITGEN_CPU_TARGET", "sm_90a", "x86-64-v2, x86-64-v3, x86-64-v4, generic"),
        ("JITGEN_TEMPLATES", "/no/such/directory", "there is no such directory"),
        ("JITGEN_TUNED", "/no/such/directory", "there is no such directory"),
    ],
)
def test_a_value_that_does_not_parse_says_what_does(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, valid: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(SettingError, match=re.escape(valid)) as caught:
        settings.get(name)
    assert f"{name}={text!r}" in str(caught.value)


def test_an_unknown_name_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        settings.get("JITGEN_NO_SUCH_SETTING")


def test_strict_is_a_context_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settings.is_strict()
    with settings.strict():
        assert settings.is_strict()
        with settings.strict():
            pass
        assert settings.is_strict()
    assert not settings.is_strict()
    monkeypatch.setenv("JITGEN_STRICT", "1")
    assert settings.is_strict()


def test_strict_ends_with_an_exception() -> None:
    with pytest.raises(RuntimeError), settings.strict():
        raise RuntimeError
    assert not settings.is_strict()


def test_strict_is_of_one_thread() -> None:
    seen = []
    with settings.strict():
        thread = threading.Thread(target=lambda: seen.append(settings.is_strict()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_the_host_compiler_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.host_compiler_name() is None
    monkeypatch.setenv("CXX", "clang++")
    assert settings.host_compiler_name() == "clang++"
    monkeypatch.setenv("JITGEN_CXX", "ccache g++")
    assert settings.host_compiler_name() == "ccache g++"


def test_the_interpreter_is_asked_for_as_triton_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settings.interpreting_triton()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert settings.interpreting_triton()


def test_nothing_else_reads_a_jitgen_variable() -> None:
    package = Path(settings.__file__).parent
    readers = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"(environ|getenv)\W[^\n]*JITGEN_", path.read_text())
    ]
    assert readers == []
