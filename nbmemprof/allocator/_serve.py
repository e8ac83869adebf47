"""The requests of a recording served under other settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from nbmemprof import schema
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._infer import Followed
from nbmemprof.allocator._model import Model, Words
from nbmemprof.allocator.conf import Settings, native
from nbmemprof.allocator.versions import rules_of

__all__ = ["Requests", "Served", "serve"]


@dataclass
class Served:
    """A model at the end of a recording's requests; ``trace`` in rows of six words, empty where none was kept."""

    model: Model
    rows: Words
    trace: Words

    @property
    def tied(self) -> bool:
        """Whether another order of addresses could have changed the outcome."""
        m = self.model.m
        return bool(m[M.SEGMENTS_MADE] > 1 or m[M.AREAS_MADE] > m[M.LISTS_MADE])


class Requests:
    """What a recording asks: its allocs and frees, ``empty_cache()`` and dropped pools; made once, served many times.

    What was live before the first event is asked for at the beginning, in the order of addresses (a cold start). What was refused
    when it was recorded is asked again, and has a row of its own behind the others.
    """

    def __init__(self, followed: Followed) -> None:
        recording = followed.recording
        self.recording, self.followed = recording, followed
        cold = np.flatnonzero(recording.at_start)
        self.cold = cold[np.argsort(recording.rows["addr"].to_numpy()[cold], kind="stable")]
        self.pool_of_cold = [0] * len(self.cold)
        if len(self.cold) and len(recording.pool_names) > 1:
            names = recording.rows["pool_id"].cast(str).fill_null("0_0").to_list()
            self.pool_of_cold = [recording.pool_names.index(names[i]) if names[i] in recording.pool_names else 0 for i in self.cold.tolist()]
        self.refused = np.flatnonzero(recording.kind == M.OOM)
        self.height = recording.rows.height + len(self.refused)
        self._operations: dict[tuple[int, ...], Words] = {}

    def rows(self) -> pl.DataFrame:
        """Allocations as they were recorded, and a row for each request that was refused."""
        recording = self.recording
        if not len(self.refused):
            return recording.rows
        asked = recording.events[self.refused]
        shared = ("rank", "device", "kind", "source", "addr", "requested_bytes", "stream", "pool_id", "stack_id")
        columns: dict[str, Any] = {name: asked[name] for name in shared} | {"size_bytes": asked["requested_bytes"], "category": "unknown", "evidence": "none", "addr": 0, "at_start": False}
        return pl.concat([recording.rows, schema.fill("allocations", columns, asked.height).select(recording.rows.columns)])

    def bound(self, model: Model) -> tuple[Words, Words]:
        """Return the operations and moments for a model; the array is shared by models that were made alike."""
        recording = self.recording
        while len(model.pools) < len(recording.pool_names):
            model.add_pool()
        key = tuple(model.pools)
        if key not in self._operations:
            trace = recording.bind(model)
            if len(self.refused):
                trace = trace.copy()
                trace.reshape(-1, M.WORDS)[self.refused, M.T_ROW] = np.arange(self.height - len(self.refused), self.height)
            before = np.zeros((len(self.cold), M.WORDS), np.int64)
            before[:, M.T_SIZE] = recording.rows["requested_bytes"].to_numpy()[self.cold]
            before[:, M.T_STREAM] = recording.rows["stream"].fill_null(0).to_numpy()[self.cold]
            before[:, M.T_ROW] = self.cold
            before[:, M.T_POOL] = np.asarray(model.pools, np.int64)[self.pool_of_cold]
            self._operations[key] = np.concatenate([before.reshape(-1), trace]) if len(self.cold) else trace
        moments = self.followed.moments.copy()
        known = int(np.flatnonzero(moments[0::2] < 0)[0])
        moments[0 : 2 * known : 2] += M.WORDS * len(self.cold)
        ours = self.followed.model.pools
        for i in range(known):
            if moments[2 * i + 1]:
                moments[2 * i + 1] = model.pools[ours.index(int(moments[2 * i + 1]))]
        return self._operations[key], moments


def serve(
    requests: Requests, settings: Settings, *, torch: str | None, limit_bytes: int | None, capacity_bytes: int | None, policy: str | int = "ascending", keep: bool = False, runs: int = 1,
    edit: Callable[[Words], Words] | None = None,
) -> Served:  # fmt: skip
    """Run the requests; a refused one is skipped with its frees and counted.

    Parameters
    ----------
    keep
        Whether the events are written down.
    runs
        How many such runs there will be, which tells whether compiled code pays.
    edit
        Makes other operations of them, as many.
    """
    native(settings)
    recording = requests.recording
    card: Any = recording.capture.meta.get("capacity_bytes")
    card = card.get(str(recording.key[1])) if isinstance(card, dict) else card
    records = 1 << 12
    model = Model(settings, rules_of(torch), limit_bytes=limit_bytes, capacity_bytes=capacity_bytes, card_bytes=card, policy=policy, records=records)
    operations, moments = requests.bound(model)
    operations = operations if edit is None else edit(operations)
    rows = np.zeros(2 * max(requests.height, 1), np.int64)
    trace = np.zeros(len(operations) + (6 << 10) if keep else 0, np.int64)
    m = model.m
    m[M.MODE], m[M.END], m[M.STOP] = M.TELL if keep else M.MUTE, len(trace), len(operations)
    trace = model.run(trace, operations, rows, moments, work=runs * len(operations) // M.WORDS)
    return Served(model, rows, trace[: int(model.m[M.AT])])
