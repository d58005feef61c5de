"""``jitgen cache`` and ``jitgen doctor``, run in this process through click's runner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jitgen import settings
from jitgen.cli import doctor, show
from jitgen.cli.group import COMMANDS, jitgen
from jitgen.spec import Artifact
from jitgen.store import Store, layout
from tests import fresh

KEY = "abcd" + "0" * 60
SECOND = "abce" + "0" * 60
PLAN_KEY = "cdef" + "1" * 60


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    store = Store.open()
    meta = {"entry": "double_square", "target": "sm_90a", "toolchain": "nvrtc 13.3"}
    store.put_artifact(Artifact(KEY, {"kernel.cu": b"// source\n", "kernel.cubin": b"\x7fELF"}, "kernel.cubin", meta))
    store.put_artifact(Artifact(SECOND, {"kernel.so": b"\x7fELF"}, "kernel.so", meta))
    store.put_plan(PLAN_KEY, {"artifacts": [KEY], "toolchains": ["nvrtc 13.3"]})
    return store


def run(*arguments: str, code: int = 0, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(jitgen, list(arguments), input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def run_json(*arguments: str, code: int = 0):
    return json.loads(run(*arguments, "--json", code=code).stdout)


def damage(store: Store) -> None:
    (layout.artifact_path(store.root, KEY) / "kernel.cubin").write_bytes(b"damaged")


def test_ls(store: Store) -> None:
    lines = run("cache", "ls").stdout.splitlines()
    assert [line.split("\t")[:2] for line in lines] == [
        ["artifact", KEY[:12]],
        ["artifact", SECOND[:12]],
        ["plan", PLAN_KEY[:12]],
    ]
    assert "double_square sm_90a nvrtc 13.3" in lines[0]
    assert [row["key"] for row in run_json("cache", "ls", "abcd")] == [KEY]
    assert [row["key"] for row in run_json("cache", "ls", "--kind", "plan")] == [PLAN_KEY]


def test_show_takes_prefixes_as_git_does(store: Store) -> None:
    assert run_json("cache", "show", "abcd")["files"] == {"kernel.cu": 10, "kernel.cubin": 4}
    assert run_json("cache", "show", PLAN_KEY)["plan"]["artifacts"] == [KEY]
    assert run("cache", "show", KEY[:8], "kernel.cu").stdout == "// source\n"
    assert "entry: double_square" in run("cache", "show", "ABCD").stdout
    assert "no file 'kernel.ptx'" in run("cache", "show", "abcd", "kernel.ptx", code=2).stderr
    assert "4 or more" in run("cache", "show", "abc", code=2).stderr
    assert "no key" in run("cache", "show", "wxyz", code=2).stderr
    assert "no entry" in run("cache", "show", "0123", code=1).stderr
    store.put_plan("abcd" + "2" * 60, {"artifacts": []})
    assert "ambiguous" in run("cache", "show", "abcd", code=1).stderr


def test_verify(store: Store) -> None:
    (layout.staging_path(store.root) / "left").mkdir()
    assert "3 entries read, 0 damaged, 0 incomplete, 1 leftovers" in run("cache", "verify").stdout
    damage(store)
    assert KEY in run("cache", "verify", code=1).stdout
    report = run_json("cache", "verify", code=1)
    assert not report["clean"]
    assert report["damaged"][0]["key"] == KEY
    assert "damaged" in run("cache", "show", KEY, code=1).stderr
    run("cache", "verify", "--repair")
    assert run_json("cache", "verify")["incomplete"][0]["key"] == PLAN_KEY


def test_an_unusable_store_is_status_2(store: Store) -> None:
    store.root.chmod(0o777)
    assert "chmod 700" in run("cache", "verify", code=2).stderr
    store.root.chmod(0o700)


def test_why(store: Store) -> None:
    assert run("cache", "why", "cdef").stdout.startswith("present: plan in the store")
    assert "absent" in run("cache", "why", "0" * 64, code=1).stdout
    assert run_json("cache", "why", "0" * 64, code=1) == []
    damage(store)
    assert "kernel.cubin has 7 bytes, expected 4" in run("cache", "why", KEY, code=1).stdout
    store.remove("artifact", KEY)
    assert run_json("cache", "why", PLAN_KEY, code=1)[0]["state"] == "incomplete"


def test_prune(store: Store) -> None:
    assert run_json("cache", "prune")["removed"] == []
    assert "3 entries removed" in run("cache", "prune", "--limit", "0").stdout
    assert "expected a size" in run("cache", "prune", "--limit", "plenty", code=2).stderr
    assert list(store.entries()) == []


def test_clear_asks_first(store: Store) -> None:
    run("cache", "clear", code=1, stdin="n\n")
    assert len(list(store.entries())) == 3
    assert run_json("cache", "clear", "--yes") == {"removed": 3}


def test_export_and_import(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = str(tmp_path / "kernels.tar")
    assert {row["key"] for row in run_json("cache", "export", archive, "cdef")} == {KEY, PLAN_KEY}
    assert "3 entries" in run("cache", "export", archive).stdout
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "other"))
    assert len(run_json("cache", "import", archive)["added"]) == 3
    assert "0 added, 3 here already" in run("cache", "import", archive).stdout
    Path(archive).write_bytes(b"")
    assert "no archive" in run("cache", "import", archive, code=2).stderr


def test_a_bundle_is_not_imported_under_no_name(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "store.zip"
    run("cache", "export", str(bundle))
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "other"))
    run("cache", "import", str(bundle), "--protect", "../v7", code=2)
    assert list(Store.open(tmp_path / "other", layers=[]).entries()) == []


def test_nothing_reaches_a_terminal_that_it_would_obey(store: Store) -> None:
    """Not even what somebody sealed."""
    key = "aaaa" + "7" * 60
    store.put_artifact(Artifact(key, {"kernel.so": b"\x7fELF"}, "kernel.so", {"entry": "a\x1b[2Jb\x9b"}))
    store.put_plan(PLAN_KEY, {"artifacts": [KEY], "name": "\x1b]0;title\x07"})
    for words in (["ls"], ["show", key], ["show", PLAN_KEY], ["why", PLAN_KEY]):
        shown = run("cache", *words).output
        assert shown.replace("\n", "").replace("\t", "").isprintable(), shown
    assert "a?[2Jb?" in run("cache", "ls").output


def test_a_command_that_does_not_exist(store: Store) -> None:
    for words, meant in ((["cach"], "cache"), (["cache", "verfy"], "verify")):
        done = CliRunner().invoke(jitgen, words)
        assert done.exit_code == 2
        assert f"Did you mean {meant}?" in done.output


def test_path(store: Store) -> None:
    assert run("cache", "path").stdout.strip() == str(store.root)
    assert run_json("cache", "path") == {"root": str(store.root), "layers": [], "writable": True}


def test_doctor_reports_what_is_broken_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_json("doctor")
    names = {row["name"]: row for row in report["checks"]}
    assert names["torch"]["state"] == names["cpu"]["state"] == "ok"
    assert names[str(store.root)]["value"].startswith("3 entries")
    assert "nvrtc 13.3: 2 artifacts" in {row["value"] for row in report["checks"]}
    for row in report["checks"]:
        assert row["state"] in ("ok", "note") or row["remedy"], row
    monkeypatch.setenv("JITGEN_DEBUG", "9")
    store.root.chmod(0o777)
    broken = {row["name"]: row for row in run_json("doctor")["checks"]}
    store.root.chmod(0o700)
    assert "0 to 5" in broken["JITGEN_DEBUG"]["value"]
    assert "chmod 700" in broken["store"]["value"]
    assert "runs: cpu" in run("doctor").stdout


def test_doctor_finds_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*parts: str) -> str:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True)
        path.write_text("")
        path.chmod(0o755)
        return str(path)

    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    usual = tmp_path / "usual"
    assert doctor.find_nvcc(None, usual) is None
    package = made("packages", "nvidia", "cu13", "bin", "nvcc")
    assert doctor.find_nvcc(None, usual) == package
    made("usual", "cuda-9.2", "bin", "nvcc")
    newest = made("usual", "cuda-13.0", "bin", "nvcc")
    assert doctor.find_nvcc(None, usual) == newest
    on_path = made("path", "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert doctor.find_nvcc(None, usual) == on_path
    named = made("named", "bin", "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    assert doctor.find_nvcc(None, usual) == named
    torchs = made("torch", "bin", "nvcc")
    assert doctor.find_nvcc(str(tmp_path / "torch"), usual) == torchs


def test_doctor_knows_bundles(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, absent, other = tmp_path / "store.zip", tmp_path / "absent", tmp_path / "other.zip"
    store.export(bundle)
    monkeypatch.setenv("JITGEN_CACHE_PATH", f"{bundle}:{absent}")
    rows = {row["name"]: row for row in run_json("doctor")["checks"]}
    assert (rows[str(bundle)]["state"], rows[str(absent)]["state"]) == ("ok", "missing")
    other.write_text("no archive")
    monkeypatch.setenv("JITGEN_CACHE_PATH", str(other))
    rows = {row["name"]: row for row in run_json("doctor")["checks"]}
    assert "no archive of a jitgen store" in rows["store"]["value"]


def test_help_loads_no_command() -> None:
    code = (
        "import sys\nfrom jitgen.cli.group import COMMANDS, jitgen\n"
        "jitgen(['--help'], standalone_mode=False)\n"
        "assert not {row[0].partition(':')[0] for row in COMMANDS.values()} & set(sys.modules)\n"
    )
    printed = fresh.run(code)
    assert printed.returncode == 0, printed.stderr
    assert all(name in printed.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_loads(name: str) -> None:
    assert "--help" in run(name, "--help").stdout


def test_units() -> None:
    assert [show.in_units(size) for size in (0, 1023, 1536, 3 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
    assert [show.age(seconds) for seconds in (5, 120, 7200, 200000)] == ["now", "2 min ago", "2 h ago", "2 d ago"]
