"""What in the counted kernels deserves attention, and what would mending it win?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from nbmemprof.analyses._kernel_rules import CONSEQUENCES, RULES, Said, short
from nbmemprof.analyses._kernel_time import predicted_us
from nbmemprof.analyses.kernel_lines import kernel_lines
from nbmemprof.analyses.kernels import alike, kernels
from nbmemprof.capture import Capture
from nbmemprof.units import format_time_us

__all__ = ["kernel_findings"]

_SCHEMA: dict[str, Any] = {
    "device": pl.Int64, "kernel_id": pl.Int64, "name": pl.String, "site": pl.String, "line": pl.Int64, "launches": pl.Int64, "rule": pl.String, "finding": pl.String,
    "action": pl.String, "duration_us": pl.Float64, "predicted_us": pl.Float64, "saving_us": pl.Float64, "origin": pl.String,
}  # fmt: skip
_SMALL = 0.01  # share of all kernels' time below which a kernel is left out


def kernel_findings(capture: Capture) -> pl.DataFrame:
    """What in the counted kernels deserves attention, and what would mending it win?

    Launches of one kernel with the same grid and pattern from the same line are one finding. Kernels that took less than 1 % of the time are left out.

    Returns
    -------
    A row a finding, by ``saving_us`` descending: ``device``, ``kernel_id`` (of the first such launch), ``name``, ``site`` that launched it, ``line`` of the
    kernel's own source (null: not known), ``launches``, ``rule`` (its name), ``finding`` and ``action`` as sentences, ``duration_us`` of all such launches,
    ``predicted_us`` what they would take with everything that is found in this kernel mended, ``saving_us`` their difference (null: the card's
    ceilings are not known, or nothing can be said), ``origin``: ``predicted`` where there is a saving, else that of the capture.
    """
    ceilings = capture.meta.get("ceilings") or {}
    frame, lines = kernels(capture), kernel_lines(capture)
    total = float(frame["duration_us"].sum() or 0.0)
    rows: list[dict[str, Any]] = []
    for group in alike(frame).partition_by("alike", maintain_order=True) if frame.height else []:
        row, took = group.row(0, named=True), float(group["duration_us"].sum() or 0.0)
        if took >= _SMALL * total:
            said = [one for rule in RULES for one in rule(row, lines.filter(pl.col("kernel_id") == row["kernel_id"]))]
            if any(one.fault for one in said):  # then how near the ceiling it is, and that it waits, follow from that
                said = [one for one in said if one.rule not in CONSEQUENCES]
            rows += [_row(one, row, group.height, took, str(capture.meta["origin"])) | _gain(said, one, row, took, ceilings) for one in said]
    for row in rows:
        row["action"] += row.pop("words", "")
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row").sort("saving_us", descending=True, nulls_last=True, maintain_order=True)


def _row(one: Said, row: Mapping[str, Any], launches: int, took: float, origin: str) -> dict[str, Any]:
    where = f" line {one.line}" if one.line is not None else f" ({row['site']})" if row["site"] else ""
    name = short(row["name"]) or f"kernel {row['kernel_id']}"
    return {
        "device": row["device"], "kernel_id": row["kernel_id"], "name": row["name"], "site": row["site"], "line": one.line, "launches": launches, "rule": one.rule,
        "finding": f"{name}{where}: {one.finding}.", "action": one.action, "duration_us": took, "predicted_us": None, "saving_us": None, "origin": origin,
    }  # fmt: skip


def _gain(said: list[Said], one: Said, row: Mapping[str, Any], took: float, ceilings: Mapping[str, Any]) -> dict[str, Any]:
    """Time with every fault of this kernel mended, and the words for it."""
    faults = {each.fault for each in said if each.fault}
    then_us = predicted_us(row, faults, ceilings) if one.fault else None
    if then_us is None:
        return {}
    then = took * then_us / row["duration_us"]
    mended = "Mended" if len(faults) == 1 else "With all that is found in it mended"
    words = f" {mended}, about {format_time_us(then)} in place of {format_time_us(took)} (predicted from such a card's measured ceilings)."
    if then >= 0.97 * took:
        words = f" {mended}, it would take about as long: something else holds it back (predicted)."
    return {"predicted_us": then, "saving_us": took - then, "origin": "predicted", "words": words}
