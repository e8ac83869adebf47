"""Twenty kernels of CuPy, torch and Triton that are counted in two ways; imported, it makes their arrays, and ``run`` launches each once.

Arrays are 1 GiB, sixteen times an H200's L2: what lies in the caches before a kernel is small beside what it moves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import cupy
import torch
import triton
import triton.language as tl

from nbmemprof.gpu import _loader

SIDE = int(os.environ.get("COUNTED_KERNELS_SIDE", 1 << 14))  # of a square matrix; smaller where the kernels are only checked
N = SIDE * SIDE  # words of an array
SOURCE = r"""
typedef long long Index;
#define I ((Index)blockIdx.x * blockDim.x + threadIdx.x)
extern "C" __global__ void copy4(const float* x, float* y) { y[I] = x[I]; }
extern "C" __global__ void copy16(const float4* x, float4* y) { y[I] = x[I]; }
extern "C" __global__ void stride2(const float* x, float* y) { y[I] = x[2 * I]; }
extern "C" __global__ void stride8(const float* x, float* y) { y[I] = x[8 * I]; }
extern "C" __global__ void shifted(const float* x, float* y, Index n) { Index i = I; if (i + 1 < n) y[i] = x[i + 1]; }
extern "C" __global__ void scattered_store(const float* x, float* y) { Index i = I; y[(i & ~1023) | ((i & 31) << 5) | ((i >> 5) & 31)] = x[i]; }
extern "C" __global__ void structures(const float* x, float* y) { y[I] = x[4 * I] + x[4 * I + 1]; }
extern "C" __global__ void conflicts(const float* x, float* y) {
    __shared__ float part[1024];
    int t = threadIdx.x;
    part[t] = x[I];
    __syncthreads();
    float sum = 0;
    for (int k = 0; k < 8; ++k) sum += part[(t % 32 * 32 + t / 32 + k) % 1024];
    y[I] = sum;
}
extern "C" __global__ void spills(const float* x, float* y, int m) {
    float kept[16];
    for (int k = 0; k < 16; ++k) kept[k] = x[I + k * (Index)gridDim.x * blockDim.x];
    float sum = 0;
    for (int k = 0; k < m; ++k) sum += kept[(threadIdx.x + 5 * k) % 16];
    y[I] = sum;
}
"""


@triton.jit
def triton_add(x, y, out, n, BLOCK: tl.constexpr):
    """Sum of two arrays."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def triton_softmax(x, out, columns, BLOCK: tl.constexpr):
    """Softmax of a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * columns + i, e / tl.sum(e, axis=0), mask=i < columns)


@triton.jit
def triton_columns(x, out, rows, columns, ROWS: tl.constexpr):
    """Sum of each column, a program for 32 columns."""
    j = tl.program_id(0) * 32 + tl.arange(0, 32)
    total = tl.zeros((32,), dtype=tl.float32)
    for first in range(0, rows, ROWS):
        i = (first + tl.arange(0, ROWS)).to(tl.int64)
        total += tl.sum(tl.load(x + i[:, None] * columns + j[None, :]), axis=0)
    tl.store(out + j, total)


def _cupy_calls() -> list[tuple[str, Callable[[], Any]]]:
    module = cupy.RawModule(code=SOURCE, options=("-std=c++17", "-lineinfo"))
    x, y = cupy.random.default_rng(1).random(N, dtype=cupy.float32), cupy.zeros(N, dtype=cupy.float32)
    cupy.random.seed(2)
    places = cupy.random.permutation(N // 8).astype(cupy.uint32)
    sums = cupy.zeros(N // 8, dtype=cupy.uint32)

    def raw(name: str, threads: int, *more: Any, block: int = 256) -> tuple[str, Callable[[], Any]]:
        function = module.get_function(name)
        return name, lambda: function((threads // block,), (block,), (x, y, *more))

    def shipped(file: str, name: str, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any, shared: int = 0) -> tuple[str, Callable[[], Any]]:
        function = _loader.kernel(file, name)
        return name, lambda: function(grid, block, arguments, shared_mem=shared)

    tiles = (SIDE // 32, SIDE // 32)
    return [
        raw("copy4", N), raw("copy16", N // 4), raw("stride2", N // 2), raw("stride8", N // 8), raw("shifted", N, cupy.int64(N)), raw("scattered_store", N),
        raw("structures", N // 4), raw("conflicts", N, block=1024), raw("spills", N // 16, cupy.int32(16)),
        shipped("transpose", "transpose_naive", tiles, (32, 8), x, y, cupy.int32(SIDE)),
        shipped("transpose", "transpose_tiled", tiles, (32, 8), x, y, cupy.int32(SIDE)),
        shipped("reduction", "reduce_strided", (132 * 8,), (256,), x.view(cupy.uint32), sums, cupy.int32(N // (132 * 8 * 256)), shared=1024),
        shipped("coalescing", "gather", (132 * 16,), (256,), x.view(cupy.uint32), places, sums, cupy.uint64(N // 8), cupy.uint32(1), cupy.int32(0)),
        ("cupy add", lambda: cupy.add(x, y, out=y)),
    ]  # fmt: skip


def _torch_calls() -> list[tuple[str, Callable[[], Any]]]:
    torch.manual_seed(3)
    x, y = torch.rand(SIDE, SIDE, device="cuda"), torch.rand(SIDE, SIDE, device="cuda")
    rows = torch.randint(0, SIDE, (SIDE,), device="cuda")
    out = torch.empty_like(x)
    return [
        ("torch add", lambda: torch.add(x, y, out=out)),
        ("torch transpose", lambda: out.copy_(x.t())),
        ("torch rows", lambda: torch.index_select(x, 0, rows, out=out)),
        ("triton add", lambda: triton_add[(x.numel() // 1024,)](x, y, out, x.numel(), BLOCK=1024)),
        ("triton softmax", lambda: triton_softmax[(SIDE,)](x, out, SIDE, BLOCK=SIDE)),
        ("triton columns", lambda: triton_columns[(SIDE // 32,)](x, out, SIDE, SIDE, ROWS=64)),
    ]


CALLS = [*_cupy_calls(), *_torch_calls()]


def run() -> None:
    """Launch each kernel once."""
    for _, call in CALLS:
        call()


run()  # compiled and loaded: what is counted later are the kernels alone
torch.cuda.synchronize()
