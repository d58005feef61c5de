"""What a trace sees and guards: captures, sizes, numbers, containers; and what it says where it cannot go on."""

from __future__ import annotations

import enum
import functools
import threading
import types
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jitgen_cases import compiled, lowered, lowered_graph

import jitgen
from jitgen.errors import JitgenError, TraceError, UnsupportedError

x3 = torch.tensor([1.0, -2.0, 3.0])


def same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert list(got) == list(want)
        got, want = list(got.values()), list(want.values())
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for left, right in zip(got, want, strict=True):
            same(left, right)
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6, equal_nan=True)
    else:
        assert got == want


def agrees(function: Any, *arguments: Any, **keywords: Any) -> None:
    same(function(*arguments, **keywords), function.reference(*arguments, **keywords))


# ------------------------------------------------------------------------------------------------------ captures

scale = 2.0
offset = torch.tensor([0.5, 0.25, 0.125])


@jitgen.jit
def with_globals(x: torch.Tensor) -> torch.Tensor:
    return x * scale + offset


def test_globals_are_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = globals()
    agrees(with_globals, x3)
    for name, value in (
        ("scale", 3.0),
        ("scale", 3),
        ("scale", 2.0),
        ("offset", torch.ones(3)),
        ("offset", torch.ones(1)),
    ):
        monkeypatch.setitem(module, name, value)
        agrees(with_globals, x3)
    offset.mul_(4)
    agrees(with_globals, x3)


def test_closures_are_read_at_every_call() -> None:
    factor: Any = 2
    bias = torch.ones(3)
    dtype = torch.float32
    activation: Callable[..., Any] = torch.sin

    @jitgen.jit
    def function(x: torch.Tensor) -> torch.Tensor:
        return activation(x * factor + bias).to(dtype)

    agrees(function, x3)
    for factor in (3, 3.0, True, 0.0, -0.0, float("inf")):  # noqa: B007 - the closure reads it
        agrees(function, x3)
    factor = 1
    for bias in (torch.zeros(3), torch.zeros(1), torch.zeros(2, 3), torch.zeros(3, dtype=torch.float64)):  # noqa: B007 - the closure reads it
        agrees(function, x3)
    for dtype in (torch.bfloat16, torch.int32, torch.float32):  # noqa: B007 - the closure reads it
        agrees(function, x3)
    for activation in (torch.cos, F.silu, lambda x: x * 5, functools.partial(torch.add, other=3)):  # noqa: B007 - the closure reads it
        agrees(function, x3)


def test_rebinding_a_captured_tensor_compiles_nothing() -> None:
    weight = torch.ones(3)
    function = jitgen.jit(lambda x: x * weight)
    function(x3)
    with compiled() as events:
        for weight in (torch.zeros(3), torch.full((3,), 7.0)):  # noqa: B007 - the closure reads it
            agrees(function, x3)
        weight.add_(1)
        agrees(function, x3)
    assert events == []
    assert len(function.specializations) == 1


class Config:
    RATE = 3.0

    def __init__(self, gain: float):
        self.gain = gain


class Mode(enum.Enum):
    PLUS = 1
    MINUS = -1


@dataclass
class Layer:
    weight: torch.Tensor
    config: Config
    mode: Mode = Mode.PLUS

    @property
    def doubled(self) -> torch.Tensor:
        return self.weight * 2

    @staticmethod
    def bend(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.doubled * self.config.gain + Config.RATE

    @jitgen.jit
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.helper(self.bend(x))
        return y if self.mode is Mode.PLUS else -y


def test_attributes_through_methods_and_properties() -> None:
    layer, other = Layer(torch.ones(3), Config(2.0)), Layer(torch.zeros(3), Config(5.0))
    run = jitgen.jit(lambda x: layer.helper(layer.bend(x)) * layer.mode.value)
    for _ in range(2):
        agrees(run, x3)
    layer.weight = torch.full((3,), 4.0)
    agrees(run, x3)
    layer.config.gain = 7.0
    agrees(run, x3)
    layer.config = Config(9.0)
    agrees(run, x3)
    layer.mode = Mode.MINUS
    agrees(run, x3)
    layer = other
    agrees(run, x3)


def test_class_attributes_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(torch.ones(3), Config(2.0))
    run = jitgen.jit(lambda x: layer.helper(x))
    agrees(run, x3)
    monkeypatch.setattr(Config, "RATE", 11.0)
    agrees(run, x3)


def test_decorated_methods_belong_to_their_instance() -> None:
    first, second = Layer(torch.ones(3), Config(2.0)), Layer(torch.zeros(3), Config(5.0), Mode.MINUS)
    for layer in (first, second, first):
        same(
            Layer.__call__.__get__(layer)(x3),
            (x3 * scale + layer.weight * 2 * layer.config.gain + 3) * layer.mode.value,
        )


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("shift", torch.ones(3))
        self.layers = torch.nn.ModuleList([torch.nn.SiLU(), torch.nn.ELU(), torch.nn.PReLU()])
        self.chain = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Hardtanh(-1.0, 2.0))
        self.eps = 0.5

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return self.chain(x) + self.eps


