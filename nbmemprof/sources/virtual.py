"""``--as H200:8GiB``: the cell's CPU tensors on a GPU that isn't there.

Each request of a CPU tensor is put to the model of PyTorch's CUDA allocator (:class:`nbmemprof.allocator.Device`) as it comes, so
that reserved memory, fragmentation and an out-of-memory error can be studied on any machine. A refusal is raised as
``torch.OutOfMemoryError`` from the very operator that asked: from the call as it stands in the cell, or within a function of torch
that is written in Python (``F.multi_head_attention_forward``) from the call in there. One place is later than on a GPU, as no
code of ours may run within an operator: one that asks several times, and a node of backward, is refused at its end. Nothing
is asked of the device in between. What the operator had made is dropped, what it had written in place stays written.

The assumption, which every view says: a CPU kernel's requests are not a CUDA kernel's. Outputs and saved tensors
are the same; workspaces, and what other kernels save, are not. Tensors count from the cell that made them under ``--as``;
they stay on the device until they are freed, and while any are there the next cell with the same words goes on with it.

Calls are seen by a ``TorchFunctionMode``: it stands above autograd and the dispatcher and changes neither what runs nor what is allocated.
The compiler can't look through such a mode, so functions under ``torch.compile`` run uncompiled meanwhile.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import types
from typing import Any

import numpy as np
import polars as pl

from nbmemprof import _optional, heap, schema
from nbmemprof.allocator import Device
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._picture import picture
from nbmemprof.capture import Capture
from nbmemprof.errors import FlagError, NbmemprofError, NotRecording
from nbmemprof.flags import Flag
from nbmemprof.sources import _cpu_trace as tr
from nbmemprof.sources import torch_cpu
from nbmemprof.sources._virtual_feed import Feed
from nbmemprof.units import format_bytes, format_count, parse_bytes

__all__ = ["CAPACITIES", "FLAGS", "VirtualDevice", "device_words"]

CAPACITIES = {"H200": 150_109_880_320}  # measured: what cudaMemGetInfo calls total
_ACTIONS = {M.ALLOC: "alloc", M.FREE_REQUESTED: "free_requested", M.FREE_COMPLETED: "free_completed", M.SEGMENT_ALLOC: "segment_alloc",
            M.SEGMENT_FREE: "segment_free", M.SEGMENT_MAP: "segment_map", M.SEGMENT_UNMAP: "segment_unmap", M.OOM: "oom"}  # fmt: skip
_CARRIED = ("category", "evidence", "layer", "phase", "step", "op")
_feeds: dict[tuple[str, str], Feed] = {}
_busy: set[tuple[str, str]] = set()


def device_words(text: str) -> tuple[str, int]:
    """Name and bytes of ``H200:8GiB``; the size may be left out where the card is known."""
    name, colon, size = text.partition(":")
    if not re.fullmatch(r"[\w. -]{1,40}", name):
        raise FlagError(f"{text!r} names no device. Write it like H200:8GiB: a name, and how much memory it has.")
    if not colon:
        if name.upper() not in CAPACITIES:
            raise FlagError(f"the memory of {name!r} is not known here. Say how much it has: {name}:24GiB. Known: {', '.join(CAPACITIES)}.")
        return name, CAPACITIES[name.upper()]
    try:
        capacity = parse_bytes(size)
    except NbmemprofError as error:
        raise FlagError(str(error)) from error
    if capacity < 2 << 20:
        raise FlagError(f"{format_bytes(capacity)} is less than the smallest segment (2 MiB). Use a size like 8GiB.")
    return name, capacity


def _checked(text: str) -> str:
    device_words(text)
    return text


FLAGS = [Flag("--as", "put the CPU tensors of this cell on a modelled GPU of this much memory, as H200:8GiB; raises torch.OutOfMemoryError where it would", type=_checked, metavar="DEVICE[:SIZE]")]


class VirtualDevice:
    """Records CPU tensors as the allocator of a GPU would have served them.

    Parameters
    ----------
    words
        ``DEVICE[:SIZE]``.
    conf
        ``PYTORCH_CUDA_ALLOC_CONF``; None: that of the environment.
    """

    name = "virtual"
    needs_torch = True

    def __init__(self, words: str, conf: str | None = None) -> None:
        self.title, self.capacity = device_words(words)
        self.conf = (os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "") if conf is None else conf
        self._key = (words, self.conf)
        self._host = torch_cpu.source()
        self._feed: Feed | None = None
        self._mode: Any = None
        self._stance: Any = None
        self._made: Capture | None = None
        self._before: dict[str, Any] = {}
        self._options: dict[str, Any] = {}
        self._written = 0

    def start(self, **options: Any) -> None:
        """Begin; the device of an earlier cell is taken up where tensors are still on it."""
        torch = _optional.require("torch", feature="A virtual device")
        if self._key in _busy:
            self._made = Capture.build({}, source="none", origin="modelled")  # so that it can be stopped in order
            raise NotRecording(f"The virtual device {self._key[0]} is in use by a cell around this one. Record inside without as_device: the outer capture has it all.")
        self._options = options
        self._host.start(**options)
        try:
            feed = _feeds.get(self._key)
            if feed is not None:
                feed.begin()
            if feed is None or not feed.placed:
                feed = _feeds[self._key] = Feed(Device(self.conf, torch=torch.__version__, capacity_bytes=self.capacity), tr.tracker)
                feed.begin()
            self._feed = feed
            feed.device.reset_peak_stats()
            self._before, self._written = feed.device.snapshot(), feed.written
            self._mode = _mode(torch)(feed)
            self._stance = _eager()
            self._mode.__enter__()
            _busy.add(self._key)
        except BaseException:
            self._host.stop()
            raise

    def stop(self) -> Capture:
        """Everything since ``start``, as the device had it; recording ends."""
        if self._made is None:
            if self._feed is None:
                raise NotRecording("This virtual device was never started. Call start() first.")
            _busy.discard(self._key)
            _leave(self._mode)
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
            self._feed.follow()
            self._feed.refused = None
            begin = self._host._begin
            assert begin is not None  # noqa: S101 - it was started
            try:
                places = _places(begin)
            finally:
                host = self._host.stop()
            self._made = self._capture(host, places)
        return self._made

    # ------------------------------------------------------------------ the capture
    def _capture(self, host: Capture, places: dict[int, int]) -> Capture:
        feed = self._feed
        assert feed is not None  # noqa: S101 - as above
        trace = feed.device._trace[self._written * M.WORDS : feed.written * M.WORDS].reshape(-1, M.WORDS)
        ends = np.asarray([end for end, _ in feed.sources], np.int64) - self._written
        index = [i for _, i in feed.sources]
        at = np.searchsorted(ends, np.arange(len(trace)), side="right")
        seqs = [places.get(index[i]) if i < len(index) else None for i in at.tolist()]
        events = self._events(trace, pl.Series("host", seqs, dtype=pl.Int64), host)
        pictures = [picture(taken, i) for i, taken in enumerate((self._before, feed.device.snapshot()))]
        tables = {
            "events": events.drop("host"), "stacks": host.tables["stacks"], "marks": pl.concat([host.tables["marks"], _refusals(trace, events)], how="diagonal"),
            "segments": pl.concat([s for s, _ in pictures]), "blocks": pl.concat([b for _, b in pictures]),
        }  # fmt: skip
        made = heap.build(tables, start_snapshot_id=0, **self._meta(host))
        made.tables["allocations"] = _carry(made.tables["allocations"], events, host.tables["allocations"])
        return made

    def _events(self, trace: Any, seqs: pl.Series, host: Capture) -> pl.DataFrame:
        told = pl.DataFrame({"host": seqs}).join(host.tables["events"].select(pl.col("seq").alias("host"), "time_us", "stack_id"), on="host", how="left", maintain_order="left")
        kind, refused = trace[:, 0], trace[:, 0] == M.OOM
        addr = pl.Series(trace[:, 1].astype(np.uint64))
        columns = {
            "device": 0, "kind": "device", "source": "torch", "seq": np.arange(len(trace)), "time_us": told["time_us"].forward_fill().fill_null(0.0),
            "action": pl.Series(kind).replace_strict(_ACTIONS, return_dtype=pl.String), "addr": addr.set(pl.Series(refused), None) if len(addr) else addr,
            "requested_bytes": trace[:, 2], "stream": trace[:, 3], "pool_id": "0_0", "stack_id": told["stack_id"], "cell": self._options.get("cell"),
        }  # fmt: skip
        return schema.fill("events", columns, len(trace)).with_columns(told["host"])

    def _meta(self, host: Capture) -> dict[str, Any]:
        feed = self._feed
        assert feed is not None  # noqa: S101 - as above
        stats = feed.device.stats()
        size = format_bytes(self.capacity)
        model = f"a virtual {self.title} with {size}: the CPU tensors of this cell were put through the model of torch {_short(host.meta['torch'])}'s CUDA allocator."
        warnings = [f"{model} A CPU kernel's requests are not a CUDA kernel's: workspaces are missing, and what kernels save may differ."]
        if feed.unasked:
            warnings.append(f"{format_count(feed.unasked)} requests that followed a refusal within its operator were not asked of the device.")
        if feed.lost:
            warnings.append(f"history truncated: {format_count(feed.lost)} events came faster than they could be read and did not reach the device.")
        return {
            "origin": "modelled", "source": "virtual", "device": f"a virtual {self.title} ({size})", "capacity_bytes": self.capacity, "conf": self.conf, "torch": host.meta["torch"],
            "versions": host.meta["versions"], "warnings": warnings + [w for w in host.meta["warnings"] if w.startswith(("inconsistent", "no frames"))], "dropped": host.meta["dropped"],
            "settings": feed.device.snapshot()["allocator_settings"], "recording": host.meta["recording"], "cell": self._options.get("cell"),
            "counters": {"0": {
                "peak_allocated_bytes": stats["allocated_bytes.all.peak"], "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
                "start_allocated_bytes": _sum(self._before, "allocated_size"), "start_reserved_bytes": _sum(self._before, "total_size"),
                "end_allocated_bytes": stats["allocated_bytes.all.current"], "end_reserved_bytes": stats["reserved_bytes.all.current"],
            }},
        }  # fmt: skip


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _sum(snapshot: dict[str, Any], name: str) -> int:
    return sum(segment[name] for segment in snapshot["segments"])


def _places(begin: tr.Mark) -> dict[int, int]:
    """Index of a native event → its number in the host's capture."""
    window = torch_cpu._Window(tr.tracker.rows(), tr.tracker.captures(), begin, tr.tracker.mark())
    seq, _ = window._events(None)
    return dict(zip(window.rows["index"][window.shown].tolist(), seq.tolist(), strict=True))


