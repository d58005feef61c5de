"""On a GPU: torch.compile both ways, gradients, CUDA graphs, streams, several devices, autocast, determinism, vmap."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
import jitgen.dynamo.registration

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class Block(nn.Module):
    """A block of Llama: 4 heads that share 2 heads of keys and values."""

    def __init__(self, width: int = 256, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, size = heads, shared, width // heads
        self.first, self.second = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * shared) * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        found = self.qkv(F.rms_norm(x, (width,), self.first)).view(batch, length, -1, width // self.heads)
        q, k, v = found.transpose(1, 2).split((self.heads, self.shared, self.shared), 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y = F.rms_norm(x, (width,), self.second)
        result: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


def close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """``ours`` is ``exact``, of float64, to what three roundings of ``dtype`` in a row of sums of this size leave."""
    scale = exact.abs().max()
    assert (ours.double() - exact).abs().max() <= 16 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_of_llama(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = Block().cuda().to(dtype).requires_grad_(False)
    exact = Block().cuda().double().requires_grad_(False)
    exact.load_state_dict(block.state_dict())
    compiled = torch.compile(block, backend="jitgen")
    for length in (5, 128, 131):
        x = torch.randn(2, length, 256, device="cuda", dtype=dtype)
        close(compiled(x), exact(x.double()), dtype)
    assert jitgen.report(block).share_of_flops == 1.0


@pytest.mark.parametrize("backend", ["inductor", "jitgen"])
def test_products_with_quantised_weights_and_matrices_of_them(backend: str) -> None:
    torch.manual_seed(0)
    experts = jitgen.quantize(torch.randn(8, 64, 128, device="cuda", dtype=torch.bfloat16), "int4", 32)
    matrix = jitgen.quantize(torch.randn(96, 128, device="cuda", dtype=torch.bfloat16), "int8")

    def products(x: torch.Tensor, matrix: torch.Tensor, experts: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        chosen = [x @ experts[ids].mT, x @ experts.index_select(0, ids).mT, x @ experts[[5, 0, 7]].mT]
        divided = x @ matrix.view(3, -1, 128).transpose(1, 2)
        return [F.linear(x, matrix), x @ matrix[:64].T, *chosen, x @ experts[1:4].mT, F.linear(x, experts[2]), divided]

    x = torch.randn(3, 4, 128, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([5, 0, 7], device="cuda")
    found = torch.compile(products, backend=backend)(x, matrix, experts, ids)
    dense = [weight.dequantize(torch.float64) for weight in (matrix, experts)]
    for ours, exact in zip(found, products(x.double(), *dense, ids), strict=True):
        close(ours, exact, torch.bfloat16)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "jitgen"])
def test_a_decorated_function_reads_quantised_weights(backend: str) -> None:
    """One weight is an argument and another is closed over: torch 2.11 would take neither as an operand of a region."""
    torch.manual_seed(0)
    up = jitgen.quantize(torch.randn(96, 128, device="cuda", dtype=torch.bfloat16), "int8")

    @jitgen.jit
    def swiglu(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    compiled = torch.compile(lambda x, gate: swiglu(x + 1, gate) * 2, backend=backend, fullgraph=True)
    for rows in (1, 5, 100):
        gate = jitgen.quantize(torch.randn(96, 128, device="cuda", dtype=torch.bfloat16), "int4", 32)
        x = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = (x.detach() + 1).double().requires_grad_()
        exact = F.silu(y @ gate.dequantize(torch.float64).T) * (y @ up.dequantize(torch.float64).T) * 2
        found = compiled(x, gate)
        close(found, exact, torch.bfloat16)
        close(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(exact.sum(), y)[0], torch.bfloat16)


def test_a_step_of_training_is_eager_torch_s() -> None:
    torch.manual_seed(0)
    models = [Block(64).cuda(), Block(64).cuda()]
    models[1].load_state_dict(models[0].state_dict())
    steps = [models[0], torch.compile(models[1], backend="jitgen")]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for _ in range(3):
        x = torch.randn(2, 17, 64, device="cuda")
        for step, optimizer in zip(steps, optimizers, strict=True):
            optimizer.zero_grad()
            step(x).square().mean().backward()
            optimizer.step()
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@jitgen.jit
def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ weight) + 1


def test_a_graph_is_captured_after_a_first_call() -> None:
    x, weight = torch.randn(4, 64, device="cuda"), torch.randn(64, 32, device="cuda")
    compiled = torch.compile(lambda x: gated(x, weight) * 2, fullgraph=True)
    layer = nn.Linear(64, 32, device="cuda")
    jitgen.quantize_(layer, "int4", 32)
    layer.requires_grad_(False)
    for call in (lambda x: gated(x, weight), compiled, layer):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(x)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, call(x))


def test_a_first_call_within_a_capture_is_an_error_that_names_prewarm() -> None:
    fresh = jitgen.jit(lambda x: torch.sin(x) * 3 + x.cos())
    x = torch.randn(37, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(jitgen.UnsupportedError, match="prewarm"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fresh(x)


def test_streams_and_threads_have_their_own_order() -> None:
    weight, failures = torch.randn(512, 512, device="cuda") / 23, list[float]()
    gated(weight, weight)

    def chain(seed: int) -> None:
        torch.manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(256, 512, device="cuda")
            ours, exact = x, x.double()
            for _ in range(10):
                ours, exact = gated(ours, weight) - 1, F.silu(exact @ weight.double())
            failures.append(float((ours.double() - exact).abs().max() / exact.abs().max()))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=chain, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 4
    assert max(failures) < 1e-4


def test_autocast_determinism_and_vmap() -> None:
    x, weight = torch.randn(4, 64, device="cuda"), torch.randn(64, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = gated(x, weight)
    assert found.dtype == torch.bfloat16
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(gated(x, weight), gated(x, weight))
    finally:
        torch.use_deterministic_algorithms(False)
    rows = torch.randn(3, 4, 64, device="cuda")
    expected = torch.stack([gated(row, weight) for row in rows])
    torch.testing.assert_close(torch.vmap(gated, in_dims=(0, None))(rows, weight), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_runs_its_own_calls() -> None:
    for index in (1, 0, 1):
        x, weight = torch.randn(4, 64, device=f"cuda:{index}"), torch.randn(64, 32, device=f"cuda:{index}")
        found = gated(x, weight)
        assert found.device == x.device
        torch.testing.assert_close(found, gated.reference(x, weight))
    with pytest.raises(jitgen.UnsupportedError, match="one device"):
        gated(torch.randn(4, 64, device="cuda:0"), torch.randn(64, 32, device="cuda:1"))
