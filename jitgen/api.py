"""The public functions: ``jit``, and lowering from specs.

Everything public is exported by ``jitgen/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from jitgen import pipeline, quant, settings, weights
from jitgen.compile import routes
from jitgen.dispatch import NUMBERS
from jitgen.errors import UnsupportedError
from jitgen.function import JitFunction as _JitFunction
from jitgen.pipeline import Route
from jitgen.spec import SYMBOL_HINT, Target, TensorSpec, host_target

if TYPE_CHECKING:
    from jitgen.inspect import Lowered


class JitFunction(_JitFunction):
    """A function whose calls run generated kernels.

    Call it as the original. On the first call of a signature it is traced, lowered, and its kernels come from the store
    or are compiled; later calls launch. ``bind``, ``source``, ``reference``, ``specializations`` and ``lower`` look
    inside.
    """

    def lower(
        self, *args: Any, target: str | Target | None = None, backend: str | None = None, **kwargs: Any
    ) -> Lowered:
        """Lower for these arguments without running or compiling anything.

        Args:
            args: tensors or ``TensorSpec``s (no device is needed), numbers and whatever else a call takes.
            target: such as ``"sm_90a"``; the default is where the tensors are, for specs this host's CPU.
            backend: ``"cuda"``, ``"triton"`` or ``"cpp"``; the default is the function's own, else by the target.

        Raises:
            TraceError, UnsupportedError: as a call would.
        """
        from jitgen.inspect import Lowered

        given = pytree.tree_leaves((args, kwargs))
        devices = (
            torch.device("meta") if isinstance(leaf, TensorSpec) else getattr(leaf, "device", None) for leaf in given
        )
        device = next((device for device in devices if device is not None), torch.device("cpu"))
        chosen = self._route_for(device, target, backend)
        leaves, tree, _ = self._leaves(args, kwargs, lambda weight: weights.LAYOUTS[chosen.backend])
        shapes = _Symbols()
        tensors = [shapes.tensor(leaf) if isinstance(leaf, TensorSpec) else leaf for leaf in leaves]
        return Lowered(self._lower_only(tensors, tree, leaves, chosen))

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The generated source that a call with these arguments runs."""
        return self.lower(*args, **kwargs).source

    def _route_for(self, device: torch.device, target: str | Target | None, backend: str | None) -> Route:
        if target is None and device.type != "meta":
            if backend is None:
                return self.route(device)
            return JitFunction(self.function, backend, None).route(device)
        wanted = Target.parse(target) if target is not None else host_target()
        name = routes.backend_for(backend or self.requested[0], wanted.kind)
        same = name == self.backend and self.compiler is not None
        compiler = self.compiler if same and self.compiler else routes.default_compiler(name)
        routes.check(name, compiler, wanted)
        return Route(name, compiler, wanted)

    def _lower_only(self, tensors: Sequence[Any], tree: Any, leaves: Sequence[Any], route: Route) -> pipeline.Lowered:
        from jitgen.families.layout import Memory
        from jitgen.ir.views import Strided
        from jitgen.specialization import memory_of

        real = [leaf for leaf in tensors if isinstance(leaf, torch.Tensor)]
        specs = [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, TensorSpec))]
        for spec in specs:
            if isinstance(spec, torch.Tensor):
                self._check([spec])
        numbers = [leaf for leaf in tensors if type(leaf) in NUMBERS]
        device = torch.device("cuda:0" if route.target.kind in ("cuda", "hip") else "cpu")
        found, captured, environment = self._specialize(tensors, tree, real, numbers, device, route)
        memory = []
        for tensor, spec in zip([*real, *captured], [*specs, *captured], strict=True):
            if isinstance(spec, TensorSpec):
                alignment = 16 if route.target.kind == "cpu" else min(16, spec.alignment)
                memory.append(Memory(Strided(tuple(tensor.shape), tuple(tensor.stride())), alignment))
            else:
                memory.append(memory_of(tensor, route.target.kind == "cpu"))
        return found.lower(environment, memory, ())


class _Symbols:
    """Concrete sizes for symbolic ones: distinct multiples of 16, the same for the same name."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def size(self, size: int | str) -> int:
        if isinstance(size, int):
            return size
        if size not in self._sizes:
            # Distinct primes times 16: two names never look equal, nor one a multiple of the other.
            self._sizes[size] = SYMBOL_HINT * _PRIMES[len(self._sizes) % len(_PRIMES)]
        return self._sizes[size]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        shape = tuple(map(self.size, spec.shape))
        with torch._C.DisableTorchFunction():
            if spec.strides is None:
                return torch.empty(shape, dtype=spec.dtype, device="meta")
            return torch.empty_strided(shape, spec.strides, dtype=spec.dtype, device="meta")


_PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def _linear_with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _register_linear() -> None:
    """Make ``F.linear`` with a quantised weight a generated kernel in eager torch too."""
    plain, biased = JitFunction(_linear, None, None), JitFunction(_linear_with_bias, None, None)

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            return plain(x, weight) if bias is None else biased(x, weight, bias)

    quant.kernel = kernel


_register_linear()


@overload
def jit(function: Callable[..., Any]) -> JitFunction: ...
@overload
def jit(*, backend: str | None = None, compiler: str | None = None) -> Callable[[Callable[..., Any]], JitFunction]: ...
def jit(function: Callable[..., Any] | None = None, *, backend: str | None = None, compiler: str | None = None) -> Any:
    """Make calls of a plain PyTorch function run as generated, compiled, cached kernels.

    Args:
        function: the function, method, lambda or module; omitted when options are given.
        backend: ``"auto"`` (CUDA tensors: ``cuda``; CPU tensors: ``cpp``), ``"cuda"``, ``"triton"`` or ``"cpp"``; the
            default is ``JITGEN_BACKEND``.
        compiler: another route to the same kernel: ``"load_inline"`` builds ``cpp`` and ``cuda`` sources as torch
            operators through ``torch.utils.cpp_extension``.

    Returns:
        a ``JitFunction``.

    Raises:
        UnsupportedError: no such backend, or no such compiler for it.
    """
    if backend is not None and backend not in settings.BACKENDS:
        raise UnsupportedError(f"unknown backend {backend!r}; expected one of {', '.join(settings.BACKENDS)}")
    if compiler is not None:
        if backend in (None, "auto"):
            raise UnsupportedError(f"compiler={compiler!r} needs a backend: it is one of a backend's compilers")
        if (backend, compiler) not in routes.ROUTES:
            names = [name for owner, name in routes.ROUTES if owner == backend]
            raise UnsupportedError(f"backend {backend!r} has no compiler {compiler!r}; it has {', '.join(names)}")

    def decorate(function: Callable[..., Any]) -> JitFunction:
        if isinstance(function, JitFunction):
            function = function.function
        module = function if isinstance(function, torch.nn.Module) else None
        if module is not None:
            function = module.__call__
        if not callable(function):
            raise TypeError(f"jit decorates functions, not {type(function).__name__}")
        made = JitFunction(function, backend, compiler)
        if module is not None:
            made.name = type(module).__name__
        return made

    return decorate if function is None else decorate(function)
