"""Why a request was refused."""

from __future__ import annotations

from typing import Any

import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._help import Help, settings_that_serve, site_to_free
from nbmemprof.analyses._lists import free_lists, nominal_bytes, pool_of, settings_of
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes

__all__ = ["explained", "oom"]

_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "device": pl.Int64, "rank": pl.Int64, "seq": pl.Int64, "time_us": pl.Float64, "requested_bytes": pl.Int64, "device_free_bytes": pl.Int64, "site": pl.String,
    "stack": pl.List(pl.String), "reason": pl.String, "would_help_bytes": pl.Int64, "free_bytes_in_list": pl.Int64, "largest_free_bytes": pl.Int64, "pending_bytes": pl.Int64,
    "private_free_bytes": pl.Int64, "reserved_bytes": pl.Int64, "live_bytes": pl.Int64, "free_blocks": pl.Int64, "ratio": pl.Float64,
    "releasable_bytes": pl.Int64, "fits_if_adjacent": pl.Boolean, "fits_if_all_freed": pl.Boolean, "free_site": pl.String, "free_site_bytes": pl.Int64, "setting": pl.String, "help": pl.String,
    "stack_id": pl.UInt32, "origin": pl.String,
}  # fmt: skip
_NOT_SEEN = "A real run that does not catch the error has ended at the first refusal."
_EXPLAINED = 100  # of more refusals, the first and the last fifty: each needs the heap as it was
_BLOCKS_LOOKED_AT = 200_000  # over all refusals; beyond it the nearest hole is not looked for


def oom(capture: Capture, replay: bool = False) -> pl.DataFrame:
    """Why was a request refused, and what would have let it through?

    The heap as it was at the refusal: what lay free in the list that serves the request, in which pieces, what waited for
    streams, what private pools held, how much the device had left.

    Parameters
    ----------
    capture
        Any capture with a trace.
    replay
        Whether to put the requests through the allocator's model under other settings, which takes a second or so: only where
        the model gives the recorded addresses, and for at most 300,000 events.

    Returns
    -------
    One row a refusal, in the order of events: ``device rank seq time_us``; ``requested_bytes`` (rounded); ``device_free_bytes``
    (null: not told); ``site`` and ``stack`` of the request (null: no frames); ``reason``, a sentence with the numbers;
    ``would_help_bytes``: the fewest live or pending bytes to give back that would have made room, as one piece beside a hole or as
    new memory from the device (null: can't be told, or nothing that torch holds would have been enough); ``free_bytes_in_list``, ``largest_free_bytes`` and ``pending_bytes`` of the
    list that serves it; ``private_free_bytes``: free in private pools, no use to it; ``reserved_bytes`` and ``live_bytes`` of the
    device; ``free_blocks`` pieces and ``ratio`` (1 − largest / free) of that list; ``releasable_bytes``: what ``empty_cache()`` would have
    given back then; ``fits_if_adjacent``: the pieces would do if they lay side by side; ``fits_if_all_freed``: false where the
    request is larger than the card, than torch's limit, or than all that torch held and the device had left (null: none of these is told); ``free_site`` and ``free_site_bytes``: the line
    that holds least of those whose blocks alone would have made room (null: none); ``setting``: that under which every request is
    served (null: not replayed, or none); ``help``: all that in a sentence; ``stack_id``; ``origin``. Of more than a hundred refusals the first and last fifty are explained; the others have null
    in what would need the heap at their time, and a ``reason`` that says so.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device(limit_bytes="1GiB")
    >>> kept = device.malloc("600MiB")
    >>> try:
    ...     more = device.malloc("500MiB")
    ... except mp.OutOfMemoryError:
    ...     pass
    >>> mp.oom(mp.load(device.snapshot())).select("requested_bytes", "live_bytes").rows()
    [(524288000, 629145600)]
    """
    refusals = capture.tables["events"].filter(pl.col("action") == "oom").sort("seq")
    rows = explained(capture, refusals, settings_that_serve(capture) if replay and refusals.height else {})
    needs = capture.meta.get("needs")
    if capture.meta.get("source") != "prediction" or not rows.height or (isinstance(needs, dict) and needs.get("raised")):
        return rows
    later = pl.int_range(pl.len()) > 0  # this prediction met no error and went on; a run doesn't
    return rows.with_columns(pl.when(later).then(pl.format("{} {}", pl.lit(_NOT_SEEN), "reason")).otherwise("reason").alias("reason"))


