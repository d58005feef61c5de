"""torch's own operator samples and random programs on a GPU, in both dialects."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import jitgen
from tests.conformance import refusals, report
from tests.conformance.judgement import judge
from tests.conformance.samples import operators, samples
from tests.programs import draw, verdict

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BACKENDS = ["cuda", "triton"]
PARTITIONS = 24
SAMPLED = 20
CHUNK, CHUNKS = 50, 20


def faults(names: list[str], backend: str, count: int) -> str:
    found = [sample.on("cuda") for name in names for sample in samples(name, count=count)]
    return report.faults(judge(sample, backend) for sample in found)


def supported() -> list[str]:
    return sorted(set(operators()) - set(refusals.expected()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_of_operators(backend: str) -> None:
    assert not faults(random.Random(20).sample(supported(), SAMPLED), backend, count=1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_every_operator(partition: int, backend: str) -> None:
    assert not faults(supported()[partition::PARTITIONS], backend, count=4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs(chunk: int, backend: str) -> None:
    for number in range(CHUNK):
        generator = random.Random(f"{chunk} {number}")
        program = draw(generator.choice)
        program = replace(program, arguments=[argument.cuda() for argument in program.arguments])
        kind, found = verdict(program, jitgen.jit(program.function(), backend=backend))
        assert kind in ("right", "refused"), f"{kind}: {found}"
