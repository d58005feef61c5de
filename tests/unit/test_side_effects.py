"""What a function does besides computing happens at every call as in eager torch, or is refused and leaves no mark."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import itertools
import operator
import random
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import jitgen
from jitgen.errors import JitgenError, TraceError, UnsupportedError
from jitgen.trace import modes
from jitgen.trace.proxy import TensorProxy

X = torch.arange(6.0).reshape(2, 3)


@dataclasses.dataclass
class State:
    h: Any = None
    n: int = 0
    items: list[Any] = dataclasses.field(default_factory=list)


class Slotted:
    __slots__ = ("h", "n")

    def __init__(self) -> None:
        self.h, self.n = torch.zeros(3), 0


class Module(torch.nn.Module):
    def __init__(self, forward: Callable[..., Any]):
        super().__init__()
        self.register_buffer("m", torch.zeros(3))
        self.w = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.child = torch.nn.Dropout(0.0)
        self.n = 0
        self.log: list[Any] = []
        self.function = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self)


def appended(x: torch.Tensor, s: Any) -> Any:
    s.append(x * 2)
    return x + len(s)


def inserted(x: torch.Tensor, s: Any) -> Any:
    s.insert(0, 1.5)
    return x + s[0]


def popped(x: torch.Tensor, s: Any) -> Any:
    return x + s.pop()


def replaced(x: torch.Tensor, s: Any) -> Any:
    s[0] = s[0] + x[0]
    return x + s[0]


def nested(x: torch.Tensor, s: Any) -> Any:
    s[0]["h"][1] = x * 3
    return x + 1


def stored(x: torch.Tensor, s: Any) -> Any:
    s["h"] = s.get("h", 0) + x[0]
    return x + s["h"]


def counted(x: torch.Tensor, s: Any) -> Any:
    s["n"] += 1
    return x * s["n"]


def removed(x: torch.Tensor, s: Any) -> Any:
    s.pop("h", None)
    return x * len(s)


def moved(x: torch.Tensor, s: Any) -> Any:
    s.move_to_end("a")
    return x * next(iter(s.values()))


def defaulted(x: torch.Tensor, s: Any) -> Any:
    return x + s["missing"]


def added(x: torch.Tensor, s: Any) -> Any:
    s.add(len(s))
    return x * len(s)


def updated_elements(x: torch.Tensor, s: Any) -> Any:
    s["h"].add_(x[0])
    return x + s["h"]


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "list append": (appended, list),
    "deque append": (appended, lambda: collections.deque(maxlen=3)),
    "list insert": (inserted, lambda: [1, 2]),
    "list pop": (popped, lambda: [torch.ones(3), torch.ones(3) * 5, torch.ones(3)]),
    "deque popleft": (lambda x, s: x + s.popleft(), lambda: collections.deque([torch.ones(3), torch.ones(3)] * 2)),
    "list item": (replaced, lambda: [torch.zeros(3), 2]),
    "list in dict in list": (nested, lambda: [{"h": [torch.zeros(2, 3), torch.zeros(2, 3)]}]),
    "dict item": (stored, dict),
    "dict number": (counted, lambda: {"n": 0}),
    "dict pop": (removed, lambda: {"h": torch.ones(3), "a": 2}),
    "OrderedDict move_to_end": (moved, lambda: collections.OrderedDict(a=2.0, b=3.0)),
    "OrderedDict item": (stored, lambda: collections.OrderedDict(h=torch.zeros(3))),
    "defaultdict": (defaulted, lambda: collections.defaultdict(lambda: 2.0)),
    "Counter": (counted, lambda: collections.Counter(n=2)),
    "UserDict": (stored, lambda: collections.UserDict(h=torch.zeros(3))),
    "set": (added, set),
    "elements": (updated_elements, lambda: {"h": torch.zeros(3)}),
    "tuple of lists": (lambda x, s: (s[1].append(1), x * len(s[1]))[1], lambda: (3, [2])),
    "array": (lambda x, s: (s.__setitem__(0, s[0] + 1), x * float(s[0]))[1], lambda: np.ones(2)),
    "bytearray": (lambda x, s: (s.append(1), x * len(s))[1], lambda: bytearray(b"ab")),
}


def attribute(x: torch.Tensor, s: Any) -> Any:
    s.h = x * 2
    return x + 1


def average(x: torch.Tensor, s: Any) -> Any:
    s.m = s.m * 0.9 + x.detach().mean(0) * 0.1
    return x * s.w - s.m


def number(x: torch.Tensor, s: Any) -> Any:
    s.n += 1
    return x * s.n


def flag(x: torch.Tensor, s: Any) -> Any:
    s.n = 7
    return x * 2


def deleted(x: torch.Tensor, s: Any) -> Any:
    del s.n
    return x * 2


def by_name(x: torch.Tensor, s: Any) -> Any:
    setattr(s, "n" + "ew", x * 2)
    return x * 2


def in_dict(x: torch.Tensor, s: Any) -> Any:
    vars(s)["h"] = x * 2
    return x * 2


def sized(x: torch.Tensor, s: Any) -> Any:
    s.n = x.shape[0]
    return x * 2


def boxed(x: torch.Tensor, s: Any) -> Any:
    s.h = State(x + 1)
    return x * 2


def logged(x: torch.Tensor, s: Any) -> Any:
    s.log.append(x.sum())
    return x * 2


def logged_number(x: torch.Tensor, s: Any) -> Any:
    s.log.append(len(s.log))
    return x * len(s.log)


def evaluated(x: torch.Tensor, s: Any) -> Any:
    s.eval()
    return x * (2 if s.child.training else 3)


def raised(x: torch.Tensor, s: Any) -> Any:
    s.h, s.n = x * 2, 5
    raise RuntimeError("the user's own")


def unsupported(x: torch.Tensor, s: Any) -> Any:
    s.h, s.n = x * 2, 5
    return x * 2 if x.sum() > 0 else x


OBJECTS: dict[str, tuple[Callable[..., Any], Callable[[Callable[..., Any]], Any]]] = {
    "attribute": (attribute, lambda f: State()),
    "slot": (attribute, lambda f: Slotted()),
    "namespace": (attribute, lambda f: types.SimpleNamespace()),
    "attribute of a module": (attribute, Module),
    "average in a buffer": (average, Module),
    "number": (number, lambda f: State()),
    "number in a slot": (number, lambda f: Slotted()),
    "number of a module": (number, Module),
    "constant": (flag, lambda f: State()),
    "attribute that is deleted": (deleted, lambda f: State(n=3)),
    "setattr": (by_name, lambda f: State()),
    "vars": (in_dict, lambda f: State()),
    "size": (sized, lambda f: State()),
    "tensor in an object": (boxed, lambda f: State()),
    "list of a module": (logged, Module),
    "numbers in a list of a module": (logged_number, Module),
    "mode of a module": (evaluated, Module),
    "an exception of the user's": (raised, lambda f: State()),
    "a refusal": (unsupported, Module),
}


def described(value: Any) -> Any:
    """What two states have in common if they are equal. Fails where a tensor of a trace is left."""
    assert not isinstance(value, TensorProxy)
    if isinstance(value, torch.Tensor):
        while torch._C._functorch.is_batchedtensor(value):  # what vmap leaves behind has its elements within
            value = torch._C._functorch.get_unwrapped(value)
        return type(value).__name__, value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (dict, collections.UserDict)):
        return type(value).__name__, [(key, described(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, list(map(described, value))
    if isinstance(value, (set, bytearray)):
        return sorted(value)
    if isinstance(value, Slotted):
        return [described(getattr(value, name, None)) for name in Slotted.__slots__]
    if isinstance(value, (State, Module, types.SimpleNamespace)):
        own = (
            vars(value) if not isinstance(value, Module) else {name: getattr(value, name) for name in ("n", "log", "m")}
        )
        modes = [module.training for module in value.modules()] if isinstance(value, Module) else []
        return type(value).__name__, described(own), modes, len(vars(value))
    return value


def over_batch(function: Callable[..., Any], state: Any) -> Callable[[], Any]:
    return lambda: torch.vmap(lambda row: function(row, state))(X.expand(2, 2, 3))


def same_or_refused(call: Callable[[], Any], eager: Callable[[], Any], state: Any, expected: Any) -> bool:
    """One call, which does what eager torch does, or is refused and does nothing; whether it was refused.

    Args:
        state, expected: what the call and the eager one change.
    """
    before = described(state)
    outcome, error, refused = None, None, None
    try:
        outcome = eager()
    except Exception as caught:
        error = caught
    try:
        result = call()
    except Exception as caught:
        refused: Any = caught
    if refused is not None:
        assert described(state) == before, "a refused call leaves everything as it was"
        assert " at " in str(refused) if isinstance(refused, JitgenError) else type(refused) is type(error)
        return True
    torch.testing.assert_close(result, outcome)
    assert described(state) == described(expected)
    return False


def turn(names: Iterable[str], name: str, routes: list[str], route: str) -> bool:
    """Whether it is this route's turn: every third name has it, other routes with other names."""
    return (list(names).index(name) + routes.index(route)) % 3 == 0


