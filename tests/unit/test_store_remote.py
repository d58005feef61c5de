"""The store that hosts share: found, filled, verified, and left alone for a while when it fails."""

from __future__ import annotations

import functools
import http.server
import multiprocessing
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from store_samples import ARTIFACT, KEY, PLAN, PLAN_KEY, numbered_key

from jitgen import spec
from jitgen.errors import CacheWarning
from jitgen.store import Store, bundle, notice, remote, signing

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    notice.forget()
    remote._opened.cache_clear()
    if "s3fs" in sys.modules:  # each test has an endpoint of its own
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of moto's S3 server on this machine."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server.start()
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        fsspec.filesystem("s3").mkdir("kernels")
        yield "s3://kernels"
        server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    unique = uuid.uuid4().hex
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{unique}"
    return f"memory://{unique}" if request.param == "memory" else f"file://{tmp_path}/share"


def host(tmp_path: Path, name: str, url: str) -> Store:
    return Store.open(tmp_path / name, layers=[], remote=url)


def keep(store: Store) -> None:
    store.keep_artifact(ARTIFACT)
    store.keep_plan(PLAN_KEY, PLAN)


def test_what_one_host_compiles_another_finds(tmp_path: Path, url: str) -> None:
    one, other = host(tmp_path, "one", url), host(tmp_path, "other", url)
    assert other.get_plan(PLAN_KEY) is None
    keep(one)
    assert other.get_plan(PLAN_KEY) == PLAN
    found = other.get_artifact(KEY)
    assert found is not None
    assert found.artifact().files == ARTIFACT.files
    assert found.directory.is_relative_to(other.root), "and has it from then on"
    alone = Store.open(other.root, layers=[])
    assert alone.verify().clean
    assert alone.get_artifact(KEY) == found
    if url.startswith("file"):
        assert [path for path in (tmp_path / "share").rglob("*") if path.name.endswith(".new")] == []


def test_a_store_shares_what_it_had_before(tmp_path: Path, url: str) -> None:
    keep(Store.open(tmp_path / "one", layers=[]))
    assert host(tmp_path, "one", url).share(PLAN_KEY)
    assert host(tmp_path, "other", url).get_artifact(KEY) is not None
    assert not host(tmp_path, "other", url).share(numbered_key(3))


def test_what_cannot_be_written_here_is_kept_in_memory(tmp_path: Path, url: str) -> None:
    keep(host(tmp_path, "one", url))
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "store", (), url)
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert store.get_plan(PLAN_KEY) == PLAN
    remote.opened(url).resting_until = float("inf")
    assert store.get_plan(PLAN_KEY) == PLAN


LIES = {
    "text": b"not what was asked for",
    "another entry": bundle.packed("artifact", numbered_key(9), {"meta.json": b"{}"}),
    "no digest": bundle.packed("artifact", KEY, {"meta.json": b"{}"}),
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES.keys())
def test_a_remote_that_lies_is_left_alone(tmp_path: Path, url: str, content: bytes) -> None:
    keep(host(tmp_path, "one", url))
    files, root = remote.opened(url)._opened()
    files.pipe_file(remote._path(root, "artifact", KEY), content)
    store = host(tmp_path, "other", url)
    with pytest.warns(CacheWarning, match="left alone"):
        assert store.get_artifact(KEY) is None
    assert store.get_plan(PLAN_KEY) is None, "it is not asked"
    remote.opened(url).resting_until = 0.0
    assert store.get_plan(PLAN_KEY) == PLAN, "but it is, after a while"


