"""Opens executors that the command line names by a URL, one row for each scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager

from jitgen.errors import JitgenError


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    """Connects to the ``dask.distributed`` scheduler at ``address``, whose workers need jitgen and a compiler."""
    try:
        from distributed import Client
    except ImportError:
        raise JitgenError("dask:// needs the package distributed; install it: pip install 'jitgen[dask]'") from None
    try:
        client = Client(f"tcp://{address}", timeout=10)
    except OSError as error:
        raise JitgenError(f"no dask scheduler answers at {address}: {error}") from error
    with client:
        yield client.get_executor()


SCHEMES: dict[str, Callable[[str], AbstractContextManager[Executor]]] = {"dask": _dask}
"""The context manager for each scheme of a URL: it opens the executor at the address after it."""


def at(url: str) -> AbstractContextManager[Executor]:
    """Returns a context in which the executor at ``url``, such as ``dask://HOST:PORT``, can be used.

    Raises:
        JitgenError: the URL names no executor, or nothing answers there.
    """
    scheme, separator, address = url.partition("://")
    if not separator or scheme not in SCHEMES or not address:
        known = ", ".join(f"{name}://HOST:PORT" for name in SCHEMES)
        raise JitgenError(f"{url!r} names no executor; expected {known}")
    return SCHEMES[scheme](address)