def test_modules() -> None:
    module = Block().eval()
    run = jitgen.jit(module)
    with torch.no_grad():
        agrees(run, x3)
        with compiled() as events:
            module.scale.mul_(3)
            agrees(run, x3)
            module.scale = torch.nn.Parameter(torch.zeros(3))
            agrees(run, x3)
            module.shift = torch.full((3,), 9.0)
            agrees(run, x3)
            module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
            agrees(run, x3)
        assert events == []
        module.eps = 0.75
        agrees(run, x3)
        module.layers[0] = torch.nn.Tanh()
        agrees(run, x3)
        module.train()
        assert len({run(x3).sum().item() for _ in range(30)}) > 1  # dropout


def test_functions_of_every_kind() -> None:
    namespace: dict[str, Any] = {"torch": torch, "k": 4.0}
    exec("def made(x):\n    return torch.sin(x) * k", namespace)
    made = jitgen.jit(namespace["made"])
    agrees(made, x3)
    namespace["k"] = 5.0
    agrees(made, x3)

    main = types.FunctionType(
        (lambda x: x * 3).__code__, {"__name__": "__main__", "__builtins__": __builtins__}, "of_main"
    )
    agrees(jitgen.jit(main), x3)

    def generator(x: torch.Tensor) -> Iterator[torch.Tensor]:
        for step in range(3):
            yield x * step

    agrees(jitgen.jit(lambda x: list(generator(x))), x3)
    agrees(jitgen.jit(lambda x: [y + 1 for y in (x, x * 2)]), x3)
    agrees(jitgen.jit(functools.partial(torch.add, alpha=2)), x3, x3)
    agrees(jitgen.jit(torch.sigmoid), x3)

    def recursive(x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        return x if depth == 0 else recursive(x * 2, depth - 1) + 1

    agrees(jitgen.jit(recursive), x3)


def test_names_do_not_collide() -> None:
    """A parameter or local that has the name of a global, a keyword of C++, or of the kernel's own variables."""

    @jitgen.jit
    def float32(x: torch.Tensor, scale: torch.Tensor, v0: torch.Tensor, p0_0: torch.Tensor) -> torch.Tensor:
        return x * scale + v0 - p0_0

    agrees(float32, x3, x3, x3 * 2, x3 * 3)
    for name in ("main", "float", "_", "Ünïcödé", "jitgen", "load"):
        function = types.FunctionType((lambda x: x + 1).__code__, globals(), name)
        agrees(jitgen.jit(function), x3)


def test_nested_decorated_functions_are_one_kernel() -> None:
    weight = torch.ones(3)

    @jitgen.jit
    def inner(x: torch.Tensor, k: float) -> torch.Tensor:
        return torch.sin(x * weight) * k

    @jitgen.jit
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x, 2.0) + inner(x + 1, k=3.0)

    agrees(outer, x3)
    assert len(lowered(outer, x3).program.kernels) == 1
    weight = torch.full((3,), 2.0)
    agrees(outer, x3)


def test_a_decorated_function_called_with_captured_tensors_alone_is_inlined() -> None:
    """Also one that has launched kernels of its own, and one with containers or without tensors."""
    weight, bias = torch.ones(3), torch.full((3,), 2.0)
    inner = jitgen.jit(lambda a, b: a.exp() * b)
    nested = jitgen.jit(lambda pair, k=1.0: pair[0] * k + pair[1])
    made = jitgen.jit(lambda n: torch.full((3,), n))
    for warm in (False, True):
        if warm:
            inner(weight, bias), nested([weight, bias]), nested([weight, bias], k=2.0), made(2.0)
        outer = jitgen.jit(
            lambda x: x + inner(weight, bias) + nested([weight, bias]) * nested([bias, weight], k=2.0) + made(2.0)
        )
        agrees(outer, x3)
        assert len(lowered(outer, x3).program.kernels) == 1
        weight.mul_(2)
        agrees(outer, x3)


