"""Six kernels that use memory badly, and the same work done well: what the findings predict for the first is held against the second.

``launches`` gives both, by name; they work on the arrays of ``Arrays``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

N = int(os.environ.get("SLOW_KERNELS_N", 1 << 27))  # elements; smaller where the kernels are only checked
ROWS, COLUMNS = N >> 11, 1 << 12
SOURCE = r"""
typedef long long Index;
#define I ((Index)blockIdx.x * blockDim.x + threadIdx.x)

// the sum of each row, a thread a row: the lanes of a warp read a whole row apart
extern "C" __global__ void rows_thread(const float* x, float* y, int rows, int columns) {
    Index row = I;
    if (row >= rows) return;
    float sum = 0;
    for (int c = 0; c < columns; ++c) sum += x[row * columns + c];
    y[row] = sum;
}
// a warp a row: the lanes read side by side, 16 bytes each
extern "C" __global__ void rows_warp(const float4* x, float* y, int rows, int columns) {
    Index row = I / 32;
    if (row >= rows) return;
    float sum = 0;
#pragma unroll 4
    for (int c = threadIdx.x % 32; c < columns / 4; c += 32) {
        float4 v = x[row * (columns / 4) + c];
        sum += v.x + v.y + v.z + v.w;
    }
    for (int away = 16; away; away /= 2) sum += __shfl_down_sync(~0u, sum, away);
    if (threadIdx.x % 32 == 0) y[row] = sum;
}

// one of the eight fields of a particle moves on
struct Particle { float x, y, z, vx, vy, vz, mass, charge; };
extern "C" __global__ void move_structures(Particle* p, Index n) { Index i = I; if (i < n) p[i].x = 0.5f * p[i].x + 1.0f; }
// the fields in arrays of their own, 16 bytes a thread
extern "C" __global__ void move_arrays(float4* x, Index n) {
    Index i = I;
    if (i >= n) return;
    float4 v = x[i];
    x[i] = make_float4(0.5f * v.x + 1.0f, 0.5f * v.y + 1.0f, 0.5f * v.z + 1.0f, 0.5f * v.w + 1.0f);
}

// each thread sums the column of a tile: 32 lanes in one bank
template <int PITCH> __device__ __forceinline__ void columns(const float* x, float* y, int rounds) {
    __shared__ float tile[8][32 * PITCH];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* mine = tile[warp];
    for (int r = 0; r < 32; ++r) mine[r * PITCH + lane] = x[(I - lane) * 32 + r * 32 + lane];
    __syncwarp();
    float sum = 0;
    for (int k = 0; k < rounds; ++k) {
#pragma unroll
        for (int c = 0; c < 32; ++c) sum += ((volatile float*)mine)[lane * PITCH + c];
    }
    y[I] = sum;
}
extern "C" __global__ void __launch_bounds__(256) tile_square(const float* x, float* y, int rounds) { columns<32>(x, y, rounds); }
extern "C" __global__ void __launch_bounds__(256) tile_padded(const float* x, float* y, int rounds) { columns<33>(x, y, rounds); }

// the sum of 32 values in an order that the compiler can't know: the array has addresses, and lies in local memory
extern "C" __global__ void pick_local(const float* x, float* y, Index n, int m) {
    float kept[32];
    Index i = I;
    if (i >= n) return;
    for (int k = 0; k < 32; ++k) kept[k] = x[i + (Index)k * n];
    float sum = 0;
    for (int k = 0; k < m; ++k) sum += kept[(k * 7 + (int)(i & 31)) & 31];
    y[i] = sum;
}
// every element is taken once: the order is free, and the array stays in registers
extern "C" __global__ void pick_registers(const float* x, float* y, Index n, int m) {
    Index i = I;
    if (i >= n) return;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 32; ++k) sum += x[i + (Index)k * n];
    y[i] = sum;
}

// looked up in random order
extern "C" __global__ void look_up(const float* x, const unsigned* at, float* y, Index n) { Index i = I; if (i < n) y[i] = x[at[i]]; }
// the places sorted beforehand, four a thread
extern "C" __global__ void look_up_sorted(const float* x, const uint4* at, float4* y, Index n) {
    Index i = I;
    if (i >= n) return;
    uint4 p = at[i];
    y[i] = make_float4(x[p.x], x[p.y], x[p.z], x[p.w]);
}

