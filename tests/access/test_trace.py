"""Index arithmetic of whole kernels, run for a block."""

from __future__ import annotations

import numpy as np
import pytest

import nbmemprof as mp
from nbmemprof.errors import NbmemprofError

SIDE = 64


def naive(source, target):
    x, y = cuda.grid(2)  # noqa: F821 - the name is given to the kernel when it is traced
    target[x, y] = source[y, x]


def tiled(source, target, pitch):
    tile = cuda.shared.array((32, pitch), np.float32)  # noqa: F821
    x = cuda.blockIdx.x * 32 + cuda.threadIdx.x  # noqa: F821
    y = cuda.blockIdx.y * 32 + cuda.threadIdx.y  # noqa: F821
    for j in range(0, 32, 8):
        tile[cuda.threadIdx.y + j, cuda.threadIdx.x] = source[y + j, x]  # noqa: F821
    cuda.syncthreads()  # noqa: F821
    x = cuda.blockIdx.y * 32 + cuda.threadIdx.x  # noqa: F821
    y = cuda.blockIdx.x * 32 + cuda.threadIdx.y  # noqa: F821
    for j in range(0, 32, 8):
        target[y + j, x] = tile[cuda.threadIdx.x, cuda.threadIdx.y + j]  # noqa: F821


def added_up(source, sums):
    part = cuda.shared.array(256, np.float32)  # noqa: F821
    t = cuda.threadIdx.x  # noqa: F821
    part[t] = source[t]
    cuda.syncthreads()  # noqa: F821
    s = 1
    while s < 256:
        if 2 * s * t < 256:
            part[2 * s * t] = part[2 * s * t] + part[2 * s * t + s]
        cuda.syncthreads()  # noqa: F821
        s *= 2
    if t == 0:
        sums[0] = part[0]


def matrices():
    source = np.arange(SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)
    return source, np.zeros_like(source)


def row(trace, array, operation):
    (found,) = [r for r in trace.frame.iter_rows(named=True) if r["array"] == array and r["operation"] == operation]
    return found


def test_a_naive_transpose_writes_32_sectors_where_4_would_do():
    trace = mp.access.trace(naive, *matrices(), grid=(2, 8), block=(32, 8))
    read, written = row(trace, "source", "load"), row(trace, "target", "store")
    assert (read["instructions"], read["per_instruction"]) == (8, 4)
    assert (written["instructions"], written["per_instruction"], written["efficiency"]) == (8, 32, 0.125)
    assert written["source"] == "target[x, y] = source[y, x]"
    assert [site.line for site in trace.sites] == [read["line"]] * 2


@pytest.mark.cost(0.4)
@pytest.mark.parametrize(("pitch", "ways"), [(32, 32), (33, 1)])
def test_a_tile_with_and_without_padding_and_its_result(pitch, ways):
    source, target = matrices()
    trace = mp.access.trace(tiled, source, target, pitch, grid=(2, 2), block=(32, 8), blocks=[(x, y) for x in (0, 1) for y in (0, 1)])
    assert (target == source.T).all()
    assert row(trace, "shared", "load")["per_instruction"] == ways
    assert {site.worst.efficiency for site in trace.sites if site.space == "global"} == {1.0}
    advice = {one.kind for site, one in trace.suggestions() if site.array == "shared"}
    assert advice == ({"padding", "swizzle"} if ways > 1 else set())


@pytest.mark.cost(0.4)
def test_a_sum_whose_strides_double_runs_into_conflicts_step_by_step():
    source, sums = np.ones(256, np.float32), np.zeros(1, np.float32)
    trace = mp.access.trace(added_up, source, sums, block=256)
    assert sums[0] == 256
    found = [site for site in trace.sites if site.space == "shared" and site.operation == "load" and len(site.accesses) > 1]
    ways = sorted({one.ways for site in found for one in site.accesses})
    assert ways == [1, 2, 4, 8]  # with 256 words, 16 lanes are left when the stride is 16 words, 8 when it is 32
    assert max(one.ways for site in found for one in site.accesses) == max(site.worst.ways for site in found)


def test_lanes_that_are_guarded_out_are_switched_off():
    def guarded(data, n):
        i = cuda.grid(1)  # noqa: F821
        if i < n:
            data[i] = data[i] * 2

    data = np.ones(40, np.float32)
    trace = mp.access.trace(guarded, data, 40, block=64)
    assert (data == 2).all()
    assert [access.active_lanes for access in trace.sites[0].accesses] == [32, 8]


def test_a_loop_of_unequal_length_is_matched_by_repetition_and_said_to_be():
    def ragged(data):
        t = cuda.threadIdx.x  # noqa: F821
        for k in range(1 + t % 2):
            data[k * 32 + t]

    trace = mp.access.trace(ragged, np.zeros(64, np.float32))
    assert [access.active_lanes for access in trace.sites[0].accesses] == [32, 16]
    assert not trace.sites[0].aligned