CONTAINER_ROUTES = ["plain", "gradients", "keyword", "captured", "vmap"]


@pytest.mark.parametrize("route", CONTAINER_ROUTES)
@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.quick(where=lambda name, route: route == "plain" or turn(CONTAINERS, name, CONTAINER_ROUTES, route))
def test_containers(name: str, route: str) -> None:
    function, make = CONTAINERS[name]
    state, expected = make(), make()
    x = X.clone().requires_grad_(route == "gradients")
    jitted = jitgen.jit(function)
    call, eager = functools.partial(jitted, x, state), functools.partial(function, x, expected)
    if route == "captured":
        call = functools.partial(jitgen.jit(lambda x: function(x, state)), x)
    elif route == "keyword":
        call = functools.partial(jitted, x, s=state)
    elif route == "vmap":
        call, eager = over_batch(jitted, state), over_batch(function, expected)
    for _ in range(3):
        if same_or_refused(call, eager, state, expected):
            break


OBJECT_ROUTES = ["plain", "gradients", "captured", "method", "bind", "vmap"]


@pytest.mark.parametrize("route", OBJECT_ROUTES)
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.quick(where=lambda name, route: route == "plain" or turn(OBJECTS, name, OBJECT_ROUTES, route))
def test_objects(name: str, route: str) -> None:
    function, make = OBJECTS[name]
    state, expected = make(function), make(function)
    x = X.clone().requires_grad_(route == "gradients")
    jitted: Any = jitgen.jit(function)
    call, eager = functools.partial(jitted, x, state), functools.partial(function, x, expected)
    if route == "captured":
        call = functools.partial(jitgen.jit(lambda x: function(x, state)), x)
    elif route == "method":
        if not isinstance(state, Module):
            pytest.skip("it has no methods")
        call = functools.partial(jitgen.jit(state), x)
    elif route == "vmap":
        call, eager = over_batch(jitted, state), over_batch(function, expected)
        if (
            "attribute" in name
            or "list of" in name
            or name in ("slot", "namespace", "average in a buffer", "setattr", "vars")
        ):
            pytest.skip("eager torch keeps a tensor of the transform")
    elif route == "bind":
        before = described(state)
        try:
            call = functools.partial(jitted.bind(x, state), x, state)
        except (JitgenError, RuntimeError):
            assert described(state) == before
            return
        assert described(state) == before, "binding launches nothing"
    for _ in range(2):
        if same_or_refused(call, eager, state, expected):
            break


