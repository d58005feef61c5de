"""The on-disk store: what was generated and compiled, for every later process.

::

    <store>/                       0700
        v1/                        spec.SCHEMA: a version reads and writes its own part alone
            artifact/ab/<key>/     a compiled kernel, a directory one can read
                kernel.cu  kernel.cubin  ...
                meta.json          the key, every other file's sha256 and size, the launch facts, its own digest
            plan/ab/<key>.json     what a request resolved to: kernels, launch recipe, artifact keys, toolchains
            tmp/                   entries being written, and what killed writers left
            locks/                 one file a key, for single flight

**Keys.** An artifact's is ``spec.artifact_key``, a plan's the request key; both are 64 hex digits. Neither depends on
the path of the store, so a store may be copied, mounted or shipped.

**Whole or nothing.** Every look-up checks every byte: JSON against its own digest, files against their size and
sha256. An entry that is not whole (missing file, wrong digest, cut JSON, someone else's key) is a miss. It never
raises, the next write of that key replaces it, and ``verify`` reports it. The files beside the binary are checked
too: it costs 0.1 ms for 100 KB, and the source one reads is then the source of the binary one runs.

**Writing.** Written aside on the same file system, files and directory fsynced, renamed into place, parent fsynced.
Losing a race is fine: a whole artifact that is there stays, since equal keys are equal kernels; the newer plan stays.
A plan is one file rather than a directory, because one file is replaced by one atomic rename and read by one open. An
artifact must be written before the plan that names it; a plan without its artifacts is a miss for the caller.

**Crashes.** A writer killed at any instant leaves a directory in ``tmp`` and nothing else. Later writers sweep what
is older than an hour, and ``prune`` does.

**Processes.** ``single_flight(key)`` lets one process compile while others wait; they look again inside it. It saves
work and guards nothing: readers and writers are correct without it.

**Place.** ``JITGEN_CACHE_DIR``; else ``cache/store`` of the source checkout if it is owned and writable; else the
user's cache directory. The layers of ``JITGEN_CACHE_PATH`` are searched after it, and are never written or locked.
A store owned by another user or writable by group or others is refused (``CacheError``): what lies in it is loaded
into the process. A layer may be anyone's whom the user trusts, but not writable by everyone.

**No place to write.** Reading goes on; ``put_*`` raises ``CacheError``, and ``single_flight`` yields False. The
pipeline then warns once and uses ``Store.open(tempfile.mkdtemp(), layers=[store.root, *store.layers])``.

Importing this package touches no disk. A hit imports nothing but ``json`` and ``hashlib``; file locks, tar and the
walk are loaded when they are used. The only state is the disk.

``layout`` (paths) <- ``entries`` (bytes), ``atomic`` (writing) <- ``lock``, ``maintenance``, ``archive`` <- ``store``.
"""

from jitgen.store.entries import StoredArtifact, StoredFile
from jitgen.store.layout import Entry
from jitgen.store.store import Store

__all__ = ["Entry", "Store", "StoredArtifact", "StoredFile"]
