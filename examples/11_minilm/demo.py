"""A real model: all-MiniLM-L6-v2's sentence encoder, quantised to int8 and to int4, through generated fused kernels.

With "int8 a8" activations are quantised too, token by token, and products are of 8-bit codes.

Run:   make demo            (python examples/11_minilm/demo.py; --show-source prints a kernel, --eager runs torch alone)
Shows: how fast the quantised models are beside the float model in eager torch, for one sentence and for sixteen; that
       they are right, beside eager torch on the same weights and beside the float model; similarities of sentence
       pairs; which kernels were compiled, which came from the store, and where their source lies.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import checkpoint
import encoder
import torch

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32
PAIRS = (
    ("GPUs multiply matrices quickly.", "Graphics processors are fast at algebra."),
    ("He was at the bank with a cheque.", "They picnic on the river's bank."),
    ("The soup needs more salt.", "A telescope observed a distant galaxy."),
    ("The new law was passed by parliament on Friday.", "Lawmakers approved the legislation at the end of the week."),
    ("A man is playing a guitar on stage.", "Someone performs music with a guitar in front of an audience."),
    ("The cat sleeps on the warm windowsill.", "Interest rates were raised by a quarter of a percent."),
    ("How do I reset my password?", "I forgot my login details and cannot get into my account."),
    ("Where is the nearest train station?", "Can you tell me how to get to the railway station?"),
)
SHOWN_PAIRS = 3
FORMATS = {
    "int8 per row": ("int8", None, None, 0.999, None),
    "int8 a8": ("int8", None, "int8", None, 0.99),
    "int4 g32": ("int4", 32, None, None, 0.96),
}
"""By name: format, group size, kind of activations, and what the cosine to float32 is at least: of every sentence, and
of their mean."""
FLIPS = 0.1
"""The same with quantised activations, some of whose codes are others after one rounding of a value between two."""
ROUNDINGS = 64
"""An embedding, which has length 1, may lie this many roundings of DTYPE from that of eager torch on the same weights:
it passes some thirty products, norms and softmaxes, and each rounds its result once."""


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def medians(*calls: Callable[[], object], repeats: int) -> list[float]:
    """Median milliseconds of each, taken in turn."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for times, call in zip(samples, calls, strict=True):
            wait()
            started = time.perf_counter()
            call()
            wait()
            times.append(time.perf_counter() - started)
    return [statistics.median(times) * 1e3 for times in samples]


def in_eager(model: encoder.Encoder, *inputs: torch.Tensor) -> torch.Tensor:
    """The embeddings without generated kernels; a quantised weight is dequantised first."""
    with encoder.eager():
        return model(*inputs)


def kernels() -> list:
    """The distinct kernels that the pieces have run, each as it was first met."""
    met = (kernel for piece in encoder.PIECES for found in piece.specializations for kernel in found.kernels)
    return list({kernel.key: kernel for kernel in reversed(list(met))}.values())


def quantized() -> tuple[dict[str, encoder.Encoder], dict[str, float]]:
    """The model in DTYPE and quantised to each of FORMATS, and the megabytes of the Linears' weights of each."""
    plain = checkpoint.load(DEVICE)
    models, megabytes = {"float": copy.deepcopy(plain).to(DTYPE)}, {}
    for name, (format, group_size, activation, *_) in FORMATS.items():
        model = copy.deepcopy(plain)
        report = jitgen.quantize_(model, format, group_size, activation=activation)
        models[name] = model.to(DTYPE)
        megabytes |= {"float": report.bytes_before / 1e6, name: report.bytes_after / 1e6}
    return models, megabytes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--eager", action="store_true", help="run the pieces in eager torch, without generated kernels")
    parser.add_argument("--show-source", action="store_true", help="print the source of the int4 product with its GELU")
    options = parser.parse_args()
    models, megabytes = quantized()
    with torch.inference_mode():
        return compare(models, megabytes, options)


