"""Records of chips: every number has a source, targets have defaults, and request keys depend on numbers alone."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.device import Device
from jitgen.families import registry
from jitgen.families.gemm.stream_tiles import RESERVED_BYTES
from jitgen.families.rows.reduction.schedule import Occupancy, occupancy
from jitgen.lowering import Route
from jitgen.schedule import chips
from jitgen.schedule.chips import CHIPS, H100, H200, L4, Chip
from jitgen.spec import CPU_LEVELS, Target


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_number_names_its_source(chip: Chip) -> None:
    numbers = {field.name for field in fields(chip) if field.name not in ("name", "targets", "modelled_as", "sources")}
    known = {name for name in numbers if getattr(chip, name)}
    assert {name for name, _ in chip.sources} == known
    assert all(source for _, source in chip.sources)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_records_agree_with_their_targets(chip: Chip) -> None:
    for arch in chip.targets:
        assert Target.parse(arch).shared_bytes == chip.shared_bytes <= chip.multiprocessor_shared_bytes
    assert all(size * count <= chip.multiprocessors for size, count in chip.clusters)
    assert Device(Target.parse(chip.targets[0]), "triton", chip).model.clusters, "its schedules need resident clusters"


def test_a_target_has_a_default_and_a_device_the_exact_chip() -> None:
    hopper, ada = Target.parse("sm_90a"), Target.parse("sm_89")
    assert Device(hopper, "cuda").chip is H200
    assert chips.of_device(hopper, "NVIDIA H100 80GB HBM3", 132) is H100
    assert chips.of_device(hopper, "NVIDIA H100 PCIe", 114) is H200, "a chip without a record is the target's default"
    assert chips.of_device(ada, "NVIDIA GeForce RTX 4090", 128) is chips.RTX_4090
    assert Device(ada, "cuda").chip is L4
    for arch in ("sm_86", "sm_103a", "sm_120", "gfx90a", "interpreter"):
        assert Device(Target.parse(arch), "triton").chip is None
        assert Device(Target.parse(arch), "triton").model is H200
    with pytest.raises(KeyError):
        chips.named("NVIDIA H1")


@pytest.mark.parametrize("name", CPU_LEVELS)
def test_every_cpu_level_has_a_record(name: str) -> None:
    level = Device(Target("cpu", name), "cpp").level
    assert level.name == name
    assert level.floats in (4, 8, 16)


def test_occupancy_of_a_chip() -> None:
    assert occupancy(H200) == Occupancy(32, 64, 128, 1024, 15)
    assert occupancy(L4) == Occupancy(8, 16, 32, 256, 0)


def test_a_request_key_depends_on_the_numbers_of_the_model_s_chip() -> None:
    spec = jitgen.TensorSpec((64, 4096), torch.bfloat16)
    low = jitgen.jit(lambda x: torch.softmax(x, -1)).lower(spec, target="sm_90a", backend="cuda").lowered

    def key(chip: Chip | None) -> str:
        return replace(low, route=Route("cuda", "nvrtc", low.route.target, chip)).key

    assert key(None) == key(H200) == key(replace(H200, name="another name", sources=()))
    assert key(H100) == key(H200), "an H100 has the choices of an H200"
    assert key(replace(H200, multiprocessors=114)) != key(H200)
    assert H100.digest != H200.digest


def test_the_clock_of_a_chip_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="NVIDIA L4"):
        assert L4.microsecond_cycles


@pytest.mark.parametrize("format", [None, "int4"])
@pytest.mark.parametrize(
    "chip", [chip for chip in CHIPS if chip.targets[0].startswith("sm_")], ids=lambda chip: chip.name
)
def test_no_candidate_needs_more_shared_memory_than_a_chip_has(chip: Chip, format: str | None) -> None:
    """Of a product of any number of rows, one and two weights, long and short K."""
    target = Target("cuda", chip.targets[0])
    device = Device(target, "cuda", chip)
    for rows, columns, length in ((1, 4096, 4096), (8, 256, 8192), (16, 28672, 4096), (64, 256, 8192), (777, 72, 384)):
        weight = jitgen.TensorSpec((columns, length), torch.bfloat16, format=format, group_size=128 if format else None)
        for function, count in ((F.linear, 1), (_swiglu, 2)):
            x = jitgen.TensorSpec((rows, length), torch.bfloat16)
            low = jitgen.jit(function, backend="cuda").lower(x, *[weight] * count, target=target.arch).lowered
            kernel, layouts, geometries = low.program.kernels[0], low.layouts[0], low.laid_out.geometries[0]
            family = registry.family_of(kernel)
            for candidate in family.candidates(family.problem(kernel, layouts, geometries, device), device):
                for tiling in getattr(candidate, "tilings", (candidate,)):
                    shared_bytes, resident = tiling.shared_bytes, getattr(tiling, "resident", 1)
                    assert shared_bytes <= chip.shared_bytes, str(tiling)
                    assert resident * (shared_bytes + RESERVED_BYTES) <= chip.multiprocessor_shared_bytes, str(tiling)


def _swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)
