"""On a GPU: what is counted is what the model says, and what is counted is left as a single run leaves it."""

from __future__ import annotations

import pytest

import nbmemprof as mp

pytestmark = pytest.mark.gpu

SOURCE = r"""
extern "C" __global__ void apart(const float* x, float* y, int stride) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[(long long)i * stride];
}
extern "C" __global__ void banks(float* y, int stride) {
    __shared__ float part[32 * 33];
    for (int k = threadIdx.x; k < 32 * 33; k += blockDim.x) part[k] = k;
    __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = part[threadIdx.x % 32 * stride];
}
extern "C" __global__ void bump(unsigned* count) { atomicAdd(count, 1u); }
"""
N = 1 << 20


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def module(cupy):
    return cupy.RawModule(code=SOURCE, options=("-lineinfo",))


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 32])
def test_sectors_are_the_models(cupy, module, stride):
    x, y = cupy.zeros(stride * N, dtype=cupy.float32), cupy.zeros(N, dtype=cupy.float32)
    counted = mp.counters(lambda: module.get_function("apart")((N // 256,), (256,), (x, y, cupy.int32(stride))))
    assert counted["name"].to_list() == ["apart"]
    assert counted["site"][0].startswith("test_counters_gpu.py:")
    assert counted["load_sectors_per_request"][0] == mp.access.global_load(lambda t: t * stride, 4).sectors
    assert counted["store_sectors_per_request"][0] == 4


@pytest.mark.parametrize("stride", [1, 2, 32, 33])
def test_bank_ways_are_the_models(cupy, module, stride):
    y = cupy.zeros(N, dtype=cupy.float32)
    counted = mp.counters(lambda: module.get_function("banks")((N // 256,), (256,), (y, cupy.int32(stride))))
    assert counted["shared_load_ways"][0] == mp.access.shared_load(lambda t: t * stride, 4).ways


def test_what_a_kernel_adds_is_added_once(cupy, module):
    count = cupy.zeros(1, dtype=cupy.uint32)
    counted = mp.counters(lambda: module.get_function("bump")((1,), (1,), (count,)))
    assert counted.passes > 1
    assert int(count[0]) == 1


def test_room_for_few_ends_the_counting_and_not_the_work(cupy, module):
    count = cupy.zeros(1, dtype=cupy.uint32)
    counted = mp.counters(lambda: [module.get_function("bump")((1,), (1,), (count,)) for _ in range(20)], max_kernels=3, metrics="dram")
    assert counted.height == 3
    assert int(count[0]) == 20
    assert counted.capture.meta["counters"]["not_counted"] == 17


def test_kernels_of_torch_have_their_names():
    torch = pytest.importorskip("torch")
    x = torch.rand(1 << 20, device="cuda")
    counted = mp.counters(torch.softmax, x, 0, metrics="dram")
    assert counted.value.shape == x.shape
    assert any("softmax" in name.lower() for name in counted["name"].drop_nulls())