def compare(models: dict[str, encoder.Encoder], megabytes: dict[str, float], options: argparse.Namespace) -> int:
    batch = checkpoint.tokenize([sentence for pair in PAIRS for sentence in pair], DEVICE)
    single = checkpoint.tokenize(PAIRS[0][:1], DEVICE)

    exact = in_eager(checkpoint.load(DEVICE), *batch)
    started = time.perf_counter()
    with encoder.eager() if options.eager else nullcontext():
        found = {name: models[name](*batch).float() for name in FORMATS}
        for name in FORMATS:
            models[name](*single)
    first_calls = time.perf_counter() - started

    def runs(inputs: tuple[torch.Tensor, ...], repeats: int) -> dict[str, float]:
        def call(name: str) -> Callable[[], object]:
            run = in_eager if name == "float" or options.eager else lambda model, *inputs: model(*inputs)
            return lambda: run(models[name], *inputs)

        return dict(zip(models, medians(*map(call, models), repeats=repeats), strict=True))

    one, many = runs(single, repeats=41), runs(batch, repeats=11)
    dtype = str(DTYPE).removeprefix("torch.")
    print(f"all-MiniLM-L6-v2, an encoder of sentences, on {DEVICE}: 36 Linears quantised, activations {dtype}\n")
    print(f"{'weights':22}{'1 sentence':>20}{f'{len(exact)} sentences':>20}   cosine to float32's embeddings")
    print(f"{f'{dtype}, eager':14}{megabytes['float']:5.1f} MB{one['float']:10.2f} ms{many['float']:17.1f} ms")
    good = True
    differences = []
    for name, (_, _, activation, each, mean) in FORMATS.items():
        cosines = torch.cosine_similarity(found[name], exact, dim=1)
        fine = bool((each is None or cosines.min() >= each) and (mean is None or cosines.mean() >= mean))
        same = in_eager(models[name], *batch).float()
        difference = float((found[name] - same).norm(dim=1).max())
        if activation is None:
            differences.append(difference)
        good = good and fine and difference <= (ROUNDINGS * torch.finfo(DTYPE).eps if activation is None else FLIPS)
        print(
            f"{name:14}{megabytes[name]:5.1f} MB"
            f"{one[name]:10.2f} ms{one['float'] / one[name]:5.2f} x"
            f"{many[name]:10.1f} ms{many['float'] / many[name]:5.2f} x"
            f"   mean {cosines.mean():.4f}, least {cosines.min():.4f}"
        )
    print(f"{'':22}(x: times as fast as eager torch)\n")

    similarities = {name: (e[0::2] * e[1::2]).sum(1) for name, e in {"float32": exact, **found}.items()}
    print("".join(f"{name:>13}" for name in similarities) + "   similarity of")
    for row, pair in enumerate(PAIRS[:SHOWN_PAIRS]):
        print("".join(f"{values[row]:13.3f}" for values in similarities.values()) + f"   {' | '.join(pair)}")

    worst = f"{max(differences):.0e} from eager torch's on the same weights"
    print(f"\n{'correct' if good else 'WRONG':9} embeddings lie at most {worst}")
    if options.eager:
        return 0 if good else 1
    ran = kernels()
    compiled = sum(kernel.origin == "compiled" for kernel in ran)
    print(f"kernels   {len(ran)} ran: {compiled} compiled, {len(ran) - compiled} from the store; ", end="")
    print(f"first calls took {first_calls:.1f} s" + ("; run this again: nothing is compiled" if compiled else ""))
    (product,) = (found.kernels[0] for found in encoder.linear_gelu.specializations[-1:])
    (name,) = (name for name in product.artifact.files if name in ("kernel.cpp", "kernel.cu", "kernel.py"))
    pattern = f"{os.path.relpath(product.artifact.directory.parent)}/{product.key[:12]}*/{name}"
    print(f"source    {pattern}\n          (the int4 product with bias and GELU; --show-source prints it)")
    if options.show_source:
        layer = models["int4 g32"].layers[0]
        x = torch.randn(*batch[0].shape, encoder.HIDDEN, dtype=DTYPE, device=DEVICE)
        print("\n" + encoder.linear_gelu.source(x, layer.up.weight, layer.up.bias))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
