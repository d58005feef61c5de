"""Times training steps of decoder layers: ``python -m bench.layer_training Llama --rows 512 4096 --json FILE``.

The layers are those of ``bench/layers.py``, of Llama-3-8B's sizes, in bfloat16, with gradients of the hidden states and
of every weight. For each number of rows: the forward, the backward and both, in microseconds between two events of a
GPU, of jitgen, eager torch and torch.compile, and the greatest relative error among gradients, in norm, against eager
torch in float64. The file is written after every measurement.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import jitgen
from bench.layers import LAYERS
from bench.measurement import made, relative_error
from bench.records import write
from bench.timing import event_seconds

WAYS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "jitgen": lambda function: jitgen.jit(function),
    "eager": lambda function: function,
    "torch.compile": lambda function: torch.compile(function, dynamic=False),
}


def arguments_of(name: str, rows: int, device: str) -> list[Tensor]:
    """The arguments of a layer, scaled so that its activations are of the order of 1."""
    arguments = []
    for position, spec in enumerate(LAYERS[name].specs(rows)):
        shape: Any = spec.shape
        tensor = torch.randn(shape, device=device)
        if position and tensor.dim() == 2 and tensor.shape[1] > 128:
            tensor /= tensor.shape[1] ** 0.5
        is_trained = position <= len(LAYERS[name].weights)  # and no angle of the rotary embedding
        arguments.append(tensor.bfloat16().requires_grad_(is_trained))
    return arguments


def trained(arguments: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in arguments if tensor.requires_grad]


def gradients(function: Callable[..., Tensor], arguments: list[Tensor], of_result: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*arguments), trained(arguments), of_result)


def measured(name: str, rows: int, ways: list[str], rounds: int, device: str) -> Iterator[dict[str, Any]]:
    """The measurements of one layer, with so many rows."""
    torch.manual_seed(0)
    arguments = arguments_of(name, rows, device)
    of_result = torch.randn(1, rows, arguments[0].shape[-1], device=device).bfloat16()
    exact = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in arguments]
    wanted = [gradient.float() for gradient in gradients(LAYERS[name].function, exact, of_result.double())]
    del exact
    for way in ways:
        function = WAYS[way](LAYERS[name].function)
        row: dict[str, Any] = {"layer": name, "rows": rows, "way": way}
        got = gradients(function, arguments, of_result)
        row["error"] = max(relative_error(g, w.double()) for g, w in zip(got, wanted, strict=True))
        result = function(*arguments)

        backward = functools.partial(torch.autograd.grad, result, trained(arguments), of_result, retain_graph=True)
        subjects: dict[str, Callable[[], object]] = {
            "forward": functools.partial(function, *arguments),
            "backward": backward,
            "both": functools.partial(gradients, function, arguments, of_result),
        }
        row["us"] = {what: round(event_seconds(call, rounds) * 1e6, 1) for what, call in subjects.items()}
        yield row


def main() -> None:
    torch._functorch.config.donated_buffer = False  # a backward is timed several times
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layers", nargs="*", default=["Llama"], help="names of bench/layers.py")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="jitgen, eager, torch.compile")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--commit", help="the commit to record")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.layers:
        for count in options.rows:
            for row in measured(name, count, options.ways, options.rounds, "cuda"):
                rows.append(row)
                print(row, flush=True)
                if options.json:
                    write(options.json, made("bench.layer_training", options.commit) | {"rows": rows})


if __name__ == "__main__":
    main()
