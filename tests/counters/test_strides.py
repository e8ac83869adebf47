"""Strides read off the text of CUDA C, told only where the counted sectors agree."""

from __future__ import annotations

import pytest

from nbmemprof.gpu import _loader
from nbmemprof.gpu._strides import stride_of

SOURCE = """
#define WIDTH 64
#define I ((long long)blockIdx.x * blockDim.x + threadIdx.x)
struct Particle { float x, y, z; float mass; };
extern "C" __global__ void many(const float* x, float* y, const Particle* p, const int* at, int n, int columns) {
    __shared__ float part[32 * WIDTH];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int row = i;
    y[i] = x[i];
    y[i] = x[i * 32];
    y[i] = x[(long long)i * 3 + 1];
    y[row * columns + 5] = 1.0f;
    y[i] = p[i].mass;
    y[i] = x[at[i]];
    y[I] = part[threadIdx.x * WIDTH];
    y[(i & ~1023) | ((i & 31) << 5) | ((i >> 5) & 31)] = 2.0f;
    y[i] = x[n - 1 - i];
    y[i] = x[other(i)];
    y[i] = x[i / 2];
    y[i] = x[unknown + i];
    __shared__ float tile[32][WIDTH];
    __shared__ float padded[32][WIDTH / 2 + 1];
    y[i] = tile[threadIdx.x][3];
    y[i] = padded[threadIdx.x][3];
    y[i] = other[threadIdx.x][i];
}
"""
BLOCK = (256, 1, 1)


def told(text, operation, each, *, space="global", width=4, block=BLOCK):
    line = next(i for i, row in enumerate(SOURCE.splitlines(), 1) if text in row)
    return stride_of(SOURCE, line, operation=operation, space=space, width_bytes=width, block=block, each=each)


@pytest.mark.parametrize(
    ("text", "operation", "each", "stride"),
    [
        ("y[i] = x[i];", "load", 4, "1"),
        ("x[i * 32]", "load", 32, "32"),
        ("x[(long long)i * 3 + 1]", "load", 12, "3"),
        ("y[row * columns + 5]", "store", 32, "columns"),
        ("p[i].mass", "load", 16, "4"),  # words of a structure of four
        ("((i & 31) << 5)", "store", 32, "32"),
        ("x[n - 1 - i]", "load", 4, "-1"),
    ],
)
def test_simple_arithmetic_is_worked_out(text, operation, each, stride):
    assert told(text, operation, each) == stride


@pytest.mark.parametrize(
    ("text", "operation", "each"),
    [
        ("x[at[i]]", "load", 18),  # where it goes stands in memory
        ("x[other(i)]", "load", 32),
        ("x[i / 2]", "load", 2),  # not one stride
        ("x[unknown + i]", "load", 4),
        ("other[threadIdx.x][i]", "load", 4),
        ("x[i * 32]", "load", 7),  # the text is not what was counted
    ],
)
def test_what_the_text_does_not_tell_is_not_told(text, operation, each):
    assert told(text, operation, each) is None


def test_a_stride_in_shared_memory_has_to_give_the_counted_wavefronts():
    assert told("part[threadIdx.x * WIDTH]", "load", 32, space="shared") == "64"
    assert told("part[threadIdx.x * WIDTH]", "load", 1, space="shared") is None


def test_two_dimensions_are_rows_of_the_declared_length():
    assert told("tile[threadIdx.x][3]", "load", 32, space="shared") == "64"
    assert told("padded[threadIdx.x][3]", "load", 1, space="shared") == "33"


def test_lanes_that_run_over_two_rows_of_threads_have_no_single_stride():
    assert told("y[i] = x[i];", "load", 4, block=(16, 16, 1)) is None


def test_the_naive_transpose_writes_a_row_apart():
    source = _loader.source("transpose")
    line = next(i for i, row in enumerate(source.splitlines(), 1) if "out[(long long)x * n + y + j] = in" in row)
    known = {"space": "global", "width_bytes": 4, "block": (32, 8, 1)}
    assert stride_of(source, line, operation="store", each=32, **known) == "n"
    assert stride_of(source, line, operation="load", each=4, **known) == "1"
