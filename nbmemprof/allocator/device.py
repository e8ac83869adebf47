"""A CUDA device without the device: PyTorch's caching allocator, call by call."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator import _refusal, _snapshot
from nbmemprof.allocator._model import Model
from nbmemprof.allocator.conf import Settings, native, parse
from nbmemprof.allocator.versions import DEFAULT, rules_of
from nbmemprof.errors import NbmemprofError, OutOfMemoryError
from nbmemprof.units import parse_bytes

__all__ = ["Device", "StreamCaptureError"]

PoolId = tuple[int, int]


class StreamCaptureError(NbmemprofError, RuntimeError):
    """What torch raises where the driver refuses a call because a stream is being captured."""


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

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> address = device.malloc("3MiB")
    >>> device.stats()["allocated_bytes.all.current"], device.stats()["reserved_bytes.all.current"]
    (3145728, 20971520)
    >>> device.free(address)
    >>> device.empty_cache()
    >>> device.stats()["reserved_bytes.all.current"]
    0
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
        settings = native(conf if isinstance(conf, Settings) else parse(conf, torch))
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

        Parameters
        ----------
        size
            Bytes, or text such as ``"8MiB"``.
        stream
            The stream that asks: a block is given again to the same stream only.
        pool
            A pool of :meth:`mem_pool` or :meth:`graph_pool`; None: the one that requests are routed to now.

        Raises
        ------
        NbmemprofError
            For a negative size, or a pool that is not of this device.
        OutOfMemoryError
            There is no room; a ``torch.OutOfMemoryError`` too where torch is loaded.
        """
        requested = size if isinstance(size, int) else parse_bytes(size)
        if requested < 0:
            raise NbmemprofError(f"{requested} bytes can't be asked for. Give zero or more.")
        if requested == 0:
            return 0
        if requested >= _refusal.UNSERVED:
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
        """Give an address back; where other streams used it, it stays until they are done.

        Raises
        ------
        NbmemprofError
            Nothing is allocated at ``addr``.
        """
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
            raise NbmemprofError(f"Nothing is allocated at {addr:#x}. It was freed before, or never given out: free what malloc() returned, once.")
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
        """Make a ``torch.cuda.MemPool``.

        Parameters
        ----------
        use_on_oom
            Others may have its free memory where they would be refused.
        no_split
            Its blocks are not split.
        custom
            It has an allocator of its own, which is never expandable.
        """
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
        """Change the settings at run time, as ``torch.cuda.memory._set_allocator_settings`` does; ``conf`` is ``key:value`` joined by commas.

        Raises
        ------
        ConfError
            Where torch would raise.
        """
        self._model.configure(parse(conf, self.torch, self._model.settings), self.limit_bytes, self.capacity_bytes)

    def set_limit(self, limit_bytes: int | str | None) -> None:
        """Set torch's own memory limit to ``limit_bytes``, which may be text such as ``"8GiB"``; None removes it."""
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
        trace = self._trace[: int(self._model.m[M.AT])] if len(self._trace) else self._trace
        return _snapshot.snapshot(self._model, trace, list(self._pools), self.device)

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
        return _refusal.out_of_memory(self._model, requested, device=self.device, torch=self.torch, capacity_bytes=self.capacity_bytes)
