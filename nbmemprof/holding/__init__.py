"""Who holds it: for every live tensor the shortest chain from something that a person can name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.holding._before import leads_to_tensors, names_now, replaced
from nbmemprof.holding._names import short
from nbmemprof.holding._scan import GARBAGE, NOTEBOOK, Row, Scan, look
from nbmemprof.units import format_bytes

__all__ = ["KINDS", "frame_of", "grouped", "held_by_traceback", "holders", "look", "names_now", "told"]

KINDS = ("variable", "local", "thread", "module", "closure", "generator", "hook", "lru_cache", "graph", "output", "result", "traceback", "handled", "cycle", "native")
_SCHEMA: dict[str, Any] = {
    "device": pl.Int64, "addr": pl.UInt64, "size_bytes": pl.Int64, "tensor_bytes": pl.Int64, "counted_bytes": pl.Int64, "holder": pl.String, "kind": pl.String,
    "name": pl.String, "chain": pl.List(pl.String), "shape": pl.String, "dtype": pl.String, "amplification": pl.Float64, "references": pl.Int64,
    "releasable": pl.Boolean, "advice": pl.String,
}  # fmt: skip
_LARGE_VIEW = 2.0  # a storage this much larger than what is seen of it is worth a word


def holders(namespace: Mapping[str, Any] | None = None, *, device: str | int | None = None, by: str | None = None) -> pl.DataFrame:
    """Who holds each live tensor?

    The whole process is searched, from the user's variables first, then running functions, threads and modules,
    then what the notebook keeps of its own accord (``Out``, ``_``, the last traceback), then C++ and garbage. What
    autograd saved is found through the tensor whose ``grad_fn`` leads to it. The search runs no method of the user's
    objects and keeps nothing alive.

    Parameters
    ----------
    namespace
        The user's variables, by name; those of the notebook, or of ``__main__``, by default.
    device
        ``"cpu"``, ``"cuda"``, a device's ordinal, or ``"all"``. By default GPUs, or the CPU where no GPU memory is in use.
    by
        None: a row a tensor. ``"holder"``: a row a holder, the parts of its name in brackets put together.

    Returns
    -------
    Largest first: ``device`` (null for host), ``addr``, ``size_bytes`` (of the storage), ``tensor_bytes`` (what this tensor
    shows of it; null for a bare storage), ``counted_bytes`` (the storage once: on the row of its first holder; sums to
    what is alive), ``holder`` (in words), ``kind`` (one of ``KINDS``), ``name`` (the root: a variable, ``Out[3]``,
    ``sys.last_exc``), ``chain`` (the shortest way from it), ``shape``, ``dtype``, ``amplification`` (storage bytes per byte
    that any tensor shows of it), ``references`` (containers that refer to the tensor), ``releasable`` (``%memprof release
    --yes`` lets go of it) and ``advice``.
    With ``by="holder"``: ``device kind holder name count size_bytes tensor_bytes amplification releasable chain advice``.

    Raises
    ------
    NbmemprofError
        For a device or a grouping that is none.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> model = torch.nn.Linear(2000, 2000)
    >>> mp.holders({"model": model}, device="cpu").filter(size_bytes=16000000).select("name", "holder").rows()
    [('model', 'model.weight')]
    """
    if by not in (None, "holder"):
        raise NbmemprofError(f"holders can't be grouped by {by!r}. Use by='holder', or leave it out for a row a tensor.")
    _place(device)
    frame = frame_of(look(namespace), device)
    return grouped(frame) if by else frame


# ---------------------------------------------------------------------- frames
def frame_of(scan: Scan, device: str | int | None = None) -> pl.DataFrame:
    """The rows of a look as a frame."""
    rows = list(_chosen(scan.rows, device))
    tiers, shown = scan.tiers(), _shown(scan.rows)
    rows.sort(key=lambda r: (-r.memory.size_bytes, r.memory.key, r.tier, len(r.link.steps)))
    counted: set[int] = set()
    made = []
    for row in rows:
        memory, link, key = row.memory, row.link, row.memory.key
        first = key not in counted
        counted.add(key)
        amplification = memory.size_bytes / max(shown.get(key, memory.size_bytes), 1)
        made.append((
            memory.ordinal, memory.addr, memory.size_bytes, memory.tensor_bytes, memory.size_bytes if first else 0, _words(row), link.kind, link.root or None, list(link.steps), memory.shape,
            memory.dtype, amplification, row.references, tiers[key] in (NOTEBOOK, GARBAGE), _advice(row, amplification),
        ))  # fmt: skip
    return pl.DataFrame(made, schema=_SCHEMA, orient="row")


def grouped(frame: pl.DataFrame) -> pl.DataFrame:
    """Put the rows of one holder together: ``BEST[0]``, ``BEST[1]`` are ``BEST[…]``; by bytes."""
    cells = pl.col("holder").str.replace_all(r"\b(In|Out)\[(\d+)\]", "$1⟦$2⟧")  # these numbers tell places apart
    one = cells.str.replace_all(r"\[[^\[\]]*\]", "[…]").str.replace_all(r"\.\d+(\.|$)", ".*$1").str.replace_all("⟦", "[").str.replace_all("⟧", "]")
    owned = frame.with_columns(one.alias("holder")).filter(pl.col("counted_bytes") > 0)
    visible = pl.col("size_bytes") / pl.col("amplification")
    parts = [
        pl.len().alias("count"), pl.col("size_bytes").sum(), pl.col("tensor_bytes").sum(), (pl.col("size_bytes").sum() / visible.sum()).alias("amplification"),
        pl.col("releasable").all(), pl.col("chain").first(), pl.col("advice").first(),
    ]  # fmt: skip
    return owned.group_by("device", "kind", "holder", "name", maintain_order=True).agg(parts).sort("size_bytes", descending=True, maintain_order=True)


def _place(device: str | int | None) -> tuple[str | None, int | None]:
    """Kind and ordinal of a device; (None, None): GPUs, or the CPU where they hold nothing."""
    if device is None or (type(device) is int and device >= 0):
        return None, device
    kind, colon, ordinal = str(device).partition(":")
    if kind not in ("all", "cpu", "cuda", "xpu", "mps") or (colon and not ordinal.isdigit()):
        raise NbmemprofError(f"{device!r} is not a device. Use 'cpu', 'cuda', 'cuda:1', an ordinal, or 'all'.")
    return kind, int(ordinal) if colon else None


def _chosen(rows: list[Row], device: str | int | None) -> list[Row]:
    kind, ordinal = _place(device)
    if ordinal is not None:
        return [row for row in rows if row.memory.ordinal == ordinal and kind in (None, row.memory.device)]
    if kind is None:
        return [row for row in rows if row.memory.device != "cpu"] or rows
    return rows if kind == "all" else [row for row in rows if row.memory.device == kind]


def _shown(rows: list[Row]) -> dict[int, int]:
    """Bytes of each storage that some tensor shows; what autograd saved is in use whole."""
    parts: dict[int, set[tuple[int, int]]] = {}
    for row in rows:
        parts.setdefault(row.memory.key, set()).add(row.memory.part or (0, row.memory.size_bytes))
    found = {}
    for key, seen in parts.items():
        total, end = 0, 0
        for begin, size in sorted(seen):
            total += max(begin + size - max(begin, end), 0)
            end = max(end, begin + size)
        found[key] = total
    return found


# ---------------------------------------------------------------------- words
def _words(row: Row) -> str:
    link = row.link
    text, kind, place = short(link.text), link.kind, link.place
    if link.origin in ("traceback", "result"):
        return f"{text} in {place}, kept by the last traceback ({link.root})" if place and link.origin == "traceback" else f"{text}, kept by the notebook ({link.root})"
    if link.origin == "handled":
        return f"{text} in {place}, kept by the exception being handled" if place else f"{text} of the exception being handled"
    if kind == "lru_cache":
        return f"lru_cache of {place}"
    if kind in ("hook", "closure"):
        return f"{place}: {text}"
    if kind in ("local", "thread"):
        return f"{text}, local of {place}"
    if kind == "generator":
        return f"{text} ({place})"
    if kind == "cycle":
        return f"{text} in a reference cycle, garbage until gc.collect()"
    if kind == "native":
        return f"{text}, held by C++ code or a running expression"
    return text


def _advice(row: Row, amplification: float) -> str:
    link = row.link
    name = link.root
    if amplification >= _LARGE_VIEW and row.memory.part is not None and link.kind not in ("cycle", "native"):
        return f"a view (slice) keeps a storage {amplification:.4g} times as large alive: keep its .clone()"
    if link.origin in ("output", "traceback", "result"):
        return "%memprof release --yes" if link.origin != "traceback" else "%memprof release --yes, or del sys.last_exc, sys.last_value, sys.last_traceback"
    if link.origin == "handled":
        return "leave the except block before the next try"
    return {
        "graph": f"{name} keeps the autograd graph (its grad_fn): no_grad() or inference_mode() around it, or .item() / .detach() on what is summed",
        "lru_cache": f"{link.place}.cache_clear(), or a cache that does not keep its arguments",
        "hook": "remove the hook: handle.remove()",
        "closure": f"the function {link.place} captures it: delete the function, or pass the tensor in",
        "generator": "finish or close() the generator",
        "local": "a function that runs now holds it",
        "thread": "the thread that runs it holds it",
        "cycle": "gc.collect()",
        "native": "",
        "module": f"a module keeps it: {short(link.text)}",
    }.get(link.kind, f"del {name}")


# ---------------------------------------------------------------------- after an error
def held_by_traceback(shell: Any = None) -> tuple[int, str]:
    """How much does the last error keep, that nothing of the user's keeps too, and what is the way out?

    Returns
    -------
    Bytes of storages, and a sentence (empty where the bytes are 0).
    """
    scan = look(shell=shell)
    last = getattr(shell, "last_execution_result", None)
    # the shell's result of the last cell is a part of the error's only where that cell is the one that failed
    kinds = ("traceback",) if last is not None and last.success else ("traceback", "result")
    places = [place for place in scan.places if place.kind in kinds]
    keys = frozenset().union(*(place.keys for place in places)) if places else frozenset()
    sizes = {row.memory.key: row.memory.size_bytes for row in _chosen(scan.rows, None) if row.memory.key in keys}
    total = sum(sizes.values())
    if not total:
        return 0, ""
    rows = sorted((row for row in scan.rows if row.memory.key in sizes and row.link.place), key=lambda r: -r.memory.size_bytes)
    where = ", ".join(dict.fromkeys(f"{short(row.link.text)} in {row.link.place}" for row in rows[:2]))
    return total, f"The traceback of this error keeps {format_bytes(total)} of tensors alive{f' ({where})' if where else ''}. %memprof release --yes lets go of them."



def told(shell: Any, capture: Capture, before: Mapping[int, str], error: BaseException | None) -> dict[str, Any]:
    """What a profiled cell's capture should know of the names around it, for ``meta``.

    Returns
    -------
    ``replaced`` (name and size_bytes of values that the cell bound anew and that its peak had) and, after an error,
    ``traceback_bytes`` and ``traceback_text``; empty where there is nothing to say, or where looking failed: a cell's
    report comes all the same.
    """
    found: dict[str, Any] = {}
    try:
        old = replaced(capture, before, names_now(shell.user_ns, shell)) if before else []
        if old:
            found["replaced"] = old
        if leads_to_tensors(error, shell.user_ns):
            size, text = held_by_traceback(shell)
            if size:
                found |= {"traceback_bytes": size, "traceback_text": text}
    except Exception as failure:  # the report of a cell must come whatever stands in its names
        capture.meta["warnings"].append(f"who holds what was not found out ({type(failure).__name__}: {failure})")
    return found
