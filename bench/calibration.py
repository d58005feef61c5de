"""Measures what quantising costs two models, with and without calibration: ``python -m bench.calibration``.

all-MiniLM-L6-v2 (the encoder of ``examples/11_minilm``), all 36 Linears quantised: the mean and the least cosine of
embeddings to those of float32, on the sixteen sentences of the example and on 64 of Python's documentation. It is
calibrated on 192 other sentences, half of them ordinary ones that this file makes, half of the documentation; with
``--narrow`` on the documentation alone. And the GPT of ``examples/15_train_char_gpt.py``, trained for 400 steps on nine
tenths of its text: the loss of 64 windows of the last tenth, relative to the float model's.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import torch

import jitgen
from bench import records

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BATCHES, SENTENCES = 4, 48
WAYS: tuple[tuple[str, str, int | None, str | None], ...] = (
    *(("", "int4", 32, None), ("awq", "int4", 32, None), ("gptq", "int4", 32, None), ("gptq", "int4", 32, "int8")),
    *(("", "int8", None, "int8"), ("smoothquant", "int8", None, "int8"), ("gptq", "int8", None, "int8")),
    *(("", "int8", None, "int8.block128"), ("smoothquant", "int4", 32, "int8")),
)
"""The method of ``calibrate``, or none, with format, group size and kind of activations."""
GPT_WAYS: tuple[tuple[str, int | None, str | None], ...] = (
    *(("int8", None, "int8"), ("fp8_e4m3", None, "fp8_e4m3")),
    *(("int4", 32, "int8"), ("int4", 128, "int8"), ("uint4", 32, "int8")),
)

WHO = """A young woman|My neighbour|The old fisherman|Two children|The prime minister|Our teacher|Several students
A team of engineers|The football coach|An artist from Spain|The nurse|A black dog|His grandmother|The waiter
A group of tourists|The police officer|The pianist|A farmer|Scientists|The company's director"""
DID = """bought fresh bread|repaired the broken engine|sang a quiet song|won the final match|signed the contract
discovered a new species|read an interesting book|cooked dinner for the family|lost the house keys|planted apple trees
opened a small restaurant|studied the history of Rome|measured the temperature of the sea|wrote a long letter
booked a cheap flight|complained about the noise|treated the patient with antibiotics|sold the shares at a loss
trained for the marathon|updated the software|watched the sunset|crossed the river by boat|painted the kitchen wall"""
WHEN = """last summer|in the morning|near the railway station|before the meeting|during the storm|at the market
because it was cheap|after the election|without any help|in the mountains|on Friday evening|despite the cold
for the third time|in the city centre|when the lights went out"""
ASK = "How do I {}?|What is the best way to {}?|Is it possible to {}?|Why should I {}?"
DEED = """install the printer driver|grow tomatoes indoors|learn a foreign language|reduce my electricity bill
get from the airport to the hotel|invest money safely|fix a flat tyre|lose weight|apply for a visa|bake a chocolate cake
return a damaged product|find a good dentist|train a neural network|clean a wool carpet"""
THING = """price of oil|Moon's gravity|new phone's battery|hotel room|French president's speech|medicine|museum|soup
final exam|weather in Norway|bridge|stock market|violin concerto|tax law|coral reef|vaccine"""
STATE = """much weaker than expected|closed on Mondays|better than the last one|expensive but worth it|falling again
a matter of debate|older than the town itself|protected by law|surprisingly easy to understand|known all over the world
too hot to touch|the subject of a documentary"""


def ordinary(count: int) -> list[str]:
    """Returns sentences about everyday things."""
    chance = random.Random(0)

    def one(words: str) -> str:
        return chance.choice(re.split(r"[|\n]", words))

    kinds = (
        *(lambda: f"{one(WHO)} {one(DID)} {one(WHEN)}.",) * 2,
        lambda: one(ASK).format(one(DEED)),
        lambda: f"The {one(THING)} is {one(STATE)}.",
    )
    return [chance.choice(kinds)() for _ in range(count)]


