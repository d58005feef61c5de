"""Random numbers on a GPU: the same in both dialects, of torch's CUDA generator, and refused under capture."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests import philox
from tests.distributions import chi_square, kolmogorov_smirnov, normal_cdf, uncorrelated, uniform_cdf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BACKENDS = ("cuda", "triton")


def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.rand_like(x), torch.randn_like(x), F.dropout(torch.ones_like(x), 0.2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_distributions(backend: str) -> None:
    x = torch.zeros(300, 400, device="cuda")
    function = jitgen.jit(several, backend=backend)
    torch.cuda.manual_seed(20)
    first, second = (tuple(t.cpu() for t in function(x)) for _ in range(2))
    for uniform, normal, dropped in (first, second):
        assert kolmogorov_smirnov(uniform, uniform_cdf)
        assert kolmogorov_smirnov(normal, normal_cdf)
        assert chi_square(torch.bincount((dropped > 0).flatten().long()), torch.tensor([0.2, 0.8]))
        assert uncorrelated(uniform, normal)
    assert all(uncorrelated(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_and_the_generator(backend: str) -> None:
    """Numbers of the generator's seed and offset, which moves on by four for each tensor, as torch's own functions
    move it."""
    x = torch.zeros(4, 9, device="cuda")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    function = jitgen.jit(lambda x: (torch.rand_like(x), torch.rand_like(x)), backend=backend)
    torch.cuda.manual_seed(2**63 + 12345)
    torch.rand(10, device="cuda")
    before = generator.get_offset()
    found = function(x)
    assert generator.get_offset() == before + 8
    for number, tensor in enumerate(found):
        bits = [philox.bits(index, 2**63 + 12345, before + 4 * number) % 2**24 for index in range(36)]
        assert torch.equal(tensor.cpu().flatten(), torch.tensor([value / 2**24 for value in bits]))
    torch.cuda.manual_seed(2**63 + 12345)
    torch.rand(10, device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(found, function(x), strict=True))
    assert not torch.equal(found[0], function(x)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capture_is_refused(backend: str) -> None:
    x = torch.zeros(4, 9, device="cuda")
    function = jitgen.jit(lambda x: torch.rand_like(x), backend=backend)
    function(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(jitgen.UnsupportedError, match="outside of the capture"), torch.cuda.graph(graph):
        function(x)
