"""What would have let a refused request through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from nbmemprof.analyses._pinning import NOWHERE
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.analyses._trials import serving, why_not
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes

__all__ = ["Help", "settings_that_serve", "site_to_free"]

_SITES = 20  # lines that are tried, those that hold most


@dataclass(frozen=True)
class Help:
    """What was there at a refusal; ``missing_bytes``: new memory that the device or limit was short of (None: not told)."""

    asked: int
    free: int
    largest: int
    pending: int
    releasable: int
    missing_bytes: int | None
    site: tuple[str, int, int] | None

    def sentence(self) -> str:
        """Put it into words, each with its number."""
        say, parts = format_bytes, []
        if self.largest >= self.asked:
            parts.append(
                "A fitting piece is free: the same request again would likely be served, as torch does not search again after it has emptied its cache."
            )
        elif self.free >= self.asked:
            parts.append(f"It would fit if the free pieces were adjacent ({say(self.free)}).")
        if self.releasable == 0:
            parts.append(
                "empty_cache() would not help: every free piece shares a segment with a block in use."
                if self.free
                else "empty_cache() would not help: nothing is free."
            )
        elif self.missing_bytes is None:
            parts.append(f"empty_cache() would give {say(self.releasable)} back.")
        elif self.releasable >= self.missing_bytes:
            parts.append(f"empty_cache() before it would help: it gives {say(self.releasable)} back, {say(max(self.missing_bytes, 0))} are missing.")
        else:
            parts.append(f"empty_cache() would not be enough: it gives {say(self.releasable)} back, {say(self.missing_bytes)} are missing.")
        if self.pending:
            parts.append(f"Waiting for the other streams would complete {say(self.pending)}.")
        if self.site is not None:
            parts.append(
                f"Freeing what {self.site[0]} holds ({say(self.site[1])} in {self.site[2]} block{'' if self.site[2] == 1 else 's'}) would have made room."
            )
        return " ".join(parts)


def site_to_free(blocks: pl.DataFrame, stacks: pl.DataFrame, asked: int, missing: int | None) -> tuple[str, int, int] | None:
    """Which line's blocks, all given back, make room for a request?

    Either they and the holes beside them are one piece that is long enough, or whole segments come free that are what the
    device is short of. ``blocks``: those of the list that serves the request.

    Returns
    -------
    The line, its bytes and its blocks; of several lines the one that holds least; None where no line alone is enough.
    """
    rows = blocks.sort("segment_addr", "addr").with_columns(state=pl.col("state").cast(pl.String))
    if rows.is_empty():
        return None
    named = rows.join(site_of_stacks(stacks).select("stack_id", "site"), on="stack_id", how="left", maintain_order="left")
    live = named["state"] == "active_allocated"
    sums = (
        named.filter(live).drop_nulls("site").group_by("site").agg(pl.col("size_bytes").sum(), n=pl.len()).sort("size_bytes", "site", descending=[True, False])
    )
    size, segment = named["size_bytes"].to_numpy(), named["segment_addr"].to_numpy()
    free, sites = (named["state"] == "inactive").to_numpy(), named["site"].fill_null(NOWHERE)
    found = None
    for site, held, count in sums.head(_SITES).iter_rows():
        then = free | ((sites == site) & live).to_numpy()
        if _longest(size, segment, then) >= asked or (missing is not None and _whole(size, segment, then) >= missing > 0):
            found = (site, int(held), int(count)) if found is None or held < found[1] else found
    return found


def _longest(size: np.ndarray, segment: np.ndarray, free: np.ndarray) -> int:
    """Most bytes of neighbouring free blocks in one segment."""
    fresh = np.empty(len(size), bool)
    fresh[0], fresh[1:] = True, (segment[1:] != segment[:-1]) | ~free[1:] | ~free[:-1]
    runs = np.add.reduceat(np.where(free, size, 0), np.flatnonzero(fresh))
    return int(runs.max(initial=0))


def _whole(size: np.ndarray, segment: np.ndarray, free: np.ndarray) -> int:
    """Bytes of segments that are wholly free."""
    starts = np.flatnonzero(np.r_[True, segment[1:] != segment[:-1]])
    return int(np.add.reduceat(size, starts)[np.logical_and.reduceat(free, starts)].sum())


def settings_that_serve(capture: Capture) -> dict[int, tuple[str | None, str]]:
    """Which setting would have served a refused request? By its ``seq``: the setting (None: none is known) and a sentence."""
    reason = why_not(capture)
    seqs = capture.tables["events"].filter(pl.col("action") == "oom")["seq"].to_list()
    if reason is not None:
        return dict.fromkeys(seqs, (None, f"Other settings were not replayed: {reason}."))
    made: dict[int, tuple[str | None, str]] = {}
    for seq, (refuses, good) in serving(capture).items():
        if not refuses:
            made[seq] = (None, "The replay does not refuse it under the recorded setting: what refused it is not in the recording.")
        elif good:
            others = f" So would {', '.join(c or 'the defaults' for c in good[1:])}." if good[1:] else ""
            made[seq] = (good[0], f"{_named(good[0])} would have served it (replayed).{others}")
        else:
            made[seq] = (None, "None of the settings that were replayed would have served it.")
    return made


def _named(conf: str) -> str:
    return f"PYTORCH_CUDA_ALLOC_CONF={conf}" if conf else "torch's default setting"
