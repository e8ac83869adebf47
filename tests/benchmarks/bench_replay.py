"""How fast a million events go through the allocator's rules: replay with its verdict, and what-if over eight settings.

Run as a script: ``python tests/benchmarks/bench_replay.py``. Bars: 3 M events/s after the first call; the first call within
10 s, or compiled code on disk; eight settings within 4 s on two cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

EVENTS = 1_000_000


def main() -> None:
    import nbmemprof as mp
    from nbmemprof.allocator import _link, _run
    from nbmemprof.allocator.what_if import CONFS

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.pickle"
        subprocess.run([sys.executable, str(Path(__file__).parents[1] / "make_snapshot.py"), str(EVENTS), str(path)], check=True, stdout=subprocess.DEVNULL)
        capture = mp.load(path)
    events, _ = capture.events.height, capture.allocations.height
    on_disk = _link._on_disk(_run.run)
    begin = time.perf_counter()
    first = mp.replay(capture)
    print(f"first call: {time.perf_counter() - begin:.2f} s (compiled code {'was' if on_disk else 'was not'} on disk); {first.meta['verdict']['text']}")
    best = min(timed(mp, capture) for _ in range(5))
    print(f"replay: {best:.3f} s, {events / best / 1e6:.1f} M events/s")
    begin = time.perf_counter()
    frame = mp.what_if(capture, CONFS)
    print(f"what-if: {frame.height} settings, {frame['runs'].sum()} runs in {time.perf_counter() - begin:.2f} s")
    begin = time.perf_counter()
    mp.replay(capture, "expandable_segments:True")
    print(f"replay under another setting, as a capture: {time.perf_counter() - begin:.2f} s")


def timed(mp, capture) -> float:
    capture.__dict__.pop("_as_recorded", None)
    begin = time.perf_counter()
    mp.replay(capture)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
