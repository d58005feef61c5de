"""Keeps on disk what was generated and compiled, for every later process.

::

    <store>/                       0700
        v1/                        spec.SCHEMA: each schema version reads and writes its own directory only
            artifact/ab/<key>/     a compiled kernel, a directory one can read
                kernel.cu  kernel.cubin  ...
                meta.json          the key, every other file's sha256 and size, launch metadata, its own digest
            plan/ab/<key>.json     what a request resolved to: kernels, launch recipe, artifact keys, toolchains
            tmp/                   entries being written, and what interrupted writers left behind
            quarantine/            damaged entries that were set aside, for a week
            protected/<name>       the keys of a bundle that is not to be pruned
            locks/                 one file per key, for single flight
            missed.json            a manifest of what strict processes did not find
            in-use, size           which entries processes use, and how many bytes there are (``usage``)

**Keys.** The key of an artifact is ``spec.artifact_key``, and that of a plan is the request key; both have 64 hex
digits. Neither depends on the path of the store, so that a store may be copied, mounted or shipped.

**Integrity.** Every look-up checks every byte: JSON against its own digest, files against their size and sha256. An
entry that is damaged (a missing file, a wrong digest, truncated JSON, the key of another entry, a FIFO in place of a
file) is a miss. It never raises; the process warns once and moves the entry to ``quarantine``, the next write of that
key replaces it, and ``verify`` reports it. What was verified is what is loaded: the bytes of the look-up, never a path.
Signatures (``signing``) say who made an entry, which digests cannot. Source files are checked like the binary, so that
the source one reads is the source of the binary one runs; that costs 0.1 ms for 100 KB.

**Writing.** A writer makes the entry in ``tmp``, on the same file system, fsyncs its files and directory, renames it to
its final path and fsyncs the parent. Losing a race is harmless: if an intact artifact exists it remains, since equal
keys mean equal kernels, and of two plans the newer remains. A plan is one file rather than a directory, because one
atomic rename replaces a file and one open reads it. An artifact must be written before the plan that names it; a plan
without its artifacts is a miss for the caller.

**Crashes.** A writer killed at any instant leaves a directory in ``tmp`` and nothing else. Later writers, and
``prune``, delete such leftovers once they are an hour old.

**Processes.** ``single_flight(key)`` lets one process compile a key while others wait; each of them repeats its look-up
once it has the lock. The lock only saves work: readers and writers are correct without it. Who has waited for a minute
(``JITGEN_PATIENCE``) compiles for itself and does not publish.

**Size.** A write that makes the store exceed ``JITGEN_CACHE_LIMIT`` removes the least recently used entries, but none
that a running process uses or a bundle protects. Nothing is walked to find out (``usage``).

**Location.** The store is ``JITGEN_CACHE_DIR`` if that is set, else ``cache/store`` of the source checkout if the user
owns it and it is writable, else the user's cache directory. The layers of ``JITGEN_CACHE_PATH``, directories and
bundles (``bundle``), are searched after it and are never written or locked. A store that belongs to another user, or
that its group or others can write, is refused (``CacheError``), because what it contains is loaded into the process. A
layer may belong to anyone the user trusts, but must not be writable by everyone.

**Stores that cannot be written.** Reading works; ``put_*`` raises ``CacheError``, and ``single_flight`` yields what is
false. A call uses ``keep_*``, which never fails: what cannot be written is kept in memory, with one warning.

Importing this package touches no disk. A hit imports nothing but ``json`` and ``hashlib``; file locks, bundles and
directory walks are imported when they are used. The only state is on disk, except what could not be written there.

``layout`` (paths), ``files`` (safe reads) <- ``entries`` (bytes) <- ``sources``, ``bundle`` (where they are);
``atomic`` (writing) <- ``lock``, ``usage``, ``maintenance``, ``archive``; all <- ``store`` <- ``default``.
"""

from jitgen.store.entries import StoredArtifact, StoredFile
from jitgen.store.layout import Entry
from jitgen.store.store import Store

__all__ = ["Entry", "Store", "StoredArtifact", "StoredFile"]
