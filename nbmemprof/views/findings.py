"""Sentences about a capture, each with its number and the next step, the most urgent first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes, format_count, format_time_us
from nbmemprof.views import replayed
from nbmemprof.views._facts import Device, Facts, facts
from nbmemprof.views._fits import caches
from nbmemprof.views.svg import middle

__all__ = ["findings", "sentences"]

_EACH = 3  # sentences of one sort
_ALL = 12
_LONG = 600  # characters of a sentence
_LOUD_GAP = 0.25  # reserved this much above allocated is worth a sentence
_MIN_GAP = 64 << 20
_MANY = 4  # times as much; above it no percentage is said
_MIN_LEAK = 1 << 20
_ROOMY = 0.5  # of the capacity or limit: below it no request is refused
_NEAR = 0.9  # of the capacity or limit
_COSTLY = 0.05  # share of the cell's time that recording, or the allocator's device calls, took
_LONG_STALL_US = 10_000
_ADVICE = 2  # sentences of what the rules prove
_OUTSIDE = ("cupy_pool", "unexplained", "pinned")  # rules that look past torch
_ANYWHERE = ("one_checkpoint", "checkpoint", "first_step")  # rules that hold for host memory too


def findings(capture: Capture) -> list[str]:
    """Say what deserves attention in a capture."""
    return sentences(facts(capture))


def sentences(known: Facts, limit: int | None = _ALL) -> list[str]:
    """Return the sentences of facts that were gathered already, ``limit`` of them at most."""
    said: list[str] = []
    if known.is_quiet:  # torch's allocator did nothing; another pool may have, and the driver's number tells it
        told = [_at(device, s) for device in known.devices for s in _proven(known, device, _OUTSIDE)] if known.moves_outside else []
        return [middle(w, _LONG) for w in [*told, *_warnings(known)]]
    for name in () if known.is_empty else ("leaks", "oom", "fragmentation"):  # the tables need them too; if one fails, it is said here
        known.ask(name)
    for rule in (_ooms, _leaks, _kept, _near_limit, _gap, _retries, _proven, caches, _top_site):
        for device in known.devices:
            said += [_at(device, s) for s in rule(known, device)]
    for general in (_traceback, _replaced, _dropped, _warnings, _unrecorded, _assumed, _cost, _silent):
        said += general(known)
    said += known.notes
    whole = [middle(s, _LONG) for s in dict.fromkeys(said)]
    return whole if limit is None or len(whole) <= limit else [*whole[:limit], f"{limit} of {len(whole)} findings are shown; cap.to_html(path) has them all."]


def _at(device: Device, sentence: str) -> str:
    return f"{device.label}: {sentence}" if device.label else sentence


def _some(frame: pl.DataFrame, what: str) -> Iterator[tuple[dict[str, Any], str]]:
    """First rows, the last of them with "N of M" where more were found."""
    for i, row in enumerate(frame.head(_EACH).iter_rows(named=True)):
        cut = f" ({_EACH} of {frame.height} {what} are listed.)" if i == _EACH - 1 and frame.height > _EACH else ""
        yield row, cut


def _ooms(known: Facts, device: Device) -> list[str]:
    if not device.row.get("ooms"):
        return []
    frame = known.of(known.ask("oom"), device)
    said, goes_on = [], known.meta.get("source") == "prediction" and not (known.meta.get("needs") or {}).get("raised")
    further = f" {format_count(frame.height - 1)} more {'was' if frame.height == 2 else 'were'} refused in the prediction, which goes on; a real run ends at the first." if goes_on and frame.height > 1 else ""
    frame = frame.head(1) if goes_on else frame
    for row, cut in _some(frame, "out-of-memory errors"):
        where = f" at {middle(row['site'])}" if row.get("site") else ""
        text = f"Out of memory{where}: {row.get('reason') or format_bytes(row.get('requested_bytes')) + ' asked for.'}"
        helps = row.get("would_help_bytes")
        if row.get("fits_if_all_freed") is False:  # what held most does not matter then
            said.append(f"{text} Ask for less at once, or use a larger card or limit.{cut}{further}")
            continue
        text += f" Giving back {format_bytes(helps)} would have made room" if helps else " A smaller batch or activation checkpointing asks for less"
        named = device.sites.height and device.sites["site"].drop_nulls().len()
        said.append(f"{text}{'; the lines that held most are in the tables' if named else '' if text.endswith('.') else '; what held most is in the tables' if device.breakdown.height else ''}.{cut}{further}")
    return said or [
        "Out of memory" + (f", {device.row['ooms']} times" if device.row["ooms"] > 1 else "") + ". A smaller batch or activation checkpointing asks for less."
    ]


def _leaks(known: Facts, device: Device) -> list[str]:
    said = []
    frame = known.of(known.ask("leaks"), device)
    if frame.height:  # a few bytes a step are in the table, not worth a sentence
        # one sentence a line: the stacks that reach it, each a row of its own in the table, are added up
        frame = frame.group_by("site", maintain_order=True).agg(pl.col("leak_bytes", "leak_count", "bytes_per_iteration").sum()).sort("leak_bytes", descending=True, maintain_order=True)
        frame = frame.filter(pl.col("leak_bytes") >= min(_MIN_LEAK, device.peak // 1000))
    nameless = "an unrecorded line" if known.capture.tables["stacks"].height else "Judged by sizes alone (no lines were recorded), something"
    for row, cut in _some(frame, "growing lines"):
        site, each = middle(row["site"]) if row.get("site") else nameless, row.get("bytes_per_iteration")
        total = f"{_blocks(row.get('leak_count'))}, {format_bytes(row.get('leak_bytes'))}"
        if each:
            text = f"{site} keeps {format_bytes(each)} more every iteration: {total} by the end."
        else:
            text = f"{site} left {total} that nothing frees."
        said.append(f"{text} Look for a list, attribute or global that holds its result; .detach() or .item() lets go of the graph.{cut}")
    return said


def _kept(known: Facts, device: Device) -> list[str]:
    kept = device.kept
    if known.meta.get("source") == "torch_snapshot" or not kept or kept < max(1 << 20, device.peak // 20) or "kept_bytes" not in device.sites.columns:
        return []
    rows = device.sites.drop_nulls("site").sort("kept_bytes", descending=True, nulls_last=True).head(1)
    if not rows.height or not rows["kept_bytes"][0]:
        return []
    return [
        f"{format_bytes(kept)} stay allocated after this cell, most of it from {middle(rows['site'][0])} ({format_bytes(rows['kept_bytes'][0])}). If it is not meant to stay, delete the names that hold it."
    ]


def _near_limit(known: Facts, device: Device) -> list[str]:
    reserved, outside = device.number("peak_reserved_bytes"), device.number("outside_bytes") or 0
    limit, capacity = known.meta.get("limit_bytes"), device.number("capacity_bytes") or known.meta.get("capacity_bytes")
    if not reserved or device.row.get("ooms"):
        return []
    for bound, used, word in ((limit, reserved, "limit"), (capacity, reserved + outside, "device")):
        if isinstance(bound, int) and bound > 0 and used >= _NEAR * bound:
            return [f"The peak took {used / bound:.0%} of the {format_bytes(bound)} {word}: the next larger batch will likely not fit.".replace("%", " %")]
    return []


def _gap(known: Facts, device: Device) -> list[str]:
    reserved, allocated = device.number("peak_reserved_bytes"), device.number("peak_allocated_bytes")
    if not reserved or not allocated or reserved - allocated < max(_MIN_GAP, _LOUD_GAP * allocated):
        return []
    more, times = format_bytes(reserved - allocated), reserved / allocated
    text = f"Torch reserved {more} more than the tensors needed at their peak, {times:.0f} times as much in all."
    if times <= _MANY:
        text = f"Torch reserved {more} ({times - 1:.0%}) more than the tensors needed at their peak.".replace("%", " %")
    free = known.of(known.ask("fragmentation"), device)
    releasable = int(free.filter(~pl.col("private"))["releasable_bytes"].sum() or 0) if free.height else 0  # private pools keep theirs
    if releasable:
        text += f" torch.cuda.empty_cache() would give {format_bytes(releasable)} back."
    if "expandable_segments:True" not in str(known.meta.get("conf") or ""):
        text += " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True often narrows the gap."
    return [text]


def _retries(known: Facts, device: Device) -> list[str]:
    """Requests that were made again after a flush: by torch's counter, else by the trace, where the program's own ``empty_cache()`` is marked."""
    retries, took = device.number("retries"), ""
    collects = "garbage_collection_threshold" in str(known.meta.get("conf") or "")  # gives back before new memory, too
    bounds = [b for b in (known.meta.get("limit_bytes"), device.number("capacity_bytes")) if isinstance(b, int)]
    roomy = bool(bounds) and (device.number("peak_reserved_bytes") or 0) + (device.number("outside_bytes") or 0) < _ROOMY * min(bounds)  # nothing can have been refused
    if retries is None and known.meta.get("source") == "torch_history" and not collects and not roomy:
        rows = known.of(known.ask("stalls"), device).filter(pl.col("what") == "retry")
        retries = int(rows["count"].sum()) if rows.height else 0
        took = f", {format_time_us(float(rows['time_us'].sum()))} in all" if retries and rows["time_us"].null_count() == 0 else ""
    if retries and device.row.get("ooms"):  # a request that no free could have served says nothing of how tight memory is
        refused = known.of(known.ask("oom"), device)
        retries = max(0, retries - refused.filter(~pl.col("fits_if_all_freed").fill_null(value=True)).height) if refused.height else retries
    return (
        [f"Torch had to free its cache and ask again {_times(retries)}{took}: memory is so tight that it costs time. A smaller batch avoids it."] if retries else []
    )


def _proven(known: Facts, device: Device, only: tuple[str, ...] = ()) -> list[str]:
    """What the allocator's rules prove, and the time that device calls took: the advice that needs no replay; of some rules ``only``."""
    rows = known.ask("advise", replay=False)
    rows = rows.filter(pl.col("rule").is_in(only)) if only and rows.height else rows
    if rows.height and device.kind != "device":
        rows = rows.filter(pl.col("device").is_null() & pl.col("rule").is_in(_ANYWHERE))
    elif rows.height:
        here = [pl.col(name).is_null() | pl.col(name).eq_missing(pl.lit(value, dtype=pl.Int64)) for name, value in (("device", device.device), ("rank", device.rank))]
        rows = rows.filter(*here)
        small = pl.col("saving_bytes") < max(_MIN_GAP, (device.number("peak_reserved_bytes") or 0) // 20)
        slow = pl.col("rule") == "device_calls"
        rows = rows.filter(~(pl.col("rule").is_in(["survivors", "private_pools"]) & small), ~slow | pl.lit(_stalled(known, device)))
    if rows.height:
        leaking = known.of(known.ask("leaks"), device)["site"].drop_nulls().to_list() if known.ask("leaks").height else []
        told = pl.any_horizontal(pl.lit(value=False), *(pl.col("finding").str.contains(site, literal=True) for site in leaking))
        rows = rows.filter(~((pl.col("rule") == "survivors") & told)).sort(pl.col("rule") != "scattered", maintain_order=True)  # a growing line has its sentence
    return [f"{row['finding']} {_answered(known, device, row)}" for row in rows.head(_ADVICE).iter_rows(named=True)]


def _answered(known: Facts, device: Device, row: dict[str, Any]) -> str:
    """What to do; where the replay is there by now, what it says of the setting."""
    judged = replayed.known(known.capture)
    if row["rule"] != "scattered" or judged is None or judged.frame is None:
        return str(row["action"])
    here = judged.frame.filter(pl.col("device").eq_missing(pl.lit(device.device, dtype=pl.Int64)), pl.col("rank").eq_missing(pl.lit(device.rank, dtype=pl.Int64)))
    now, other = here.filter("recorded"), here.filter(pl.col("conf") == "expandable_segments:True")
    if not now.height or not other.height:
        return str(row["action"])
    before, after = int(now["ooms"][0]), int(other["ooms_high"][0])
    if after >= before:
        return "expandable_segments:True would have refused as much (replayed); make what stays before the large temporaries."
    return f"Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch is imported: it refuses {format_count(after) if after else 'none'} of the requests instead of {format_count(before)} (replayed)."


def _stalled(known: Facts, device: Device) -> bool:
    rows = known.of(known.ask("stalls"), device).filter(pl.col("what") != "retry")
    return bool((rows["share"].sum() or 0.0) >= _COSTLY and (rows["time_us"].sum() or 0.0) >= _LONG_STALL_US)


def _top_site(known: Facts, device: Device) -> list[str]:
    rows = device.sites.drop_nulls("site") if device.sites.height else device.sites
    if not rows.height or not device.peak:
        return []
    rows = rows.group_by("site", maintain_order=True).agg(pl.col("size_bytes", "count").sum()).sort("size_bytes", descending=True, maintain_order=True)
    row = rows.row(0, named=True)
    count = f" in {_blocks(row['count'])}" if row.get("count") else ""
    return [
        f"At the peak {middle(row['site'])} held the most: {format_bytes(row['size_bytes'])}{count}, {row['size_bytes'] / device.peak:.0%} of all.".replace(
            "%", " %"
        )
    ]


def _traceback(known: Facts) -> list[str]:
    """What the error of this cell keeps alive, as it was found when the cell ended."""
    text = known.meta.get("traceback_text")
    return [text] if isinstance(text, str) and text else []


def _replaced(known: Facts) -> list[str]:
    rows = [row for row in known.meta.get("replaced") or [] if isinstance(row, dict) and row.get("size_bytes")]
    said = [
        f"{format_bytes(row['size_bytes'])} of the peak were the previous value of {middle(str(row.get('name')))}, which lives until the cell binds the name anew. del {middle(str(row.get('name')))} first, and the cell needs that much less."
        for row in rows[:_EACH]
    ]
    return said if len(rows) <= _EACH else [*said, f"{_EACH} of {len(rows)} such names are listed."]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{format_count(count)} times"


def _blocks(count: int | None) -> str:
    return f"{format_count(count)} block{'' if count == 1 else 's'}"


def _dropped(known: Facts) -> list[str]:
    said, kept = [], known.capture.events.height
    for what, count in (known.meta.get("dropped") or {}).items():
        if isinstance(count, (int, float)) and count:
            of = f" of {format_count(count + kept)}" if "event" in str(what) else ""
            said.append(f"{format_count(count)}{of} {str(what).replace('_', ' ')} were dropped to keep the recording small; the peak's value is kept. Record with a larger ring_bytes to keep more." if "event" in str(what)
                        else f"{format_count(count)} {str(what).replace('_', ' ')} were left out.")  # fmt: skip
    return said


def _warnings(known: Facts) -> list[str]:
    """What the source says about its input, as it says it; an empty capture's reason is its headline."""
    texts = [str(w) for w in known.meta.get("warnings") or []]
    return [w[:1].upper() + w[1:] + ("" if w.endswith((".", "!", "?")) else ".") for w in texts if w and not w.startswith("empty")]


def _assumed(known: Facts) -> list[str]:
    """What a prediction had to assume: the most frequent, and where the others are."""
    rows = sorted(known.meta.get("assumptions") or [], key=lambda row: -int(row["count"]))
    told = [str(row["what"]) for row in rows[:_EACH]]
    more = f"; {len(rows) - _EACH} more in meta['assumptions']" if len(rows) > _EACH else ""
    return [f"Assumed: {'; '.join(told)}{more}."] if told else []


def _unrecorded(known: Facts) -> list[str]:
    said = []
    for device in known.devices if known.capture.events.height else []:
        size, end = device.number("unrecorded_bytes"), device.number("end_allocated_bytes")
        if size and "end_bytes" in device.sites.columns:  # an earlier recording may have told their lines
            size = min(size, int(device.sites.filter(pl.col("site").is_null())["end_bytes"].sum()))
        if size and end and size > end // 20:
            said.append(
                _at(
                    device,
                    f"{format_bytes(size)} of the {format_bytes(end)} live at the end were allocated before recording began, so their lines are unknown. Profile the cell that builds the model too.",
                )
            )
    return said


def _cost(known: Facts) -> list[str]:
    recording = known.meta.get("recording") or {}
    fraction, bound = recording.get("cost_fraction"), "at most " if recording.get("at_most") else ""
    if fraction is None or fraction < _COSTLY:
        return []
    return [f"Recording took {bound}{fraction:.0%} of this cell's time; --stacks none costs less but names no lines.".replace("%", " %")]


def _silent(known: Facts) -> list[str]:
    return [f"Nothing happened on {', '.join(known.silent)}."] if known.silent and known.devices else []
