"""Which line of the user's code a call stack belongs to."""

from __future__ import annotations

import re

import polars as pl

__all__ = ["is_user_file", "site_of_stacks", "with_site"]

_LIBRARY = re.compile(
    r"(^|[/\\])(site-packages|dist-packages|python3\.\d+|torch)[/\\]|^(<frozen |<__array_function__|<string>|<eval_with_key>|\?\?$)|\.(cpp|cc|cu|h|so)\b|^$"
)
_OLD_CELL = re.compile(r"^<ipython-input-(\d+)[^>]*>$")


def is_user_file(filename: str) -> bool:
    """Whether a frame's file is the user's: not the standard library, an installed package, or native code."""
    return _LIBRARY.search(filename) is None


def site_of_stacks(stacks: pl.DataFrame) -> pl.DataFrame:
    """Which frame stands for each stack?

    The innermost frame in the user's code; where there is none, the innermost frame.

    Returns
    -------
    One row a stack: ``stack_id``, ``site`` (``train.py:19``, ``In[7]:3``; as much of the path as tells
    files of one name apart), ``function``, ``user`` (false: no frame of the user's).
    """
    if stacks.is_empty():
        return pl.DataFrame(schema={"stack_id": pl.UInt32, "site": pl.String, "function": pl.String, "user": pl.Boolean})
    names = stacks["filename"].unique().drop_nulls().to_list()
    known = pl.DataFrame(
        {"filename": names, "short": _shortest(names), "user": [is_user_file(n) for n in names]},
        schema={"filename": pl.String, "short": pl.String, "user": pl.Boolean},
    )
    found = (
        stacks.join(known, on="filename", how="left")
        .with_columns(pl.col("user").fill_null(value=False))
        .sort(["stack_id", "user", "depth"], descending=[False, True, False])
        .unique("stack_id", keep="first", maintain_order=True)
    )
    line = pl.when(pl.col("line").is_null()).then(pl.lit("")).otherwise(pl.format(":{}", pl.col("line")))
    return found.select("stack_id", (pl.col("short") + line).alias("site"), "function", "user")


def with_site(allocations: pl.DataFrame, stacks: pl.DataFrame) -> pl.DataFrame:
    """Add ``site`` and ``function`` to rows with a ``stack_id``; null where no stack was recorded."""
    return allocations.join(site_of_stacks(stacks).select("stack_id", "site", "function"), on="stack_id", how="left", maintain_order="left")


def _shortest(names: list[str]) -> list[str]:
    """The end of each path, as long as it takes to tell it from the others."""
    shown = {name: f"In[{cell[1]}]" if (cell := _OLD_CELL.match(name)) else name for name in names}
    parts = {name: shown[name].replace("\\", "/").split("/") for name in names}
    width = dict.fromkeys(names, 1)
    while True:
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault("/".join(parts[name][-width[name] :]), []).append(name)
        clash = [n for group in groups.values() if len(group) > 1 for n in group if width[n] < len(parts[n])]
        if not clash:
            return ["/".join(parts[n][-width[n] :]) for n in names]
        for name in clash:
            width[name] += 1
