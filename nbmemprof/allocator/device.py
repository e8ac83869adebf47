"""A CUDA device without the device: PyTorch's caching allocator, call by call."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from nbmemprof import _optional
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._model import Model
from nbmemprof.allocator.conf import Settings, parse
from nbmemprof.allocator.versions import DEFAULT, rules_of
from nbmemprof.errors import NbmemprofError, OutOfMemoryError
from nbmemprof.units import parse_bytes

__all__ = ["Device", "StreamCaptureError"]

_WORDS = {
    M.ALLOC: "alloc", M.FREE_REQUESTED: "free_requested", M.FREE_COMPLETED: "free_completed", M.SEGMENT_ALLOC: "segment_alloc", M.SEGMENT_FREE: "segment_free",
    M.SEGMENT_MAP: "segment_map", M.SEGMENT_UNMAP: "segment_unmap", M.OOM: "oom",
}  # fmt: skip
_UNSERVED = 1 << 60
PoolId = tuple[int, int]


class StreamCaptureError(NbmemprofError, RuntimeError):
    """What torch raises where the driver refuses a call because a stream is being captured."""


@functools.cache
def _oom_class(base: type | None) -> type[OutOfMemoryError]:
    """An error that ``except torch.OutOfMemoryError`` catches too, where torch is loaded."""
    return (
        OutOfMemoryError
        if base is None
        else type("OutOfMemoryError", (OutOfMemoryError, base), {"__module__": "nbmemprof", "__doc__": OutOfMemoryError.__doc__})
    )


class Device:
    """One modelled device.

    Parameters
    ----------
    conf
        ``PYTORCH_CUDA_ALLOC_CONF``, read as this torch reads it.
    torch
        Version whose rules hold.
    limit_bytes
        torch's own limit (``set_per_process_memory_fraction``); sizes may be text such as ``"8GiB"``.
    capacity_bytes
        What the driver can give to this process; None: as much as is asked.
    addresses
        Where new segments lie, on which ties of the best fit hang: ``"ascending"``, ``"descending"``, ``"windows"``, a seed, or the
        addresses themselves in the order of need (then ascending).
    history
        Whether events are kept for :meth:`snapshot`.

    Raises
    ------
    NbmemprofError
        For a configuration that torch would refuse (:class:`ConfError`) or that is not modelled.
    """

    def __init__(
        self,
        conf: str | Settings = "",
        *,
        torch: str | None = DEFAULT,
        limit_bytes: int | str | None = None,
        capacity_bytes: int | str | None = None,
        addresses: str | int | Iterable[int] = "ascending",
        device: int = 0,
        history: bool = True,
    ) -> None:
        self.rules = rules_of(torch)
        settings = conf if isinstance(conf, Settings) else parse(conf, torch)
        if settings.backend != "native":
            raise NbmemprofError(
                f"backend:{settings.backend} leaves memory to the driver's pool; only torch's native allocator is modelled. Leave the option out."
            )
        self.torch, self.device = torch or DEFAULT, device
        self.capacity_bytes = None if capacity_bytes is None else parse_bytes(capacity_bytes)
        limit = None if limit_bytes is None else parse_bytes(limit_bytes)
        if limit is None and settings.per_process_memory_fraction not in (None, 1.0) and self.capacity_bytes is not None:
            limit = int(float(settings.per_process_memory_fraction or 0.0) * float(self.capacity_bytes))
        known = isinstance(addresses, (str, int))
        self._given: deque[int] = deque() if known else deque(addresses)  # type: ignore[arg-type]
        self._model = Model(settings, self.rules, limit_bytes=limit, capacity_bytes=self.capacity_bytes, policy=addresses if known else "ascending")  # type: ignore[arg-type]
        self._trace = np.zeros(6 << 8 if history else 0, np.int64)
        self._model.m[M.MODE], self._model.m[M.END] = M.TELL if history else M.MUTE, len(self._trace)
        self._operation, self._row = np.zeros(M.WORDS, np.int64), np.zeros(2, np.int64)
        self._calls = 0
        self._live: dict[int, int] = {}
        self._uses: dict[int, set[int]] = {}
        self._queues: dict[int, deque[list[Any]]] = {}  # [[block, events it waits for], whether the stream is busy with it]
        self._busy: set[int] = set()
        self._deferred: list[tuple[int, set[int]]] = []
        self._pools: dict[PoolId, int] = {(0, 0): self._model.default}
        self._routes: list[PoolId] = []
        self._captures = 0

    # ------------------------------------------------------------------ requests
    def malloc(self, size: int | str, stream: int = 0, pool: PoolId | None = None) -> int:
        """Serve a request and return its address; 0 for no bytes, as torch does.

        Raises
        ------
        OutOfMemoryError
            There is no room; a ``torch.OutOfMemoryError`` too where torch is loaded.
        """
        requested = size if isinstance(size, int) else parse_bytes(size)
        if requested < 0:
            raise NbmemprofError(f"{requested} bytes can't be asked for. Give zero or more.")
        if requested == 0:
            return 0
        if requested >= _UNSERVED:
            raise self._error(requested)
        routed = pool or (self._routes[-1] if self._routes else (0, 0))
        if not self._quiet() and (routed == (0, 0) or not self.rules.routed_quiet):
            self._poll()
        block = self._call(M.ALLOC, size=requested, stream=stream, extra=self._pool(routed))
        if block <= 0:
            raise self._error(requested)
        addr = int(self._model.m[block + M.ADDR])
        self._live[addr] = block
        return addr

    def free(self, addr: int) -> None:
        """Give an address back; where other streams used it, it stays until they are done."""
        if addr == 0:
            return
        block = self._block(addr)
        del self._live[addr]
        uses = self._uses.pop(addr, None)
        self._call(M.FREE_REQUESTED, block=block, extra=1 if uses else 0)
        if uses and self._quiet():
            self._deferred.append((block, uses))
        elif uses:
            self._wait(block, uses)

    def record_stream(self, addr: int, stream: int) -> None:
        """Note that another stream uses the block, as ``Tensor.record_stream`` does; its own stream is ignored."""
        m = self._model.m
        if m[m[self._block(addr) + M.LIST] + M.LIST_STREAM] != stream:
            self._uses.setdefault(addr, set()).add(stream)

    def empty_cache(self) -> None:
        """Give free memory back: whole segments, whole pages.

        Raises
        ------
        StreamCaptureError
            A graph is being captured, and pages of a pool that has no user any more would have to be unmapped on its stream, as in torch (2.11).
        """
        self._call(M.EMPTY)
        m = self._model.m
        if m[M.FAILED]:
            m[M.FAILED] = 0
            raise StreamCaptureError(
                "CUDA error: operation not permitted when stream is capturing (modelled by nbmemprof): empty_cache() waits for the captured stream before it unmaps the pages of a pool "
                "that no graph uses any more. Call it before the capture begins, or after its end."
            )

    def _block(self, addr: int) -> int:
        block = self._live.get(addr)
        if block is None:
            raise NbmemprofError(f"Nothing is allocated at {addr:#x}. It was freed before, or never given out.")
        return block

    # ------------------------------------------------------------------ streams
    def busy(self, stream: int) -> None:
        """What is put on this stream from now on does not end until :meth:`synchronize`; other streams are done whenever they are asked."""
        self._busy.add(stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Let streams finish. Blocks that waited come back at the next ``malloc``, not here."""
        for of, queue in self._queues.items():
            for entry in queue if stream in (None, of) else ():
                entry[1] = False
        self._busy = set() if stream is None else self._busy - {stream}

    def _wait(self, block: int, streams: set[int]) -> None:
        item = [block, len(streams)]
        for stream in sorted(streams):
            self._queues.setdefault(stream, deque()).append([item, stream in self._busy])

    def _poll(self) -> None:
        for queue in self._queues.values():
            while queue and not queue[0][1]:
                item = queue.popleft()[0]
                item[1] -= 1
                if item[1] == 0:
                    self._call(M.FREE_COMPLETED, block=item[0])

    # ------------------------------------------------------------------ pools
    def mem_pool(self, *, use_on_oom: bool = False, no_split: bool = False, custom: bool = False) -> PoolId:
        """Make a ``torch.cuda.MemPool``; ``custom``: with an allocator of its own, which is never expandable."""
        return self._add((0, 1 + max(i for _, i in self._pools)), on_oom=use_on_oom, no_split=no_split, custom=custom)

    def graph_pool(self) -> PoolId:
        """Make the pool of a CUDA graph."""
        return self._add((1 + max(i for i, _ in self._pools), 0))

    def _add(self, name: PoolId, **options: bool) -> PoolId:
        self._pools[name] = self._model.add_pool(name, **options)
        return name

    def _pool(self, name: PoolId) -> int:
        if name not in self._pools:
            raise NbmemprofError(f"There is no pool {name} here. Make one with mem_pool() or graph_pool().")
        return self._pools[name]

    @contextlib.contextmanager
    def use_pool(self, pool: PoolId) -> Iterator[None]:
        """Route requests to a pool, as ``torch.cuda.use_mem_pool`` does for the current thread."""
        self._pool(pool)
        self._routes.append(pool)
        self._model.m[M.QUIET] += self.rules.routed_quiet
        try:
            yield
        finally:
            self._routes.remove(pool)
            self._model.m[M.QUIET] -= self.rules.routed_quiet
            self._settle_deferred()

    @contextlib.contextmanager
    def capture(self, pool: PoolId | None = None, stream: int | None = None) -> Iterator[PoolId]:
        """Capture a CUDA graph: requests go to its pool, nothing is flushed or polled, frees of blocks that other streams used wait for its end.

        ``stream``: the one that is captured, which :meth:`empty_cache` must not wait for; None: it may be any.
        """
        name = self.graph_pool() if pool is None else pool
        self._pool(name)
        self._routes.append(name)
        barred = self._model.m[M.BARRED]
        self._model.m[M.BARRED] = -1 if stream is None else 1 + stream
        self._captures += 1
        self._model.m[M.QUIET] += 1
        try:
            yield name
        finally:
            self._routes.remove(name)
            self._captures -= 1
            self._model.m[M.QUIET] -= 1
            self._model.m[M.BARRED] = barred
            self._settle_deferred()

    def drop_pool(self, pool: PoolId) -> None:
        """The last user of a pool goes: a MemPool gives its free memory back at once, a graph's at the next flush."""
        handle = self._pool(pool)
        if pool[0] != 0:
            self._call(M.DROP_POOL, extra=handle)
            return
        self._finish(handle)
        waiting = self._queues
        self._queues = {}
        self._call(M.DROP_POOL, size=1, extra=handle)
        self._queues = waiting  # a deleted MemPool waits for its own blocks only

    def _finish(self, pool: int) -> None:
        """Wait for the streams that use a pool's freed blocks."""
        m = self._model.m
        for queue in self._queues.values():
            for entry in [e for e in queue if m[m[m[e[0][0] + M.LIST] + M.LIST_HALF] + M.HALF_POOL] == pool]:
                queue.remove(entry)
                entry[0][1] -= 1
                if entry[0][1] == 0:
                    self._call(M.FREE_COMPLETED, block=entry[0][0])
                    m = self._model.m

    def _quiet(self) -> bool:
        return bool(self._model.m[M.QUIET])

    def _settle_deferred(self) -> None:
        if not self._quiet():
            for block, uses in self._deferred:
                self._wait(block, uses)
            self._deferred.clear()

    # ------------------------------------------------------------------ settings
    @property
    def conf(self) -> str:
        """The configuration as text."""
        return self._model.settings.text

    @property
    def limit_bytes(self) -> int | None:
        """Torch's own memory limit; None for none."""
        return self._model.limit_bytes

    def set_conf(self, conf: str) -> None:
        """Change the settings at run time, as ``torch.cuda.memory._set_allocator_settings`` does."""
        self._model.configure(parse(conf, self.torch, self._model.settings), self.limit_bytes, self.capacity_bytes)

    def set_limit(self, limit_bytes: int | str | None) -> None:
        """Set torch's own memory limit; None removes it."""
        self._model.configure(self._model.settings, None if limit_bytes is None else parse_bytes(limit_bytes), self.capacity_bytes)

    # ------------------------------------------------------------------ reading
    def stats(self) -> dict[str, int]:
        """Return what ``torch.cuda.memory_stats()`` returns."""
        return self._model.stats()

    def reset_peak_stats(self) -> None:
        """Set every peak to what is current."""
        m = self._model.m
        for at in (*range(M.ALLOCATION, M.OVERSIZE_ALLOCATIONS, 4), M.OVERSIZE_ALLOCATIONS, M.OVERSIZE_SEGMENTS):
            m[at + 1] = m[at]

    def snapshot(self) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot()`` of torch 2.11 returns, its trace included (stacks are empty)."""
        names = list(self._pools)
        columns = self._model.blocks()
        segments: list[dict[str, Any]] = []
        end = None
        states = {M.FREE: "inactive", M.LIVE: "active_allocated", M.PENDING: "active_pending_free"}
        for i in range(len(columns["addr"])):
            state = int(columns["state"][i])
            if state == M.HOLE:
                end = None
                continue
            addr, size, requested = (int(columns[n][i]) for n in ("addr", "size", "requested"))
            if columns["first"][i] or end is None:
                segments.append({
                    "device": self.device, "address": addr, "total_size": 0, "allocated_size": 0, "active_size": 0, "requested_size": 0, "stream": int(columns["stream"][i]),
                    "segment_type": "small" if columns["small"][i] else "large", "segment_pool_id": names[int(columns["pool"][i])], "is_expandable": bool(columns["area"][i]),
                    "frames": [], "blocks": [],
                })  # fmt: skip
            segment = segments[-1]
            segment["total_size"] += size
            segment["allocated_size"] += size if state == M.LIVE else 0
            segment["active_size"] += size if state != M.FREE else 0
            segment["requested_size"] += requested if state != M.FREE else 0
            segment["blocks"].append({"address": addr, "size": size, "requested_size": requested, "state": states[state], "frames": []})
            end = addr + size
        settings = self._model.settings
        return {
            "segments": segments,
            "device_traces": [[] for _ in range(self.device)] + [self._events()],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": settings.text, "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
                "garbage_collection_threshold": settings.garbage_collection_threshold, "expandable_segments": settings.expandable_segments,
                "release_lock_on_cudamalloc": settings.release_lock_on_cudamalloc, "graph_capture_record_stream_reuse": settings.graph_capture_record_stream_reuse,
                "roundup_power2_divisions": {str(1 << i): d for i, d in enumerate(settings.roundup_power2_divisions)},
            },
            "external_annotations": [],
        }  # fmt: skip

    def _events(self) -> list[dict[str, Any]]:
        rows = self._trace[: int(self._model.m[M.AT])].reshape(-1, M.WORDS) if len(self._trace) else np.zeros((0, M.WORDS), np.int64)
        out = []
        for i, (kind, addr, size, stream, _row, _source) in enumerate(rows.tolist()):
            place = {"device_free": max(0, addr)} if kind == M.OOM else {"addr": addr}
            out.append(
                {"action": _WORDS[kind]} | place | {"size": size, "stream": stream, "time_us": i, "compile_context": "N/A", "user_metadata": "", "frames": []}
            )
        return out

    # ------------------------------------------------------------------ the way into the rules
    def _call(self, kind: int, *, size: int = 0, stream: int = 0, block: int = 0, extra: int = 0) -> int:
        o, m = self._operation, self._model.m
        o[:] = (kind, 0, size, stream, 0, extra)
        self._row[0] = block
        m[M.NOW], m[M.STOP], m[M.NEXT_GIVEN] = 0, M.WORDS, 0
        m[M.GIVEN] = self._given[0] if self._given else 0
        if block:
            m[block + M.ROW] = 0
        self._calls += 1
        flushes = m[M.SYNCS]
        self._trace = self._model.run(self._trace, o, self._row, work=self._calls)
        m = self._model.m  # it may have grown
        if self._given and m[M.GIVEN] == 0:
            self._given.popleft()
        if m[M.SYNCS] != flushes:  # the flush waited for every stream
            self._queues.clear()
        return int(self._row[0])

    def _error(self, requested: int) -> OutOfMemoryError:
        from nbmemprof.units import format_bytes

        m = self._model.m
        torch = _optional.loaded("torch")
        base = getattr(torch, "OutOfMemoryError", None) if torch is not None else None
        rounded = requested if requested >= _UNSERVED else _nominal(self._model, requested)
        live, reserved = int(m[M.ALLOCATED_BYTES]), int(m[M.RESERVED_BYTES])
        text = f"CUDA out of memory. Tried to allocate {_mib(rounded)}. GPU {self.device} (modelled by nbmemprof, torch {self.torch})"
        if self.capacity_bytes is not None:
            text += f" has a total capacity of {_mib(self.capacity_bytes)} of which {_mib(max(0, self.capacity_bytes - reserved))} is free."
        else:
            text += " has no stated capacity."
        if self.limit_bytes is not None:
            text += f" {_mib(self.limit_bytes)} allowed;"
        text += f" Of the allocated memory {_mib(live)} is allocated by PyTorch, and {_mib(reserved - live)} is reserved by PyTorch but unallocated."
        if reserved - live >= rounded and not self._model.settings.expandable_segments:
            text += " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        return _oom_class(base)(f"{text} Nothing real was refused: {format_bytes(requested)} were asked of a model.")


def _nominal(model: Model, requested: int) -> int:
    from nbmemprof.allocator import _rules

    return int(_rules.segment_size(model.m.data, _rules.round_size(model.m.data, requested)))  # type: ignore[arg-type]


def _mib(size: int) -> str:
    """As torch prints sizes: two digits and the largest unit that leaves them above 1."""
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << scale:
            return f"{size / (1 << scale):.2f} {unit}"
    return f"{size} bytes"