def test_a_remote_entry_must_be_signed(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    keep(host(tmp_path, "one", url))
    monkeypatch.setenv("JITGEN_TRUSTED_KEYS", signing.make_key(tmp_path / "key"))
    with pytest.warns(CacheWarning, match="not signed"):
        assert host(tmp_path, "other", url).get_artifact(KEY) is None
    monkeypatch.setenv("JITGEN_SIGNING_KEY", str(tmp_path / "key"))
    keep(host(tmp_path, "third", url))
    assert host(tmp_path, "other", url).get_artifact(KEY) is not None


class _Slow(http.server.BaseHTTPRequestHandler):
    """Sleeps, or fails, before it answers anything."""

    seconds, status, asked = 0.0, 500, 0

    def do_GET(self) -> None:
        type(self).asked += 1
        time.sleep(self.seconds)
        self.send_error(self.status)

    do_HEAD = do_PUT = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(_Slow, "asked", 0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/kernels"
    server.shutdown()


@pytest.mark.parametrize("protocol", ["http", "s3"])
@pytest.mark.parametrize(("seconds", "status"), [(30.0, 404), (0.0, 500), (0.0, 403)])
def test_a_remote_that_fails_costs_its_timeout_once(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, seconds: float, status: int
) -> None:
    """An object store's client repeats what fails (status 500), and the timeout is for all of that."""
    monkeypatch.setattr(_Slow, "seconds", seconds)
    monkeypatch.setattr(_Slow, "status", status)
    monkeypatch.setenv("JITGEN_REMOTE_TIMEOUT", "1.5")
    url = slow
    if protocol == "s3":
        pytest.importorskip("s3fs")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        monkeypatch.setenv("AWS_ENDPOINT_URL", slow.removesuffix("/kernels"))
        url = "s3://kernels/slow"
    store = host(tmp_path, "one", url)
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CacheWarning)
        for number in range(20):
            assert store.get_plan(numbered_key(number)) is None
        keep(store)
    assert time.monotonic() - started < 8
    assert ["left alone" in str(one.message) for one in told if one.category is CacheWarning] == [True]
    assert store.get_artifact(KEY) is not None, "the store itself is as good as ever"
    asked = _Slow.asked
    store.get_plan(numbered_key(99))
    assert _Slow.asked == asked <= (1 if protocol == "http" else 12)


def test_a_web_server_is_read_and_not_written(slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Slow, "seconds", 0.0)
    monkeypatch.setattr(_Slow, "status", 404)
    store = host(tmp_path, "one", slow)
    assert store.get_plan(PLAN_KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        keep(store)
    assert store.get_plan(numbered_key(1)) is None
    assert _Slow.asked == 2, "it is still read"


@contextmanager
def serving(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def test_what_a_web_server_has_is_found(tmp_path: Path) -> None:
    keep(host(tmp_path, "one", f"file://{tmp_path}/share"))
    with serving(functools.partial(_Files, directory=str(tmp_path / "share"))) as url:
        store = host(tmp_path, "other", url)
        assert store.get_plan(PLAN_KEY) == PLAN
        found = store.get_artifact(KEY)
        assert found is not None
        assert found.artifact().files == ARTIFACT.files


class _Endless(http.server.BaseHTTPRequestHandler):
    """Answers with 256 KiB at a time for as long as somebody listens."""

    ended: threading.Event

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(bytes(2**18))
        self.ended.set()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize("protocol", ["http", "s3"])
def test_an_answer_without_end_is_not_read_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Nor behind the back of a process that went on."""
    monkeypatch.setattr(_Endless, "ended", threading.Event(), raising=False)
    monkeypatch.setenv("JITGEN_REMOTE_TIMEOUT", "2")
    with serving(_Endless) as url:
        if protocol == "s3":
            pytest.importorskip("s3fs")
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.setenv(name, "testing")
            monkeypatch.setenv("AWS_ENDPOINT_URL", url)
            url = "s3://kernels/endless"
        with pytest.warns(CacheWarning, match="left alone"):
            assert host(tmp_path, "one", url).get_plan(PLAN_KEY) is None
        assert _Endless.ended.wait(60)


def test_a_remote_that_refuses_writes_is_still_read(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(host(tmp_path, "one", url))

    def refuse(*arguments: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(remote, "_write", refuse)
    store = host(tmp_path, "other", url)
    with pytest.warns(CacheWarning, match="only read from now on"):
        store.keep_plan(numbered_key(1), PLAN)
    assert store.get_plan(PLAN_KEY) == PLAN


def test_a_remote_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    for url in ("nosuch://x", "s3://kernels/none"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setenv("JITGEN_REMOTE_TIMEOUT", "1.5")
        store = host(tmp_path, "one", url)
        with pytest.warns(CacheWarning, match="left alone"):
            assert store.get_plan(PLAN_KEY) is None


def test_a_child_process_has_a_connection_of_its_own(tmp_path: Path, url: str) -> None:
    """Its parent's ran in a thread, which a fork does not copy."""
    keep(host(tmp_path, "one", url))
    parent = host(tmp_path, "parent", url)
    assert parent.get_plan(PLAN_KEY) == PLAN

    def look() -> None:
        assert host(tmp_path, "child", url).get_artifact(KEY) is not None

    child = multiprocessing.get_context("fork").Process(target=look)
    child.start()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_ranks_and_hosts_at_once(
    tmp_path: Path, scheme: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts of two ranks each put and get the same eight entries; each host has all of them whole afterwards."""
    monkeypatch.setenv("JITGEN_REMOTE_TIMEOUT", "60")  # a machine with much to do is not a remote that fails
    unique = uuid.uuid4().hex
    url = f"file://{tmp_path}/share" if scheme == "file" else f"{request.getfixturevalue('s3')}/{unique}"
    artifacts = [spec.Artifact(numbered_key(n), {"kernel.so": b"%d" % n * 500}, "kernel.so") for n in range(8)]

    def rank(number: int) -> None:
        store = host(tmp_path, f"host-{number % 2}", url)
        for artifact in artifacts[number:] + artifacts[:number]:
            found = store.get_artifact(artifact.key) or store.keep_artifact(artifact)
            assert found.artifact().files == artifact.files
            store.keep_plan(artifact.key, {"artifacts": [artifact.key]})

    ranks = [multiprocessing.get_context("fork").Process(target=rank, args=(number,)) for number in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * 4
    for name in ("host-0", "host-1", "new"):
        store = host(tmp_path, name, url)
        assert all(store.get_artifact(artifact.key) is not None for artifact in artifacts)
        assert store.verify().clean
