"""``%memprof auto [on|off]``: every following cell is recorded; a line where it mattered."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.capture import Capture
from nbmemprof.errors import NotRecording
from nbmemprof.flags import Flag
from nbmemprof.units import format_bytes

NAME = "auto"
HELP = "Record every following cell; a line is printed only where what it kept, or its peak, is more than 1 % of what was held before."
FLAGS = [Flag("STATE", "on or off", choices=("on", "off"), default="on", metavar="on|off")]

CHANGE = 0.01


def run(args: Namespace, shell: Any) -> None:
    """Switch it."""
    from nbmemprof import magics

    here = magics.of(shell)
    if here is None:
        raise NotRecording("The extension is not loaded in this shell. Run %load_ext nbmemprof.")
    before, here.auto = here.auto, args.state == "on"
    if not here.auto:
        said = "off: cells are recorded where %%memprof asks for it"
    else:
        said = f"on{' already' if before else ''}: every following cell is recorded, a line comes where it mattered; %memprof auto off ends it"
    print(f"memprof: auto is {said}.")  # noqa: T201 - what a magic says


def line(capture: Capture) -> str | None:
    """The cell's line, or None where neither kept nor peak changed by more than 1 %."""
    from nbmemprof.views._facts import facts

    parts = []
    for device in facts(capture).devices:
        end = device.number("end_allocated_bytes") or 0
        start = end if device.start_bytes is None else device.start_bytes
        kept = end - start
        if max(abs(kept), device.peak - start) > CHANGE * start:
            where = f"{device.label}: " if device.label else ""
            parts.append(f"{where}peak {format_bytes(device.peak)} ({_signed(device.peak - start)}) · kept {_signed(kept)}")
    if not parts:
        return None
    cell = capture.meta.get("cell")
    return f"memprof{'' if cell is None else f' In[{cell}]'}: " + "; ".join(parts)


def _signed(size: int) -> str:
    return ("+" if size > 0 else "") + format_bytes(size)
