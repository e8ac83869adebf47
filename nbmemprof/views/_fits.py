"""On which card it would fit, and how many more sequences: what is left, in words."""

from __future__ import annotations

from typing import Any

import polars as pl

from nbmemprof.errors import NbmemprofError
from nbmemprof.units import format_bytes, format_count
from nbmemprof.views._facts import Device, Facts

__all__ = ["caches", "cards_of", "smallest"]

_CACHES = 2


def cards_of(known: Facts, *, replay: bool) -> pl.DataFrame:
    """The cards of the catalogue, asked once; no rows where no peak is told."""
    from nbmemprof.prediction.cards import cards  # with the allocator's model behind it, which a first paint of host memory needs not

    key = ("cards", replay)
    if key not in known._answers:
        try:
            known._answers[key] = cards(known.capture, replay)
        except NbmemprofError:
            known._answers[key] = pl.DataFrame()
    return known._answers[key]


def smallest(known: Facts, device: Device) -> str | None:
    """The smallest card that holds what was recorded, in words; None where it is no GPU's memory, or none holds it."""
    if device.kind != "device" or device is not known.devices[0]:
        return None
    found = cards_of(known, replay=False)
    fit = found.filter(pl.col("fits") == "yes").head(1) if found.height else found
    if not fit.height:
        return None
    row: dict[str, Any] = fit.row(0, named=True)
    return f"{row['card']} ({format_bytes(row['capacity_bytes'])}): at most {format_bytes(row['high_bytes'])} of it, context and libraries included"


def caches(known: Facts, device: Device) -> list[str]:
    """What a KV cache takes for each token, what of it is wasted, and how many more sequences fit."""
    frame, said = known.of(known.ask("kv_cache"), device), []
    for row in frame.drop_nulls("bytes_per_token").head(_CACHES).iter_rows(named=True) if frame.height else ():
        each, tokens, count = row["bytes_per_sequence"], row["tokens"], row["sequences"]
        words = f"The KV cache ({row['cache']}) takes {format_bytes(row['bytes_per_token'])} for a token"
        words += f", {format_bytes(each)} for each of {format_count(count)} sequences of {format_count(tokens)} tokens" if each and tokens and count else ""
        waste = {"are padding": row["padding_bytes"], "are room that no token uses": row["room_bytes"]}
        words += "".join(f"; {format_bytes(size)} {what}" for what, size in waste.items() if size)
        if row["fits_sequences"] is not None:
            words += f". {format_count(row['fits_sequences'])} more of that length would fit into the {format_bytes(row['free_bytes'])} that are free"
        said.append(f"{words}.")
    return said