// a byte a thread
extern "C" __global__ void bytes_one(const unsigned char* x, unsigned char* y, Index n) { Index i = I; if (i < n) y[i] = x[i] ^ 0x55; }
// sixteen bytes a thread
extern "C" __global__ void bytes_sixteen(const uint4* x, uint4* y, Index n) {
    Index i = I;
    if (i >= n) return;
    uint4 v = x[i];
    y[i] = make_uint4(v.x ^ 0x55555555u, v.y ^ 0x55555555u, v.z ^ 0x55555555u, v.w ^ 0x55555555u);
}
"""
ROUNDS = 96


@dataclass
class Arrays:
    """The arrays that both versions work on, made anew from seeds."""

    module: Any
    big: Any
    out: Any
    shuffled: Any
    sorted: Any


def arrays() -> Arrays:
    """Compile, and fill the arrays with random words."""
    import cupy

    module = cupy.RawModule(code=SOURCE, options=("-std=c++17", "-lineinfo"))
    big = cupy.random.default_rng(5).random(8 * N, dtype=cupy.float32)
    cupy.random.seed(6)
    shuffled = cupy.random.permutation(N).astype(cupy.uint32)
    return Arrays(module, big, cupy.zeros(8 * N, dtype=cupy.float32), shuffled, cupy.arange(N, dtype=cupy.uint32))


def launches(a: Arrays) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """Name to launch, before and after."""
    import cupy

    n, f = cupy.int64(N), a.module.get_function

    def go(name: str, threads: int, *arguments: Any, block: int = 256) -> Callable[[], Any]:
        function = f(name)
        return lambda: function(((threads + block - 1) // block,), (block,), arguments)

    rows = (a.big, a.out, cupy.int32(ROWS), cupy.int32(COLUMNS))
    picks = (a.big, a.out, cupy.int64(N // 8), cupy.int32(32))
    raw, out = a.big.view(cupy.uint8), a.out.view(cupy.uint8)
    before = {
        "rows": go("rows_thread", ROWS, *rows, block=64),
        "structures": go("move_structures", N, a.out, n),
        "tile": go("tile_square", N // 64, a.big, a.out, cupy.int32(ROUNDS)),
        "local": go("pick_local", N // 8, *picks),
        "look_up": go("look_up", N, a.big, a.shuffled, a.out, n),
        "bytes": go("bytes_one", 4 * N, raw, out, cupy.int64(4 * N)),
    }
    after = {
        "rows": go("rows_warp", ROWS * 32, *rows),
        "structures": go("move_arrays", N // 4, a.out, cupy.int64(N // 4)),
        "tile": go("tile_padded", N // 64, a.big, a.out, cupy.int32(ROUNDS)),
        "local": go("pick_registers", N // 8, *picks),
        "look_up": go("look_up_sorted", N // 4, a.big, a.sorted, a.out, cupy.int64(N // 4)),
        "bytes": go("bytes_sixteen", 4 * N // 16, raw, out, cupy.int64(4 * N // 16)),
    }
    return before, after


def wrong(a: Arrays) -> list[str]:
    """Names of the kernels, before or after, whose result is not NumPy's; run with a small ``N``."""
    import cupy
    import numpy as np

    big = cupy.asnumpy(a.big)
    threads, words = N // 64, np.arange(N // 64)
    tiles = big[: threads * 32].reshape(-1, 32, 32)
    twins = {
        "rows": (ROWS, big[: ROWS * COLUMNS].reshape(ROWS, COLUMNS).sum(axis=1)),
        "tile": (threads, (ROUNDS * tiles.sum(axis=2)).reshape(-1)[words]),
        "local": (N // 8, big[: 4 * N].reshape(32, N // 8).sum(axis=0)),
    }
    exact = {"look_up": (big[cupy.asnumpy(a.shuffled)], big[:N]), "bytes": (big.view(np.uint8)[: 4 * N] ^ 0x55,) * 2}
    found = []
    for number, calls in enumerate(launches(a)):
        for name, call in calls.items():
            a.out.fill(-1.0)
            call()
            got = cupy.asnumpy(a.out)
            if name in twins:
                count, right = twins[name]
                good = np.allclose(got[:count], right, rtol=1e-4)
            elif name == "structures":  # every eighth word moved on, or every word of the first eighth
                moved = got[: 8 * N : 8] if number == 0 else got[:N]
                good = bool((moved == 0.5).all()) and int((got == 0.5).sum()) == N
            else:
                right = exact[name][number]
                good = bool((got.view(right.dtype)[: right.size] == right).all())
            if not good:
                found.append(f"{('before', 'after')[number]}: {name}")
    return found
