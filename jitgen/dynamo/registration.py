"""Registers the backend ``"jitgen"`` with Dynamo when it is imported, for a jitgen that is not installed."""

from torch._dynamo.backends import registry

from jitgen.dynamo.backend import compile_graph

if "jitgen" not in registry._COMPILER_FNS:
    registry.register_backend(compile_graph, name="jitgen")