@pytest.mark.parametrize("name", OBJECTS)
def test_a_look_inside_changes_nothing(name: str) -> None:
    function, make = OBJECTS[name]
    state = make(function)
    before = described(state)
    with contextlib.suppress(JitgenError, RuntimeError):
        jitgen.jit(function).source(X, state)
    assert described(state) == before


def test_a_program_that_torch_records_would_not_change_it_again() -> None:
    state, jitted = State(), jitgen.jit(number)
    with pytest.raises(TraceError, match=r"changes s\.n at every call, and a program that torch records would not"):
        make_fx(lambda x: jitted(x, state), tracing_mode="fake")(X)
    assert state.n == 0


@pytest.mark.parametrize("grad", [False, True])
def test_a_constant_is_stored_again_where_something_else_changed_it(grad: bool) -> None:
    state, x = State(), X.clone().requires_grad_(grad)
    jitted = jitgen.jit(flag)
    for _ in range(3):
        jitted(x, state)
        assert state.n == 7
        state.n = 0


TOTAL = 0
LAST: Any = None
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def sets_global(x: torch.Tensor) -> Any:
    global TOTAL
    TOTAL += 1
    return x * TOTAL


def sets_global_tensor(x: torch.Tensor) -> Any:
    global LAST
    LAST = x * 2
    return x + 1