def test_a_kernel_that_numba_compiled_is_taken_by_its_python_function():
    class Compiled:
        py_func = staticmethod(naive)

    assert mp.access.trace(Compiled(), *matrices(), block=(32, 8)).kernel == "naive"


def test_index_arrays_are_read_for_real():
    def gathered(data, places, out):
        i = cuda.grid(1)  # noqa: F821
        out[i] = data[places[i]]

    places = (np.arange(32) * 8).astype(np.int32)
    trace = mp.access.trace(gathered, np.arange(256, dtype=np.float32), places, np.zeros(32, np.float32))
    assert row(trace, "data", "load")["per_instruction"] == 32


@pytest.mark.parametrize(
    ("kernel", "args", "options", "said"),
    [
        (naive, (np.zeros((4, 4), np.float32),) * 2, {"block": (32, 1)}, r"source\[0, 4\] lies outside its shape \(4, 4\)"),
        (naive, (np.zeros((32, 32), np.complex256),) * 2, {}, "Elements of complex256 are 32 bytes"),
        (naive, (np.zeros((32, 64), np.float32).T,) * 2, {}, "not in C order"),
        (naive, (np.zeros((32, 32), np.float32),) * 2, {"block": (64, 32)}, "A block has 1 to 1024 threads"),
        (len, ((),), {}, "is no Python function"),
        (lambda a: a[0, 0], (np.zeros(4, np.float32),), {}, "2 of 1 indices"),
    ],
)
def test_what_no_gpu_would_do_is_refused(kernel, args, options, said):
    with pytest.raises(NbmemprofError, match=said):
        mp.access.trace(kernel, *args, **options)


def test_an_error_of_the_kernel_s_own_is_told_with_its_thread():
    def wrong(data):
        if cuda.threadIdx.x == 5:  # noqa: F821
            raise ZeroDivisionError("five")
        cuda.syncthreads()  # noqa: F821

    with pytest.raises(NbmemprofError, match=r"wrong raised in thread 5 of block \(0, 0, 0\): ZeroDivisionError: five"):
        mp.access.trace(wrong, np.zeros(4, np.float32))


def test_a_barrier_that_not_all_threads_reach_is_no_endless_wait():
    def split(data):
        if cuda.threadIdx.x < 16:  # noqa: F821
            cuda.syncthreads()  # noqa: F821

    with pytest.raises(NbmemprofError, match="some threads wait at cuda.syncthreads"):
        mp.access.trace(split, np.zeros(4, np.float32))


def helper(data, i):
    return data[i + cuda.blockDim.x]  # noqa: F821


def calls(data, out):
    i = cuda.threadIdx.x  # noqa: F821
    out[i] = helper(data, i)


def test_functions_of_the_kernel_s_file_are_followed():
    trace = mp.access.trace(calls, np.arange(64, dtype=np.float32), out := np.zeros(32, np.float32))
    assert (out == np.arange(32, 64)).all()
    assert row(trace, "data", "load")["per_instruction"] == 4


def test_cuda_may_be_a_name_of_the_surrounding_function():
    cuda = None

    def kernel(data):
        data[cuda.threadIdx.x] = 1

    data = np.zeros(32, np.float32)
    mp.access.trace(kernel, data)
    assert data.all()


def test_a_warp_waits_for_itself_and_atomics_count_their_sectors():
    def warp_sum(data, total):
        t = cuda.threadIdx.x  # noqa: F821
        mine = cuda.local.array(1, np.float32)  # noqa: F821
        s = 16
        while s:
            mine[0] = data[t] + (data[t + s] if t % 32 < s else 0)
            cuda.syncwarp()  # noqa: F821
            data[t] = mine[0]
            cuda.syncwarp()  # noqa: F821
            s //= 2
        if t % 32 == 0:
            cuda.atomic.add(total, 0, data[t])  # noqa: F821

    data, total = np.ones(64, np.float32), np.zeros(1, np.float32)
    trace = mp.access.trace(warp_sum, data, total, block=64)
    assert total[0] == 64
    atomic = row(trace, "total", "atomic")
    assert (atomic["instructions"], atomic["transactions"]) == (2, 2)


def test_atomics_on_shared_memory_are_said_to_be_unknown():
    def histogram(data):
        bins = cuda.shared.array(32, np.int32)  # noqa: F821
        cuda.atomic.add(bins, data[cuda.threadIdx.x] % 32, 1)  # noqa: F821

    with pytest.raises(NbmemprofError, match="atomics on shared memory are not modelled"):
        mp.access.trace(histogram, np.arange(32, dtype=np.int32))
