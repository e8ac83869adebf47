"""Colours, words and order that every view shares.

Hues are those of Okabe and Ito (2008), chosen to stay apart for colour-blind readers; the four
further ones were searched to be farthest from all others, also as a protanope and a deuteranope see them. No view tells things apart by colour alone: areas are labelled in
stacking order, bars carry their names.
"""

from __future__ import annotations

from nbmemprof.schema import CATEGORIES

__all__ = ["CARD", "CATEGORY_COLOURS", "FAINT", "GRID", "INK", "LINE", "MARK", "MUTED", "OTHER", "OTHER_NAMES", "PLAIN", "SERIES_COLOURS", "colour", "word"]

CATEGORY_COLOURS = {
    "weights": "#0072b2",
    "gradients": "#e69f00",
    "optimizer_state": "#009e73",
    "activations": "#56b4e9",
    "inputs": "#f0e442",
    "kv_cache": "#cc79a7",
    "buffers": "#232fb6",
    "workspace": "#d55e00",
    "temporary": "#deeba7",
    "cuda_graph": "#1a1037",
    "framework": "#542c1a",
    "unknown": "#c4c7cc",
}
# for series without a meaning of their own (sites, phases, pools): strongest contrast between neighbours first
SERIES_COLOURS = ("#0072b2", "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#f0e442", "#542c1a")
OTHER = "#c4c7cc"
OTHER_NAMES = ("other", "unknown", "no stack")
# words of the timeline analysis as they are shown
PLAIN = {"(other)": "other", "(not known)": "no stack", "live": "allocated"}

# A deliberate light card: an image can't see the page's theme, so it brings its own ground.
CARD, INK, MUTED, FAINT, GRID = "#fcfcfb", "#1d2025", "#555b66", "#8a8f98", "#e4e5e8"
LINE, MARK = "#1d2025", "#b3261e"


def colour(series: str, place: int = 0) -> str:
    """Colour of one series: fixed for a category, by place for others."""
    if series in CATEGORY_COLOURS:
        return CATEGORY_COLOURS[series]
    if series == "other":
        return "#e1e3e6"
    return OTHER if series in OTHER_NAMES else SERIES_COLOURS[place % len(SERIES_COLOURS)]


def word(category: str) -> str:
    """A category as a person reads it."""
    return {"optimizer_state": "optimizer state", "kv_cache": "KV cache", "cuda_graph": "CUDA graph"}.get(category, category)


def rank_of(series: str) -> int:
    """Where a series belongs in the fixed stacking order; series that are no category come last."""
    return CATEGORIES.index(series) if series in CATEGORIES else len(CATEGORIES)
