"""What a modelled device holds at a moment, as the capture's tables."""

from __future__ import annotations

from typing import Any

import polars as pl

from nbmemprof import schema

__all__ = ["picture"]


def picture(snapshot: dict[str, Any], number: int = 0) -> tuple[pl.DataFrame, pl.DataFrame]:
    """``segments`` and ``blocks`` of one ``Device.snapshot()``, by the schema."""
    segments, blocks = snapshot["segments"], [(s, b) for s in snapshot["segments"] for b in s["blocks"]]
    common: dict[str, Any] = {"device": 0, "kind": "device", "source": "torch", "snapshot_id": number, "pool_id": "0_0"}
    one = {
        "addr": pl.Series([s["address"] for s in segments], dtype=pl.UInt64), "size_bytes": [s["total_size"] for s in segments],
        "allocated_bytes": [s["allocated_size"] for s in segments], "active_bytes": [s["active_size"] for s in segments],
        "stream": [s["stream"] for s in segments], "pool": [s["segment_type"] for s in segments], "is_expandable": [s["is_expandable"] for s in segments],
    }  # fmt: skip
    other = {
        "segment_addr": pl.Series([s["address"] for s, _ in blocks], dtype=pl.UInt64), "addr": pl.Series([b["address"] for _, b in blocks], dtype=pl.UInt64),
        "size_bytes": [b["size"] for _, b in blocks], "requested_bytes": [None if b["state"] == "inactive" else b["requested_size"] for _, b in blocks],
        "state": [b["state"] for _, b in blocks], "stream": [s["stream"] for s, _ in blocks], "pool": [s["segment_type"] for s, _ in blocks],
    }  # fmt: skip
    return schema.fill("segments", common | one, len(segments)), schema.fill("blocks", common | other, len(blocks))
