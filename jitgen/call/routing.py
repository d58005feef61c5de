"""Chooses the route of a call: the backend, compiler and target of its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jitgen import settings
from jitgen.compilers import routes
from jitgen.errors import UnsupportedError
from jitgen.lowering import Route
from jitgen.schedule import chips
from jitgen.spec import Target, host_target, runs_here


@dataclass(frozen=True)
class Routing:
    """Holds what the user asked for when decorating a function.

    Attributes:
        name: the function's, for messages.
        backend: None for the setting ``JITGEN_BACKEND``, at the time of the call.
        compiler: None for the backend's own.
        batch_invariant: None for the setting ``JITGEN_BATCH_INVARIANT``, at the time of the call.
    """

    name: str
    backend: str | None
    compiler: str | None
    batch_invariant: bool | None = None

    @property
    def is_batch_invariant(self) -> bool:
        """Returns whether a row's bits must not depend on how many rows come with it."""
        return settings.get("JITGEN_BATCH_INVARIANT") if self.batch_invariant is None else self.batch_invariant

    @property
    def requested(self) -> tuple[str, str | None]:
        """Returns the requested backend, which may be ``"auto"``, and compiler, which may be None."""
        return self.backend or settings.get("JITGEN_BACKEND"), self.compiler

    def on_device(self, device: torch.device) -> Route:
        """Returns the route of a call with tensors on ``device``.

        Raises:
            UnsupportedError: the backend does not run there, or this processor cannot run the code.
        """
        requested, _ = self.requested
        backend = routes.backend_for(requested, "cuda" if device.type == "cuda" else "cpu")
        compiler = self.compiler or routes.default_compiler(backend)
        chip = None
        if device.type == "cuda":
            from jitgen.runtime import cuda

            target = cuda.target_of(device.index)
            chip = chips.of_device(target, cuda.name_of(device.index), cuda.multiprocessors(device.index))
        elif backend == "triton" and settings.interpreting_triton():
            target = Target.parse("interpreter")
        else:
            target = host_target()
            if not runs_here(target):
                raise UnsupportedError(f"this processor cannot run code for {target}; unset JITGEN_CPU_TARGET")
        if backend != "cpp" and target.kind == "cpu":
            raise UnsupportedError(
                f"{self.name}: backend {backend!r} needs CUDA tensors, these are on the CPU"
                + ("; set TRITON_INTERPRET=1 to run Triton's interpreter" if backend == "triton" else "")
            )
        routes.check(backend, compiler, target)
        automatic = self._is_automatic(requested)
        return Route(backend, compiler, target, chip, self.is_batch_invariant, automatic, _bounds_waits(backend))

    def for_target(self, target: Target, backend: str | None) -> Route:
        """Returns the route of kernels for ``target``, which this machine need not have; ``backend`` replaces the
        requested one.

        Raises:
            UnsupportedError: the backend makes no kernels for the target.
        """
        name = routes.backend_for(backend or self.requested[0], target.kind)
        own = self.compiler if name == self.backend else None
        compiler = own or routes.default_compiler(name)
        routes.check(name, compiler, target)
        automatic = self._is_automatic(backend or self.requested[0])
        return Route(name, compiler, target, None, self.is_batch_invariant, automatic, _bounds_waits(name))

    def _is_automatic(self, requested: str) -> bool:
        return requested == "auto" and self.compiler is None


def _bounds_waits(backend: str) -> bool:
    """Returns whether kernels of ``backend`` bound every wait, so that none lasts forever."""
    return backend == "cuda" and settings.get("JITGEN_DEBUG") >= settings.BOUNDED_WAITS
