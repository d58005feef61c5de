"""A call never fails because of its store: it warns once, keeps what it compiled in memory, and goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from store_samples import ARTIFACT, KEY, PLAN, PLAN_KEY, filled, flip, make_old, numbered_key

import jitgen
from jitgen import scratch, settings
from jitgen.compilers import host
from jitgen.errors import CacheWarning
from jitgen.store import Store, atomic, layout, notice, usage
from jitgen.store.default import default_store
from jitgen.store.lock import Flight
from tests import fresh

needs_compiler = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    notice.forget()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", layers=[])


def call() -> list[str]:
    """A call of a new function, twice, whose result is right; the warnings of the store."""

    def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * y

    x, y = torch.randn(3, 5), torch.randn(5)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.testing.assert_close(jitgen.jit(gate)(x, y), gate(x, y))
    return [str(one.message) for one in told if issubclass(one.category, CacheWarning)]


@needs_compiler
@pytest.mark.parametrize("place", ["/dev/null/nope", "/proc/nope", "file/store"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / place))
    [told] = call()
    assert "JITGEN_CACHE_DIR" in told


@needs_compiler
def test_a_refused_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o777)
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(root))
    [told] = call()
    assert "chmod 700" in told
    assert list(root.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("step", ["mkdir", "fsync", "rename", "replace"])
@pytest.mark.quick(where=lambda code, step: code == errno.ENOSPC or (step == "fsync" and code == errno.EACCES))
def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, step: str) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / f"store-{step}-{code}"))
    own, system_call = atomic, getattr(os, step)

    def failing(path: object, *arguments: object, **options: object) -> object:
        if isinstance(path, int) or str(tmp_path) in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return system_call(path, *arguments, **options)

    monkeypatch.setattr(own.os, step, failing)
    [told] = call()
    assert os.strerror(code) in told


@needs_compiler
def test_a_strict_process_reads_what_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    assert call() == []

    def failing(*arguments: object, **options: object) -> object:
        raise OSError(errno.EROFS, "Read-only file system")

    for step in ("mkdir", "rename", "replace", "utime"):
        monkeypatch.setattr(atomic.os, step, failing)
    with jitgen.strict():
        assert call() == []


NO_HOME = """
import os, torch, jitgen, warnings
x = torch.randn(7)
jitgen.jit(torch.neg)(x)  # imports what root alone may be able to read
del os.environ["JITGEN_CACHE_DIR"]
os.setuid(54321)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert torch.equal(jitgen.jit(torch.relu)(x), torch.relu(x))
print([str(one.message) for one in told if issubclass(one.category, jitgen.errors.CacheWarning)])
"""


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can")
@pytest.mark.parametrize("home", [None, "/proc/nope", "/nonexistent"])
@pytest.mark.quick(where=lambda home: home == "/proc/nope")
def test_a_user_without_a_name_and_a_home(home: str | None, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {"JITGEN_CACHE_DIR": str(tmp_path)} | ({"HOME": home} if home else {})
    done = fresh.run(NO_HOME, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("JITGEN_CACHE_DIR") == 1, done.stdout


# ----------------------------------------------------------------------------------------------------------- damage


def test_damage_is_told_once_and_set_aside(store: Store) -> None:
    filled(store)
    path = layout.artifact_path(store.root, KEY)
    flip(path / "kernel.cubin")
    with pytest.warns(CacheWarning, match="does not match its digest") as told:
        assert [store.get_artifact(KEY) for _ in range(3)] == [None] * 3
    assert len(told) == 1
    assert not path.exists()
    found = store.verify()
    assert [finding.key for finding in found.damaged] == [KEY]
    [aside] = found.quarantined
    assert (aside / "kernel.cubin").exists()
    store.put_artifact(ARTIFACT)
    assert store.verify().clean
    assert len(store.verify().quarantined) == 1
    make_old(aside, 8 * 86400.0)
    atomic.sweep(store.root)
    assert store.verify().quarantined == ()


def test_what_another_process_mended_is_not_set_aside(store: Store) -> None:
    filled(store)
    path = layout.artifact_path(store.root, KEY)
    atomic.set_aside(store.root, path, lambda moved: store._is_whole(moved, "artifact", KEY))
    assert store.get_artifact(KEY) is not None
    assert store.verify().quarantined == ()


@pytest.mark.filterwarnings("ignore::jitgen.errors.CacheWarning")
@pytest.mark.parametrize("name", ["kernel.cubin", "meta.json"])
def test_a_fifo_is_damage_and_not_waited_for(store: Store, name: str) -> None:
    path = filled(store).put_artifact(ARTIFACT).directory / name
    path.unlink()
    os.mkfifo(path)
    started = time.monotonic()
    assert store.get_artifact(KEY) is None
    assert time.monotonic() - started < 5
    plan = layout.plan_path(store.root, PLAN_KEY)
    plan.unlink()
    os.mkfifo(plan)
    assert store.get_plan(PLAN_KEY) is None


@pytest.mark.filterwarnings("ignore::jitgen.errors.CacheWarning")
def test_a_link_is_damage(store: Store, tmp_path: Path) -> None:
    path = store.put_artifact(ARTIFACT).path()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert store.get_artifact(KEY) is None


@pytest.mark.filterwarnings("ignore::jitgen.errors.CacheWarning")
@pytest.mark.parametrize("inner", ["", "kernel.cubin", "..", "../..", "../../.."])
def test_what_others_may_write_is_not_loaded(store: Store, inner: str) -> None:
    """Below a root that others may enter; below a private one nobody reaches it."""
    path = store.put_artifact(ARTIFACT).directory / inner
    path.chmod(0o777)
    assert store.get_artifact(KEY) is not None
    store.root.chmod(0o755)
    assert store.get_artifact(KEY) is None


@pytest.mark.filterwarnings("ignore::jitgen.errors.CacheWarning")
@pytest.mark.parametrize("plan", [{}, {"artifacts": None}, {"artifacts": [7]}, {"artifacts": ["../x"]}])
def test_a_plan_that_names_no_artifacts_is_damage(store: Store, plan: dict[str, object]) -> None:
    """Somebody sealed it: its digest fits."""
    store.put_plan(PLAN_KEY, plan)
    assert store.get_plan(PLAN_KEY) is None


@needs_compiler
@pytest.mark.filterwarnings("ignore::jitgen.errors.CacheWarning")
@pytest.mark.parametrize("change", [{"artifacts": []}, {"artifacts": [KEY] * 9}, {"toolchains": None}])
def test_a_plan_of_another_form_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    x = torch.randn(3, 5)
    jitgen.jit(torch.relu)(x)
    store = default_store()
    key = jitgen.jit(torch.relu).lower(x).key
    plan = store.get_plan(key)
    assert plan is not None
    store.put_plan(key, {**plan, **change})
    assert torch.equal(jitgen.jit(torch.relu)(x), torch.relu(x))
    assert store.get_plan(key) == plan, "and it is made again"


@needs_compiler
def test_a_layer_that_is_no_bundle_is_told_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "layer.zip").write_text("no archive")
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("JITGEN_CACHE_PATH", str(tmp_path / "layer.zip"))
    [told] = call()
    assert "no archive of a jitgen store" in told
    assert told.endswith("It is not read")


def test_a_parent_in_which_all_may_rename_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open" / "store").mkdir(parents=True)
    (tmp_path / "open" / "store").chmod(0o700)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(jitgen.CacheError, match=r"chmod \+t"):
        Store.open(tmp_path / "open" / "store", layers=[])
    (tmp_path / "open").chmod(0o1777)
    Store.open(tmp_path / "open" / "store", layers=[])


# ------------------------------------------------------------------------------------------------------ limits, locks


def test_a_store_keeps_its_limit_by_itself(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(map(len, ARTIFACT.files.values())) + 1000
    limit = 10 * size
    monkeypatch.setenv("JITGEN_CACHE_LIMIT", str(limit))
    for number in range(40):
        path = store.put_artifact(replace(ARTIFACT, key=numbered_key(number))).directory
        make_old(path, 4000.0 - number)
        assert sum(entry.size for entry in store.entries()) <= limit
    kept = {entry.key for entry in store.entries()}
    assert len(kept) >= 5
    assert kept <= {numbered_key(number) for number in range(25, 40)}, "the oldest went first"


def test_writes_that_are_noted_are_added_up(store: Store) -> None:
    path = store.root / layout.VERSION / "size"
    path.parent.mkdir(parents=True)
    path.write_text("5 10000\n")
    for _ in range(1000):
        assert not usage.note_written(store.root, 3, 10_000)
        assert len(path.read_text().splitlines()) <= 202
    counted, *written = path.read_text().replace(" 10000", "").split()
    assert int(counted) + sum(map(int, written)) == 3005
    assert usage.note_written(store.root, 6996, 10_000)
    assert usage.note_written(store.root, 3, 10_001), "another limit"
    path.write_bytes(b"\xb0")
    assert usage.note_written(store.root, 3, 10_000), "damaged"


HOLD = """
import sys
from jitgen.store import Store
store = Store.open(sys.argv[1], layers=[])
store.hold(sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


def test_what_is_written_stays_whatever_the_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used at once. The next writer removes it, if by then nobody uses it any more."""
    monkeypatch.setenv("JITGEN_CACHE_LIMIT", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.keep_artifact(ARTIFACT)
    assert [entry.key for entry in store.entries()] == [KEY]


def test_prune_spares_what_a_process_uses_and_what_is_protected(store: Store) -> None:
    for number in range(3):
        store.put_artifact(replace(ARTIFACT, key=numbered_key(number)))
    store.protect("release", [numbered_key(1)])
    command = [sys.executable, "-c", HOLD, str(store.root), numbered_key(0)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "held\n"
        result = store.prune(0)
        assert [entry.key for entry in result.removed] == [numbered_key(2)]
        assert result.spared == 2
        user.kill()
    assert [entry.key for entry in store.prune(0).removed] == [numbered_key(0)]
    assert store.unprotect("release")
    assert [entry.key for entry in store.prune(0).removed] == [numbered_key(1)]


@pytest.mark.slow
def test_prune_of_8000_entries_is_quick(store: Store) -> None:
    small = {"kernel.cu": b"x" * 100, "kernel.cubin": b"y" * 400}
    store.put_artifact(replace(ARTIFACT, files=small))
    template = layout.artifact_path(store.root, KEY)
    contents = {path.name: path.read_bytes() for path in template.iterdir()}
    for number in range(8000):
        target = layout.artifact_path(store.root, numbered_key(number))
        target.mkdir(parents=True)
        for name, content in contents.items():
            (target / name).write_bytes(content)
    total = sum(entry.size for entry in store.entries())
    started = time.process_time()
    assert len(store.prune(total // 2).removed) >= 3900
    assert time.process_time() - started < 2


def test_who_overtakes_a_hung_owner_does_not_publish(store: Store) -> None:
    with store.single_flight(KEY) as owner, store.single_flight(KEY, patience=0.05) as second:
        assert owner is Flight.OWNER
        assert second is Flight.OVERTAKING
        assert not second.may_publish
    kept = store.keep_artifact(ARTIFACT, publish=False)
    store.keep_plan(PLAN_KEY, PLAN, publish=False)
    assert kept.read() == ARTIFACT.files["kernel.cubin"]
    assert store.get_artifact(KEY) == kept
    assert store.get_plan(PLAN_KEY) == PLAN
    assert not store.root.exists() or list(layout.walk(store.root)) == []


def test_patience_is_a_minute_and_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.get("JITGEN_PATIENCE") == 60.0
    monkeypatch.setenv("JITGEN_PATIENCE", "0")
    with pytest.raises(ValueError, match="above 0"):
        settings.get("JITGEN_PATIENCE")


# -------------------------------------------------------------------------------------------------- temporary files

KILLED = """
import os, signal
from jitgen import scratch
with scratch.directory() as directory:
    (directory / "kernel.cpp").write_text("")
    print(directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = fresh.run(KILLED, env=os.environ | {"TMPDIR": str(tmp_path)})
    left = Path(done.stdout.strip())
    assert left.is_dir(), done.stderr
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make_old(left, 60.0)
    with scratch.directory() as mine:
        make_old(mine, 60.0)
        scratch.sweep()
        assert mine.is_dir(), "locked by this process"
        assert not left.exists()
    kept = scratch.keep("kernel.cpp", "text")
    assert kept is not None
    scratch.sweep()
    assert Path(kept).read_text() == "text"
    assert scratch.keep("kernel.cpp", "text") == kept, "one text has one file"
    taken = Path(str(scratch.keep("kernel.cpp", "other"))).parent
    taken.chmod(0o777)
    assert Path(str(scratch.keep("kernel.cpp", "other"))).parent != taken, "a directory that others may write"
    for path in tmp_path.iterdir():
        make_old(path, 2 * 86400.0)
    make_old(Path(kept).parent, 2 * 86400.0)
    scratch.sweep()
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_a_swap_after_the_look_up_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that were verified are loaded, wherever the files are by then."""
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    jitgen.jit(torch.relu)(torch.randn(9))
    found = Store.get_artifact

    def swapped(self: Store, key: str) -> object:
        artifact = found(self, key)
        assert artifact is not None
        artifact.path().write_bytes(b"not the kernel")
        return artifact

    monkeypatch.setattr(Store, "get_artifact", swapped)
    x = torch.randn(9)
    torch.testing.assert_close(jitgen.jit(torch.relu)(x), torch.relu(x))
    assert default_store().root == tmp_path / "store"