def documented() -> list[str]:
    """Returns sentences of Python's documentation."""
    text = " ".join("\n".join(topics.values()).split())
    pieces = [piece.strip() for piece in re.split(r"(?<=[a-z]\.) ", text)]
    sentences = [piece for piece in pieces if 30 < len(piece) < 300 and piece.count('"') < 2 and "*" not in piece]
    random.Random(0).shuffle(sentences)
    return sentences


def module(name: str, path: Path) -> ModuleType:
    """Imports a file of the examples."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def minilm(narrow: bool) -> list[Mapping[str, Any]]:
    """Measures MiniLM by every way."""
    sys.path.insert(0, str(EXAMPLES / "11_minilm"))
    demo = module("demo", EXAMPLES / "11_minilm" / "demo.py")
    checkpoint, encoder = demo.checkpoint, demo.encoder
    documentation = documented()
    tests = {"example": [sentence for pair in demo.PAIRS for sentence in pair], "documentation": documentation[-64:]}
    count = BATCHES * SENTENCES
    seen = documentation[:count] if narrow else [*ordinary(count // 2), *documentation[: count // 2]]
    random.Random(1).shuffle(seen)
    batches = [checkpoint.tokenize(seen[at : at + SENTENCES], "cpu") for at in range(0, count, SENTENCES)]
    tokens = {name: checkpoint.tokenize(sentences, "cpu") for name, sentences in tests.items()}
    plain, rows = checkpoint.load("cpu"), list[Mapping[str, Any]]()
    for method, format, group, activation in WAYS:
        model = copy.deepcopy(plain)
        row: dict[str, Any] = {"method": method, "format": format, "group": group, "activation": activation}
        with torch.no_grad(), encoder.eager():
            if method:
                jitgen.calibrate(model, batches, method, format=format, group_size=group, activation=activation)
            else:
                jitgen.quantize_(model, format, group, activation=activation)
            for name, inputs in tokens.items():
                cosines = torch.cosine_similarity(model(*inputs), plain(*inputs), dim=1)
                row[name] = {"mean": round(float(cosines.mean()), 5), "least": round(float(cosines.min()), 5)}
        print(row, flush=True)
        rows.append(row)
    return rows


def char_gpt() -> list[Mapping[str, Any]]:
    """Measures the GPT of characters by every way."""
    gpt = module("char_gpt", EXAMPLES / "15_train_char_gpt.py")
    text = gpt.corpus()
    characters = "".join(sorted(set(text)))
    data = torch.tensor([characters.index(character) for character in text])
    cut = len(data) * 9 // 10
    model = gpt.train("eager", data[:cut], len(characters), gpt.Sizes(), 400).model.eval()
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(len(data) - cut - 65, (64,), generator=generator) + cut
    windows = torch.stack([data[start : start + 65] for start in starts.tolist()])

    def loss(model: Any) -> float:
        with torch.no_grad():
            return float(model.loss_of(model(windows[:, :-1]), windows[:, 1:]))

    exact, rows = loss(model), list[Mapping[str, Any]]()
    for format, group, activation in GPT_WAYS:
        quantised = copy.deepcopy(model)
        for layer in quantised.layers:
            for name in ("qkv", "out", "up", "down"):
                weight = jitgen.quantize(getattr(layer, name).detach(), format, group, activation=activation)
                setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))
        found = loss(quantised)
        rows.append(
            {"format": format, "group": group, "activation": activation, "loss": found, "more": found / exact - 1}
        )
        print(rows[-1], flush=True)
    return [{"format": "float32", "loss": exact}, *rows]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--narrow", action="store_true", help="calibrate on Python's documentation alone")
    parser.add_argument("--only", choices=("minilm", "char_gpt"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    measured: dict[str, Any] = {}
    if options.only != "char_gpt":
        measured["minilm"] = minilm(options.narrow)
    if options.only != "minilm":
        measured["char_gpt"] = char_gpt()
    if options.output is not None:
        records.write(options.output, measured)


if __name__ == "__main__":
    main()
