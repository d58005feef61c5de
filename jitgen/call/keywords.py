"""Calls with keywords, ``out=`` among them: a generated function for each form of call puts the arguments in order.

The *form* of a call is how many positional arguments it has, and the names of its keywords in the order in which it
gives them. ``inspect.Signature.bind`` orders the arguments of a form once. For ``def f(x, w, *, eps)`` and the call
``f(x, eps=1e-5, w=w, out=y)`` the function reads::

    def call(arg0, *, eps, w, out):
        if out is None:
            dispatcher = dispatchers.get((("eps",), type(arg0), type(w), type(eps)))
            return dispatcher(arg0, w, eps) if dispatcher is not None else call_of((arg0, w), {"eps": eps})
        return plans.launch(arg0, w, eps, out=out)
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from typing import Any

from jitgen.call import observers
from jitgen.call.arguments import Parameters, leaf_kinds, walk
from jitgen.call.dispatch import Dispatchers
from jitgen.call.plan import LaunchPlan
from jitgen.call.resolver import Resolver
from jitgen.call.signature import check, plan_key
from jitgen.call.table import Table
from jitgen.codegen.python import PythonFunction, block, tuple_text
from jitgen.errors import TraceError
from jitgen.quant import weights
from jitgen.trace.guards import tracing

Form = tuple[Any, ...]
"""(number of positional arguments, *names of keywords)."""


class Keywords:
    """Holds the calls with keywords of one function.

    Attributes:
        table: by form.
    """

    def __init__(self, resolver: Resolver, parameters: Parameters, dispatchers: Dispatchers):
        self.table: Table[Form, Callable[..., Any]] = Table()
        self._resolver = resolver
        self._parameters = parameters
        self._dispatchers = dispatchers
        self._plans: Table[Form, FormPlans] = Table()

    def forget(self) -> None:
        """Releases everything resolved."""
        self.table.clear()
        self._plans.clear()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call of a new form.

        Raises:
            TypeError: the function has no such parameter, or it gets one twice, or lacks one.
        """
        if not all(name.isidentifier() and not keyword.iskeyword(name) for name in kwargs):
            return self._call_unnamed(args, kwargs)
        made = self._make(len(args), tuple(kwargs))
        self.table.put((len(args), *kwargs), made)
        return made(*args, **kwargs)

    def _call_unnamed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call with keywords that are no identifiers, such as ``**{"not a name": 1}``, for which no text can be
        made."""
        out = None if "out" in self._parameters.names else kwargs.pop("out", None)
        args, kwargs = self._parameters.arranged(args, kwargs)
        if out is None:
            return self._dispatchers.call(args, kwargs)
        return self._plans_of(len(args), tuple(kwargs)).launch(*args, *kwargs.values(), out=out)

    def _make(self, count: int, names: Sequence[str]) -> Callable[..., Any]:
        """Generates the function of one form."""
        takes_out = "out" in names and "out" not in self._parameters.names
        named = {name: name for name in names if name != "out" or not takes_out}
        taken = set(names)
        positional = [_free(f"arg{index}", taken) for index in range(count)]
        values, rest = self._parameters.arranged(tuple(positional), named)
        table, call_of, plans = (_free(name, taken) for name in ("dispatchers", "call_of", "plans"))
        dispatcher_name, kind_of = _free("dispatcher", taken), _free("type", taken)
        ordered = [*values, *rest.values()]
        key = [repr(tuple(rest)), *(f"{kind_of}({value})" for value in ordered)]
        remaining = ", ".join(f"{name!r}: {value}" for name, value in rest.items())
        lines = [
            f"{dispatcher_name} = {table}.get({tuple_text(key[0 if rest else 1 :])})",
            *block(f"if {dispatcher_name} is not None:", [f"return {dispatcher_name}({', '.join(ordered)})"]),
            f"return {call_of}({tuple_text(values)}, {{{remaining}}})",
        ]
        if takes_out:
            launched = ", ".join([*ordered, "out=out"])
            lines = [*block("if out is None:", lines), f"return {plans}.launch({launched})"]
        used = {table: self._dispatchers.table, call_of: self._dispatchers.call, kind_of: type}
        if takes_out:
            used[plans] = self._plans_of(len(values), tuple(rest))
        function = PythonFunction("call", [*positional, "*", *names], lines)
        made: Callable[..., Any] = function.define(f"arguments of {self._resolver.name}", used)
        return made

    def _plans_of(self, count: int, names: tuple[str, ...]) -> FormPlans:
        plans = self._plans.get((count, *names))
        if plans is None:
            plans = FormPlans(self._resolver, self._parameters, count, names)
            self._plans.put((count, *names), plans)
        return plans


Unpacked = tuple[Sequence[Any], Any, Sequence[Any] | None]
"""Leaves, structure, and the tokens of quantised weights (``LaunchPlan``), or None where the arguments, with such
weights unpacked, are not the leaves."""


class Plans:
    """Holds the plans of calls with ``out=``.

    Attributes:
        launch: ``(*arguments, out)``: the plan of the last call, which asks ``look_up`` for those that are not like it.
    """

    def __init__(self, resolver: Resolver, unpack: Callable[[tuple[Any, ...]], Unpacked]):
        self._resolver = resolver
        self._unpack = unpack
        self._table: Table[Any, LaunchPlan] = Table()
        self.launch: Callable[..., Any] = self._launch

    def _launch(self, *values: Any, out: Any) -> Any:
        return self.look_up(values, out)

    def look_up(self, values: tuple[Any, ...], out: Any) -> Any:
        """Makes a call that is not like the last one."""
        if tracing.get() is not None:
            raise TraceError(
                f"{self._resolver.name}: a call with out= within a function that is being traced is not supported; "
                "return the result, and give out= to the outermost call"
            )
        observers.refuse_proxies(self._resolver.name)
        leaves, tree, tokens = self._unpack(values)
        call = check(self._resolver.name, leaves, tree)
        plan = self._table.get(plan_key(leaves, tree, self._resolver.static_numbers))
        if plan is None:
            plan = LaunchPlan(self._resolver, call, tokens or (), self.look_up)
            # The key is made only now: the trace may have found that it depends on a number.
            self._table.put(plan_key(leaves, tree, self._resolver.static_numbers), plan)
        if tokens is not None:
            self.launch = plan
        return plan.run(call, out)


class FormPlans(Plans):
    """Holds the plans of one form: of calls with as many positional arguments and the same keywords. Nested arguments
    are flattened."""

    def __init__(self, resolver: Resolver, parameters: Parameters, count: int, names: tuple[str, ...]):
        super().__init__(resolver, self._flattened)
        self._parameters = parameters
        self._count, self._names = count, names
        self._nested: Table[Any, Plans] = Table()

    def look_up(self, values: tuple[Any, ...], out: Any) -> Any:
        if any(isinstance(value, (list, tuple, dict)) for value in values):
            walked = walk(*self._split(values), self._resolver.layout_of)
            if walked is not None:
                plans = self._nested.get(walked[0])
                if plans is None:
                    _, tree, _ = self._flattened(values)
                    plans = Plans(self._resolver, lambda leaves: (leaves, tree, ()))
                    self._nested.put(walked[0], plans)
                return plans.launch(*walked[1], out=out)
        return super().look_up(values, out)

    def _split(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return values[: self._count], dict(zip(self._names, values[self._count :], strict=True))

    def _flattened(self, values: tuple[Any, ...]) -> Unpacked:
        leaves, tree, _ = self._parameters.flatten(*self._split(values), self._resolver.layout_of)
        return leaves, tree, self._tokens(values)

    def _tokens(self, values: Sequence[Any]) -> list[Any] | None:
        tokens = [value.token if weights.is_quantized(value) else None for value in values]
        others = [type(value) for value, token in zip(values, tokens, strict=True) if token is None]
        pairs = zip(values, tokens, strict=True)
        ready = all(token is None or token.layout == self._resolver.layout_of(value) for value, token in pairs)
        if not leaf_kinds(others) or not ready:
            return None
        return tokens if any(tokens) else []


def _free(name: str, taken: set[str]) -> str:
    """Returns a name like ``name`` that is not in ``taken``, and adds it there."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