def test_captured_tensors_are_computed_with_in_the_kernel() -> None:
    weight = torch.ones(3)
    function = jitgen.jit(lambda x: x + (weight.exp() * 2).sin())
    agrees(function, x3)
    weight.add_(1)
    agrees(function, x3)


def test_a_tensor_no_name_leads_to_is_an_error() -> None:
    hidden = unittest.mock.Mock(return_value=torch.ones(3))
    with pytest.raises(TraceError, match="neither an argument nor reachable"):
        jitgen.jit(lambda x: x + hidden())(x3)


# ------------------------------------------------------------------------------------- arguments and containers


def test_defaults_keywords_and_containers() -> None:
    @jitgen.jit
    def function(x: torch.Tensor, k: float = 2.0, *, parts: Any = None, flag: bool = False) -> dict[str, Any]:
        extra = sum(parts["list"]) if parts else x
        return {"a": x * k + extra, "b": [x - 1, (x if flag else -x, k, "text", None)]}

    agrees(function, x3)
    agrees(function, x3, 3.0)
    agrees(function, x=x3, k=4.0)
    agrees(function, x3, flag=True)
    agrees(function, x3, parts={"list": [x3, x3 * 2]})
    agrees(function, x3, parts={"list": (x3, x3 * 2, x3)})
    assert len(function.specializations) == 5


def test_star_arguments() -> None:
    agrees(jitgen.jit(lambda *xs, **named: sum(xs) * named["k"]), x3, x3, k=x3)


def test_results_that_are_not_tensors() -> None:
    function = jitgen.jit(lambda x, n: (x * n, n + 1, x.shape, x.dtype, None, "text", x.ndim, n > 2, x.numel() / 2))
    for n in (2, 5):
        for x in (x3, torch.ones(4)):
            got, want = function(x, n), function.reference(x, n)
            same(got[0], want[0])
            assert got[1:] == want[1:]


def test_functions_without_tensors() -> None:
    agrees(jitgen.jit(lambda: torch.ones(3)))
    made = jitgen.jit(lambda n, v: torch.full((n,), v))
    for n, value in ((3, 2.5), (4, 2.5), (4, 7), (0, 1.0)):
        agrees(made, n, value)
    weight = torch.ones(2)
    agrees(jitgen.jit(lambda: weight * 2))


