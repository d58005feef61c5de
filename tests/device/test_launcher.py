"""The GPU launcher: every kind of parameter, constants beside varying values, threads, streams, graphs, refusals."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jitgen.compilers import nvrtc
from jitgen.errors import JitgenError
from jitgen.runtime import cuda
from jitgen.spec import KernelSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALL_KINDS = """
extern "C" __global__ void all_kinds(double* out, int i, long long q, float f, double d, const float* x) {
  out[0] = i; out[1] = double(q); out[2] = f; out[3] = d; out[4] = x[0];
}
"""
ADD_ONE = """
extern "C" __global__ void add_one(const float* x, float* y, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1.0f;
}
"""
SHARED = """
extern "C" __global__ void shared(int* out, int words) {
  extern __shared__ int memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) { out[0] = 0; for (int i = 0; i < words; ++i) out[0] += memory[i] == i; }
}
"""
CLUSTER = """
extern "C" __global__ void cluster(int* out) {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  out[blockIdx.x] = int(size);
}
"""
DEPENDENT = """
extern "C" __global__ void dependent(float* x) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  x[threadIdx.x] = x[threadIdx.x] * 2.0f + 1.0f;
  asm volatile("griddepcontrol.launch_dependents;");
}
"""

BLOCK = (128, 1, 1)
ONE = (1, 1, 1)


def load(name: str, text: str, device: int = 0, shared_bytes: int = 0) -> cuda.Function:
    artifact = nvrtc.compile(KernelSource(name, "cuda", "nvrtc", cuda.target_of(device), text))
    return cuda.load(artifact.files["kernel.cubin"], name, device, shared_bytes)


@pytest.fixture
def stream() -> int:
    torch.cuda.init()
    return cuda.current_stream(torch.cuda.current_device())


@pytest.fixture(scope="module")
def add_one() -> cuda.Function:
    return load("add_one", ADD_ONE)


def prepared_add_one(function: cuda.Function, elements: int) -> cuda.Launch:
    blocks = (elements + BLOCK[0] - 1) // BLOCK[0]
    return cuda.Launch(function, "PPq", (None, None, elements), (blocks, 1, 1), BLOCK)


def test_the_target_is_the_device() -> None:
    major, minor = torch.cuda.get_device_capability(0)
    assert cuda.target_of(0).arch.removesuffix("a") == f"sm_{major}{minor}"
    assert cuda.target_of(0).arch.endswith("a") == (major >= 9)
    assert cuda.multiprocessors(0) == torch.cuda.get_device_properties(0).multi_processor_count


@pytest.fixture(scope="module")
def all_kinds() -> cuda.Function:
    return load("all_kinds", ALL_KINDS)


@pytest.mark.parametrize("mask", range(64))
def test_every_mix_of_constants_and_varying_values(mask: int, all_kinds: cuda.Function, stream: int) -> None:
    out = torch.zeros(5, dtype=torch.float64, device="cuda")
    x = torch.full((1,), 0.75, device="cuda")
    values = (out.data_ptr(), -7, 2**40 + 1, 1.5, -0.1, x.data_ptr())
    constants = tuple(value if mask >> place & 1 else None for place, value in enumerate(values))
    varying = tuple(value for place, value in enumerate(values) if not mask >> place & 1)
    cuda.Launch(all_kinds, "PiqfdP", constants, ONE, ONE)(stream, *varying)
    assert out.tolist() == [-7.0, float(2**40 + 1), 1.5, -0.1, 0.75]


def test_a_launch_is_used_again_with_other_values(add_one: cuda.Function, stream: int) -> None:
    x = torch.randn(1000, device="cuda")
    launch = prepared_add_one(add_one, 1000)
    outputs = [torch.full((1000,), float("nan"), device="cuda") for _ in range(20)]
    for output in outputs:
        launch(stream, x.data_ptr(), output.data_ptr())
    for output in outputs:
        assert torch.equal(output, x + 1)


def test_many_threads_share_one_launch(add_one: cuda.Function) -> None:
    launch = prepared_add_one(add_one, 4096)

    def work(seed: int) -> bool:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.full((4096,), float(seed), device="cuda")
            y = torch.zeros_like(x)
            for _ in range(200):
                launch(cuda.current_stream(0), x.data_ptr(), y.data_ptr())
                launch(cuda.current_stream(0), y.data_ptr(), x.data_ptr())
            side.synchronize()
            return bool((x == seed + 400).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_a_thread_that_never_used_the_device(add_one: cuda.Function, stream: int) -> None:
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    launch = prepared_add_one(add_one, 8)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            launch(0, x.data_ptr(), y.data_ptr())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures
    assert y.tolist() == [2.0] * 8


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x, y = torch.ones(8, device="cuda:1"), torch.zeros(8, device="cuda:1")
    torch.cuda.synchronize(1)
    with torch.cuda.device(0):
        prepared_add_one(load("add_one", ADD_ONE, device=1), 8)(cuda.current_stream(1), x.data_ptr(), y.data_ptr())
    assert y.tolist() == [2.0] * 8


def test_a_graph_captures_and_replays(add_one: cuda.Function) -> None:
    x, y = torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda")
    launch = prepared_add_one(add_one, 256)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(cuda.current_stream(0), x.data_ptr(), y.data_ptr())
        launch(cuda.current_stream(0), y.data_ptr(), x.data_ptr())
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert x.unique().tolist() == [6.0]


def test_more_than_48_kib_of_shared_memory(stream: int) -> None:
    words = 20_000
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    function = load("shared", SHARED, shared_bytes=4 * words)
    cuda.Launch(function, "Pi", (None, words), ONE, BLOCK, shared_bytes=4 * words)(stream, out.data_ptr())
    assert out.item() == words


def test_clusters(stream: int) -> None:
    if torch.cuda.get_device_capability(0) < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    launch = cuda.Launch(load("cluster", CLUSTER), "P", (None,), (8, 1, 1), ONE, cluster=(4, 1, 1))
    launch(stream, out.data_ptr())
    assert out.tolist() == [4] * 8


def test_programmatic_dependent_launch_keeps_the_order(stream: int) -> None:
    if torch.cuda.get_device_capability(0) < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    x = torch.zeros(128, device="cuda")
    launch = cuda.Launch(load("dependent", DEPENDENT), "P", (None,), ONE, BLOCK, pdl=True)
    for _ in range(10):
        launch(stream, x.data_ptr())
    assert x.unique().tolist() == [2.0**10 - 1]


def test_refusals_say_what_was_asked(add_one: cuda.Function, stream: int) -> None:
    too_many = cuda.Launch(add_one, "PPq", (None, None, 8), ONE, (4096, 1, 1))
    with pytest.raises(JitgenError, match=r"add_one.*4096.*CUDA_ERROR_INVALID_VALUE"):
        too_many(stream, 0, 0)
    with pytest.raises(cuda.DriverError, match=r"nosuch.*CUDA_ERROR_NOT_FOUND"):
        cuda.load(_cubin("add_one", ADD_ONE), "nosuch", 0)
    with pytest.raises(cuda.DriverError, match="loading kernel add_one"):
        cuda.load(b"neither a cubin nor PTX", "add_one", 0)
    with pytest.raises(cuda.DriverError, match="1000000 bytes of shared memory"):
        load("shared", SHARED, shared_bytes=1_000_000)
    with pytest.raises(ValueError, match="2 values for 3 parameters"):
        cuda.Launch(add_one, "PPq", (None, None), ONE, ONE)


def _cubin(name: str, text: str) -> bytes:
    source = KernelSource(name, "cuda", "nvrtc", cuda.target_of(0), text)
    return nvrtc.compile(source).files["kernel.cubin"]
