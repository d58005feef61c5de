"""Where the store lies, who may write it, and the read-only layers behind it."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pytest
from store_samples import ARTIFACT, KEY, PLAN, PLAN_KEY, filled, flip, numbered_key

from jitgen.cli import doctor
from jitgen.errors import CacheError, CacheWarning
from jitgen.store import Store, atomic, layout, notice
from tests import fresh

needs_permissions = pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may do everything")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", layers=[])


def test_the_store_is_private(store: Store) -> None:
    previous = os.umask(0)
    try:
        filled(store)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    for entry in store.entries():
        assert not entry.path.stat().st_mode & 0o002


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_store_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(CacheError, match="chmod 700"):
        Store.open(root, layers=[])


def test_a_store_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(Store.open(tmp_path / "store", layers=[]))
    monkeypatch.setattr(os, "geteuid", lambda: store.root.stat().st_uid + 1)
    with pytest.raises(CacheError, match="belongs to user id"):
        Store.open(store.root, layers=[])
    assert Store.open(tmp_path / "mine", layers=[store.root]).get_artifact(KEY) is not None


def test_a_store_made_unsafe_meanwhile_is_not_written(store: Store) -> None:
    store.root.mkdir()
    store.root.chmod(0o777)
    with pytest.raises(CacheError, match="chmod 700"):
        store.put_artifact(ARTIFACT)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(CacheError, match="not a directory"):
        Store.open(tmp_path / "store", layers=[])


def test_writing_where_nothing_can_be_made_is_a_cache_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "store")
    for write in (lambda: store.put_artifact(ARTIFACT), lambda: store.put_plan(PLAN_KEY, PLAN)):
        with pytest.raises(CacheError, match="JITGEN_CACHE_DIR"):
            write()
    assert store.get_artifact(KEY) is None
    with store.single_flight(KEY) as held:
        assert not held


def test_a_full_disk_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(CacheError, match="No space left"):
        store.put_artifact(ARTIFACT)
    with pytest.raises(CacheError, match="cache prune"):
        store.put_plan(PLAN_KEY, PLAN)
    monkeypatch.undo()
    assert not store.verify().leftovers
    assert list(store.entries()) == []


@needs_permissions
def test_an_unwritable_store_can_be_read(store: Store) -> None:
    filled(store)
    store.root.chmod(0o500)
    paths = [path for path in store.root.rglob("*") if path.is_dir()]
    try:
        for path in paths:
            path.chmod(0o500)
        assert store.get_artifact(KEY) is not None
        assert store.get_plan(PLAN_KEY) == PLAN
        with pytest.raises(CacheError, match="cannot be written"):
            store.put_plan(numbered_key(1), {"artifacts": []})
    finally:
        for path in (store.root, *paths):
            path.chmod(0o700)


def test_layers_are_searched_and_never_written(tmp_path: Path) -> None:
    layer = filled(Store.open(tmp_path / "layer", layers=[])).root
    before = {path: path.stat().st_mtime_ns for path in layer.rglob("*")}
    store = Store.open(tmp_path / "store", layers=[tmp_path / "absent", layer])
    found = store.get_artifact(KEY)
    assert found is not None
    assert found.directory.is_relative_to(layer)
    assert store.get_plan(PLAN_KEY) == PLAN
    assert not store.root.exists()
    store.put_plan(PLAN_KEY, {"artifacts": [], "mine": True})
    assert store.get_plan(PLAN_KEY) == {"artifacts": [], "mine": True}
    store.clear()
    assert store.get_plan(PLAN_KEY) == PLAN
    assert [entry.layer for entry in store.entries()] == [True, True]
    assert before == {path: path.stat().st_mtime_ns for path in layer.rglob("*")}


def test_a_damaged_entry_does_not_hide_the_layers(tmp_path: Path) -> None:
    layer = filled(Store.open(tmp_path / "layer", layers=[])).root
    store = filled(Store.open(tmp_path / "store", layers=[layer]))
    flip(layout.artifact_path(store.root, KEY) / "kernel.cubin")
    found = store.get_artifact(KEY)
    assert found is not None
    assert found.directory.is_relative_to(layer)
    assert [finding.state for finding in store.why(KEY)] == ["damaged", "present"]


def test_a_layer_that_may_not_be_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = filled(Store.open(tmp_path / "layer", layers=[])).root
    store = Store.open(tmp_path / "store", layers=[layer])
    opened = os.open

    def denied(path: str | Path, *args: int, **options: int | None) -> int:  # root may read everything
        if Path(path).is_relative_to(layer):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", denied)
    notice.forget()
    with pytest.warns(CacheWarning) as told:
        found = [store.get_plan(PLAN_KEY), store.get_artifact(KEY)]
    assert found == [None, None]
    (text,) = (str(warning.message) for warning in told)
    assert f"the layer {layer} is not used, because this user may not read it" in text
    assert "damaged" not in text
    assert {finding.state for finding in store.why(KEY)} == {"unreadable"}


def test_a_layer_anyone_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "layer").mkdir()
    (tmp_path / "layer").chmod(0o777)
    with pytest.raises(CacheError, match="chmod o-w"):
        Store.open(tmp_path / "store", layers=[tmp_path / "layer"])


def test_the_place_follows_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("JITGEN_CACHE_PATH", os.pathsep.join([str(tmp_path / "b"), str(tmp_path / "c")]))
    assert Store.open() == Store(tmp_path / "a", (tmp_path / "b", tmp_path / "c"))
    monkeypatch.delenv("JITGEN_CACHE_DIR")
    monkeypatch.delenv("JITGEN_CACHE_PATH")
    checkout = Path(layout.__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and layout.is_writable(checkout):
        assert Store.open().root == checkout / "cache" / "store"
    monkeypatch.setattr(layout, "is_writable", lambda path: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if sys.platform == "linux":
        assert Store.open().root == tmp_path / "cache" / "jitgen"


def test_import_and_hits_load_nothing_heavy(store: Store) -> None:
    filled(store)
    script = (
        "import sys, torch; before = set(sys.modules)\n"
        "from jitgen.store import Store\n"
        f"store = Store.open({str(store.root)!r}, layers=[])\n"
        f"assert store.get_artifact({KEY!r}) and store.get_plan({PLAN_KEY!r})\n"
        "loaded = set(sys.modules) - before\n"
        "heavy = {'filelock', 'platformdirs', 'jinja2', 'triton', 'click', 'rich', 'cuda', 'jitgen.store.archive',"
        " 'jitgen.store.atomic', 'jitgen.store.maintenance', 'jitgen.store.lock'}\n"
        "assert not heavy & loaded, heavy & loaded\n"
    )
    package = Path(layout.__file__).resolve().parents[2]
    done = fresh.run(script, cwd=package, env={**os.environ, "HOME": "/nonexistent"})
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory in which nobody can write")
def test_doctor_says_that_a_store_cannot_be_written_where_permissions_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", "/proc/self")
    rows = list(doctor._store())
    assert [row.state for row in rows if row.name == "writing"] == [doctor.MISSING]
