"""A modelled device: settings written into its header, growth, statistics, and the way into the rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator import _run
from nbmemprof.allocator._link import worth
from nbmemprof.allocator.conf import Settings
from nbmemprof.allocator.versions import Rules

__all__ = ["Model", "NOTHING", "SCALARS", "STATISTICS"]

Words = npt.NDArray[np.int64]
NOTHING: Words = np.full(2, -1, np.int64)
_POLICIES = {"ascending": M.ASCENDING, "descending": M.DESCENDING, "windows": M.WINDOWS}
_BASE = 0x700000000000
_CARD = 141 << 30  # an unknown card is taken to be an H200: its size only sets the reach of expandable segments


def _slot(name: tuple[int, int]) -> int:
    """Where a pool stands in torch's tables of pools (``ska::flat_hash_map``, Fibonacci hashing of the id's part that is not 0)."""
    return ((name[0] or name[1]) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


STATISTICS = {
    "allocation": M.ALLOCATION, "segment": M.SEGMENT, "active": M.ACTIVE, "inactive_split": M.INACTIVE_SPLIT, "allocated_bytes": M.ALLOCATED_BYTES,
    "reserved_bytes": M.RESERVED_BYTES, "active_bytes": M.ACTIVE_BYTES, "inactive_split_bytes": M.INACTIVE_SPLIT_BYTES, "requested_bytes": M.REQUESTED_BYTES,
}  # fmt: skip
SCALARS = {
    "num_alloc_retries": M.RETRIES, "num_ooms": M.OOMS, "num_sync_all_streams": M.SYNCS, "num_device_alloc": M.DEVICE_ALLOC, "num_device_free": M.DEVICE_FREE,
}  # fmt: skip


class Model:
    """The memory ``m`` of one device, and what is done with it.

    Parameters
    ----------
    settings, rules
        Configuration and torch version.
    limit_bytes
        torch's own memory limit; None for none.
    capacity_bytes
        What the driver can give; None for as much as is asked.
    policy
        Where new segments lie: ``ascending``, ``descending``, ``windows`` (as the driver of an H200 was seen to do), or a number, the seed of a random order.
    """

    def __init__(
        self,
        settings: Settings,
        rules: Rules,
        *,
        limit_bytes: int | None = None,
        capacity_bytes: int | None = None,
        card_bytes: int | None = None,
        policy: str | int = "ascending",
        records: int = 1 << 12,
    ) -> None:
        self.settings, self.rules = settings, rules
        self.m: Words = np.zeros(M.HEAD + records * M.RECORD, np.int64)
        m = self.m
        m[M.TOP], m[M.ROOM], m[M.SEED] = M.HEAD, len(m), 12345
        m[M.CAPACITY] = M.NO_LIMIT if capacity_bytes is None else capacity_bytes
        self.configure(settings, limit_bytes, card_bytes or capacity_bytes)
        self.set_policy(policy)
        self.pools: list[int] = []
        self._chain: list[tuple[int, int]] = []  # private pools: place in the table, record
        default = self.add_pool()
        m = self.m
        m[M.DEFAULT_SMALL], m[M.DEFAULT_LARGE] = m[default + M.POOL_SMALL], m[default + M.POOL_LARGE]
        m[M.POOLS] = 0  # the chain has private pools only
        self.default = default

    def configure(self, settings: Settings, limit_bytes: int | None, card_bytes: int | None) -> None:
        """Write the settings into the header."""
        m = self.m
        self.settings, self.limit_bytes = settings, limit_bytes
        m[M.EXPANDABLE] = settings.expandable_segments
        m[M.MAX_SPLIT] = M.NO_LIMIT if settings.max_split_size is None else min(settings.max_split_size, M.NO_LIMIT)
        m[M.NON_SPLIT], m[M.LARGE] = min(settings.max_non_split_rounding, 1 << 60), settings.large_segment_size
        m[M.LIMIT] = M.NO_LIMIT if limit_bytes is None else limit_bytes
        armed = settings.garbage_collection_threshold > 0 and limit_bytes is not None  # up to 2.8 a fraction of 1.0 is a limit too
        m[M.GC_ON] = armed
        m[M.GC_LIMIT] = int(settings.garbage_collection_threshold * float(limit_bytes)) if armed and limit_bytes is not None else 0
        card = card_bytes or _CARD
        reserve = settings.expandable_reserve
        m[M.VIRTUAL] = card * 9 // 8 if reserve is None else min(card * 9 // 8, int(reserve * card) if isinstance(reserve, float) else reserve)
        m[M.ROUTED_QUIET] = self.rules.routed_quiet
        m[M.REJECT] = settings.throw_on_cudamalloc_oom and limit_bytes is not None
        m[M.DIVISIONS : M.DIVISIONS + 16] = settings.roundup_power2_divisions

    def set_policy(self, policy: str | int) -> None:
        m = self.m
        if isinstance(policy, str):
            m[M.POLICY], m[M.NEXT_ADDR] = _POLICIES[policy], _BASE
        else:
            m[M.POLICY], m[M.NEXT_ADDR] = M.RANDOM, (policy * 7919 + 1) & 0x7FFFFF

    def add_pool(self, name: tuple[int, int] | None = None, *, no_split: bool = False, custom: bool = False, on_oom: bool = False) -> int:
        """Make a pool: its record. Private pools stand in the chain in the order of torch's hash table, those without a name as they were made."""
        pool = self._record(M.IS_POOL)
        halves = [self._record(M.IS_HALF) for _ in range(2)]
        m = self.m
        for half, small in zip(halves, (1, 0), strict=True):
            m[half + M.HALF_POOL], m[half + M.HALF_SMALL], m[half + M.HALF_FIRST], m[half + M.HALF_SEARCHES] = pool, small, 0, 0
        m[pool + M.POOL_SMALL], m[pool + M.POOL_LARGE], m[pool + M.POOL_NEXT] = halves[0], halves[1], 0
        m[pool + M.POOL_NO_SPLIT], m[pool + M.POOL_CUSTOM], m[pool + M.POOL_ON_OOM] = no_split, custom, on_oom and self.rules.use_on_oom
        m[pool + M.POOL_FREEABLE], m[pool + M.POOL_NUMBER] = 0, len(self.pools)
        self.pools.append(pool)
        if len(self.pools) > 1:
            self._chain.append((_slot(name) if name else len(self.pools), pool))
            self._chain.sort()
            for at, following in zip(self._chain, [*self._chain[1:], (0, 0)], strict=True):
                m[at[1] + M.POOL_NEXT] = following[1]
            m[M.POOLS] = self._chain[0][1]
        return pool

    def _record(self, state: int) -> int:
        if self.m[M.TOP] + 2 * M.RECORD > len(self.m):
            self._grow()
        at = int(self.m[M.TOP])
        self.m[M.TOP] += M.RECORD
        self.m[at + M.STATE] = state
        return at

    def _grow(self) -> None:
        self.m = np.concatenate([self.m, np.zeros(len(self.m), np.int64)])
        self.m[M.ROOM] = len(self.m)

    # ------------------------------------------------------------------ running
    def run(self, trace: Words, operations: Words, rows: Words, moments: Words = NOTHING, *, work: int) -> Words:
        """Run to the end; returns the trace, which may have grown. ``work``: about how many events this and its like will be."""
        fast = worth(_run.run, work)
        while True:
            if fast is not None:
                code = fast(self.m, trace, operations, rows, moments)
            else:
                views: list[Any] = [a.data for a in (self.m, trace, operations, rows, moments)]
                code = _run.run(*views)
            if code == _run.DONE:
                return trace
            if code == _run.MORE_ROOM:
                self._grow()
            else:
                trace = np.concatenate([trace, np.zeros(max(len(trace), 6 << 10), np.int64)])
                self.m[M.END] = len(trace)

    # ------------------------------------------------------------------ reading
    def stats(self) -> dict[str, int]:
        """Return the counters of ``torch.cuda.memory_stats()``, under its names."""
        m, out = self.m, {}
        for name, at in STATISTICS.items():
            for kind, offset in (("all", 0), ("small_pool", 4), ("large_pool", 8)):
                for i, metric in enumerate(("current", "peak", "allocated", "freed")):
                    out[f"{name}.{kind}.{metric}"] = int(m[at + offset + i])
        for name, at in (("oversize_allocations", M.OVERSIZE_ALLOCATIONS), ("oversize_segments", M.OVERSIZE_SEGMENTS)):
            for i, metric in enumerate(("current", "peak", "allocated", "freed")):
                out[f"{name}.{metric}"] = int(m[at + i])
        for name, at in SCALARS.items():
            out[name] = int(m[at])
        if "throw_on_cudamalloc_oom" in self.rules.keys:
            out["num_oom_rejections"] = int(m[M.REJECTIONS])
        out["max_split_size"] = -1 if self.settings.max_split_size is None else self.settings.max_split_size
        return dict(sorted(out.items()))

    def records(self) -> npt.NDArray[np.int64]:
        """All records, a row each; the row number is (offset - HEAD) / RECORD."""
        return self.m[M.HEAD : int(self.m[M.TOP])].reshape(-1, M.RECORD)

    def blocks(self) -> dict[str, Any]:
        """Blocks in use, free, pending and unmapped, by address: columns ``addr size requested state row stream pool small area``."""
        table = self.records()
        table = table[table[:, M.STATE] < M.GONE]
        table = table[np.argsort(table[:, M.ADDR], kind="stable")]
        m = self.m
        half = m[table[:, M.LIST] + M.LIST_HALF]
        return {
            "addr": table[:, M.ADDR], "size": table[:, M.SIZE], "requested": table[:, M.REQUESTED], "state": table[:, M.STATE], "row": table[:, M.ROW],
            "stream": m[table[:, M.LIST] + M.LIST_STREAM], "pool": m[m[half + M.HALF_POOL] + M.POOL_NUMBER], "small": m[half + M.HALF_SMALL],
            "area": table[:, M.AREA], "first": table[:, M.PREV] == 0,
        }  # fmt: skip
