"""What can this card do? Measured by small kernels; where there is no GPU, the recordings of an NVIDIA H200 that ship with the package.

Each probe returns a Polars frame with ``.origin`` (``measured`` or ``recorded``), ``.device``, ``.about`` and ``.chart()``. A number stands only
beside ``verified``: the kernel's output, poisoned before, equalled its NumPy twin's bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbmemprof.gpu._device import Gpu
from nbmemprof.gpu.probes import _bandwidth, _banks, _coalescing, _latency, _transfers
from nbmemprof.gpu.probes._frame import ProbeFrame, answer, telling

__all__ = ["NAMES", "ProbeFrame", "allocators", "bandwidth", "bank_conflicts", "coalescing", "latency", "transfers", "unified_memory", "working_set"]

NAMES = ("bandwidth", "coalescing", "bank_conflicts", "latency", "working_set", "transfers", "allocators", "unified_memory")


def bandwidth(*, size_bytes: int | None = None, repeats: int = 20, recorded: bool = False, gpu: Gpu | None = None) -> ProbeFrame:
    """How fast is memory read and written?

    Parameters
    ----------
    size_bytes
        Bytes of each array; None for 2 GiB, or an eighth of what is free.
    repeats
        Launches whose median counts.
    recorded
        Return the shipped recording also where there is a GPU.
    gpu
        Another GPU than CuPy's current one; for tests.

    Returns
    -------
    A row a kernel (read, write, copy, scale, add, triad), width (4, 8, 16 bytes a lane) and form of launch: the best geometry of those ``tried``, the
    ``best`` of a kernel marked. Bytes read plus bytes written. ``ceiling_bytes_per_s`` is the highest rate of this frame,
    ``theory_bytes_per_s`` memory clock × 2 × bus width, ``datasheet_bytes_per_s`` null where the data sheet isn't known.

    Raises
    ------
    NbmemprofError
        Arrays that the L2 could hold; no GPU and no recording.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> frame = mp.probes.bandwidth(recorded=True)
    >>> frame.filter(what="read", best=True)["achieved_bytes_per_s"].item() > 4.6e12
    True
    """
    return answer("bandwidth", _bandwidth.COLUMNS, lambda g: _bandwidth.measure(g, size_bytes, repeats=repeats), recorded=recorded, gpu=gpu)


def coalescing(*, size_bytes: int | None = None, repeats: int = 20, recorded: bool = False, gpu: Gpu | None = None) -> ProbeFrame:
    """What do strides, offsets, structures and gathers cost?

    Parameters
    ----------
    size_bytes, repeats, recorded, gpu
        As for :func:`bandwidth`.

    Returns
    -------
    A row a pattern: the model's ``sectors`` of a load and ``efficiency`` (useful bytes by bytes of sectors), useful bytes per second
    (``achieved_bytes_per_s``), their share of the best row (``share_of_ceiling``) beside the model's (``modelled_share``), and
    ``sector_bytes_per_s``: what memory delivered if every sector came once.

    Raises
    ------
    NbmemprofError
        There is no GPU, and no recording ships with this version.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> frame = mp.probes.coalescing(recorded=True)
    >>> frame.filter(what="stride 3").select("sectors", "efficiency").rows()
    [(12.0, 0.333333)]
    """
    return answer("coalescing", _coalescing.COLUMNS, lambda g: _coalescing.measure(g, size_bytes, repeats), recorded=recorded, gpu=gpu)


def bank_conflicts(*, repeats: int = 10, recorded: bool = False, gpu: Gpu | None = None) -> ProbeFrame:
    """What do bank conflicts cost, and do padding and swizzling cure them?

    Parameters
    ----------
    repeats
        Launches of a pattern, whose median counts.
    recorded, gpu
        As for :func:`bandwidth`.

    Returns
    -------
    A row a pattern of a loop of shared loads: the model's ``wavefronts`` and ``ways``, ``cycles_per_load`` of a multiprocessor with eight warps. Then
    a transpose in four ways and a sum in two, with their times; cycles are null there.

    Raises
    ------
    NbmemprofError
        There is no GPU, and no recording ships with this version.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> frame = mp.probes.bank_conflicts(recorded=True)
    >>> frame.filter(what="stride 2", width=4).select("ways", "wavefronts").rows()
    [(2, 2)]
    """
    return answer("bank_conflicts", _banks.COLUMNS, lambda g: _banks.measure(g, repeats), recorded=recorded, gpu=gpu)


def latency(*, repeats: int = 7, recorded: bool = False, gpu: Gpu | None = None) -> ProbeFrame:
    """How long does one load take?

    Parameters
    ----------
    repeats
        Walks of a size, whose median counts.
    recorded, gpu
        As for :func:`bandwidth`.

    Returns
    -------
    A row a size of a pointer chase through lines of 128 bytes in random order: ``cycles`` and ``ns`` a load; the highest level that may answer
    (``through``); ``brought_by``: ``all`` where all multiprocessors wrote the lines just before and none is met twice, ``walk`` where the same
    thread walked all of them before (an L2 of two halves then has copies near by). Last, single lines of the L2, nearest to farthest.

    Raises
    ------
    NbmemprofError
        There is no GPU, and no recording ships with this version.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> frame = mp.probes.latency(recorded=True)
    >>> frame.filter(what="L2", size_bytes=2097152)["cycles"].item() < 400
    True
    """
    return answer("latency", _latency.COLUMNS, lambda g: _latency.measure(g, repeats), recorded=recorded, gpu=gpu)


def working_set(*, repeats: int = 7, recorded: bool = False, gpu: Gpu | None = None) -> ProbeFrame:
    """How fast is a set of bytes read again and again, by its size: where does the L2 end?

    Parameters
    ----------
    repeats
        Launches of a size, whose median counts.
    recorded, gpu
        As for :func:`bandwidth`.

    Returns
    -------
    A row a size; ``ceiling_bytes_per_s`` is the rate of the largest set, which memory alone answers.

    Raises
    ------
    NbmemprofError
        There is no GPU, and no recording ships with this version.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> frame = mp.probes.working_set(recorded=True)
    >>> frame["achieved_bytes_per_s"][0] > 2 * frame["ceiling_bytes_per_s"][0]
    True
    """
    return answer("working_set", _latency.SET_COLUMNS, lambda g: _latency.measure_sets(g, repeats), recorded=recorded, gpu=gpu)


def transfers(*, repeats: int = 10, recorded: bool = False, gpu: Gpu | None = None) -> ProbeFrame:
    """How fast do bytes come to the card and back?

    Parameters
    ----------
    repeats
        Copies of a size, whose median counts.
    recorded, gpu
        As for :func:`bandwidth`.

    Returns
    -------
    A row a kind of host memory (pinned, pageable, registered), direction and size, timed from call to completion; ``register`` is the
    time to lock pages that are there already.

    Raises
    ------
    NbmemprofError
        There is no GPU, and no recording ships with this version.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> frame = mp.probes.transfers(recorded=True)
    >>> frame.filter(what="pinned", direction="to device")["achieved_bytes_per_s"].max() > 50e9
    True
    """
    return answer("transfers", _transfers.COLUMNS, lambda g: _transfers.measure(g, repeats=repeats), recorded=recorded, gpu=gpu)


def allocators(*, repeats: int = 100, recorded: bool = False, gpu: Gpu | None = None) -> ProbeFrame:
    """What does an allocation cost?

    Parameters
    ----------
    repeats
        Calls of a size, whose median counts.
    recorded, gpu
        As for :func:`bandwidth`.

    Returns
    -------
    A row an allocator (``cudaMalloc``; ``cudaMallocAsync`` on one stream, from the default pool as it is set) and size: microseconds of a call, the
    cost of an empty Python call taken off.

    Raises
    ------
    NbmemprofError
        There is no GPU, and no recording ships with this version.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> frame = mp.probes.allocators(recorded=True)
    >>> frame.filter(size_bytes=1 << 26)["what"].to_list()
    ['cudaMalloc', 'cudaMallocAsync']
    """
    return answer("allocators", _transfers.ALLOCATOR_COLUMNS, lambda g: _transfers.measure_allocators(g, repeats=repeats), recorded=recorded, gpu=gpu)


def unified_memory(*, size_bytes: int = _transfers.MOST_MANAGED, rounds: int = 3, recorded: bool = False, gpu: Gpu | None = None) -> ProbeFrame:
    """What does it cost to touch memory that lies on the other side?

    Parameters
    ----------
    size_bytes
        Managed memory, at most 64 MiB.
    rounds
        How often the pages go to the GPU and back after the first time.
    recorded, gpu
        As for :func:`bandwidth`.

    Returns
    -------
    A row a step: the GPU touches pages that are on the host, for the first time and later, or its own; the host reads pages that are on the GPU.

    Raises
    ------
    NbmemprofError
        There is no GPU, and no recording ships with this version.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> frame = mp.probes.unified_memory(recorded=True)
    >>> frame["what"].to_list()[-1]
    'GPU touches pages on the host'
    """
    return answer("unified_memory", _transfers.UNIFIED_COLUMNS, lambda g: _transfers.measure_unified(g, size_bytes, rounds), recorded=recorded, gpu=gpu)


def run(name: str, *, told: Callable[[str], None] | None = None, **options: Any) -> ProbeFrame:
    """Run a probe by its name; ``told`` hears how far it is."""
    with telling(told or (lambda _: None)):
        found: ProbeFrame = {n: globals()[n] for n in NAMES}[name](**options)
    return found