def sets_variable(x: torch.Tensor) -> Any:
    VARIABLE.set(VARIABLE.get() + 1)
    return x * VARIABLE.get()


def sets_function_attribute(x: torch.Tensor) -> Any:
    sets_global.calls = getattr(sets_global, "calls", 0) + 1  # type: ignore[attr-defined]
    return x * sets_global.calls  # type: ignore[attr-defined]


def sets_class_attribute(x: torch.Tensor) -> Any:
    State.total = getattr(State, "total", 0) + 1  # type: ignore[attr-defined]
    return x * State.total  # type: ignore[attr-defined]


@functools.lru_cache
def cached_ones(n: int) -> torch.Tensor:
    return torch.ones(n)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    global TOTAL, LAST
    TOTAL, LAST = 0, None
    VARIABLE.set(0)
    yield
    sets_global.__dict__.clear()
    if hasattr(State, "total"):
        del State.total
    cached_ones.cache_clear()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", [sets_global, sets_variable, sets_function_attribute, sets_class_attribute])
def test_variables(function: Callable[..., Any], grad: bool) -> None:
    x, jitted = X.clone().requires_grad_(grad), jitgen.jit(function)
    jitted.source(x.detach())
    for number in (1, 2, 3):
        torch.testing.assert_close(jitted(x), x * number)


def test_nonlocal_variables() -> None:
    def counter(keeps: bool) -> tuple[Callable[..., Any], Callable[[], Any]]:
        n: Any = 0
        last: Any = None

        def function(x: torch.Tensor) -> Any:
            nonlocal n, last
            n += 1
            if keeps:
                last = x * 2
            return x * n

        return function, lambda: (n, last)

    function, seen = counter(False)
    jitted = jitgen.jit(function)
    for number in (1, 2, 3):
        torch.testing.assert_close(jitted(X), X * number)
        assert seen() == (number, None)
    function, seen = counter(True)
    jitted = jitgen.jit(function)
    for number in (1, 2):
        torch.testing.assert_close(jitted(X), X * number)
        torch.testing.assert_close(seen(), (number, X * 2))


def test_a_global_variable_keeps_a_tensor() -> None:
    torch.testing.assert_close(jitgen.jit(sets_global_tensor)(X), X + 1)
    torch.testing.assert_close(LAST, X * 2)


def test_refused_variables_are_as_they_were() -> None:
    def function(x: torch.Tensor) -> Any:
        global LAST
        LAST = [{x * 2}]
        return x + 1

    with pytest.raises(TraceError, match="keeps a tensor in variable 'LAST'") as refused:
        jitgen.jit(function)(X)
    assert LAST is None
    assert f"{__file__}:{function.__code__.co_firstlineno + 2}" in str(refused.value)


def test_a_context_variable_without_a_value_gets_none_by_a_refused_call() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("fresh")

    def function(x: torch.Tensor, refuses: bool) -> Any:
        variable.set(3)
        return x * 2 if refuses and x.sum() > 0 else x

    jitted = jitgen.jit(function)
    with pytest.raises(TraceError):
        jitted(X, True)
    jitted.source(X, False)
    assert variable.get(None) is None
    jitted(X, False)
    assert variable.get() == 3


def test_caches_hold_no_tensor_of_a_trace() -> None:
    with pytest.raises(TraceError, match="keeps a tensor"):
        jitgen.jit(lambda x: x + cached_ones(3))(X)
    assert type(cached_ones(3)) is torch.Tensor


