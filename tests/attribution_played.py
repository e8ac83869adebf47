"""Recordings of ``tests/gpu/record_attribution.py`` from an H200, made into captures again."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from fake_cuda import FakeCuda

from nbmemprof import _kv_caches
from nbmemprof.capture import Capture
from nbmemprof.sources import _placing, _routing, torch_history

FOLDER = Path(__file__).parent / "fixtures" / "h200" / "attribution"
NAMES = sorted(p.name.removesuffix(".raw.gz") for p in FOLDER.glob("*.raw.gz"))


def numbers(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())["numbers"]
    return found


class Seen:
    """The observer as it was then."""

    def __init__(self, raw: dict[str, Any], drop: tuple[str, ...]) -> None:
        log = {k: np.array(v) if k in ("times_us", "phase", "group", "back", "layer", "name", "grad") else v for k, v in raw["log"].items()}
        log["steps"], log["owners"] = [tuple(s) for s in log["steps"]], [tuple(o) for o in log["owners"] if o[4] not in drop]
        log["caches"] = [(record, clock, _kv_caches.Shape(*shape), padded) for record, clock, shape, padded in log.get("caches", ())]
        log["routing"] = [_routing.Call(*call) for call in log.get("routing", ())]
        self.log, self.noted = _placing.Log(**log), raw["noted"]

    def look(self, **_: Any) -> int:
        return 0

    def open(self) -> None: ...
    def close(self) -> None: ...


class Played(FakeCuda):
    def __init__(self, name: str, drop: tuple[str, ...]) -> None:
        super().__init__()
        self.raw = pickle.loads(gzip.decompress((FOLDER / f"{name}.raw.gz").read_bytes()))
        self.told, self.at, self.seen = (self.raw["start"], self.raw["end"]), 0, Seen(self.raw, drop)

    def stats(self, device: int) -> dict[str, Any]:
        found: dict[str, Any] = self.told[self.at]
        return found

    def snapshot(self, devices: range) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self.at = 1
        return [self.told[1]], self.raw["snapshot"]

    def observer(self, *, notes: bool) -> Any:
        return self.seen


def play(name: str, drop: tuple[str, ...] = (), *, notes: bool = True) -> Capture:
    """The capture again; ``drop``: categories whose owners nobody found; ``notes``: whether the notes are read."""
    cuda = Played(name, drop)
    cuda.seen.noted &= notes
    when = [cuda.raw["begin_us"], cuda.raw["log"]["times_us"][-1] + 1000.0]
    source = torch_history.TorchHistory(cuda, clock=lambda: when[0] / 1e6)
    source._look = lambda since, ring: cuda.seen.log  # type: ignore[method-assign]
    source.start()
    when.pop(0)
    return source.stop()
