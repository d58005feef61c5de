"""Quantised models in several processes: handed to spawned ones after they have run, and in DistributedDataParallel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from jitgen import _data
from jitgen.compilers import host
from tests import fresh

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")

SPAWN = """
import sys
import torch
import torch.multiprocessing as mp

def work(rank, model, x, expected):
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)

def take(queue, x, expected):
    work(0, queue.get(), x, expected)

if __name__ == "__main__":
    import jitgen
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32)).requires_grad_(False)
    jitgen.quantize_(model, "int4", 32)
    x = torch.randn(5, 64)
    expected = model(x)
    assert model[0].weight.layout == "cpu"
    mp.spawn(work, args=(model, x, expected), nprocs=1)
    context = mp.get_context("forkserver")
    queue = context.Queue()
    process = context.Process(target=take, args=(queue, x, expected))
    process.start()
    queue.put(model)
    process.join(120)
    assert process.exitcode == 0, process.exitcode
"""

DATA_PARALLEL = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

class Adapted(nn.Module):
    '''A frozen layer, and a trainable product of low rank beside it.'''

    def __init__(self, base):
        super().__init__()
        rows, columns = base.weight.shape
        self.base = base
        self.a, self.b = nn.Parameter(torch.randn(4, columns) * 0.1), nn.Parameter(torch.randn(rows, 4) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T

def made(seed):
    import jitgen
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).requires_grad_(False)
    jitgen.quantize_(model, "int4", 32)
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    return model

def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]

def work(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = made(rank)
    if rank:  # this one has other weights, in another layout
        model(torch.randn(4, 64))
    parallel = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(7)
    x, single = torch.randn(8, 64), made(0)
    parallel(x[4 * rank : 4 * rank + 4]).square().mean().backward()
    single(x).square().mean().backward()
    assert torch.equal(model[0].base.weight, single[0].base.weight)
    for ours, theirs in zip(gradients(model), gradients(single), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1],), nprocs=2)
"""


def run(script: str, directory: Path) -> None:
    path = directory / "script.py"  # spawned processes import the script by its path
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(_data.checkout_directory()), "GLOO_SOCKET_IFNAME": "lo"}
    program = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    done = fresh.run(program, str(directory / "rendezvous"), env=environment)
    assert done.returncode == 0, done.stderr


def test_a_model_that_has_run_is_handed_to_spawned_processes(tmp_path: Path) -> None:
    run(SPAWN, tmp_path)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    run(DATA_PARALLEL, tmp_path)
