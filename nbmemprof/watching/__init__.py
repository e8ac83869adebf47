"""Over time, without a notebook: a watch on a process, its files, its trend and its alarm.

Nothing here loads Polars until lines are looked at: a server that is watched pays for NumPy alone.
"""

from __future__ import annotations

from nbmemprof.watching.alarm import Alarm
from nbmemprof.watching.recorder import Watch, watch

__all__ = ["Alarm", "Watch", "watch"]
