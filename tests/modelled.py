"""Traces of known troubles, made by the allocator's model on the CPU."""

from __future__ import annotations

import contextlib

import nbmemprof as mp
from nbmemprof.allocator import Device
from nbmemprof.capture import Capture

MIB = 1 << 20


def loaded(device: Device, **meta) -> Capture:
    cap = mp.load(device.snapshot())
    return Capture.build(dict(cap.tables.items()), **(cap.meta | meta)) if meta else cap


def chequered(conf: str = "") -> Device:
    """2 GiB cut into 32 parts of which every other one is in use, a limit 64 MiB above, and a request for 256 MiB."""
    device = Device(conf, capacity_bytes="141GiB")
    device.free(device.malloc(2048 * MIB))
    for part in [device.malloc(64 * MIB) for _ in range(32)][::2]:
        device.free(part)
    device.set_limit(2112 * MIB)
    with contextlib.suppress(mp.OutOfMemoryError):
        device.malloc(256 * MIB)
    return device


def graphs(batches: tuple[int, ...] = (1, 2, 4, 8), row: int = 32 * MIB) -> Device:
    """A CUDA graph for each batch, each in a pool of its own: a temporary and an output live in it."""
    device = Device()
    for n in batches:
        device.malloc(n * row)
        with device.capture():
            a = device.malloc(n * row)
            b = device.malloc(n * row)
            device.free(a)
            device.malloc(n * row)
            device.free(b)
        device.empty_cache()
    return device


def fenced(conf: str = "max_split_size_mb:128,expandable_segments:True", cycles: int = 20) -> Device:
    """Two large blocks beside a small one that stays, again and again."""
    device = Device(conf)
    for _ in range(cycles):
        a, b = device.malloc(91 * MIB), device.malloc(int(45.5 * MIB))
        device.malloc(2 * MIB)
        device.free(a)
        device.free(b)
    return device


def waited() -> Device:
    """20 MiB in use and 80 behind another stream, in one segment under a limit of 102: 50 MiB are refused, then served."""
    device = Device(limit_bytes=102 * MIB)
    device.free(device.malloc(100 * MIB))
    device.malloc(20 * MIB)
    late = device.malloc(80 * MIB)
    device.record_stream(late, 7)
    device.busy(7)
    device.free(late)
    device.malloc(512)
    with contextlib.suppress(mp.OutOfMemoryError):
        device.malloc(50 * MIB)
    return device