class Hidden:
    """An object that no name of the function leads to a tensor of."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def keep(self, value: Any) -> None:
        object.__getattribute__(self, "val" + "ues")["last"] = value

    def keep_by_name(self, value: Any) -> None:
        getattr(self, "val" + "ues")["last"] = value


def test_what_a_name_leads_to_that_is_looked_up_is_kept() -> None:
    hidden = Hidden()
    jitgen.jit(lambda x: (hidden.keep_by_name(x * 2), x)[1])(X)
    torch.testing.assert_close(hidden.values["last"], X * 2)


def test_what_no_name_leads_to_is_emptied() -> None:
    hidden = Hidden()
    with pytest.raises(TraceError, match="keeps a tensor"):
        jitgen.jit(lambda x: (hidden.keep(x * 2), x)[1])(X)
    assert hidden.values == {}


def test_the_line_is_the_one_that_changes() -> None:
    def function(x: torch.Tensor, cache: list[Any]) -> Any:
        n = len(cache)
        cache.append(x)
        return x * n

    with pytest.raises(TraceError, match="changes its argument cache, a list") as refused:
        jitgen.jit(function)(X, [])
    assert f"{__file__}:{function.__code__.co_firstlineno + 2}" in str(refused.value)


# --------------------------------------------------------------------------------------------------- random programs


def steps(rng: random.Random) -> list[Callable[[torch.Tensor, Any], torch.Tensor]]:
    """A random function of a tensor and a state that reads and changes the state."""

    def put(x: torch.Tensor, s: Any) -> torch.Tensor:
        s.items.append(rng_number)
        return x + len(s.items)

    def add(x: torch.Tensor, s: Any) -> torch.Tensor:
        s.n += 1
        return x * s.n

    def keep(x: torch.Tensor, s: Any) -> torch.Tensor:
        s.h = x * 2
        return x + 1

    def read(x: torch.Tensor, s: Any) -> torch.Tensor:
        return x + (s.h if s.h is not None else s.n)

    def drop(x: torch.Tensor, s: Any) -> torch.Tensor:
        if s.items:
            s.items.pop()
        return x - len(s.items)

    def reset(x: torch.Tensor, s: Any) -> torch.Tensor:
        s.items, s.n = [], 3
        return x

    def swap(x: torch.Tensor, s: Any) -> torch.Tensor:
        s.items, s.h = s.items[::-1], None
        return x.tanh()

    rng_number = rng.randrange(5)
    return rng.choices([put, add, read, drop, reset, swap, keep], [3, 3, 3, 2, 1, 1, 0.3], k=rng.randrange(1, 5))


@pytest.mark.parametrize("seed", range(12))
def test_random_changes(seed: int) -> None:
    rng = random.Random(seed)
    program = steps(rng)

    def function(x: torch.Tensor, s: Any) -> torch.Tensor:
        for step in program:
            x = step(x, s)
        return x

    state, expected, jitted = State(h=torch.ones(3)), State(h=torch.ones(3)), jitgen.jit(function)
    for number in range(4):
        x = X.clone().requires_grad_(number % 2 == 1)
        call, eager = functools.partial(jitted, x, state), functools.partial(function, x, expected)
        if same_or_refused(call, eager, state, expected):
            expected = copy.deepcopy(state)
        if rng.random() < 0.3:
            state.n = expected.n = rng.randrange(4)


# ------------------------------------------------------------------------------------------------- modes and generators

generator = np.random.default_rng(0)
SEEDS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "torch": (lambda x: torch.manual_seed(3) and x, "torch.manual_seed seeds random numbers"),
    "torch.random": (lambda x: torch.random.manual_seed(3) and x, "torch.random.manual_seed seeds"),
    "cuda": (lambda x: (torch.cuda.manual_seed_all(3), x)[1], "torch.cuda.manual_seed_all seeds"),
    "imported name": (lambda x: manual_seed(3) and x, "manual_seed seeds"),
    "computed name": (lambda x: getattr(torch, "manual_seed")(3) and x, "torch.manual_seed seeds"),  # noqa: B009
    "state": (lambda x: (torch.set_rng_state(torch.get_rng_state()), x)[1], "rng_state reads or sets the state"),
    "numpy": (lambda x: (np.random.seed(3), x)[1], "np.random.seed seeds"),
    "numpy draws": (lambda x: x + float(np.random.rand()), "np.random.rand draws a random number"),
    "numpy's generator": (lambda x: x + generator.random(), "generator draws a random number"),
    "new generator of numpy": (lambda x: x + np.random.default_rng().random(), "np.random.default_rng draws"),
    "Python": (lambda x: (random.seed(3), x)[1], "random.seed seeds"),
    "default dtype": (lambda x: (torch.set_default_dtype(torch.float64), x)[1], "set_default_dtype sets a mode"),
    "threads": (lambda x: (torch.set_num_threads(1), x)[1], "torch.set_num_threads sets a mode"),
    "gradients": (lambda x: (torch.set_grad_enabled(False), x * 2)[1], "leaves another grad mode behind"),
    "state for a while": (lambda x: x + draws_for_a_while(), "fork_rng reads or sets the state"),
    "flag": (lambda x: (setattr(torch.backends.cudnn, "benchmark", True), x)[1], "changes torch.backends.cudnn.bench"),
    "flag of products": (lambda x: allows_tf32() + x, "changes torch.backends.cuda.matmul.allow_tf32"),
    "flag by a function": (lambda x: (torch.backends.cuda.enable_math_sdp(False), x)[1], "enable_math_sdp"),
    "numpy's errors": (lambda x: (np.seterr(all="ignore"), x)[1], "changes numpy.seterr"),
}
manual_seed = torch.manual_seed


def draws_for_a_while() -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.rand(3)


def allows_tf32() -> int:
    torch.backends.cuda.matmul.allow_tf32 = True
    return 0


def settings() -> tuple[Any, ...]:
    return *modes.flags(), np.geterr(), torch.initial_seed(), torch.get_default_dtype(), torch.get_num_threads()


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_and_modes_that_are_set_are_refused(name: str) -> None:
    function, words = SEEDS[name]
    before = *settings(), torch.is_grad_enabled()
    state = generator.bit_generator.state
    for _ in range(2):
        with pytest.raises(TraceError, match=words) as refused:
            jitgen.jit(function)(X)
        assert str(refused.value).count("\n") >= 1, "and a remedy"
    assert before == (*settings(), torch.is_grad_enabled())
    assert generator.bit_generator.state == state


@contextlib.contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


is_enabled = torch.is_grad_enabled
matmul = torch.backends.cuda.matmul
MODES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[], Any]]] = {
    "is_grad_enabled": (lambda x: x * (2 if torch.is_grad_enabled() else 3), torch.no_grad),
    "is_grad_enabled by another name": (lambda x: x * (2 if is_enabled() else 3), torch.no_grad),
    "is_autocast_enabled": (
        lambda x: x * (2 if torch.is_autocast_enabled("cpu") else 3),
        lambda: torch.autocast("cpu"),
    ),
    "is_inference_mode_enabled": (lambda x: x * (2 if torch.is_inference_mode_enabled() else 3), torch.inference_mode),
    "get_default_dtype": (
        lambda x: x * (2 if torch.get_default_dtype() == torch.float32 else 3),
        lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    ),
    "deterministic": (
        lambda x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3),
        lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
    "float32 matmul precision": (
        lambda x: x * (2 if torch.get_float32_matmul_precision() == "high" else 3),
        lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    ),
    "backends": (
        lambda x: x * (2 if torch.backends.cudnn.benchmark else 3),
        lambda: setting(
            lambda: torch.backends.cudnn.benchmark,
            lambda value: setattr(torch.backends.cudnn, "benchmark", value),
            True,
        ),
    ),
    "a backend by another name": (
        lambda x: x * (2 if matmul.allow_fp16_reduced_precision_reduction else 3),
        lambda: setting(
            lambda: matmul.allow_fp16_reduced_precision_reduction,
            lambda value: setattr(matmul, "allow_fp16_reduced_precision_reduction", value),
            False,
        ),
    ),
    "numpy's errors": (
        lambda x: x * (2 if np.geterr()["divide"] == "ignore" else 3),
        lambda: np.errstate(divide="ignore"),
    ),
}


def test_settings_that_other_threads_change_are_theirs() -> None:
    thread = threading.Thread(target=setattr, args=(torch.backends.cudnn, "benchmark", True))

    def f(x: torch.Tensor) -> torch.Tensor:
        thread.start()
        thread.join()
        return x + 1

    with setting(
        lambda: torch.backends.cudnn.benchmark, lambda value: setattr(torch.backends.cudnn, "benchmark", value), False
    ):
        torch.testing.assert_close(jitgen.jit(f)(X), X + 1)
        assert torch.backends.cudnn.benchmark


def test_precisions_that_older_settings_have_no_name_for() -> None:
    """torch's older getters raise once ``fp32_precision`` is used; calls that read the precision run."""
    backends: Any = torch.backends
    x = torch.ones(2, 2)
    function = jitgen.jit(lambda x: x @ x + (1 if backends.cuda.matmul.fp32_precision == "tf32" else 2))

    def changes(x: torch.Tensor) -> torch.Tensor:
        backends.cuda.matmul.fp32_precision = "tf32"
        return x + 1

    before = backends.cuda.matmul.fp32_precision
    assert torch.equal(function(x), torch.full((2, 2), 4.0))
    with pytest.raises(TraceError, match="fp32_precision"):
        jitgen.jit(changes)(x)
    assert backends.cuda.matmul.fp32_precision == before
    try:
        backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        for _ in range(2):
            assert torch.equal(function(x), torch.full((2, 2), 3.0))
        assert torch.equal(jitgen.jit(lambda x: x @ x)(x), x @ x)
    finally:
        torch.set_float32_matmul_precision("highest")
        backends.cuda.matmul.fp32_precision = before


