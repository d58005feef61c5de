"""Times whole decoders of named sizes with random weights: the first tokens of a process, and steps of decoding.

    python -m bench.whole_models first  --sizes llama-3-8b --route jitgen.compile --json first.json
    python -m bench.whole_models decode --sizes llama-3-8b --batches 1 2 8 --routes jitgen.compile --json decode.json
    python -m bench.whole_models decode --device cpu --sizes 60m --dtype float32 --routes eager inductor jitgen.compile
    python -m bench.whole_models prefill --sizes llama-3-8b --routes eager inductor jitgen.compile --json prefill.json
    python -m bench.whole_models checks --sizes llama-3-8b --json checks.json

``first`` runs in a process of its own for each figure: the seconds, after the weights are there, until the first token
of a prompt and until the second, and of both how many went into tracing, planning, kernels (compiled or fetched from
the store), launchers and, of torch.compile's backend, dividing Dynamo's graphs; the rest is Dynamo's and torch's own.
``decode`` has the routes in one process, on the same weights, with 512 random keys and values: milliseconds of a step
in a CUDA graph, of its argmax too, the bytes of weights and cache that it has to read, that over the time, and the time
in which a sum reads as many bytes (``floor ms``). On a CPU each route has a copy of the model, steps of the routes take
turns, and the least of them counts: milliseconds, and those of the processor, which is what to compare on one thread
(``OMP_NUM_THREADS=1``) where others use the machine. Errors are those of logits against eager torch of the same dtype,
relative in norm. ``prefill`` has prompts of 2 x 512 and 1 x 4096 tokens, with the logits of the last one. ``checks``
has the microseconds in which a unit compares its module with what it was, which each call does. Routes are ``eager``,
``inductor``, ``jitgen`` (torch.compile's backend) and ``jitgen.compile``, which comes last, as it changes the model.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measurement import made
from bench.records import end
from jitgen.deploy.measurements import cpu_model
from jitgen.models import graphs

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "vocab_size": 1000},
    "60m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "vocab_size": 10000},
    "llama-3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}
TOKENS = {"tiny": 16, "60m": 16, "llama-3-8b": 512}
"""Tokens of a prompt."""
PREFILLS = ((2, 512), (1, 4096))
"""Batches and tokens of the prompts of ``prefill``."""
LENGTH = 1024
"""Tokens for which a cache has room."""


def model_of(sizes: str, device: str, dtype: torch.dtype) -> Any:
    """Makes a decoder with random weights, directly on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES[sizes], max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=False)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def compiled(model: Any, route: str, cuda_graph: bool = False) -> Any:
    import jitgen

    if route == "jitgen.compile":
        return jitgen.compile(model, cuda_graph=cuda_graph)
    if route == "eager":
        return model
    if route == "jitgen":
        import jitgen.dynamo.registration
    return torch.compile(model, backend=route, dynamic=False)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def stages(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds of jitgen's stages within this context."""
    from jitgen.call.resolver import Resolver
    from jitgen.call.specialization import Specialization
    from jitgen.dynamo import backend

    places: dict[str, tuple[Any, str]] = {"tracing": (Resolver, "_trace"), "planning": (Specialization, "lower")}
    places |= {"kernels": (Specialization, "built"), "launchers": (Specialization, "bind")}
    places["dividing"] = (backend, "_compiled_graph")  # Dynamo's graphs into programs
    originals = {name: getattr(*place) for name, place in places.items()}

    def timed(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return originals[name](*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

        return call

    for name, place in places.items():
        setattr(*place, timed(name))
    try:
        yield
    finally:
        for name, place in places.items():
            setattr(*place, originals[name])


def cache_of(model: Any) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=LENGTH)


def filled_cache(model: Any, batch: int, length: int, generator: torch.Generator) -> Any:
    """Makes a cache with random keys and values of ``length`` tokens."""
    cache, config = cache_of(model), model.config
    for layer in cache.layers:
        new = torch.empty(batch, config.num_key_value_heads, 1, config.head_dim, dtype=model.dtype, device=model.device)
        layer.lazy_initialization(new, new)
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        layer.cumulative_length.fill_(length)
    return cache


def first(sizes: str, route: str, device: str, dtype: torch.dtype, batch: int) -> dict[str, Any]:
    """Measures the first tokens of this process."""
    model = model_of(sizes, device, dtype)
    tokens = torch.randint(0, SIZES[sizes]["vocab_size"], (batch, TOKENS[sizes]), device=device)
    (tokens.float() @ tokens.float().T).sum().item()  # the device and its libraries are awake
    synchronize(device)
    figures: dict[str, Any] = {"route": route, "sizes": sizes, "batch": batch}
    start = time.perf_counter()
    run, cache = compiled(model, route), cache_of(model)
    figures["compile() s"] = time.perf_counter() - start
    for name in ("first token", "second token", "third token", "fourth token"):
        spent: dict[str, float] = {}
        start, busy = time.perf_counter(), time.process_time()
        with torch.no_grad(), stages(spent):
            tokens = run(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
            tokens[0, 0].item()
        taken = {"s": time.perf_counter() - start, "processor s": time.process_time() - busy} | spent
        figures[name] = {stage: round(value, 3) for stage, value in taken.items()}
    return figures


def graph_of(step: Callable[[], Any]) -> Callable[[], None]:
    """Captures a step; returns what replays it. Masks of transformers are others within a capture, so that kernels of
    prompts may be compiled here."""
    return graphs.capture_resolved(step)[0]


def milliseconds(replay: Callable[[], None], steps: int = 60) -> float:
    """Measures the median of five runs of ``steps`` replays."""
    runs = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(steps):
            replay()
        end.record()
        torch.cuda.synchronize()
        runs.append(start.elapsed_time(end) / steps)
    return sorted(runs)[2]


def bytes_of(model: Any, batch: int, length: int) -> int:
    """Returns what a step has to read: all weights but the embedding, and the keys and values so far."""
    tensors = [tensor for name, tensor in model.named_parameters() if "embed_tokens" not in name]
    config = model.config
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length * batch
    keys *= model.dtype.itemsize
    return sum(tensor.nbytes for tensor in tensors) + keys


def decode(model: Any, sizes: str, route: str, batch: int, expected: dict[int, torch.Tensor]) -> dict[str, Any]:
    """Measures steps of one route and batch; ``expected`` gets the logits of the first route, eager torch."""
    torch._dynamo.reset()
    generator = torch.Generator("cuda").manual_seed(batch)
    current = torch.randint(0, 1000, (batch, 1), device="cuda", generator=generator)
    start = time.perf_counter()
    run, cache = compiled(model, route), filled_cache(model, batch, 512, generator)
    with torch.no_grad():
        logits = run(current, past_key_values=cache).logits[:, -1].float()

        def step() -> None:
            current.copy_(run(current, past_key_values=cache).logits[:, -1:].argmax(-1))

        step()
        torch.cuda.synchronize()
        ready = time.perf_counter() - start
        taken = milliseconds(graph_of(step))
    reference = expected.get(batch)  # what the first route gave, which has none to be compared with
    expected.setdefault(batch, logits)
    size = bytes_of(model, batch, int(cache.get_seq_length()))
    return {
        "route": route,
        "batch": batch,
        "ms": round(taken, 4),
        "ready s": round(ready, 2),
        "GB": round(size / 1e9, 3),
        "TB/s": round(size / taken / 1e9, 3),
        "floor ms": round(size / read_bandwidth() * 1e3, 4),
    } | ({} if reference is None else _difference(logits, reference))


def decode_on_cpu(sizes: str, dtype: torch.dtype, routes: Sequence[str], quantize: str | None) -> list[dict[str, Any]]:
    """Measures steps of batch 1 of all routes, in turns; ``quantize`` is for jitgen's routes alone."""
    steps: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    expected: torch.Tensor | None = None
    for route in routes:
        model, weights = model_of(sizes, "cpu", dtype), str(dtype).removeprefix("torch.")
        if quantize and "jitgen" in route:
            import jitgen

            weights = quantize
            jitgen.quantize_(model.model, quantize, group_size=128)
        start = time.perf_counter()
        step: Callable[[], Any] = functools.partial(
            compiled(model, route),
            torch.tensor([[5]]),
            past_key_values=filled_cache(model, 1, 512, torch.Generator().manual_seed(1)),
        )
        logits = step().logits[:, -1]
        rows[route] = {"route": route, "weights": weights, "threads": torch.get_num_threads()}
        rows[route]["GB"] = round(bytes_of(model, 1, 512) / 1e9, 3)
        rows[route] |= {"ready s": round(time.perf_counter() - start, 2), "ms": math.inf, "processor ms": math.inf}
        rows[route] |= {} if expected is None else _difference(logits, expected)
        expected = logits if expected is None else expected
        steps[route] = step
    for _ in range(60):
        for route, step in steps.items():
            step()  # the caches are those of this route
            start, busy = time.perf_counter(), time.process_time()
            step()
            taken = {"ms": time.perf_counter() - start, "processor ms": time.process_time() - busy}
            for name, seconds in taken.items():
                rows[route][name] = min(rows[route][name], round(seconds * 1e3, 3))
    return [*rows.values()]


def _difference(logits: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    return {
        "error": float((logits - reference).norm() / reference.norm()),
        "same argmax": bool((logits.argmax(-1) == reference.argmax(-1)).all()),
    }


def prefill(model: Any, sizes: str, route: str, batch: int, length: int, expected: dict[Any, Any]) -> dict[str, Any]:
    """Measures prompts of one route and size, in a CUDA graph; ``expected`` gets the logits of the first route."""
    from transformers import StaticCache

    torch._dynamo.reset()
    tokens = torch.randint(
        0, 1000, (batch, length), device="cuda", generator=torch.Generator("cuda").manual_seed(length)
    )
    start = time.perf_counter()
    run, cache = compiled(model, route), StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad():

        def step() -> Any:
            for layer in cache.layers:
                if layer.is_initialized:
                    layer.cumulative_length.zero_()
            return run(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1]

        step()
        logits = step().float()
        torch.cuda.synchronize()
        ready = time.perf_counter() - start
        taken = milliseconds(graph_of(step), 5)
    reference = expected.setdefault((batch, length), logits)
    row = {"route": route, "batch": batch, "tokens": length, "ms": round(taken, 3), "ready s": round(ready, 2)}
    return row | ({} if reference is logits else _difference(logits, reference))


@functools.cache
def read_bandwidth() -> float:
    """Measures the bytes a second at which a sum of 2 GiB reads."""
    x = torch.ones(2**30, dtype=torch.bfloat16, device="cuda")
    return x.nbytes / milliseconds(graph_of(lambda: x.sum()), 10) * 1e3


def checks(model: Any) -> list[dict[str, Any]]:
    """Measures what units compare at every call: for each class of units the median of one module's 2,000 comparisons.

    A unit that a model has once, such as its head, is among them.
    """
    import jitgen
    from jitgen.models.compile import forwards
    from jitgen.models.state import State

    jitgen.compile(model)
    rows, seen = [], set()
    for unit in forwards(model):
        if unit.name in seen:
            continue
        seen.add(unit.name)
        state = State(model.get_submodule(unit.path))
        times = []
        for _ in range(2000):
            start = time.perf_counter()
            state.is_current()
            times.append(time.perf_counter() - start)
        rows.append({"unit": unit.name, "compared in us": round(sorted(times)[1000] * 1e6, 2)})
    return rows


def captured(model: Any, batch: int) -> dict[str, Any]:
    """Measures the loop that a user writes, with the graphs that ``jitgen.compile`` captures."""
    import jitgen

    jitgen.compile(model, cuda_graph=True)
    cache = cache_of(model)
    with torch.no_grad():
        tokens = (
            model(torch.randint(0, 1000, (batch, 64), device="cuda"), past_key_values=cache).logits[:, -1:].argmax(-1)
        )
        for count in (8, 64):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                tokens = model(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            taken = (time.perf_counter() - start) / count
    return {"route": "jitgen.compile(cuda_graph=True)", "batch": batch, "loop ms": round(taken * 1e3, 3)} | {
        "report": str(jitgen.report(model)).splitlines()[:2]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("first", "decode", "prefill", "checks"))
    parser.add_argument("--sizes", default="llama-3-8b", choices=SIZES)
    parser.add_argument("--route", default="jitgen.compile")
    parser.add_argument("--routes", nargs="+", default=["eager", "jitgen.compile"])
    parser.add_argument("--batches", nargs="+", type=int, default=[2])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", help="a format, for the layers of the model but not the head")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    dtype = getattr(torch, options.dtype)
    rows: list[dict[str, Any]] = []

    def say(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            facts = made("bench.whole_models", device=options.device) | {"cpu": cpu_model()}
            options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")

    if options.what == "first":
        say(first(options.sizes, options.route, options.device, dtype, options.batches[0]))
        return
    if options.what == "checks":
        for row in checks(model_of(options.sizes, "meta", dtype)):
            say(row)
        return
    if options.device == "cpu" and options.what == "decode":
        with torch.no_grad():
            for row in decode_on_cpu(options.sizes, dtype, options.routes, options.quantize):
                say(row)
        return
    model = model_of(options.sizes, "cuda", dtype)
    expected: dict[Any, torch.Tensor] = {}
    if options.quantize:
        import jitgen

        jitgen.quantize_(model.model, options.quantize, group_size=128)
    if options.what == "prefill":
        for route in options.routes:
            for batch, length in PREFILLS:
                say(prefill(model, options.sizes, route, batch, length, expected))
        return
    for route in options.routes:
        for batch in options.batches:
            try:
                say(
                    decode(model, options.sizes, route, batch, expected)
                    | {"weights": options.quantize or options.dtype}
                )
            except Exception as error:
                say({"route": route, "batch": batch, "failed": f"{type(error).__name__}: {error}"[:600]})
    if "jitgen.compile" in options.routes:
        say(captured(model, options.batches[0]))
        import jitgen

        say({"report": str(jitgen.report(model))})
    end(rows)


if __name__ == "__main__":
    main()