def _refusals(trace: Any, events: pl.DataFrame) -> pl.DataFrame:
    at = np.flatnonzero(trace[:, 0] == M.OOM)
    columns = {"device": 0, "seq": at, "time_us": events["time_us"][at.tolist()], "kind": "oom", "name": "out of memory (modelled)", "value": np.maximum(trace[at, 1], 0).astype(np.float64)}
    return schema.fill("marks", columns, len(at))


def _carry(rows: pl.DataFrame, events: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """What each allocation is for, as it was found for the CPU's storage."""
    known = host.filter(pl.col("alloc_seq").is_not_null()).select(pl.col("alloc_seq").alias("host"), *(pl.col(name).alias("_" + name) for name in _CARRIED))
    twin = events.filter(pl.col("action") == "alloc").select(pl.col("seq").alias("alloc_seq"), "host").join(known.unique("host"), on="host", how="inner").drop("host")
    merged = rows.join(twin, on="alloc_seq", how="left", maintain_order="left")
    return merged.with_columns(pl.coalesce("_" + name, name).alias(name) for name in _CARRIED).select(rows.columns)


# ---------------------------------------------------------------------- where a refusal is raised
def _mode(torch: Any) -> Any:
    """The class of the mode that sees torch calls; torch is there only now."""
    overrides = torch.overrides
    deepcopy = torch.Tensor.__deepcopy__
    backward = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}

    class VirtualDeviceMode(overrides.TorchFunctionMode):  # type: ignore[misc,name-defined]  # torch's names come late
        def __init__(self, feed: Feed) -> None:
            super().__init__()
            self.feed = feed

        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is deepcopy:
                self.feed.follow()
                self.feed.copies = True
            try:
                return self.call(func, args, kwargs)
            finally:
                self.feed.copies = False

        def call(self, func: Any, args: Any, kwargs: Any) -> Any:
            if func in backward:
                handles = _watch_graph(self.feed, (args, kwargs))
                try:
                    result = func(*args, **kwargs)
                finally:
                    for handle in handles:
                        handle.remove()
            elif isinstance(func, types.FunctionType) and sys.getprofile() is None:
                result = _watched(self.feed, func, args, kwargs)
            else:
                result = func(*args, **kwargs)
            self.feed.follow()
            if self.feed.refused is not None:
                del result, args, kwargs
                self.feed.raise_refused()
            return result

    return VirtualDeviceMode


