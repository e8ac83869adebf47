"""Recorded traces with one event injured, and what the verdict says: for the soak test and for whoever looks into a single case.

An injury takes an event out, repeats it, exchanges it with the next, or changes its size or address by one block.
"""

from __future__ import annotations

import collections
import gzip
import json
import pickle
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "allocator"))
import recorded

import nbmemprof as mp
from nbmemprof.allocator import verdict

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = ("drop", "twice", "swap", "size", "address")
LETTERS = {
    "a": "alloc", "r": "free_requested", "f": "free_completed", "S": "segment_alloc", "F": "segment_free", "M": "segment_map", "U": "segment_unmap", "O": "oom",
}  # fmt: skip
Event = dict[str, Any]


@dataclass(frozen=True)
class Whole:
    """A recording as it is; ``readings``: torch's counters where they were asked for beside it, the first before the first event."""

    name: str
    snapshot: dict[str, Any]
    readings: list[dict[str, int]] | None = None

    @property
    def device(self) -> int:
        traces = self.snapshot["device_traces"]
        return max(range(len(traces)), key=lambda i: len(traces[i]))

    @property
    def trace(self) -> list[Event]:
        events: list[Event] = self.snapshot["device_traces"][self.device]
        return events

    def capture(self, trace: list[Event] | None = None) -> mp.Capture:
        """With another trace of the device."""
        traces = list(self.snapshot["device_traces"])
        traces[self.device] = self.trace if trace is None else trace
        made = mp.load(self.snapshot | {"device_traces": traces})
        if self.readings is None:
            return made
        return mp.Capture.build({name: made.tables[name] for name in made.tables}, **made.meta | {"readings": {str(self.device): self.readings}})


def wholes() -> Iterator[Whole]:
    """Every committed recording of a real device."""
    folder = FIXTURES / "recordings"
    for path in sorted(folder.glob("*.pickle.gz")):
        facts = path.with_name(path.name.replace(".pickle.gz", ".json").replace(".snapshot", ""))
        told = json.loads(facts.read_text()) if facts.exists() else {}
        found = [*told.get("checkpoints", ()), *([told["stats"]] if told else [])]
        yield Whole(path.name.split(".pickle")[0], pickle.loads(gzip.decompress(path.read_bytes())), [dict.fromkeys(found[-1], 0), *found] if found else None)
    for path in sorted(folder.glob("ops_*.json.gz")):
        found = json.loads(gzip.decompress(path.read_bytes()))
        yield Whole(path.name.split(".json")[0], recorded.of_requests(found), recorded.readings(found))
    yield Whole("trace_gpt2_varlen_b8_expand", recorded.of_trace("gpt2_varlen_b8_expand")[0])
    folder = FIXTURES / "h200" / "allocator"
    for path in sorted(folder.glob("ops_*.json.gz")):
        name = path.name.split(".json")[0].removeprefix("ops_")
        yield Whole(f"h200_{name}", recorded.of_script(name), recorded.readings(recorded.script(name)))
    for path in sorted(folder.glob("whatif_*.json.gz")):
        yield Whole(path.name.split(".json")[0], _of_columns(json.loads(gzip.decompress(path.read_bytes()))))
    for path in [*sorted(folder.glob("case_*.pickle.gz")), *sorted(folder.parent.glob("*.pickle.gz"))]:
        facts = json.loads(path.with_name(path.name.replace(".pickle.gz", ".json")).read_text())
        found = facts["numbers"]["stats"] if "numbers" in facts else {"start": {}, "end": facts["counters"]}
        end = _flat(found["end"])
        yield Whole(f"h200_{path.name.split('.pickle')[0]}", pickle.loads(gzip.decompress(path.read_bytes())), [dict.fromkeys(end, 0) | _flat(found["start"]), end])


def _flat(nested: dict[str, Any], before: str = "") -> dict[str, int]:
    """Counters under the names of ``torch.cuda.memory_stats``."""
    found: dict[str, int] = {}
    for name, value in nested.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return found


def _of_columns(found: dict[str, Any]) -> dict[str, Any]:
    rows = zip(found["actions"], found["addrs"], found["sizes"], found["streams"], strict=True)
    trace = [{"action": LETTERS[a], ("device_free" if a == "O" else "addr"): x + (0 if a == "O" else found["addr_base"]), "size": s, "stream": t, "time_us": i} for i, (a, x, s, t) in enumerate(rows)]
    return {"segments": [], "device_traces": [trace], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": found["conf"]}}


def injured(kind: str, trace: list[Event], at: int, rng: random.Random) -> list[Event] | None:
    """The trace with one event injured; None where that changes nothing."""
    event, shift = trace[at], rng.choice([512, -512])
    if kind == "drop":
        return trace[:at] + trace[at + 1 :]
    if kind == "twice":
        return trace[: at + 1] + trace[at:]
    if kind == "swap":
        return None if at + 1 == len(trace) or trace[at + 1] == event else [*trace[:at], trace[at + 1], event, *trace[at + 2 :]]
    changed = event | ({"size": max(event["size"] + shift, 1)} if kind == "size" else {"addr": event.get("addr", 0) + shift})
    return None if kind == "address" and "addr" not in event else [*trace[:at], changed, *trace[at + 1 :]]


def told(whole: Whole, kind: str, at: int, trace: list[Event]) -> str:
    """``at``: false at that very event; ``in``: in an interval that holds it; ``off``: elsewhere; ``exact``: the trace is a possible one."""
    judged = verdict(whole.capture(trace))
    mismatch = judged["first_mismatch"]
    if mismatch is None:
        return "exact"
    low, high = mismatch.get("between", [mismatch["index"]] * 2)
    return "at" if mismatch["index"] == at else "in" if low <= at <= high else "off"


def nothing_tells(whole: Whole, at: int) -> bool:
    """Whether a trace without this event is one that the same allocator could have left, by what is in no other event and in no picture."""
    trace, event = whole.trace, whole.trace[at]
    if event["action"] == "oom":
        return whole.readings is None
    if whole.readings is not None and {"allocation.all.allocated", "num_device_alloc"} <= set(whole.readings[-1]):
        return False
    low, high = event["addr"], event["addr"] + max(event["size"], 1)

    def touches(other: Event) -> bool:
        return other["action"] != "oom" and other["action"] != "snapshot" and other["addr"] < high and other["addr"] + max(other["size"], 1) > low

    alive = event["action"] in ("alloc", "segment_alloc", "segment_map")
    from_before = alive and not any(touches(e) for e in trace[:at] if e["action"] in ("alloc", "free_requested", "segment_alloc", "segment_map") and (e["action"] == "alloc" or event["action"] != "alloc"))
    no_more = not whole.snapshot["segments"] and not any(touches(e) for e in trace[at + 1 :])
    return from_before or no_more


def choose(wholes_: list[Whole], count: int, kind: str, rng: random.Random) -> Iterator[tuple[Whole, int, list[Event]]]:
    """Recordings in turn; of each an action at random, then one of its events."""
    places = [collections.defaultdict(list) for _ in wholes_]
    for found, whole in zip(places, wholes_, strict=True):
        for i, event in enumerate(whole.trace):
            found[event["action"]].append(i)
    for number in range(count):
        whole, found = wholes_[number % len(wholes_)], places[number % len(wholes_)]
        at = rng.choice(found[rng.choice(sorted(set(found) - {"snapshot"}))])
        trace = injured(kind, whole.trace, at, rng)
        if trace is not None:
            yield whole, at, trace
