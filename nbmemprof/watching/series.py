"""A series of any length in bounded memory: the lowest, highest and last value of equal stretches of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Series"]

Array = npt.NDArray[Any]
BUCKETS = 1024

# how a column is joined where neighbours become one; the first two say which bucket a row is
_COLUMNS = {
    "epoch": np.maximum, "index": np.maximum, "time_s": np.maximum, "steps": np.maximum,
    "low": np.minimum, "high": np.maximum, "total": np.add, "count": np.add,
}  # fmt: skip
_LAST = "last"


class Series:
    """Values over time, thinned by halves: at most ``buckets`` rows whatever comes.

    Each row is a stretch of ``width_s`` seconds within one epoch (a process from its start to its end): ``time_s``
    and ``steps`` at its end, the ``low``, ``high`` and ``last`` value, ``total`` and ``count`` of the readings.

    Parameters
    ----------
    width_s
        Of a stretch at the beginning; doubled each time that there are too many.
    buckets
        Rows kept.
    """

    def __init__(self, width_s: float = 1.0, buckets: int = BUCKETS) -> None:
        self.width_s, self.buckets = width_s, buckets
        self.epoch = 0
        self.rows: dict[str, Array] = {name: np.zeros(0) for name in (*_COLUMNS, _LAST)}

    def __len__(self) -> int:
        return len(self.rows["low"])

    def restart(self) -> None:
        """Begin an epoch: what comes now is a process that holds nothing of before."""
        self.epoch += 1

    def add(self, time_s: float, value: float, steps: float = 0.0) -> None:
        """Take one reading; times ascend."""
        self.extend(np.asarray([time_s]), np.asarray([value]), np.asarray([steps]))

    def extend(self, time_s: Array, values: Array, steps: Array) -> None:
        """Take many readings, ascending in time; millions a second."""
        if not len(time_s):
            return
        # a chunk that spans more stretches than are kept is first laid on coarser ones
        while (time_s[-1] - time_s[0]) / self.width_s > self.buckets:
            self._thin()
        index = np.floor(time_s / self.width_s)
        begin = np.flatnonzero(np.concatenate([[True], index[1:] != index[:-1]]))
        last = np.concatenate([begin[1:], [len(index)]]) - 1
        made = {
            "epoch": np.full(len(begin), float(self.epoch)), "index": index[begin], "time_s": time_s[last], "steps": steps[last],
            "low": np.minimum.reduceat(values, begin), "high": np.maximum.reduceat(values, begin),
            "total": np.add.reduceat(values.astype(np.float64), begin), "count": (last - begin + 1).astype(np.float64), _LAST: values[last],
        }  # fmt: skip
        self.rows = {name: np.concatenate([self.rows[name], made[name].astype(np.float64)]) for name in self.rows}
        self._merge()
        while len(self) > self.buckets:
            self._thin()

    def _thin(self) -> None:
        before = len(self)
        self.width_s *= 2
        self.rows["index"] = np.floor(self.rows["index"] / 2)
        self._merge()
        if before > 2 * self.buckets and len(self) == before:  # one row an epoch: the oldest epochs go
            self.rows = {name: column[-self.buckets :] for name, column in self.rows.items()}

    def _merge(self) -> None:
        epoch, index = self.rows["epoch"], self.rows["index"]
        fresh = np.concatenate([[True], (index[1:] != index[:-1]) | (epoch[1:] != epoch[:-1])])
        if fresh.all():
            return
        begin = np.flatnonzero(fresh)
        joined = {name: how.reduceat(self.rows[name], begin) for name, how in _COLUMNS.items()}
        joined[_LAST] = self.rows[_LAST][np.concatenate([begin[1:], [len(fresh)]]) - 1]
        self.rows = joined

    # ------------------------------------------------------------------ as text
    def dump(self) -> dict[str, Any]:
        """As plain numbers, for a state file."""
        return {"width_s": self.width_s, "epoch": self.epoch, "rows": {name: [_short(v) for v in column.tolist()] for name, column in self.rows.items()}}

    @classmethod
    def load(cls, made: Mapping[str, Any]) -> Series:
        """Back from :meth:`dump`."""
        series = cls(float(made["width_s"]))
        series.epoch = int(made["epoch"])
        rows = {name: np.asarray(made["rows"][name], np.float64) for name in series.rows}
        if len({len(column) for column in rows.values()}) != 1:
            raise ValueError("columns of different length")
        series.rows = rows
        return series


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 4)
