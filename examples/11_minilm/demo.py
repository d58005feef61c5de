"""A real model: all-MiniLM-L6-v2's sentence encoder, quantised to int8 and to int4, through generated fused kernels.

Run:   make demo            (python examples/11_minilm/demo.py, --show-source prints the kernels; --eager for torch alone)
Shows: similarities of sentence pairs by the float32 model and by the quantised ones; how close each sentence's
       embedding stays; the source of one kernel; how many kernels were compiled and how many came from the store;
       times against the same code in eager torch. Run it again: nothing is compiled.
"""

from __future__ import annotations

import argparse
import copy
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
    ("A man is playing a guitar on stage.", "Someone performs music with a guitar in front of an audience."),
    ("The new law was passed by parliament on Friday.", "Lawmakers approved the legislation at the end of the week."),
    ("How do I reset my password?", "I forgot my login details and cannot get into my account."),
    ("The cat sleeps on the warm windowsill.", "Interest rates were raised by a quarter of a percent."),
    ("He deposited the cheque at the bank.", "They had a picnic on the bank of the river."),
    ("GPUs multiply matrices quickly.", "Graphics processors are fast at linear algebra."),
    ("The soup needs more salt.", "The telescope observed a distant galaxy."),
    ("Where is the nearest train station?", "Can you tell me how to get to the railway station?"),
)
FORMATS = (("int8", None, 0.999, None), ("int4", 32, None, 0.96))
"""Format, group size, and what the cosine to float32 is at least: of every sentence, and of their mean."""


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def medians(*calls: Callable[[], object], repeats: int = 15) -> list[float]:
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


def quantized(model: encoder.Encoder, format: str, group_size: int | None) -> encoder.Encoder:
    twin = copy.deepcopy(model)
    report = jitgen.quantize_(twin, format, group_size)
    worst = min(report.layers, key=lambda layer: layer.sqnr)
    before, after = report.bytes_before / 1e6, report.bytes_after / 1e6
    print(
        f"{format}: {len(report.layers)} Linears of {before:.1f} MB in {after:.1f} MB; "
        f"SQNR at least {worst.sqnr:.1f} dB ({worst.name})"
    )
    return twin.to(DTYPE)


def compiled_and_stored() -> tuple[int, int]:
    """Distinct kernels that this process compiled, and that it took from the store."""
    origins: dict[str, set[str]] = {}
    for piece in encoder.PIECES:
        for specialization in piece.specializations:
            for kernel in specialization.kernels:
                origins.setdefault(kernel.key, set()).add(kernel.origin)
    compiled = sum("compiled" in found for found in origins.values())
    return compiled, len(origins) - compiled


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--eager", action="store_true", help="run the pieces in eager torch, without generated kernels")
    parser.add_argument("--source", action="store_true", help="print all of the kernel's source")
    options = parser.parse_args()
    mode = encoder.eager if options.eager else nullcontext

    print(f"==== all-MiniLM-L6-v2 on {DEVICE}, activations {DTYPE}\n")
    plain = checkpoint.load(DEVICE)
    models = {format: quantized(plain, format, group_size) for format, group_size, *_ in FORMATS}
    tokens, present = checkpoint.tokenize([sentence for pair in PAIRS for sentence in pair], DEVICE)
    with torch.inference_mode():
        with encoder.eager():
            exact = plain(tokens, present)
        with mode():
            started = time.perf_counter()
            found = {name: model(tokens, present).float() for name, model in models.items()}
            wait()
            first = time.perf_counter() - started
        similarities = {name: (e[0::2] * e[1::2]).sum(1) for name, e in {"float32": exact, **found}.items()}
        print("\n" + "  ".join(f"{name:>7}" for name in similarities) + "   cosine similarity of")
        for row, pair in enumerate(PAIRS):
            numbers = "  ".join(f"{values[row]:7.3f}" for values in similarities.values())
            print(f"{numbers}   {pair[0]} | {pair[1]}")

        good = True
        print()
        for format, group_size, each, mean in FORMATS:
            cosines = torch.cosine_similarity(found[format], exact, dim=1)
            fine = (each is None or cosines.min() >= each) and (mean is None or cosines.mean() >= mean)
            good = good and fine
            wanted = f"every one at least {each}" if each else f"mean at least {mean}"
            print(
                f"{format} {f'g{group_size}' if group_size else 'per row'}: an embedding's cosine to float32's: "
                f"mean {cosines.mean():.4f}, least {cosines.min():.4f} ({wanted}: {'yes' if fine else 'NO'})"
            )
        if options.eager:
            return 0 if good else 1

        compiled, stored = compiled_and_stored()
        layer = models["int4"].layers[0]
        x = torch.randn(*tokens.shape, encoder.HIDDEN, dtype=DTYPE, device=DEVICE)
        source = encoder.linear_gelu.source(x, layer.up.weight, layer.up.bias).splitlines()
        shown = source if options.source else source[:100]
        print("\n==== int4 projection, bias and GELU: one kernel\n\n" + "\n".join(shown))
        if len(shown) < len(source):
            print(f"... {len(source) - len(shown)} more lines (--source prints them)")

        print(f"\n==== {tokens.shape[0]} sentences of up to {tokens.shape[1]} tokens\n")

        def in_eager(model: encoder.Encoder) -> torch.Tensor:
            with encoder.eager():
                return model(tokens, present)

        dense = copy.deepcopy(plain).to(DTYPE)
        names = ["eager torch, float weights", *(f"generated, {name}" for name in models)]
        calls = [lambda: in_eager(dense), *(lambda m=model: m(tokens, present) for model in models.values())]
        times = medians(*calls)
        for name, milliseconds in zip(names, times, strict=True):
            print(f"{name:28}  {milliseconds:8.2f} ms   {times[0] / milliseconds:.2f} times as fast as eager")
        print(f"{'first calls, both models':28}  {first * 1e3:8.0f} ms")
        if compiled:
            print(f"\n{compiled} kernels compiled, {stored} came from the store. Run this again: all will.")
        else:
            print(f"\nNothing was compiled: {stored} kernels came from the store.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
