"""Packages an exported program for AOTInductor, which runs it without Python: ``jitgen.package``.

Each operator of jitgen's becomes a C++ operator of the package's own (``nodes.py``, ``table.py``, ``source.py``,
``build.py``). Inductor compiles the rest of the program, and links the operators into the model's library, so that the
package is one file, and whoever loads it needs nothing of jitgen.
"""

from __future__ import annotations

import operator as operator_module
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from jitgen import scratch
from jitgen.call.operator import empty_results
from jitgen.call.signature import environment_of
from jitgen.errors import UnsupportedError
from jitgen.export import source
from jitgen.export.build import Kernels, object_of
from jitgen.export.nodes import ConvertedNode, convert, is_ours, open_size
from jitgen.export.table import Table, table_of
from jitgen.forks import Lock
from jitgen.paths import check_writable
from jitgen.quant import weights
from jitgen.spec import digest

_lock = Lock()
"""Locked while a package is made: operators, torch's decompositions and ``LIBRARY_PATH`` are the process's."""


def package(program: torch.export.ExportedProgram, path: str | os.PathLike[str], **options: Any) -> str:
    """Writes ``program`` to ``path`` as a package that ``torch._inductor.aoti_load_package`` and C++ load.

    Its generated kernels are C++ operators in it; a process that runs it needs neither jitgen nor a compiler. Weights
    of quantised layers are in the layout that kernels read.

    Args:
        program: what ``torch.export.export`` returned, on the CPU or one GPU. One size may be open, with at most 4096
            values: ``torch.export.Dim("rows", min=2, max=512)``.
            A call of the package with a size of 0 or 1 is refused, whatever ``min`` is.
        path: ends in ``.pt2``.
        options: configuration of Inductor, such as ``max_autotune=True``.

    Returns:
        the path.

    Raises:
        UnsupportedError: ``program`` was not exported, ``path`` cannot be written to, or the program draws random
            numbers, leaves several sizes open, or is on several devices.
        CompileError: a kernel, or the operators, do not compile.
    """
    _check_arguments(program, path)
    with _lock:
        return _packaged(program.run_decompositions({}), path, options)


def _check_arguments(program: object, path: object) -> None:
    if not isinstance(program, torch.export.ExportedProgram):
        raise UnsupportedError(
            f"a package is made of an exported program, and not of a {type(program).__name__}: pass "
            "torch.export.export(model, args), where args are those of a call of the model"
        )
    if not check_writable(path, "model.pt2", UnsupportedError).endswith(".pt2"):
        raise UnsupportedError(f"a package is written to a path that ends in .pt2, and not to {path!r:.200}")


def _packaged(plain: torch.export.ExportedProgram, path: Any, options: dict[str, Any]) -> str:
    size = open_size(plain)
    ours = [convert(node, size) for node in plain.graph.nodes if is_ours(node)]
    _check_inner(plain.graph_module)
    device = _device(ours)
    kernels = Kernels()
    indices: dict[Any, int] = {}
    tables: list[Table] = []
    users: list[tuple[ConvertedNode, int]] = []
    for converted_node in ours:
        route = converted_node.use.program.routing.on_device(device)
        table = table_of(converted_node.use, size.values, route, kernels)
        if table not in indices:
            indices[table] = len(tables)
            tables.append(table)
        users.append((converted_node, indices[table]))
    if not tables:
        return _compiled(plain, path, options)
    key = device.type.upper()
    body = source.operators_source("package", tables, kernels.refs.values(), key)
    namespace = f"jitgen_{digest([body, source.header()])[:16]}"
    text = source.operators_source(namespace, tables, kernels.refs.values(), key)
    _define(namespace, users)
    with scratch.directory() as directory, _linked_from(str(directory)):
        _convert_weights(plain, ours)
        _replace(plain.graph, users, namespace)
        plain.graph_module.recompile()
        name = f"{namespace}.o"
        (directory / name).write_bytes(object_of(text, kernels))
        return _compiled(plain, path, {**options, "aot_inductor.custom_op_libs": [f":{name}"]})


