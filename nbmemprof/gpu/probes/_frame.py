"""What a probe gives: a Polars frame that knows where it comes from, draws itself, and can be the recording that ships with the package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl

from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu import _device

__all__ = ["ProbeFrame", "answer", "say", "shipped", "telling", "to_json"]

_FOLDER = Path(__file__).parent / "recorded"
Schema = Mapping[str, Any]


class ProbeFrame(pl.DataFrame):
    """A frame with its provenance. What Polars makes of it (a filter, a join) is a plain frame.

    Attributes
    ----------
    probe
        Name of the probe.
    origin
        ``measured`` on the GPU at hand, or ``recorded``: measured before, on the device named, and shipped with this package.
    device
        Name of the GPU.
    about
        ``date``, ``versions``, ``command`` and what else belongs to the numbers.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> frame = mp.probes.latency(recorded=True)
    >>> frame.origin, frame.device
    ('recorded', 'NVIDIA H200')
    """

    probe: str = ""
    origin: str = "unknown"
    device: str = ""
    about: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], schema: Schema, *, probe: str, origin: str, device: str, about: Mapping[str, Any]) -> ProbeFrame:
        """Make it from rows; what a row lacks is null. The rest are the frame's attributes."""
        frame = cls([tuple(row.get(name) for name in schema) for row in rows], schema=dict(schema), orient="row")
        frame.probe, frame.origin, frame.device, frame.about = probe, origin, device, dict(about)
        return frame

    def said(self) -> str:
        """Say what was measured where: the sentence above every picture of it."""
        where = f"measured here on {self.device}" if self.origin == "measured" else f"recorded on {self.device}, {self.about.get('date', 'date unknown')}; not measured here"
        return f"{self.probe.replace('_', ' ').capitalize()}: {where}."

    def chart(self) -> Any:
        """Draw it with Altair: what was achieved, the measured ceiling, the data sheet."""
        from nbmemprof.views.charts.probes import probes

        return probes(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from nbmemprof.views.probes import bundle

        return bundle(self)


_TOLD: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)


@contextmanager
def telling(told: Callable[[str], None]) -> Iterator[None]:
    """Say inside how far a long probe is."""
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


def say(text: str) -> None:
    """Tell whoever listens."""
    told = _TOLD.get()
    if told is not None:
        told(text)


def answer(probe: str, schema: Schema, measure: Callable[[_device.Gpu], list[dict[str, Any]]], *, recorded: bool = False, gpu: _device.Gpu | None = None) -> ProbeFrame:
    """Measure on the GPU at hand; where there is none, or a recording is asked for, return the one that ships."""
    found = gpu or (None if recorded else _device.find())
    if found is None:
        return shipped(probe, schema)
    say(f"probe {probe}: measuring on {found.name} …")
    with found.memory():
        rows = measure(found)
    about = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": dict(found.versions), "command": f"mp.probes.{probe}()"}
    return ProbeFrame.of(rows, schema, probe=probe, origin="measured", device=found.name, about=about)


def shipped(probe: str, schema: Schema) -> ProbeFrame:
    """Return the recording that comes with the package.

    Raises
    ------
    NbmemprofError
        There is none.
    """
    kept = _read(probe)
    return ProbeFrame.of(kept["rows"], schema, probe=probe, origin="recorded", device=kept["device"], about={k: v for k, v in kept.items() if k not in ("rows", "device", "probe")})


@cache
def _read(probe: str) -> dict[str, Any]:
    path = _FOLDER / f"{probe}.json"
    if not path.is_file():
        raise NbmemprofError(f"There is no GPU here that CuPy can use, and no recording of {probe!r} ships with this version. Run it on a machine with a GPU and CuPy (pip install 'nbmemprof[cupy]').")
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def to_json(frame: ProbeFrame) -> str:
    """Write a measured frame as the package ships it."""
    head = {"probe": frame.probe, "device": frame.device, **frame.about}
    rows = ",\n".join("  " + json.dumps(_short(row), separators=(", ", ": ")) for row in frame.to_dicts())
    return json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n ]\n}\n"


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Six figures: no timer gives more."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}