def explained(capture: Capture, refusals: pl.DataFrame, served: dict[int, tuple[str | None, str]]) -> pl.DataFrame:
    """Explain some refusals, rows of ``events``."""
    if refusals.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    marks = capture.tables["marks"].filter(pl.col("kind") == "oom").select("seq", "value").unique("seq", keep="first")
    sites = _sites(capture.tables["stacks"], refusals.get_column("stack_id"))
    budget = _BLOCKS_LOOKED_AT
    rows = []
    for place, event in enumerate(refusals.join(marks, on="seq", how="left", maintain_order="left").iter_rows(named=True)):
        explained = min(place, refusals.height - 1 - place) < _EXPLAINED // 2
        row, looked = (
            _explain(capture, event, budget)
            if explained
            else (_known(event) | {"reason": f"{format_bytes(event['requested_bytes'])} asked for: one of {refusals.height} refusals, not looked into."}, 0)
        )
        budget -= looked
        site, stack = sites.get(event["stack_id"], (None, None))
        if explained:
            row = _with_setting(row, served.get(event["seq"]))
        rows.append(row | {"site": site, "stack": stack, "stack_id": event["stack_id"], "origin": capture.meta["origin"]})
    return pl.DataFrame(rows, schema=_SCHEMA)


def _sites(stacks: pl.DataFrame, ids: pl.Series) -> dict[int, tuple[str, list[str]]]:
    mine = stacks.filter(pl.col("stack_id").is_in(ids.drop_nulls().unique().implode())).sort("stack_id", "depth")
    text = pl.format("{}:{} {}", pl.col("filename").fill_null("?"), pl.coalesce(pl.col("line").cast(pl.String), pl.lit("?")), pl.col("function").fill_null("?"))
    lines = dict(mine.group_by("stack_id", maintain_order=True).agg(text.alias("stack")).iter_rows())
    return {i: (site, lines[i]) for i, site in site_of_stacks(stacks).select("stack_id", "site").iter_rows() if i in lines}


def _known(event: dict[str, Any]) -> dict[str, Any]:
    free = event["value"]
    return {name: event[name] for name in ("device", "rank", "seq", "time_us", "requested_bytes")} | {"device_free_bytes": None if free is None else int(free)}


def _explain(capture: Capture, event: dict[str, Any], budget: int) -> tuple[dict[str, Any], int]:
    conf, _ = settings_of(capture)
    known = _known(event)
    asked, device_free = int(known["requested_bytes"] or 0), known["device_free_bytes"]
    mine = heap.matches((event["rank"], event["device"], event["kind"]))
    segments, blocks = heap.segments_at(capture, event["seq"]).filter(mine), heap.blocks_at(capture, event["seq"]).filter(mine)
    lists = free_lists(segments, blocks, conf)
    pool, pool_id = pool_of(asked), str(event["pool_id"] or "0_0")
    here = (
        (pl.col("pool").cast(pl.String) == pool).fill_null(value=True)
        & (pl.col("pool_id").cast(pl.String).fill_null("0_0") == pool_id)
        & pl.col("stream").eq_missing(pl.lit(event["stream"]))
    )
    own = lists.filter(here)
    others = lists.filter(~here & (~pl.col("private") | (pl.col("pool_id").cast(pl.String) == pool_id)))
    seen = known | {
        "requested_bytes": asked,
        "free_bytes_in_list": int(own["free_bytes"].sum()), "largest_free_bytes": int(own["largest_free_bytes"].max() or 0), "pending_bytes": int(own["pending_bytes"].sum()),  # type: ignore[arg-type]
        "private_free_bytes": int(lists.filter(pl.col("private") & (pl.col("pool_id").cast(pl.String) != pool_id))["free_bytes"].sum()),
        "reserved_bytes": int(lists["reserved_bytes"].sum()), "live_bytes": int(lists["allocated_bytes"].sum()),
    }  # fmt: skip
    nominal, limit = nominal_bytes(asked, conf), capture.meta.get("limit_bytes")
    room = [] if device_free is None else [device_free]
    if isinstance(limit, int):
        room.append(limit - seen["reserved_bytes"])
    inside = blocks.filter(here)
    holes = _nearest_hole(inside, asked) if inside.height <= budget else None
    ways = [w for w in (holes, nominal - min(room) if room else None) if w is not None and w > 0]
    bounds = _bounds(capture, seen, event["device"])
    broken = [bound for bound in bounds if nominal > bound[0]] if holes is None else []
    reason = _reason(seen, own, others, nominal, limit if isinstance(limit, int) else None)
    if broken:
        most, whose = broken[0]
        return seen | {
            "reason": f"{reason.removesuffix('.')}; {_larger(asked, most, whose)}.", "free_blocks": int(own["free_blocks"].sum()), "fits_if_adjacent": False, "fits_if_all_freed": False,
            "ratio": 1 - seen["largest_free_bytes"] / seen["free_bytes_in_list"] if seen["free_bytes_in_list"] else None,
            "releasable_bytes": int(lists.filter(~pl.col("private"))["releasable_bytes"].sum()),
            "help": f"Nothing that could be freed would help: the request is larger than {whose} ({format_bytes(most)}).",
        }, inside.height  # fmt: skip
    free, largest = seen["free_bytes_in_list"], seen["largest_free_bytes"]
    releasable = int(lists.filter(~pl.col("private"))["releasable_bytes"].sum())
    site = None
    if holes is not None or inside.height <= budget:
        site = site_to_free(inside, capture.tables["stacks"], asked, nominal - min(room) if room else None)
    helped = Help(asked, free, largest, seen["pending_bytes"], releasable, nominal - min(room) if room else None, site)
    return seen | {
        "reason": reason, "would_help_bytes": min(ways) if ways else None, "free_blocks": int(own["free_blocks"].sum()), "ratio": 1 - largest / free if free else None,
        "releasable_bytes": releasable, "fits_if_adjacent": free >= asked, "fits_if_all_freed": True if bounds else None, "free_site": site[0] if site else None, "free_site_bytes": site[1] if site else None,
        "help": helped.sentence(),
    }, inside.height  # fmt: skip