def test_the_default_dtype_is_read_at_every_call() -> None:
    whole = torch.arange(3)
    functions = [
        jitgen.jit(lambda x: x / 2),
        jitgen.jit(lambda x: x * 0.5),
        jitgen.jit(lambda x: x.sin()),
        jitgen.jit(lambda x: x + torch.ones(3)),
        jitgen.jit(lambda x: torch.arange(0.0, 3.0) * x),
        jitgen.jit(lambda x: x.to(torch.get_default_dtype())),
    ]
    untouched = jitgen.jit(lambda x: x * 0.5 + 1)
    agrees(untouched, x3)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            for function in functions:
                for _ in range(2):
                    assert function(whole).dtype == dtype
                agrees(function, whole)
            agrees(untouched, x3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {len(function.specializations) for function in functions} == {2}
    assert len(untouched.specializations) == 1
    assert untouched.specializations[0].traced.guards == ()


# ---------------------------------------------------------------------------------------------- sizes and numbers


def test_sizes_stay_symbolic() -> None:
    @jitgen.jit
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        padded = torch.zeros(rows, 2)
        return torch.cat([x * columns / x.numel(), padded + y.size(0), x[:, : columns // 2]], 1).view(-1, 1)

    agrees(function, torch.rand(4, 6), torch.rand(3))
    with compiled() as events:
        for rows, columns, length in ((5, 8, 2), (2, 10, 70), (30, 4, 4)):
            agrees(function, torch.rand(rows, columns), torch.rand(length))
    assert events == []
    (only,) = function.specializations
    assert only.static_sizes == {}


def test_a_branch_on_a_size_is_a_guard() -> None:
    @jitgen.jit
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x * 3

    for length in (3, 4, 5, 6, 2, 100):
        agrees(function, torch.rand(length))
    assert len(function.specializations) == 2
    assert {str(guard) for found in function.specializations for guard in found.guards} >= {
        "(s0_0 > 4)",
        "not (s0_0 > 4)",
    }


def test_a_size_python_must_know_is_static() -> None:
    @jitgen.jit
    def function(x: torch.Tensor) -> torch.Tensor:
        total = x
        for _ in range(x.shape[1]):
            total = total + 1
        return total

    for shape in ((2, 3), (5, 3), (2, 4)):
        agrees(function, torch.rand(shape))
    assert [found.static_sizes for found in function.specializations] == [{"s0_1": 3}, {"s0_1": 4}]
    assert "4" in function.specializations[1].signature


def test_numbers_are_run_time_scalars() -> None:
    function = jitgen.jit(lambda x, a, n: x * a + n)
    agrees(function, x3, 0.5, 2)
    with compiled() as events:
        for a in (0.1, -3.0, 1e30, float("inf"), 0.0):
            for n in (0, -7, 2**31):
                agrees(function, x3, a, n)
    assert events == []
    assert len(function.specializations) == 1
    agrees(function, x3, 1, 2)
    agrees(function, x3, True, 2)
    assert len(function.specializations) == 3


def test_numbers_python_must_know_are_guarded() -> None:
    @jitgen.jit
    def function(x: torch.Tensor, n: int, a: float) -> torch.Tensor:
        for _ in range(n):
            x = x * a
        return x + 1 if n > 4 else x

    for n in (1, 2, 5, 2):
        for a in (0.5, 2.0):
            agrees(function, x3, n, a)
    assert len(function.specializations) == 3


def test_arithmetic_on_numbers() -> None:
    @jitgen.jit
    def function(x: torch.Tensor, n: int, a: float) -> Any:
        return (
            x * (n + 1) * (a - 1) / (n * 2),
            x + n // 2 + n % 3 + n**2 + abs(-n),
            x * (1 / n) + max(n, 3) - min(a, 0.5) + round(a),
            x - (n << 1) + (n & 3) + divmod(n, 4)[1] + -n + float(n) + int(a),
            torch.arange(n).sin()[:3],
        )

    for n, a in ((3, 0.5), (8, 2.5), (5, -1.25)):
        agrees(function, x3, n, a)


def test_sizes_of_one_are_static() -> None:
    function = jitgen.jit(lambda x, y: x + y)
    for left, right in ((3, 3), (1, 3), (3, 1), (1, 1), (4, 4)):
        agrees(function, torch.rand(left), torch.rand(right))
    assert len(function.specializations) == 4


def test_questions_about_tensors() -> None:
    @jitgen.jit
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        assert x.ndim == x.dim() == len(x.shape) == 2
        assert x.is_floating_point()
        assert not y.is_floating_point()
        assert not x.requires_grad
        assert x.device == y.device
        assert torch.is_tensor(x)
        assert isinstance(x, torch.Tensor)
        assert not isinstance(x, torch.nn.Parameter)
        assert isinstance(x.shape[0], int)
        assert not isinstance(x.shape[0], float)
        assert torch.promote_types(x.dtype, y.dtype) == torch.float32
        assert torch.result_type(x, y) == torch.float32
        assert torch.finfo(x.dtype).max > 1e38
        assert x.element_size() == 4
        assert x.shape == x.size()
        assert len(x) == 2
        return x * y

    agrees(function, torch.rand(2, 3), torch.ones(2, 3, dtype=torch.int32))


# -------------------------------------------------------------------------------------------------------- errors


def data_dependent_if(x: torch.Tensor) -> torch.Tensor:
    return x if x[0] > 0 else -x


ERRORS: dict[str, tuple[Callable[..., Any], type[JitgenError], str, str]] = {
    "a data-dependent if": (data_dependent_if, TraceError, "condition", "torch.where"),
    "while": (lambda x: [x for _ in iter(lambda: bool(x[0] > 0), False)], TraceError, "condition", "torch.where"),
    "item": (lambda x: x * x[0].item(), TraceError, "item", "keep it a tensor"),
    "tolist": (lambda x: x.tolist(), TraceError, "tolist", "outside"),
    "float()": (lambda x: x * float(x[0]), TraceError, "Python number", "keep it a tensor"),
    "index": (lambda x: [1, 2, 3][x[0].long()], TraceError, "Python number", "argument"),
    "an operation without a row": (lambda x: torch.fft.fft(x), UnsupportedError, "fft", "outside"),
    "a mask as an index": (lambda x: x[x > 0], UnsupportedError, "indexing by a tensor", "slices"),
    "a nested list as an index": (lambda x: x[[[0, 1]]], UnsupportedError, "tuple of lists", "x[tuple(index)]"),
    "nonzero": (lambda x: x.nonzero(), UnsupportedError, "nonzero", "outside"),
    "where of one argument": (lambda x: torch.where(x > 0), UnsupportedError, "where", "depends on data"),
    "assignment": (lambda x: x.__setitem__(x > 0, x.flatten()), UnsupportedError, "assignment", "torch.where"),
    "a table of numbers": (lambda x: x + torch.tensor([1.0] * 100), UnsupportedError, "tensor", "outside"),
    "out=": (lambda x: torch.add(x, x, out=x), UnsupportedError, "out=", "return the value"),
    "another device": (lambda x: x.to("meta"), UnsupportedError, "meta", ""),
    "a backward": (lambda x: x.backward(), UnsupportedError, "backward", "outside"),
    "numpy": (lambda x: x.numpy(), TraceError, "numpy", "outside"),
    "in": (lambda x: 3 in x, TraceError, "searched", "=="),
    "wrong types": (lambda x: x + "text", TraceError, "str", ""),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_where_and_what_to_do(name: str) -> None:
    function, kind, what, advice = ERRORS[name]
    with pytest.raises(kind) as caught:
        jitgen.jit(function)(x3)
    message = str(caught.value)
    assert what in message
    assert advice in message
    assert "test_trace.py:" in message, "the user's line"


def test_properties() -> None:
    agrees(jitgen.jit(lambda x: (x.real * 2, x.nbytes, x.itemsize, x.is_leaf, x.layout, x.data + 1)), x3)
    with pytest.raises(UnsupportedError, match="imag"):
        jitgen.jit(lambda x: x.imag)(x3)


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        jitgen.jit(lambda x: x.no_such_thing)(x3)
    agrees(jitgen.jit(lambda x: x * 2 if hasattr(x, "no_such_thing") else x * 3), x3)


def test_a_users_own_error_is_left_alone() -> None:
    class Mine(Exception):
        pass

    def function(x: torch.Tensor) -> torch.Tensor:
        raise Mine("as it is")

    with pytest.raises(Mine, match="as it is"):
        jitgen.jit(function)(x3)


def test_print_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        print("value", x, x.shape, f"{x.shape[0]}")
        return x * 2

    same(jitgen.jit(function)(x3), x3 * 2)
    assert "value" in capsys.readouterr().out


def test_arguments_that_are_not_supported() -> None:
    with pytest.raises(UnsupportedError, match="layout"):
        jitgen.jit(lambda x, y: x)(x3, torch.ones(2, 2).to_sparse())
    with pytest.raises(UnsupportedError, match="complex64"):
        jitgen.jit(lambda x: x * 2)(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match="meta"):
        jitgen.jit(lambda x, y: x + y)(x3, torch.ones(3, device="meta"))


# -------------------------------------------------------------------------------------------------------- threads


def test_threads_call_concurrently() -> None:
    weight = torch.ones(64)
    function = jitgen.jit(lambda x, k: torch.sin(x * weight) * k)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(50):
                x = torch.full((1 + (seed + step) % 7, 64), float(seed))
                same(function(x, float(step)), torch.sin(x) * step)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_tracing_leaves_torch_as_it_was() -> None:
    """After a trace, and after one that failed, torch functions run eagerly again."""
    with pytest.raises(JitgenError):
        jitgen.jit(lambda x: torch.fft.fft(x))(x3)
    assert type(torch.ones(2) + 1) is torch.Tensor
    graph = lowered_graph(lambda x: x + 1, x3)
    assert graph.outputs[0].op == "add"


def test_a_device_is_made_as_of_a_tensor() -> None:
    """Wrappers of kernels choose a context by it."""

    @jitgen.jit
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if torch.device(x.device).type == "cpu" else 3)

    assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))
