"""Two runs side by side, as text: what got worse, and by how much."""

from __future__ import annotations

from typing import Any

import polars as pl

from nbmemprof.analyses.diff import diff, on_one_place
from nbmemprof.analyses.summary import summary
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes, format_count
from nbmemprof.views.text import aligned, cell

__all__ = ["report", "sentence", "totals"]

_MEASURES = {"peak_allocated_bytes": "peak", "end_allocated_bytes": "at the end", "peak_reserved_bytes": "peak reserved"}


def totals(a: Capture, b: Capture) -> pl.DataFrame:
    """How did the whole of each device change?

    Returns
    -------
    A row a device and measure (``peak``, ``at the end``, ``peak reserved``; of a watch, its gauges): ``device rank kind measure a_bytes b_bytes change_bytes
    change_share``; a measure that either run lacks is left out. One device each is compared, be it another.
    """
    keys = ["device", "rank", "kind", "measure"]
    sides = [rows.rename({"bytes": f"{side}_bytes"}) for side, rows in zip("ab", on_one_place(_measures(a), _measures(b)), strict=True)]
    joined = sides[0].join(sides[1], on=keys, how="inner", nulls_equal=True, maintain_order="left")
    change = pl.col("b_bytes") - pl.col("a_bytes")
    return joined.with_columns(change_bytes=change, change_share=pl.when(pl.col("a_bytes") > 0).then(change / pl.col("a_bytes")))


def _measures(capture: Capture) -> pl.DataFrame:
    columns = {"device": pl.Int64, "rank": pl.Int64, "kind": pl.String, "measure": pl.String, "bytes": pl.Int64}
    rows = [
        (row["device"], row["rank"], str(row["kind"]), word, row[name]) for row in summary(capture).iter_rows(named=True) for name, word in _MEASURES.items() if row[name] is not None
    ]
    samples = capture.tables["samples"]
    if not rows or capture.meta.get("source") == "watch":
        kept = samples.filter(pl.col("gauge").cast(pl.String).is_in(["rss_bytes", "allocated_bytes", "reserved_bytes"]))
        made = kept.group_by("device", "rank", "kind", "gauge", maintain_order=True).agg(peak=pl.col("value").max(), end=pl.col("value").sort_by("time_us").last())
        rows = [
            (d, r, str(k), {"peak": "peak", "end": "at the end"}[what] + {"rss_bytes": "", "allocated_bytes": ""}.get(str(g), " reserved"), int(v))
            for d, r, k, g, *values in made.iter_rows()
            for what, v in zip(("peak", "end"), values, strict=True)
            if v is not None
        ]
    return pl.DataFrame(rows, schema=columns, orient="row")


def report(a: Capture, b: Capture, *, by: str = "site", at: str | float = "peak", top: int = 20) -> str:
    """Totals, then what changed, the worst first."""
    whole, changes = totals(a, b), diff(a, b, by, at=at)
    places = [_places(capture) for capture in (a, b)]
    lines = [f"before: {places[0]}; after: {places[1]}"] if places[0] != places[1] and all(places) else []
    nothing = "no device is in both runs" if lines else f"{'neither run tells' if not any(places) else 'one of the runs does not tell'} of its peak or its end"
    lines += [sentence(row) for row in whole.iter_rows(named=True)] or [nothing]
    if changes.is_empty():
        return "\n".join([*lines, f"nothing changed by {by}."])
    many = changes.select(pl.col("device").n_unique() > 1).item()
    shown = changes.head(top)
    head = [*(["device"] if many else []), by, "before", "after", "change", "", "blocks", "what"]
    rows = [_row(row, by, many) for row in shown.iter_rows(named=True)]
    cut = f" ({top} of {format_count(changes.height)})" if changes.height > top else ""
    moment = {"peak": "at the peak", "end": "at the end"}.get(str(at), f"at {at} µs")
    return "\n".join([*lines, "", f"Changes by {by}, {moment}{cut}", *aligned(head, rows)])


def _places(capture: Capture) -> str:
    """Devices of which a run tells: ``GPU 0, GPU 1``, or ``host memory``."""
    devices = _measures(capture)["device"].unique().sort().to_list()
    return ", ".join("host memory" if device is None else f"GPU {device}" for device in devices)


def sentence(row: dict[str, Any]) -> str:
    """One row of :func:`totals` in words."""
    where = f"GPU {row['device']} " if row["device"] is not None else ""
    change, share = row["change_bytes"], row["change_share"]
    how = "unchanged" if not change else f"{'+' if change > 0 else ''}{format_bytes(change)}" + (f" ({share:+.1%})" if share is not None else "")
    return f"{where}{row['measure']}: {format_bytes(row['a_bytes'])} → {format_bytes(row['b_bytes'])}, {how}"


def _row(row: dict[str, Any], by: str, many: bool) -> list[str]:
    change, share = row["change_bytes"], row["change_share"]
    words = [str(row["device"])] if many else []
    name = cell("site" if by == "site" else by, row[by]) + (f" (was {row['a_site']})" if row.get("a_site") else "")
    return [
        *words, name, format_bytes(row["a_bytes"], 2), format_bytes(row["b_bytes"], 2), f"{'+' if change > 0 else ''}{format_bytes(change, 2)}",
        "–" if share is None else f"{share:+.1%}", f"{row['a_count']} → {row['b_count']}", str(row["verdict"]),
    ]  # fmt: skip