class Counts:
    def __init__(self) -> None:
        self.all_numbers = itertools.count()

    def zero(self) -> int:
        return next(self.all_numbers)


@pytest.mark.parametrize("method", ["a_number", "zero"])
def test_an_iterator_is_refused_wherever_the_code_is_that_mentions_it(method: str) -> None:
    """Attributes are followed in the order of their names: this one before ``zero``, whose code mentions it."""
    counts, Counts.a_number = Counts(), Counts.zero  # type: ignore[attr-defined]
    function = {"a_number": lambda x: x + counts.a_number(), "zero": lambda x: x + counts.zero()}[method]  # type: ignore[attr-defined]
    with pytest.raises(TraceError, match="is an iterator"):
        jitgen.jit(function)(X)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_modes_that_are_read_are_guarded(name: str, grad: bool) -> None:
    function, mode = MODES[name]
    x, jitted = X.clone().requires_grad_(grad), jitgen.jit(function)
    plan = jitgen.jit(function).bind(X)
    for _ in range(2):
        torch.testing.assert_close(jitted(x), function(x))
        torch.testing.assert_close(plan(X), function(X))
        with mode():
            torch.testing.assert_close(jitted(x), function(x))
            torch.testing.assert_close(plan(X), function(X))


# ----------------------------------------------------------------------------------------------- one tensor, two names


