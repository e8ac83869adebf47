"""A training step on the CPU, recorded as CUDA's allocator would: every event with the note that its thread carried."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import polars as pl

from nbmemprof import heap, schema
from nbmemprof.capture import Capture
from nbmemprof.sources import _cpu_trace as tr
from nbmemprof.sources import _placing
from nbmemprof.sources._observer import Observer


class CudaLike:
    """``with CudaLike() as run: ...``; ``run.capture`` afterwards. ``notes=False``: a torch whose threads carry none."""

    def __init__(self, *, notes: bool = True, everywhere: bool = True) -> None:
        self.notes, self.everywhere = notes, everywhere
        self.said: list[tuple[int, int, str]] = []
        self.capture = Capture.build({})

    def note(self, text: str) -> None:
        self.said.append((time.perf_counter_ns(), threading.get_ident(), text))

    def __enter__(self) -> Self:
        import torch

        self.begin = tr.tracker.acquire("python", 1 << 28)
        self.slots: dict[int, int] = {threading.get_ident(): self._slot()}
        self.begin = tr.tracker.mark()
        self.observer = Observer(torch, "cpu", self.note if self.notes else None, time.perf_counter_ns)
        self.observer.open()
        return self

    def _slot(self) -> int:
        """Which of the recorder's slots is this thread's."""
        import torch

        before = tr.tracker.mark().position
        torch.empty(1003)
        rows = tr.tracker.rows()
        mine = rows[(rows["index"] >= before) & (rows["size"] == 4012)]
        return int(mine["tag"][0] >> np.uint64(48))

    def __exit__(self, *_: object) -> None:
        try:
            self.observer.look(everywhere=self.everywhere)
            self.log = _placing.Log.of(self.observer)
        finally:
            self.observer.close()
            rows = tr.tracker.rows()
            tr.tracker.release()
        self.capture = self._capture(rows)

    def _capture(self, rows: Any) -> Capture:
        partner = tr.match(rows)
        keep = (rows["index"] >= self.begin.position) & (rows["addr"] > 0) & ((rows["size"] > 0) | (partner >= 0))
        size = np.where(rows["size"] > 0, rows["size"], rows["size"][np.maximum(partner, 0)])
        rows, size, made = rows[keep], size[keep], rows["size"][keep] > 0
        seq = pl.Series(np.arange(len(rows)) * 2)
        self.thread = rows["tag"] >> np.uint64(48)
        note = pl.Series(self._notes(rows), dtype=pl.String)
        empty = pl.Series([None] * len(seq), dtype=pl.String)
        told = pl.DataFrame({"seq": seq, "clock_us": rows["time"] / 1e3, "note": note if self.notes else empty, "stack_id": empty, "action": empty})
        placed = _placing.place(self.log, told, notes=self.notes)
        self.placed = placed
        count = np.where(made, 1, 2)
        at = np.repeat(np.arange(len(rows)), count)
        first = np.cumsum(count) - count
        number = seq.to_numpy()[at] + np.where(np.arange(len(at)) == first[at], 0, 1)
        action = np.where(made[at], "alloc", np.where(np.arange(len(at)) == first[at], "free_requested", "free_completed"))
        columns = {"kind": "host", "source": "torch", "seq": number, "time_us": (rows["time"][at] - self.begin.time) / 1e3, "action": pl.Series(action.tolist()), "addr": rows["addr"][at], "requested_bytes": size[at], "pool_id": "0_0"}
        touched = set(rows["addr"].tolist())
        old = {a: s for a, (s, _) in tr.tracker.known.items() if a not in touched}
        newest = len(rows) - 1 - np.unique(rows["addr"][::-1], return_index=True)[1]
        old |= {int(rows["addr"][i]): int(size[i]) for i in newest if made[i]}
        blocks = {"kind": "host", "source": "torch", "snapshot_id": 0, "state": "active_allocated", "pool_id": "0_0", "addr": pl.Series(list(old), dtype=pl.UInt64), "size_bytes": list(old.values()), "requested_bytes": list(old.values())}
        tables = {"events": schema.fill("events", columns, len(at)), "contexts": _placing.contexts(self.log, placed), "owners": _placing.owners(self.log, placed, "host")}
        if old:
            tables["blocks"] = schema.fill("blocks", blocks, len(old))
        return heap.build(tables, source="torch_cpu", origin="measured")

    def _notes(self, rows: Any) -> list[str | None]:
        threads = {slot: ident for ident, slot in self.slots.items()}
        said: dict[int, tuple[list[int], list[str]]] = {}
        for when, ident, text in self.said:
            said.setdefault(ident, ([], []))[0].append(when)
            said[ident][1].append(text)
        found: list[str | None] = []
        for slot, when in zip(self.thread.tolist(), rows["time"].tolist(), strict=True):
            times, texts = said.get(threads.get(slot, -1), ([], []))
            at = int(np.searchsorted(times, when, side="right")) - 1
            found.append(texts[at] or None if at >= 0 else None)
        return found


def saved_bytes(forward: Callable[[], Any], parameters: list[Any]) -> int:
    """Bytes of the storages that autograd saves in a forward, the parameters' own left out."""
    import torch

    own = {p.untyped_storage().data_ptr() for p in parameters}
    seen: dict[int, int] = {}
    held = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            held.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = forward()
    del result
    return sum(seen.values())


def live_before_backward(capture: Capture, step: int = 0) -> pl.DataFrame:
    """Allocations that are live when the backward of a step begins."""
    contexts = capture.tables["contexts"].filter((pl.col("phase").cast(pl.String) == "backward") & (pl.col("step").fill_null(0) == step))
    first = contexts["seq"].min()
    rows = capture.allocations
    return rows.filter((pl.col("alloc_seq").is_null() | (pl.col("alloc_seq") < first)) & (pl.col("free_seq").is_null() | (pl.col("free_seq") >= first)))
