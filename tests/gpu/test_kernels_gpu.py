"""Every kernel against its NumPy twin on a real GPU, at sizes that leave the last block incomplete.

    compute-sanitizer --tool memcheck python tests/gpu/test_kernels_gpu.py

runs all of them without pytest, for the checkers of memory, races and barriers; names of groups choose. (``access_patterns`` is no matter for
racecheck: lanes that store to one place are what it is for.)
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import patterns
import record_patterns

from nbmemprof.gpu import _device, _loader, probes, twins

pytestmark = pytest.mark.gpu
NEEDLE, SEED, FACTOR = np.uint32(0xDEADBEEF), np.uint32(7), np.float32(1.37)


def arguments(name: str, a, b, n, out, sums) -> tuple:
    return {
        "read": (a, sums, n, NEEDLE, np.int32(1)), "write": (out, n, SEED), "copy": (a, out, n), "scale": (a, out, n, FACTOR), "add": (a, b, out, n), "triad": (a, b, out, n, FACTOR),
    }[name]  # fmt: skip


def bandwidth(gpu: _device.Gpu) -> Iterator[tuple[str, bool]]:
    for width, unroll, stream, (grid, block) in itertools.product((4, 8, 16), (1, 4), (0, 1), ((3, 64), (40, 256))):
        n = 9_973
        words = n * width // 4
        a, b = gpu.reals(words), gpu.reals(words)[::-1].copy()
        for name in ("read", "write", "copy", "scale", "add", "triad"):
            out, check = gpu.poisoned(words, np.float32), gpu.poisoned(words, np.float32)
            sums, one = gpu.poisoned(grid * block, np.uint32), gpu.poisoned(1, np.uint32)
            gpu.launch("bandwidth", name, grid, block, *arguments(name, a, b, np.uint64(n), out, sums), WIDTH=width, UNROLL=unroll, STREAM=stream)
            twins.TWINS["bandwidth", name](gpu.xp, *arguments(name, a, b, np.uint64(n), check, one))
            right = twins.total(gpu.xp, sums) == int(one[0]) if name == "read" else twins.same(gpu.xp, out, check)
            yield f"{name} {width} {unroll} {stream} {grid}", right


def coalescing(gpu: _device.Gpu) -> Iterator[tuple[str, bool]]:
    source = gpu.words(40_000)
    places = _device.mixed(gpu.xp, 1000) % np.uint32(40_000)
    cases = {
        "strided": lambda s: (source, s, np.uint64(1111), np.uint64(33), np.uint64(5), NEEDLE, np.int32(1)),
        "structures": lambda s: (source, s, np.uint64(4999), np.int32(8), np.uint64(8), np.uint64(1), NEEDLE, np.int32(1)),
        "structures_wide": lambda s: (source, s, np.uint64(9999), NEEDLE, np.int32(1)),
        "gather": lambda s: (source, places, s, np.uint64(1000), NEEDLE, np.int32(1)),
    }
    for name, args in cases.items():
        sums, one = gpu.poisoned(6 * 96, np.uint32), gpu.poisoned(1, np.uint32)
        gpu.launch("coalescing", name, 6, 96, *args(sums))
        twins.TWINS["coalescing", name](gpu.xp, *args(one))
        yield name, twins.total(gpu.xp, sums) == int(one[0])


def shared(gpu: _device.Gpu) -> Iterator[tuple[str, bool]]:
    for width in (4, 8, 16):
        places = gpu.xp.asarray(np.arange(32, dtype=np.int32) * 3 * width)
        fill, cycles = gpu.words(2048), gpu.poisoned(6, np.int64)
        sums, check = gpu.poisoned(192, np.uint32), gpu.poisoned(192, np.uint32)
        args = (places, fill, np.int32(8192), np.int32(64), np.int32(0), cycles)
        gpu.launch("bank_conflicts", "shared_loads", 3, 64, *args, sums, shared=8192, WIDTH=width)
        twins.TWINS["bank_conflicts", "shared_loads"](gpu.xp, *args, check, WIDTH=width)
        yield f"shared_loads {width}", twins.same(gpu.xp, sums, check) and bool((cycles > 0).all())
    source = gpu.reals(96 * 96)
    for kind in ("naive", "tiled", "padded", "swizzled"):
        out, check = gpu.poisoned(96 * 96, np.float32), gpu.poisoned(96 * 96, np.float32)
        gpu.launch("transpose", f"transpose_{kind}", (3, 3), (32, 8), source, out, np.int32(96))
        twins.TWINS["transpose", f"transpose_{kind}"](gpu.xp, source, check, np.int32(96))
        yield f"transpose_{kind}", twins.same(gpu.xp, out, check)
    for kind, threads in itertools.product(("strided", "halves"), (64, 256)):
        source, sums, check = gpu.words(3 * 5 * threads), gpu.poisoned(5, np.uint32), gpu.poisoned(5, np.uint32)
        gpu.launch("reduction", f"reduce_{kind}", 5, threads, source, sums, np.int32(3), shared=4 * threads)
        twins.TWINS["reduction", f"reduce_{kind}"](gpu.xp, source, check, np.int32(3))
        yield f"reduce_{kind} {threads}", twins.same(gpu.xp, sums, check)


def others(gpu: _device.Gpu) -> Iterator[tuple[str, bool]]:
    xp = gpu.xp
    order = xp.argsort(_device.mixed(xp, 256)).astype(np.uint32) * np.uint32(32)
    following = xp.zeros(8192, np.uint32)
    following[order] = xp.roll(order, -1)
    for cached in (0, 1):
        out = gpu.poisoned(3, np.int64)
        gpu.launch("latency", "chase", 1, 1, following, np.uint32(int(order[0])), np.int32(256), np.int32(64), out, CACHED=cached)
        yield f"chase {cached}", int(out[2]) == int(order[64]) and int(out[0]) > 0
        itself, cycles = xp.arange(8192, dtype=np.uint32), gpu.poisoned(16, np.int64)
        gpu.launch("latency", "line_latency", 1, 1, itself, order[:16].copy(), np.int32(16), np.int32(32), cycles, CACHED=cached)
        yield f"line_latency {cached}", bool((cycles > 0).all())
    source, sums, one = gpu.words(4 * 1013), gpu.poisoned(5 * 64, np.uint32), gpu.poisoned(1, np.uint32)
    gpu.launch("working_set", "reread", 5, 64, source, sums, np.uint64(1013), np.int32(3))
    twins.TWINS["working_set", "reread"](xp, source, one, np.uint64(1013), 3)
    yield "reread", twins.total(xp, sums) == int(one[0])
    data, check = gpu.words(1013), gpu.words(1013)
    gpu.launch("touch", "touch", 3, 64, data, np.uint64(1013), np.uint32(9))
    twins.TWINS["touch", "touch"](xp, check, np.uint64(1013), np.uint32(9))
    yield "touch", twins.same(xp, data, check)


def access_patterns(gpu: _device.Gpu) -> Iterator[tuple[str, bool]]:
    found = patterns.stored()
    memory = record_patterns.initial()
    kernel = _loader.kernel("access_patterns", "access_patterns")
    xp = gpu.xp
    for launch in record_patterns.packed(found, 5)[:16:2]:
        launch = [(n, 1 + k % 3) for k, (n, _) in enumerate(launch)]
        device = xp.asarray(memory)
        places = xp.asarray(np.array([[-1 if p is None else p for p in found[n].places] for n, _ in launch], np.int32))
        tables = [xp.asarray(np.array(c, np.int32)) for c in ([found[n].width for n, _ in launch], [patterns.SPACES.index(found[n].space) for n, _ in launch], [t for _, t in launch])]
        sums = xp.full(32, 0xDEADBEEF, np.uint32)
        size = patterns.WINDOW["shared"]
        kernel((1,), (32,), (places, *tables, np.int32(len(launch)), np.int32(0), device, np.int32(size), sums), shared_mem=size)
        yield "access_patterns", bool((sums.get() == record_patterns.expected(found, launch, memory)).all()) and record_patterns.stored_right(found, launch, memory, device.get())


GROUPS: list[Callable[[_device.Gpu], Iterator[tuple[str, bool]]]] = [bandwidth, coalescing, shared, others, access_patterns]


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.__name__)
def test_kernels_compute_what_their_twins_compute(group):
    assert [name for name, right in group(_device.CupyGpu()) if not right] == []


@pytest.mark.parametrize("name", probes.NAMES)
def test_every_probe_measures_here_and_verifies_what_it_measured(name):
    frame = probes.run(name)
    assert frame.origin == "measured"
    assert "verified" not in frame.columns or frame["verified"].all()


def main() -> None:
    gpu = _device.CupyGpu()
    failed = [name for group in GROUPS if group.__name__ in (sys.argv[1:] or [g.__name__ for g in GROUPS]) for name, right in group(gpu) if not right]
    print("wrong:", failed)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