def _watched(feed: Feed, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch that is written in Python; a refusal is raised from the call in it that asked.

    The mode is off within such a function. A profile function sees each of its calls end, and may raise there; a user's own keeps its place, and then the
    refusal comes at the function's end. An operator written as ``a + b`` is no call: it is seen at the next one.
    """
    base = sys._getframe()

    def look(frame: Any, _event: str, _arg: Any) -> None:
        if feed.behind and not _ours(frame, base):
            feed.follow()
            feed.raise_refused()

    sys.setprofile(look)
    try:
        return func(*args, **kwargs)
    finally:
        sys.setprofile(None)


def _ours(frame: Any, base: Any) -> bool:
    """Whether the frame runs for the recorder, which is called within operators."""
    while frame is not None and frame is not base:
        if frame.f_globals.get("__name__", "").startswith("nbmemprof."):
            return True
        frame = frame.f_back
    return frame is None


def _eager() -> Any:
    """Let compiled functions run as they are written; returns what ends it. None where this torch has no such switch."""
    try:
        switch = importlib.import_module("torch.compiler").set_stance
        return switch("force_eager")
    except (ImportError, AttributeError, RuntimeError):
        return None


def _watch_graph(feed: Feed, given: Any) -> list[Any]:
    """Let each node of the graph look for a refusal before it runs (of what sums gradients up between nodes) and after."""

    def look(*_: Any) -> None:
        feed.follow()
        feed.raise_refused()

    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            value = value.values()
        if isinstance(value, (list, tuple)) or type(value).__name__ == "dict_values":
            for item in value:
                yield from tensors(item)
        elif hasattr(value, "grad_fn"):
            yield value

    todo = [tensor.grad_fn for tensor in tensors(given) if tensor.grad_fn is not None]
    seen, handles = set(todo), []
    while todo:
        node = todo.pop()
        handles += [node.register_prehook(look), node.register_hook(look)]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return handles


def _leave(mode: Any) -> None:
    """Take the mode off the stack, wherever it stands by now."""
    from torch import overrides

    above = []
    stack = overrides._get_current_function_mode_stack()
    if mode not in stack:
        return
    while (top := overrides._pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        overrides._push_mode(other)
