"""Traces: the function runs on proxies, and the torch functions that it calls become the nodes of a graph.

``torch.fx`` supplies the proxy (operators, methods, ``__torch_function__``). A torch function mode intercepts functions
of real tensors, so that ``weight.exp()`` on a captured weight is computed in the kernel, at every call. Each torch
function that is called arrives at ``Trace.call``, which finds its row (``trace/table.py``); the row makes nodes at
once, so a proxy has a dtype and a symbolic shape while the user's code runs.

Neighbours: ``trace/run.py`` runs the function; ``updates.py`` and ``quantized.py`` have what concerns updates in place
and quantised weights; ``trace/traced.py`` is what a trace leaves.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from jitgen import settings
from jitgen.errors import JitgenError, RequiresGrad, TraceError, UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.attributes import CONTIGUOUS, ROUNDED
from jitgen.ir.custom_gradients import DETACHED, UNTRACKED_CONTIGUOUS, UNTRACKED_VIEW
from jitgen.ir.graph import Builder, InputSpec, Node, Shape, input_shape
from jitgen.ir.nodes import CAST, CONST, INPUT, VIEW
from jitgen.quant import weights
from jitgen.quant.fakes import is_traced
from jitgen.spec import COMPLEX_REMEDY, DTYPES, dtype_name
from jitgen.trace import autocast, own_facts, remedies, table
from jitgen.trace.binding import StandIn, bind, check_method
from jitgen.trace.captured import Captured, call_leaves
from jitgen.trace.captures import Captures
from jitgen.trace.contents import is_numpy_number
from jitgen.trace.guards import Guards
from jitgen.trace.host_scalars import SymbolicScalar
from jitgen.trace.intermediates import with_wide_intermediates
from jitgen.trace.location import quote, user_location
from jitgen.trace.mistakes import refusal
from jitgen.trace.numbers import wrap
from jitgen.trace.proxy import Memory, TensorProxy
from jitgen.trace.quantized import QuantizedWeights
from jitgen.trace.readable import why_unreadable
from jitgen.trace.sequences import flattened, rebuilt
from jitgen.trace.typing import is_float, rounded
from jitgen.trace.updates import NewValues, has_other_bits, is_selection, memory_of, note_copies, reshaped, updated


class _Tracer(fx.Tracer):
    """Implements the tracer that ``torch.fx`` requires of a proxy; it hands every call on to ``Trace.call``."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.owner = trace

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        return self.owner.call(target, args, kwargs)


