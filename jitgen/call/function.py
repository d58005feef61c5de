"""Defines ``JitFunction``, which ``@jitgen.jit`` makes of a function, and with it the path of a call.

::

    __call__   names of keywords -> arguments in order     keywords.py
                    | with out=: LaunchPlan                plan.py       same as the last call? launch
               types of the arguments -> dispatcher        dispatch.py   same as the last call? launch
                    | unknown types, or nested arguments
               Dispatchers.call -> leaves, structure       arguments.py
                    | unknown sizes, strides, values
               Resolver.resolve -> BoundLaunch             resolver.py   trace, lower, fetch, bind

"Same as the last call? launch" is a generated function (``warm.py``).
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from jitgen.call import methods
from jitgen.call.arguments import Parameters
from jitgen.call.dispatch import Dispatchers
from jitgen.call.keywords import Keywords
from jitgen.call.lower import lower
from jitgen.call.plan import LaunchPlan
from jitgen.call.resolver import Resolver
from jitgen.call.routing import Routing
from jitgen.call.signature import check
from jitgen.call.specialization import Specialization
from jitgen.codegen.text import function_name
from jitgen.errors import UnsupportedError
from jitgen.inspect import Lowered
from jitgen.lowering import Route
from jitgen.quant import eager, weights
from jitgen.spec import Target
from jitgen.trace.weak_method import WeakMethod

_new = object.__new__

P = ParamSpec("P")
"""Parameters of the function."""
R = TypeVar("R", covariant=True)
"""What the function returns."""
Instance = TypeVar("Instance")
Others = ParamSpec("Others")
"""Parameters of a method, without the instance."""


class JitFunction(Generic[P, R]):
    """Wraps a function so that its calls run generated kernels. Made by ``jitgen.jit``.

    Call it as the original. On the first call of a signature it is traced, lowered, and its kernels come from the store
    or are compiled; later calls launch. ``bind``, ``source``, ``reference``, ``specializations`` and ``lower`` are for
    looking inside. A decorated method has them too: ``model.forward.source(x)``.

    Attributes:
        backend, compiler, batch_invariant: as they were asked for; None for the default.
        name: of the function, for messages and kernels.
    """

    # All JitFunctions of one method and instance share one __dict__; __wrapped__ refers to the instance.
    __slots__ = ("__dict__", "__weakref__", "__wrapped__")
    __wrapped__: Callable[..., Any]
    _resolver_class: type[Resolver] = Resolver

    def __init__(
        self,
        function: Callable[P, R],
        backend: str | None = None,
        compiler: str | None = None,
        name: str | None = None,
        batch_invariant: bool | None = None,
    ):
        """Wraps ``function``; ``name`` is the function's own by default."""
        self.backend = backend
        self.compiler = compiler
        self.batch_invariant = batch_invariant
        self.name: str = function_name(name or getattr(function, "__name__", type(function).__name__))
        functools.update_wrapper(self, function)
        self._parameters = Parameters(function)
        self._resolver = self._resolver_class(function, Routing(self.name, backend, compiler, batch_invariant))
        self._dispatchers = Dispatchers(self._resolver, self._parameters)
        self._by_types = self._dispatchers.table
        """The same dict: a warm call has no time for another attribute."""
        self._keywords = Keywords(self._resolver, self._parameters, self._dispatchers)
        self._by_form = self._keywords.table
        self._methods: methods.Rows = {}

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Any, out: torch.Tensor | Sequence[torch.Tensor], **kwargs: Any) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            call = self._by_form.get((len(args), *kwargs))
            return call(*args, **kwargs) if call is not None else self._keywords.call(args, kwargs)
        dispatcher = self._by_types.get(tuple(map(type, args)))
        return dispatcher(*args) if dispatcher is not None else self._dispatchers.call(args, kwargs)

    def __repr__(self) -> str:
        return f"<jitgen.jit {self.name}>"

    @property
    def function(self) -> Callable[P, R]:
        """Returns the original function."""
        return self.__wrapped__

    @property
    def __jitgen_function__(self) -> Callable[..., Any]:
        """Returns the original function, for a trace that meets this one (``trace/captures.py``)."""
        return self.__wrapped__

    @property
    def dispatchers(self) -> Mapping[Any, Callable[..., Any]]:
        """Returns the dispatchers of calls without keywords, by the types of the arguments."""
        return self._by_types

    @property
    def requested(self) -> tuple[str, str | None]:
        """Returns the requested backend, which may be ``"auto"``, and compiler, which may be None."""
        return self._resolver.routing.requested

    def route(self, device: torch.device) -> Route:
        """Returns the backend, compiler and target for tensors on ``device``."""
        return self._resolver.routing.on_device(device)

    # -------------------------------------------------------------------------------------------------------- methods

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> JitFunction[P, R]: ...
    @overload
    def __get__(
        self: JitFunction[Concatenate[Instance, Others], R], instance: Instance, owner: type | None = None
    ) -> JitFunction[Others, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the method bound to ``instance``. It keeps the instance alive, as Python's methods do; what its calls
        resolved does not, and is found again by every look-up of the method."""
        if instance is None:
            return self
        row = self._methods.get(id(instance))
        if row is None or row[0]() is not instance:
            return self._bound_to(instance)
        bound: JitFunction[..., Any] = _new(JitFunction)
        bound.__dict__ = row[1]
        bound.__wrapped__ = MethodType(self.__wrapped__, instance)
        return bound

    def _bound_to(self, instance: Any) -> JitFunction[..., Any]:
        """Binds the method to a new instance."""
        if isinstance(self.__wrapped__, MethodType):  # a method belongs to its own instance
            return self
        method = MethodType(self.__wrapped__, instance)
        try:
            weak_method = WeakMethod(self.__wrapped__, instance)
        except TypeError:  # the instance has no weak references
            made = JitFunction(method, self.backend, self.compiler, None, self.batch_invariant)
            methods.keep(self._methods, instance, vars(made))
            return made
        made = JitFunction(weak_method, self.backend, self.compiler, None, self.batch_invariant)
        methods.add(self._methods, instance, vars(made), made._forget)
        return self.__get__(instance)

    def _forget(self) -> None:
        """Releases everything resolved, including captured tensors."""
        self._resolver.forget()
        self._dispatchers.forget()
        self._keywords.forget()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JitFunction) and other._resolver is self._resolver

    def __hash__(self) -> int:
        return hash(self._resolver)

    def __copy__(self) -> JitFunction[P, R]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> JitFunction[P, R]:
        """A copied method belongs to the copied instance and has traces of its own; a function is itself, as
        Python's are."""
        if not isinstance(self.__wrapped__, MethodType):
            return self
        return _made_of(
            copy.deepcopy(self.__wrapped__, memo), self.backend, self.compiler, self.name, self.batch_invariant
        )

    def __reduce__(self) -> Any:
        """Pickles the function by its name if that leads to it, else by what it is made of. What it has resolved is not
        pickled."""
        original: Any = sys.modules.get(getattr(self.__wrapped__, "__module__", ""))
        for name in getattr(self.__wrapped__, "__qualname__", "").split("."):
            original = getattr(original, name, None)
        if original is self:
            return self.__wrapped__.__qualname__
        return _made_of, (self.__wrapped__, self.backend, self.compiler, self.name, self.batch_invariant)

    def __prepare_scriptable__(self) -> Any:
        """Raises the UnsupportedError that ``torch.jit.script`` meets for a function it is given."""
        raise UnsupportedError(
            f"{self.name}: torch.jit.script compiles no generated kernels; use torch.export.export or torch.compile, "
            "or script the original, which is the function's .function"
        )

    @property
    def _torchscript_modifier(self) -> Any:
        """Raises the UnsupportedError that ``torch.jit.script`` meets for a function that a scripted one calls."""
        return self.__prepare_scriptable__()

    @property
    def __globals__(self) -> Any:
        """Raises the UnsupportedError that ``torch.jit.script`` meets for the methods of a module. For others there is
        none."""
        if sys._getframe(1).f_globals.get("__name__") == "torch._jit_internal":
            self.__prepare_scriptable__()
        raise AttributeError("__globals__")

    def layout_of(self, weight: Any) -> str:
        """Returns the layout in which the function's kernels read a quantised weight, where that weight is now."""
        return self._resolver.layout_of(weight)

    # ---------------------------------------------------------------------------------------------------- inspection

    def lower(
        self, *args: Any, target: str | Target | None = None, backend: str | None = None, **kwargs: Any
    ) -> Lowered:
        """Lowers for these arguments without running or compiling anything. Where a call would compute gradients, the
        result has its backward too.

        Args:
            args: tensors or ``TensorSpec``s (no device is needed), numbers and whatever else a call takes.
            target: such as ``"sm_90a"``; the default is where the tensors are, for specs this host's CPU.
            backend: ``"cuda"``, ``"triton"``, ``"cpp"`` or ``"cutlass"``; the default is the function's own, else
                by the target.

        Raises:
            TraceError, UnsupportedError: as a call would.
        """
        return Lowered(*lower(self._resolver, self._parameters, args, kwargs, target, backend))

    def source(self, *args: Any, **kwargs: Any) -> str:
        """Returns the generated source that a call with these arguments runs."""
        return self.lower(*args, **kwargs).source

    def reference(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Makes the same call in eager torch, on dequantised weights."""
        token = eager.dequantizes.set(True)
        try:
            return self.function(*args, **kwargs)
        finally:
            eager.dequantizes.reset(token)

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """Lists what this process has resolved, in the order it met it; then the forwards and backwards of calls that
        compute gradients."""
        return (*self._resolver.specializations, *self._dispatchers.of_gradients)

    def bind(self, *args: Any, **kwargs: Any) -> LaunchPlan:
        """Returns the launch plan of these arguments' signature. ``plan(*args, out=...)`` skips the look-up.

        Raises:
            what a call raises; TraceError for keyword or nested arguments, which a plan does not take.
        """
        leaves, tree, out = self._parameters.flatten(args, kwargs, self._resolver.layout_of)
        if out is not None:
            raise TypeError("bind takes the function's arguments; give out= to the plan")
        tokens = [arg.token if weights.is_quantized(arg) else None for arg in args] if tree is not None else []
        plan = LaunchPlan(self._resolver, check(self.name, leaves, tree), tokens if any(tokens) and not kwargs else ())
        plan.function = self
        return plan


def _made_of(function: Any, backend: str | None, compiler: str | None, name: str, batch_invariant: bool | None) -> Any:
    """Makes a ``JitFunction`` again when a copy is unpickled; a class may already have decorated its method."""
    if isinstance(function, JitFunction):
        return function
    return JitFunction(function, backend, compiler, name, batch_invariant)
