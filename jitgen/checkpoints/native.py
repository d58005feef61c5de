"""Reads files that jitgen wrote (``jitgen.save_quantized``), one weight at a time; ``quant/io.py`` defines them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from jitgen.checkpoints.source import Claim, Reader, Source
from jitgen.quant import io
from jitgen.quant.formats import find as format_of
from jitgen.quant.qtensor import QTensor


def find(source: Source) -> Iterator[Claim]:
    for name, text in io.content(source.origin, source.metadata)[0].items():
        uses = tuple(f"{name}.{tensor}" for tensor in format_of(io.facts(name, text)["format"]).tensor_names)
        yield Claim(name, uses, partial(_read, source, name, text, uses))


def aliases(source: Source) -> Mapping[str, str]:
    """Maps names of tied tensors to the names under which these are stored."""
    return io.content(source.origin, source.metadata)[1]


def _read(source: Source, name: str, text: str, uses: tuple[str, ...]) -> QTensor:
    return io.from_tensors({stored: source.read(stored) for stored in uses if stored in source}, name, text)


READER = Reader("jitgen", frozenset({"jitgen"}), find, ())
