"""The on-disk store keeps what was generated and compiled, for every later process.

::

    <store>/                       0700
        v1/                        spec.SCHEMA: each schema version reads and writes its own directory only
            artifact/ab/<key>/     a compiled kernel, a directory one can read
                kernel.cu  kernel.cubin  ...
                meta.json          the key, every other file's sha256 and size, launch metadata, its own digest
            plan/ab/<key>.json     what a request resolved to: kernels, launch recipe, artifact keys, toolchains
            tmp/                   entries being written, and what interrupted writers left behind
            locks/                 one file per key, for single flight

**Keys.** The key of an artifact is ``spec.artifact_key``, and that of a plan is the request key; both have 64 hex
digits. Neither depends on the path of the store, so that a store may be copied, mounted or shipped.

**Integrity.** Every look-up checks every byte: JSON against its own digest, files against their size and sha256. An
entry that is damaged (a missing file, a wrong digest, truncated JSON, the key of another entry) is a miss. It never
raises, the next write of that key replaces it, and ``verify`` reports it. Source files are checked like the binary, so
that the source one reads is the source of the binary one runs; that costs 0.1 ms for 100 KB.

**Writing.** A writer makes the entry in ``tmp``, on the same file system, fsyncs its files and directory, renames it to
its final path and fsyncs the parent. Losing a race is harmless: if an intact artifact exists it remains, since equal
keys mean equal kernels, and of two plans the newer remains. A plan is one file rather than a directory, because one
atomic rename replaces a file and one open reads it. An artifact must be written before the plan that names it; a plan
without its artifacts is a miss for the caller.

**Crashes.** A writer killed at any instant leaves a directory in ``tmp`` and nothing else. Later writers, and
``prune``, delete such leftovers once they are an hour old.

**Processes.** ``single_flight(key)`` lets one process compile a key while others wait; each of them repeats its look-up
once it has the lock. The lock only saves work: readers and writers are correct without it.

**Location.** The store is ``JITGEN_CACHE_DIR`` if that is set, else ``cache/store`` of the source checkout if the user
owns it and it is writable, else the user's cache directory. The layers of ``JITGEN_CACHE_PATH`` are searched after it
and are never written or locked. A store that belongs to another user, or that its group or others can write, is refused
(``CacheError``), because what it contains is loaded into the process. A layer may belong to anyone the user trusts, but
must not be writable by everyone.

**Read-only stores.** Reading works; ``put_*`` raises ``CacheError``, and ``single_flight`` yields False. ``default``
therefore warns once and puts a temporary store in front of one that cannot be written.

Importing this package touches no disk. A hit imports nothing but ``json`` and ``hashlib``; file locks, tar and
directory walks are imported when they are used. The only state is on disk.

``layout`` (paths) <- ``entries`` (bytes), ``atomic`` (writing) <- ``lock``, ``maintenance``, ``archive`` <- ``store``.
"""

from jitgen.store.entries import StoredArtifact, StoredFile
from jitgen.store.layout import Entry
from jitgen.store.store import Store

__all__ = ["Entry", "Store", "StoredArtifact", "StoredFile"]