def _bounds(capture: Capture, seen: dict[str, Any], device: int | None) -> list[tuple[int, str]]:
    """How large a request can be once torch has given back all it holds, by all that bounds it."""
    bounds: list[tuple[int, str]] = []
    for name, whose in (("capacity_bytes", "the card"), ("limit_bytes", "the limit")):
        value = capture.meta.get(name)
        value = value.get(str(device)) if isinstance(value, dict) else value
        if isinstance(value, int):
            bounds.append((value, whose))
    if seen["device_free_bytes"] is not None:
        bounds.append((seen["device_free_bytes"] + seen["reserved_bytes"], "all that the device has for torch"))
    return bounds


def _larger(asked: int, most: int, whose: str) -> str:
    return f"{format_bytes(asked)} is more than {whose} ({format_bytes(most)}), and nothing that could be freed would help"


def _with_setting(row: dict[str, Any], served: tuple[str | None, str] | None) -> dict[str, Any]:
    if served is None:
        return row
    setting, words = served
    return row | {"setting": setting, "help": f"{row['help']} {words}"}


def _nearest_hole(blocks: pl.DataFrame, asked: int) -> int | None:
    """Fewest used bytes in a run of neighbouring blocks that is long enough."""
    best: int | None = None
    for _, part in blocks.sort("segment_addr", "addr").group_by("segment_addr", maintain_order=True):
        sizes = part["size_bytes"].to_list()
        if sum(sizes) < asked:
            continue
        used = [0 if state == "inactive" else size for size, state in zip(sizes, part["state"].to_list(), strict=True)]
        start = total = cost = 0
        for end, size in enumerate(sizes):
            total, cost = total + size, cost + used[end]
            while total - sizes[start] >= asked:
                total, cost, start = total - sizes[start], cost - used[start], start + 1
            if total >= asked and (best is None or cost < best):
                best = cost
    return best


def _reason(seen: dict[str, Any], own: pl.DataFrame, others: pl.DataFrame, nominal: int, limit: int | None) -> str:
    say = format_bytes
    asked, free, largest, left = seen["requested_bytes"], seen["free_bytes_in_list"], seen["largest_free_bytes"], seen["device_free_bytes"]
    parts = []
    if limit is not None and seen["reserved_bytes"] + nominal > limit and (left is None or left >= nominal):
        parts.append(f"the limit of {say(limit)} leaves {say(max(0, limit - seen['reserved_bytes']))} for new memory, {say(nominal)} would be needed")
    elif left is None:
        parts.append("no new memory could be had from the device")
    elif left >= nominal:
        parts.append(f"the device has {say(left)} left, so a limit below {say(seen['reserved_bytes'] + nominal)} must have refused it")
    else:
        parts.append(f"the device has {say(left)} left, {say(nominal)} would be needed")
    pieces = int(own["free_blocks"].sum())
    if free >= asked:
        parts.append(
            f"{say(free)} lie free in {pieces} {'piece' if pieces == 1 else 'pieces'}, the largest {say(largest)}: split by blocks in use between them"
            if largest < asked
            else f"a piece of {say(largest)} lies free and was not used"
        )
    elif free:
        parts.append(f"only {say(free)} lie free in the list that serves it, in {pieces} {'piece' if pieces == 1 else 'pieces'}")
    else:
        parts.append("nothing lies free in the list that serves it")
    if seen["private_free_bytes"]:
        parts.append(f"{say(seen['private_free_bytes'])} lie free in private pools, where this request may not go")
    if seen["pending_bytes"]:
        parts.append(f"{say(seen['pending_bytes'])} are freed but still wait for other streams")
    elsewhere = int(others["free_bytes"].sum())
    if elsewhere >= asked:
        parts.append(f"{say(elsewhere)} lie free in lists of other streams or sizes")
    if free < asked and seen["reserved_bytes"] and seen["live_bytes"] >= 0.97 * seen["reserved_bytes"]:
        parts.append(f"{say(seen['live_bytes'])} of {say(seen['reserved_bytes'])} reserved are in use: it is truly full")
    return f"{say(asked)} asked for: " + "; ".join(parts) + "."