class InterceptFunctions(TorchFunctionMode):
    """Sends every torch function to the trace, also those of real tensors and those that make tensors."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if StandIn in types else self.trace.call(func, args, kwargs or {})


_ROW_MAJOR = frozenset(["zeros", "ones", "full", "empty", "arange", "tensor", "rand", "randn", "randint"])
_ROW_MAJOR |= {f"new_{name}" for name in ("zeros", "ones", "full", "empty")}
"""Functions that make contiguous tensors, whatever their arguments are."""
_UNSET = ("empty", "empty_like", "new_empty")
"""Functions that make tensors without values."""
_VIEWS = ("view", "view_as", "unflatten", "diagonal", "linalg_diagonal", "einsum", "unfold")
"""Functions whose results are views at all strides, made of reshapes here, or that raise an error."""


class Trace:
    """Represents one run of a function on proxies: the state that rows work with.

    Attributes:
        name: the function's name, for messages.
        builder: makes the nodes.
        guards: decides symbolic comparisons and records the decisions.
        device: the device of the inputs.
        layouts: the layouts in which kernels read quantised weights that the function closes over.
        runs: whether a call follows, so that captured tensors have to be on ``device``. Else they only stand for such
            tensors, as specs do for arguments.
        differentiable: whether gradients are computed of the graph, so that it has marks where none flows.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        guards: Guards,
        device: torch.device,
        layouts: weights.Layouts,
        objects: Sequence[Captured] = (),
        runs: bool = True,
        differentiable: bool = False,
    ):
        self.function = function
        self.differentiable = differentiable
        self.runs = runs
        self.name = name
        self.builder = Builder()
        self.guards = guards
        self.device = device
        self.tracer = _Tracer(self)
        self.inputs: list[InputSpec] = []
        self.new_values = NewValues()
        self.rounds_results = settings.get("JITGEN_EAGER_ROUNDING")
        """Whether the result of each torch function is rounded, where it has 16 bits; not within a composition, which
        is one function."""
        self._began_with_gradients = torch.is_grad_enabled()
        self.enables_gradients = False
        """Whether the function enables gradients in a call under ``no_grad``."""
        self.draws = 0
        """The number of tensors of random numbers so far; see ``trace/random.py``."""
        self.captured: list[Captured] = []
        self.sources: list[Captured] = []
        """Where each input of the graph is read."""
        self._captured_proxies: dict[int, TensorProxy] = {}
        self.quantized = QuantizedWeights(self, layouts)
        self.chosen: dict[int, tuple[Node, Node, Node]] = {}
        """Matrices that ids chose, by the id of their node: the node, what they were chosen of, and the ids."""
        self.host_scalars: list[TensorProxy] = []
        self.strides_read: dict[tuple[Memory, Node], tuple[Any, ...]] = {}
        """The strides that the function has asked for, by the memory and the value of a tensor."""
        self._returned: dict[int, tuple[TensorProxy, Node]] = {}
        self._returned_nodes: set[Node] = set()
        self.captures = Captures(function, name, objects)

    # ------------------------------------------------------------------------------------------------- inputs

    def input(self, tensor: torch.Tensor, position: int) -> TensorProxy:
        """Makes a proxy for the next argument.

        Args:
            position: of the argument among the leaves of the call.
        """
        index = len(self.inputs)
        self.sources.append(Captured(f"argument {position}", lambda: call_leaves.get()[position], tensor))
        return TensorProxy(self.input_node(tensor), self, input=index)

    def _on_device(self, captured: Captured, tensor: torch.Tensor) -> Captured:
        if self.runs and tensor.device != self.device:
            raise UnsupportedError(
                f"{self.name}: {captured.path} is on {tensor.device}, the arguments on {self.device}; move it there"
            )
        return captured

    def _find_captured(self, tensor: torch.Tensor) -> Captured:
        captured = self.captures.tensor(tensor)
        if captured is None:
            raise TraceError(
                f"{self.name}: a tensor that is neither an argument nor reachable by a name of the function"
                f"{quote(user_location())}\n  pass it as an argument, or give it a name the function closes over"
            )
        return captured

    def host_scalar(self, scalar: SymbolicScalar) -> TensorProxy:
        """Makes a proxy for a 0-d CPU tensor among CUDA arguments (``trace/host_scalars.py``)."""
        self.host_scalars.append(TensorProxy(self.builder.scalar(scalar.expr, scalar.dtype), self))
        return self.host_scalars[-1]

    def input_node(self, tensor: torch.Tensor) -> Node:
        index = len(self.inputs)
        self.guards.hints.update({f"s{index}_{dim}": size for dim, size in enumerate(tensor.shape)})
        dtype, shape = dtype_name(tensor.dtype), input_shape(index, tensor.shape)
        self.inputs.append(InputSpec(dtype, shape))
        return self.builder.make("input", (), dtype, shape, (index,))

    def captured_weight(self, weight: Any) -> Captured:
        """Captures a quantised weight that the function closes over."""
        return self._on_device(self._find_captured(weight), weight)

    def captured_input(self, tensor: Captured) -> Node:
        """Returns the input node of a tensor of such a weight."""
        self.captured.append(tensor)
        self.sources.append(tensor)
        return self.input_node(tensor.value)

    def captured_tensor(self, tensor: torch.Tensor) -> Node:
        """Returns the value of a tensor that the function closes over: an input, or what an update has made of it."""
        return self.captured_proxy(tensor).value

    def captured_proxy(self, tensor: torch.Tensor) -> TensorProxy:
        """Returns the proxy of a tensor that the function closes over."""
        proxy = self._captured_proxies.get(id(tensor))
        if proxy is None:
            captured = self._find_captured(tensor)
            unreadable = None if is_traced(tensor) and not self.runs else why_unreadable(tensor)
            if unreadable is not None:
                raise UnsupportedError(f"{self.name}: {captured.path}: {unreadable}{quote(user_location())}")
            node = self.captured_input(self._on_device(captured, tensor))
            proxy = self._captured_proxies[id(tensor)] = TensorProxy(node, self, input=node.attrs.number)
        if tensor.requires_grad and torch.is_grad_enabled() and not self.differentiable:
            raise RequiresGrad(
                f"{self.name}: {self._find_captured(tensor).path} requires grad, and neither a plan nor a call with "
                f"out= computes gradients{quote(user_location())}\n  call the function itself, or this under "
                "torch.no_grad()"
            )
        return proxy

    # -------------------------------------------------------------------------------------------------- calls

    def call(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls ``target``, a torch function, an operator, or a method's name, with these arguments."""
        if isinstance(target, str):
            try:
                check_method(target, args, kwargs)
            except TypeError as error:
                raise TraceError(f"{self.name}: Tensor.{target}: {error}{quote(user_location())}") from None
        with torch._C.DisableTorchFunction():
            if target is torch._C._set_grad_enabled:  # as torch.no_grad() does
                self.enables_gradients |= bool(args[0]) and not self._began_with_gradients
                return target(*args)
            row, name = table.find(target)
            if row is None:
                return self._fact_or_refusal(name, args, kwargs)
            if kwargs.get("out") is not None:
                raise UnsupportedError(
                    f"{self.name}: out= inside a decorated function is not supported{quote(user_location())}\n"
                    "  return the value, and give out= to the call of the decorated function"
                )
            if row.of_lists:
                return self._of_lists(row, name, args, kwargs)
            enter = self._enter_proxy if row.proxies else self._enter
            positional, named = tuple(map(enter, args)), {k: enter(v) for k, v in kwargs.items()}
            nodes = [value for value in flattened((positional, named)) if isinstance(value, Node)]
            if not (row.weights or row.is_view) and any(node.is_weight for node in nodes):
                raise UnsupportedError(self._refused_weight(name))
        standing = [self._proxy_of(value) for value in flattened((args, kwargs))]
        proxies = [proxy for proxy in standing if proxy is not None]
        result = self._result(row, name, positional, named, proxies)
        if row.python and not kwargs.get("inplace"):
            return result
        with torch._C.DisableTorchFunction():
            first = self._proxy_of(args[0]) if args else None
            itself = _by_node(proxies) if row.itself else {}
            if row.itself and first is not None:
                itself[id(first.value)] = first
            copied = row.copied or (row.is_view and is_selection(result))
            if self.differentiable:
                result = self._tracked(row, name, result, proxies, itself)
            if self.rounds_results and not row.python:
                result = self.as_stored(result, nodes)
            if row.inplace or kwargs.get("inplace"):
                updated(self, first, result, name)
                return args[0]
            if row.is_view or row.python or row.copied:  # what the body of a function calls has made its copies
                left = self._leave(result, proxies, itself, copied, self._untracked_view(name))
                if name.rpartition(".")[2] not in _VIEWS:
                    note_copies(proxies, pytree.tree_leaves(left))
                return reshaped(self, first, left, name) if row.reshapes else left
            made = self._leave(self._unaliased(result))
            if name.rpartition(".")[2] in _ROW_MAJOR or (isinstance(result, Node) and result.attrs == CONTIGUOUS):
                made.memory.is_row_major = True
            if name.rpartition(".")[2] in _UNSET:
                made.memory.is_unset = True
            return made

    def _fact_or_refusal(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns a fact of a tensor that the trace knows, such as its device.

        Raises:
            UnsupportedError, TraceError: the function has no row, and is no such fact.
        """
        fact = name.removeprefix("Tensor.")
        if fact in own_facts.NAMES and isinstance(args[0], torch.Tensor):
            return self._fact(args[0], fact)
        operands = map(self._proxy_of, flattened((args, kwargs)))
        if any(proxy is not None and proxy.value.is_weight for proxy in operands):
            raise UnsupportedError(self._refused_weight(name))
        raise self._no_row(name)

    def _of_lists(self, row: table.Row, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the row of a function of lists, of which each call of a torch function is traced."""
        try:
            with torch._C._EnableTorchFunction(), InterceptFunctions(self):
                return row.function(args, kwargs)
        except JitgenError:
            raise
        except Exception as error:
            raise TraceError(f"{self.name}: {name}: {error}{quote(user_location())}") from error

    def made(self, row: table.Row, name: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Returns what a row makes of nodes and numbers, as ``call`` would leave it of proxies."""
        with torch._C.DisableTorchFunction():
            result = self._result(row, name, positional, named, ())
            if self.rounds_results:
                nodes = [value for value in flattened((positional, named)) if isinstance(value, Node)]
                result = self.as_stored(result, nodes)
            return result if row.is_view or row.copied else self._unaliased(result)

    def _result(
        self,
        row: table.Row,
        name: str,
        positional: tuple[Any, ...],
        named: dict[str, Any],
        proxies: Sequence[TensorProxy],
    ) -> Any:
        """Calls the row with the arguments as nodes. A composition gets ``proxies`` for theirs, which it may update."""
        try:
            positional, named, inner = self._autocast(name, positional, named)
            nodes = [value for value in flattened((positional, named)) if isinstance(value, Node)]
            if row.composed:
                args, keywords = bind(row.function, positional, named)
                known = _by_node(proxies)
                args = tuple(self._leave(value, known=known) for value in args)
                keywords = {key: self._leave(value, known=known) for key, value in keywords.items()}
                rounds, self.rounds_results = self.rounds_results, self.rounds_results and row.python
                try:
                    with InterceptFunctions(self), inner:
                        made = row.function(*args, **keywords)
                finally:
                    self.rounds_results = rounds
                if row.python and not named.get("inplace"):
                    return made
                result = self._enter(made)
                return result if row.python else self._with_wide_intermediates(result, nodes)
            with torch._C.DisableTorchFunction():
                args, keywords = bind(row.function, (self, *positional), named)
                return self._with_wide_intermediates(row.function(*args, **keywords), nodes)
        except JitgenError as error:
            if row.composed and str(error).startswith(f"{self.name}: "):  # of a function that the composition calls
                raise type(error)(str(error).replace(": ", f": {name}: ", 1)) from None
            raise type(error)(f"{self.name}: {name}: {error}{quote(user_location())}") from None
        except Exception as error:
            why = refusal(error, positional, named, self.guards.hint)
            raise TraceError(f"{self.name}: {name}: {why}{quote(user_location())}") from error

    def _tracked(
        self, row: table.Row, name: str, result: Any, proxies: Sequence[TensorProxy], itself: Mapping[int, TensorProxy]
    ) -> Any:
        """Returns ``result``, of a call of ``name``, with marks where autograd does not know of it: gradients are
        disabled."""
        leaves, tree = pytree.tree_flatten(result)
        if torch.is_grad_enabled():
            computes = any(isinstance(leaf, Node) and is_float(leaf) for leaf in leaves)
            for proxy in proxies if computes and name.rpartition(".")[2] != "detach" else ():
                if proxy.untracked:
                    own_facts.refuse_untracked(self, proxy, name)
            return result
        known = {memory_of(proxy.value) for proxy in proxies} if row.is_view else set()
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Node) and id(leaf) not in itself and leaf.attrs != DETACHED:
                attrs, memory = DETACHED, memory_of(leaf)
                if memory in known and leaf.kind is CAST:
                    attrs = UNTRACKED_CONTIGUOUS
                elif memory in known and not own_facts.views_know_nothing(self, memory):
                    attrs = UNTRACKED_VIEW
                leaves[index] = self.detached(leaf, attrs)
        return pytree.tree_unflatten(leaves, tree)

    def _untracked_view(self, name: str) -> str | None:
        """Returns the kind of what ``name`` views in a graph that has no marks of what is not tracked."""
        if self.differentiable:
            return None
        if name.rpartition(".")[2] in ("detach", "data"):
            return "detached"
        return None if torch.is_grad_enabled() else "view"

    def composed(self, function: Callable[..., Any], proxies: Sequence[TensorProxy]) -> Node:
        """Traces ``function``, which calls torch, on ``proxies``."""
        with torch._C._EnableTorchFunction(), InterceptFunctions(self):
            node: Node = self._enter(function(*proxies))
        return node

    def _autocast(self, name: str, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Converts the arguments as ``torch.autocast`` does for a function; returns also a context for what it calls,
        where autocast is disabled if it has converted them."""
        values = (*positional, *named.values())
        dtype = autocast.target(name, self.device.type, values)
        if dtype is None:
            return positional, named, nullcontext()
        converted = autocast.converted((*values,), dtype, self.cast)
        names = zip(named, converted[len(positional) :], strict=True)
        return converted[: len(positional)], dict(names), autocast.disabled(self.device.type)

    def _no_row(self, name: str) -> JitgenError:
        last = name.rpartition(".")[2]
        if last in remedies.READS:
            return TraceError(
                f"{self.name}: {name} asks for a tensor's value, which is known only when the kernel runs"
                f"{quote(user_location())}\n  {remedies.remedy(name)}"
            )
        remedy = COMPLEX_REMEDY if last in remedies.COMPLEX else remedies.remedy(name)
        return UnsupportedError(f"{self.name}: jitgen has no row for {name}{quote(user_location())}\n  {remedy}")

    def _with_wide_intermediates(self, result: Any, arguments: Sequence[Node]) -> Any:
        """Returns a row's result, computed from float32 where it is of 16 bits; see ``trace/intermediates.py``."""
        leaves, tree = pytree.tree_flatten(result)
        nodes = [leaf for leaf in leaves if isinstance(leaf, Node)]
        wide = iter(with_wide_intermediates(self.builder, nodes, arguments))
        return pytree.tree_unflatten([next(wide) if isinstance(leaf, Node) else leaf for leaf in leaves], tree)

    def _refused_weight(self, what: str) -> str:
        return (
            f"{self.name}: {what} of a quantised weight{quote(user_location())}\n  a quantised weight is the weight of "
            "F.linear or the right operand of @; to compute with its values, dequantise it outside the function"
        )

    def attribute(self, proxy: TensorProxy, name: str) -> Any:
        """Reads ``proxy.name``: a property's value, a method to call, or what the user has stored on an argument."""
        if name in own_facts.NAMES:
            with torch._C.DisableTorchFunction():
                return own_facts.read(self, proxy, name)
        read = table.properties().get(name)
        if read is not None:
            with torch._C.DisableTorchFunction():
                value = read(self, proxy.value)
                if name in table.VIEW_PROPERTIES and value is not proxy.value:
                    row = table.Row(read, is_view=True)
                    value = self._tracked(row, name, value, (proxy,), {}) if self.differentiable else value
                itself = {id(proxy.value): proxy} if name == "real" else {}
                return self._leave(value, (proxy,), itself, untracked=self._untracked_view(name))
        if not hasattr(torch.Tensor, name):
            return own_facts.stored(self, proxy, name)
        if not callable(getattr(torch.Tensor, name)):
            raise UnsupportedError(
                f"{self.name}: jitgen has no row for the property Tensor.{name}{quote(user_location())}\n"
                "  read it outside the decorated function"
            )
        return lambda *args, **kwargs: self.call(name, (proxy, *args), kwargs)

    def _fact(self, tensor: torch.Tensor, name: str) -> Any:
        """Reads what a tensor that the function closes over knows besides its elements."""
        proxy = self._proxy_of(tensor)
        if proxy is not None:
            return own_facts.read(self, proxy, name)
        return own_facts.read_source(self, self._find_captured(tensor), name)

    def _proxy_of(self, value: Any) -> TensorProxy | None:
        """Returns the proxy that ``value`` is, or that stands for a captured tensor which the trace has met; else
        None."""
        return value if isinstance(value, TensorProxy) else self._captured_proxies.get(id(value))

    def _enter(self, value: Any) -> Any:
        """Turns an argument into what a row takes: tensors become nodes, anything else is unchanged."""
        if isinstance(value, TensorProxy):
            return value.value
        if weights.is_quantized(value):
            return self.quantized.captured(value)
        if is_numpy_number(value):
            return value.item()
        if isinstance(value, enum.Enum) and isinstance(value, (int, float)):
            return value.value
        if isinstance(value, torch.Tensor):
            return self.captured_tensor(value)
        if isinstance(value, (list, tuple)):
            return rebuilt(value, [self._enter(item) for item in value])
        if isinstance(value, slice):
            return slice(self._enter(value.start), self._enter(value.stop), self._enter(value.step))
        return value

    def _enter_proxy(self, value: Any) -> Any:
        """Turns an argument into what a row takes that asks for proxies."""
        if isinstance(value, TensorProxy):
            return value
        is_plain = isinstance(value, torch.Tensor) and not weights.is_quantized(value)
        return self.captured_proxy(value) if is_plain else self._enter(value)

    def as_stored(self, result: Any, operands: Sequence[Node]) -> Any:
        """Rounds computed values of 16 bits among ``result`` as eager torch stores them; views of ``operands`` are
        rounded already."""
        memories = set(map(memory_of, operands))

        def rounded(leaf: Any) -> Any:
            if not isinstance(leaf, Node) or leaf.dtype not in ("float16", "bfloat16") or leaf.is_in_memory:
                return leaf
            if memory_of(leaf) in memories:
                return leaf
            return self.marked(leaf, ROUNDED)

        return pytree.tree_map(rounded, result)

    def _unaliased(self, value: Any) -> Any:
        """Copies ``value`` if it is an argument, or a view of one.

        A copy costs nothing within a kernel; only one that is returned is written to memory.
        """
        if isinstance(value, (list, tuple)):
            return rebuilt(value, [self._unaliased(item) for item in value])
        if isinstance(value, Node) and memory_of(value).kind is INPUT:
            return self.make("cast", (value,), value.dtype, value.shape)
        return value

    def _leave(
        self,
        value: Any,
        sources: Sequence[TensorProxy] = (),
        known: Mapping[int, TensorProxy] | None = None,
        copied: bool = False,
        untracked: str | None = None,
    ) -> Any:
        """Turns a row's result into what user code sees.

        Args:
            sources: the proxies of which it may be a view.
            known: proxies that are there already, by the id of their nodes.
            copied: whether torch's result is a view of the first of ``sources`` although ``value`` is none.
            untracked: what views of them are in a graph without marks; see ``TensorProxy``.
        """
        if isinstance(value, Node):
            if known and id(value) in known:
                return known[id(value)]
            memory = memory_of(sources[0].value if copied and sources else value)
            source = next((source for source in sources if memory_of(source.value) is memory), None)
            if source is None:
                return TensorProxy(value, self)
            left = TensorProxy(value, self, source.memory, is_view=source.is_view)
            left.untracked = own_facts.untracked(source, value, untracked)
            return left
        if isinstance(value, symbols.Expr):
            return wrap(value, self.guards)
        if isinstance(value, (list, tuple)):
            return rebuilt(value, [self._leave(item, sources, known, copied, untracked) for item in value])
        return value

    def forget_tensors(self) -> None:
        """Releases all tensors of the trace."""
        self._captured_proxies.clear()
        self._returned.clear()
        self.sources.clear()
        self.host_scalars.clear()

    def returned(self, proxy: TensorProxy) -> Node:
        """Returns the node of an output. A view of an updated argument is a view of its new value here. Any other
        output that has the value of such an argument, or of another output, is a copy, as outputs are distinct tensors
        unless the function returns one tensor twice."""
        if self.host_scalars and INPUT not in proxy.value.kinds:
            raise UnsupportedError(
                f"{self.name} returns what is computed from 0-d CPU tensors alone, which torch leaves on the CPU; "
                f"move them to {self.device} first, with .to(device), or compute it outside the decorated function"
            )
        own_facts.refuse_stored(self, proxy)
        if proxy.memory.input is not None and has_other_bits(proxy):
            raise UnsupportedError(
                f"{self.name} returns a view(dtype) of an argument or a captured tensor, which shares its memory\n"
                f"  return a clone of it, or call .view({DTYPES[proxy.value.dtype]}) outside of the function; "
                f"it is made{quote(proxy.value.location)}"
            )
        filled = proxy.memory.updates and proxy.memory.input is None  # a tensor of its own, whatever was copied into it
        if proxy.input is not None:
            return proxy.value
        if memory_of(proxy.value).kind is INPUT and not filled:
            return proxy.value if proxy.value.kind is not INPUT else self._another(proxy.value)
        if id(proxy) in self._returned:
            return self._returned[id(proxy)][1]
        node = proxy.value
        if node.is_weight:
            raise UnsupportedError(self._refused_weight("the return"))
        if self._is_view_of_updated(proxy):
            return self._another(node) if node is proxy.memory.base else node
        if filled and proxy.memory.is_row_major and node is proxy.memory.base:  # an update leaves its strides
            node = self.marked(node, CONTIGUOUS)
        is_updated = self.new_values.inputs_of(node) or self.new_values.inputs_of(node.under_views)
        if is_updated or memory_of(node).kind is INPUT or node in self._returned_nodes:
            node = self.marked(node, ("copy", len(self._returned)))
        self._returned[id(proxy)] = proxy, node
        self._returned_nodes.add(node)
        return node

    def _another(self, node: Node) -> Node:
        """Returns a view of all of ``node``: another tensor in its memory, as ``x[:]`` and ``x.detach()`` are."""
        return self.make("view", (node,), node.dtype, node.shape, ("permute", tuple(range(len(node.shape)))))

    def _is_view_of_updated(self, proxy: TensorProxy) -> bool:
        """Returns whether ``proxy`` is a view of an argument that was updated, or of such a captured tensor."""
        node, base = proxy.value, proxy.memory.base
        if self.new_values.inputs_of(base) != {proxy.memory.input}:  # none, or another argument has the same new value
            return False
        while node.kind is VIEW and node is not base:
            node = node.inputs[0]
        return node is base

    # ---------------------------------------------------------------------------------------------- nodes, for rows

    def location(self) -> str | None:
        """Returns the user's line that the next node comes from."""
        return user_location()

    def make(
        self, op: str, inputs: Sequence[Node], dtype: str, shape: Shape | list[Any], attrs: tuple[Any, ...] = ()
    ) -> Node:
        shape = [self.guards.value(size) if symbols.is_too_long(size) else size for size in shape]
        return self.builder.make(op, inputs, dtype, shape, attrs, self.location())

    def cast(self, node: Node, dtype: str) -> Node:
        if node.dtype == dtype:
            return node
        if node.kind.is_number:
            return self._cast_scalar(node, dtype)
        return self.make("cast", (node,), dtype, node.shape)

    def marked(self, node: Node, mark: tuple[Any, ...]) -> Node:
        """Makes a ``cast`` of ``node`` in its own dtype with the attributes ``mark`` (``ir/attributes.py``)."""
        return self.make("cast", (node,), node.dtype, node.shape, mark)

    def detached(self, node: Node, attrs: tuple[str, ...] = DETACHED) -> Node:
        """Marks ``node`` as a value through which no gradient flows."""
        if not (self.differentiable and DTYPES[node.dtype].is_floating_point):
            return node
        return self.make("view", (node,), node.dtype, node.shape, attrs)

    def copy(self, node: Node, dtype: str) -> Node:
        """Copies ``node``, as ``dtype``, to memory of its own."""
        return self.make("cast", (node,), dtype, node.shape)

    def _cast_scalar(self, node: Node, dtype: str) -> Node:
        if node.kind is CONST and (DTYPES[dtype].is_floating_point or not isinstance(node.attrs.value, float)):
            return self.builder.const(rounded(node.attrs.value, dtype), dtype)
        return self.make("cast", (node,), dtype, ())


def _by_node(proxies: Sequence[TensorProxy]) -> dict[int, TensorProxy]:
    """Maps the ids of nodes to their proxies; a value that several tensors have is left out."""
    by_node: dict[int, TensorProxy] = {}
    shared = set()
    for proxy in proxies:
        if by_node.setdefault(id(proxy.value), proxy) is not proxy:
            shared.add(id(proxy.value))
    return {key: proxy for key, proxy in by_node.items() if key not in shared}