def _compiled(program: torch.export.ExportedProgram, path: Any, options: dict[str, Any]) -> str:
    from torch._inductor import aoti_compile_and_package

    return str(aoti_compile_and_package(program, package_path=os.fspath(path), inductor_configs=options))


def _check_inner(module: fx.GraphModule) -> None:
    for inner in module.modules():
        if inner is not module and isinstance(inner, fx.GraphModule) and any(map(is_ours, inner.graph.nodes)):
            raise UnsupportedError("a package has no kernels of jitgen within torch.cond and other inner graphs yet")


def _device(converted: Sequence[ConvertedNode]) -> torch.device:
    devices = {node.meta["val"].device for program in converted for node in program.tensors}
    if len(devices) > 1:
        raise UnsupportedError(f"a package is for one device, and this program is on {', '.join(map(str, devices))}")
    device = next(iter(devices), torch.device("cpu"))
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _convert_weights(program: torch.export.ExportedProgram, converted: Sequence[ConvertedNode]) -> None:
    """Puts quantised weights into the layout that kernels read."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    ours = {converted_node.node for converted_node in converted}
    for nodes, (now, wanted) in {
        converted_node.weight_nodes: converted_node.weight
        for converted_node in converted
        if converted_node.weight is not None
    }.items():
        if any(node.name not in names or not ours.issuperset(node.users) for node in nodes):
            raise UnsupportedError(
                "a package holds quantised weights that are parameters of the model, and that products alone read"
            )
        if now.layout == wanted.layout:
            continue
        tensors = tuple(program.state_dict[names[node.name]].detach() for node in nodes)
        for node, tensor in zip(nodes, weights.converted(tensors, now, wanted.layout), strict=True):
            program.state_dict[names[node.name]] = torch.nn.Parameter(tensor, requires_grad=False)
            node.meta["val"] = node.meta["val"].fake_mode.from_tensor(tensor, static_shapes=True)


def _replace(graph: fx.Graph, users: Sequence[tuple[ConvertedNode, int]], namespace: str) -> None:
    """Calls the package's operators in ``graph``."""
    for converted_node, index in users:
        node = converted_node.node
        operator = getattr(getattr(torch.ops, namespace), f"call{index}").default
        results = node.meta["val"]
        with graph.inserting_before(node):
            new = graph.call_function(operator, (list(converted_node.tensors),))
            new.meta["val"] = results if isinstance(results, (list, tuple)) else [results]
            if not isinstance(results, (list, tuple)):
                new = graph.call_function(operator_module.getitem, (new, 0))
                new.meta["val"] = results
        node.replace_all_uses_with(new)
        graph.erase_node(node)


_defined: dict[str, torch.library.Library] = {}
"""The operators that this process has defined for packages, by their namespace. They stay: a package with them may be
loaded at any time, and then has to find either these or its own."""


def _define(namespace: str, users: Sequence[tuple[ConvertedNode, int]]) -> None:
    """Makes torch's tracers know the operators. The package itself defines them where it is loaded, which may have
    happened in this process."""
    if namespace in _defined:
        return
    library = _defined[namespace] = torch.library.Library(namespace, "FRAGMENT")
    known = getattr(torch.ops, namespace)
    for index, converted_node in {index: node for node, index in users}.items():
        try:
            library.define(source.schema(f"call{index}"))
        except RuntimeError:  # by a package that is loaded, or is being loaded by another thread
            if not hasattr(known, f"call{index}"):
                raise
        torch.library.register_fake(f"{namespace}::call{index}", _shapes(converted_node), lib=library)


def _shapes(node: ConvertedNode) -> Any:
    program, numbers = node.use.program, node.use.numbers

    def shapes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return empty_results(program, environment_of(tensors, numbers), tensors[0].device)

    return shapes


@contextmanager
def _linked_from(directory: str) -> Iterator[None]:
    """Lets ``-l`` find files in ``directory`` within this context."""
    before = os.environ.get("LIBRARY_PATH")
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, (directory, before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIBRARY_PATH"]
        else:
            os.environ["LIBRARY_PATH"] = before
