"""A whole decoder with random weights generates tokens: a model of transformers, and the one of ``model.py``.

Run:   python examples/17_llama/generate.py MODEL [--weights int4] [--batch 2] [--prompt 512] [--tokens 64]
       MODEL is llama-3-8b, granite-8b, qwen2.5-7b or tiny, or a directory with a model of transformers
Shows: jitgen.compile of the model, with generate() and a StaticCache; the share of generated kernels; tokens a second,
       the bytes that a token reads, and that as a fraction of the device's read bandwidth. --plain runs model.py
       instead, with top-k and top-p sampling as kernels.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from model import Decoder, sampler

import jitgen

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": (
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0},
    ),
    "granite-8b": (
        "Granite",
        {"hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 49155, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0},
    ),
    "qwen2.5-7b": (
        "Qwen2",
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "vocab_size": 152064, "rope_theta": 1000000.0},
    ),
    "tiny": (
        "Llama",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "vocab_size": 128},
    ),
}
"""The architecture and configuration of each; the vocabularies and angles are those of the published models."""


def model_of(name: str, device: str, dtype: torch.dtype) -> Any:
    """Makes a model with random weights, or loads one from a directory."""
    import transformers

    if name not in SIZES:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    kind, sizes = SIZES[name]
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**sizes, **tokens, max_position_embeddings=8192)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


class Clock:
    """Notes when each token is there; ``generate`` of transformers calls it a streamer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens.sum().item()  # waits for them
        self.times.append(time.perf_counter())
        return tokens

    def end(self) -> None:
        pass

    def step(self, tokens: int) -> float:
        """Returns the median seconds between the last ``tokens``."""
        times = self.times[-tokens:]
        return statistics.median(after - before for before, after in itertools.pairwise(times))


def read_bandwidth(device: str) -> float:
    """Measures the bytes a second at which a sum reads memory."""
    size = 2**28 if device == "cuda" else 2**25
    x = torch.ones(size, device=device)
    x.sum().item()
    start = time.perf_counter()
    for _ in range(10):
        total = x.sum()
    total.item()
    return 10 * x.nbytes / (time.perf_counter() - start)


def bytes_of(model: Any, decoder: Decoder | None) -> int:
    """Returns what each token reads: the weights, of the embedding one row."""
    if decoder is None:
        return sum(weight.nbytes for name, weight in model.named_parameters() if "embed_tokens" not in name)
    return decoder.head.nbytes + sum(w.nbytes for layer in decoder.layers for w in layer if w is not None)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(SIZES)}, or a directory")
    parser.add_argument("--weights", help="a format of quantised weights, such as int4")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--plain", action="store_true", help="the decoder of model.py")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    options = parser.parse_args(arguments)
    if options.model not in SIZES and not Path(options.model).is_dir():
        parser.error(f"MODEL is a directory or one of {', '.join(SIZES)}, not {options.model}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(options.model, device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokens = torch.randint(1, model.config.vocab_size, (options.batch, options.prompt), device=device)
    clock, decoder, group = Clock(), None, 32 if options.model == "tiny" else 128
    if options.plain:
        decoder = Decoder.of(model)
        if options.weights:
            decoder.quantize(options.weights, group)
        choose = sampler(options.temperature, options.top_k, options.top_p)

        def generate() -> torch.Tensor:
            return decoder.generate(tokens, options.tokens, choose, clock.put)
    else:
        if options.weights:
            jitgen.quantize_(model.model, options.weights, group_size=group)
        jitgen.compile(model, cuda_graph=device == "cuda")
        choice = {"do_sample": options.temperature > 0}
        if options.temperature:
            choice |= {"temperature": options.temperature, "top_k": options.top_k or 0, "top_p": options.top_p or 1.0}
        choice |= {"max_new_tokens": options.tokens, "cache_implementation": "static", "streamer": clock}
        mask = torch.ones_like(tokens)

        def generate() -> torch.Tensor:
            return model.generate(tokens, attention_mask=mask, **choice)

    start = time.perf_counter()
    generate()
    first = clock.times[-options.tokens] - start
    result, seconds = generate(), clock.step(options.tokens)
    moved, bandwidth = bytes_of(model, decoder), read_bandwidth(device)
    print(f"first token after {first:.2f} s, once the weights are there; the last ones: {result[0, -8:].tolist()}")
    print(f"{options.batch / seconds:.1f} tokens a second, {seconds * 1e3:.2f} ms a step of {options.batch}")
    rate = moved / seconds
    print(f"{moved / 1e9:.4f} GB of weights a step: {rate / 1e9:.1f} GB/s, {rate / bandwidth:.0%} of what a sum reads")
    if decoder is None:
        report = jitgen.report(model)
        inside = sum(unit.reason is None for unit in report.units)
        print(f"{inside} of {len(report.units)} modules run generated kernels")
        print("\n".join(line for line in str(report).splitlines() if not line.startswith("balance of")))
    return {"result": result, "ms": seconds * 1e3}


if __name__ == "__main__":
    main()