class Compares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(2, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if x is self.b else y * 3


module = Compares()
IDENTITY: dict[str, Callable[..., Any]] = {
    "is": lambda x, y: x * 2 if x is y else y * 3,
    "is not": lambda x, y: x * 2 if x is not y else y * 3,
    "operator.is_": lambda x, y: x * 2 if operator.is_(x, y) else y * 3,
    "id": lambda x, y: x * 2 if id(x) == id(y) else y * 3,
    "key of a dict": lambda x, y: x * {x: 2.0}.get(y, 3.0),
    "set": lambda x, y: x * len({x, y}),
    "captured": module,
    "update": lambda x, y: (x.add_(1), y * 2 if x is y else y * 3)[1],
    "update without a question": lambda x, y: (x.add_(1), y * 2)[1],
    "update beside one that is not read": lambda x, y: (x.add_(1), x * 2)[1],
}


@pytest.mark.parametrize("route", ["plain", "vmap", "gradients"])
@pytest.mark.parametrize("name", IDENTITY)
def test_one_tensor_as_two_arguments(name: str, route: str) -> None:
    function = IDENTITY[name]
    jitted: Any = jitgen.jit(function)
    for pair in ("ab", "aa", "mb", "ab", "aa"):
        results: list[Any] = []
        refused: Any = None
        for called in (function, jitted):
            tensors = {"a": X.clone(), "b": X + 1, "m": module.b if name == "captured" else X.clone()}
            if route == "gradients" and "update" not in name:
                tensors["a"].requires_grad_()
            left, right = (tensors[each] for each in pair)
            try:
                results.append((called_by(route if name != "captured" else "plain", called, left, right), left))
            except UnsupportedError as error:
                refused = error
        if name == "update without a question" and pair == "aa":
            assert f"{__file__}:" in str(refused), "the user's line"
        else:
            torch.testing.assert_close(results[1], results[0])


def called_by(route: str, function: Callable[..., Any], left: torch.Tensor, right: torch.Tensor) -> Any:
    if route != "vmap":
        return function(left, right)
    return torch.vmap(lambda x: function(x, x))(left) if left is right else torch.vmap(function)(left, right)


LOCAL = threading.local()


def test_attributes_of_a_thread() -> None:
    LOCAL.h = 0

    def keeps(x: torch.Tensor) -> torch.Tensor:
        LOCAL.h = {x * 2}
        return x + 1

    with pytest.raises(TraceError, match="keeps a tensor in attribute 'h'"):
        jitgen.jit(keeps)(X)
    assert LOCAL.h == 0
