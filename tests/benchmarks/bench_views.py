"""What the first view costs, and what Altair would cost in its place.

    python tests/benchmarks/bench_views.py [SNAPSHOT]

Prints milliseconds and bytes of the first view (cold: the first of a process), of the HTML report and its zoom in Chromium, and of the same timeline
drawn by Altair through vl-convert, with the memory that each adds to the process. Without a file a capture is made up.
"""

import argparse
import json
import subprocess
import sys
import time

CELL = """
import json, resource, sys, time
import polars as pl
from nbmemprof.capture import Capture, load
from nbmemprof import heap, schema
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def made_up(steps=400):
    rows, seq, t = [], 0, 0.0
    for step in range(steps):
        for layer in range(8):
            rows.append((seq, t, "alloc", 4096 * (1 + seq), 1 << 20, layer)); seq += 1; t += 40
        for layer in reversed(range(8)):
            last = seq - 1 - 2 * (7 - layer)
            for act in ("free_requested", "free_completed"):
                rows.append((seq, t, act, 4096 * (1 + step * 24 + layer), 1 << 20, None)); seq += 1; t += 40
    frame = pl.DataFrame(rows, schema=["seq", "time_us", "action", "addr", "requested_bytes", "stack_id"], orient="row", infer_schema_length=None)
    events = schema.fill("events", {n: frame[n] for n in frame.columns} | {"kind": "host", "source": "torch"})
    stacks = schema.fill("stacks", {"stack_id": list(range(8)), "depth": [0] * 8, "function": ["forward"] * 8, "filename": ["model.py"] * 8, "line": list(range(8))})
    return heap.build({"events": events, "stacks": stacks}, source="torch_cpu")
path = sys.argv[1]
cap = load(path) if path else made_up()
begin, before = time.perf_counter(), rss()
"""
OWN = """
from nbmemprof.views import first
import nbmemprof.analyses.timeline, nbmemprof.analyses.sites, nbmemprof.analyses.breakdown, nbmemprof.analyses.summary
for name in ("summary", "breakdown", "sites"):  # what others ask too is not the view's
    from nbmemprof.views import _facts
_facts.facts(cap); cap_ready = time.perf_counter(); known = _facts.facts(cap)
for device in known.devices: known.stack(device, 500)
begin, before = time.perf_counter(), rss()
shown = first.bundle(cap)
end = time.perf_counter()
again = Capture(cap.tables, cap.meta); begin2 = time.perf_counter(); first.bundle(again); end2 = time.perf_counter()
print(json.dumps({"draw_ms": 1e3 * (end - begin), "with_analyses_ms": 1e3 * (end2 - begin2), "bytes": sum(len(v.encode()) for v in shown.values()), "json_bytes": len(json.dumps(shown)), "added_MB": (rss() - before) / 1e6}))
"""
ALTAIR = """
from nbmemprof.views import _facts
known = _facts.facts(cap); device = known.devices[0]
frame = known.of(known.ask("timeline", by=device.by, max_points=500, top=8), device)
begin, before = time.perf_counter(), rss()
from nbmemprof.views.charts.timeline import timeline
import vl_convert
svg = vl_convert.vegalite_to_svg(timeline(frame).to_dict())
first_ms = 1e3 * (time.perf_counter() - begin); begin = time.perf_counter()
vl_convert.vegalite_to_svg(timeline(frame).to_dict())
print(json.dumps({"draw_ms": first_ms, "again_ms": 1e3 * (time.perf_counter() - begin), "svg_bytes": len(svg), "added_MB": (rss() - before) / 1e6}))
"""
REPORT = """
from nbmemprof.views import report
page = report.page(cap)
print(json.dumps({"ms": 1e3 * (time.perf_counter() - begin), "bytes": len(page.encode())}))
"""
FRAMES = """
import os, pathlib, shutil, tempfile
from nbmemprof.views import report
from playwright.sync_api import sync_playwright
page_file = pathlib.Path(tempfile.mkdtemp()) / "report.html"
report.write(cap, page_file)
with sync_playwright() as playwright:
    chrome = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
    page = chrome.new_page(viewport={"width": 1200, "height": 900})
    begin = time.perf_counter()
    page.goto(page_file.as_uri()); page.wait_for_function("document.querySelector('.timeline').dataset.to")
    paint = time.perf_counter() - begin
    times = page.evaluate('''async () => { const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect(), times = []; let last = performance.now();
        for (let i = 0; i < 120; i++) { canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: i < 60 ? -20 : 20, clientX: box.left + 400, clientY: box.top + 100, bubbles: true, cancelable: true}));
            await new Promise(requestAnimationFrame); times.push(performance.now() - last); last = performance.now(); }
        return times.sort((a, b) => a - b); }''')
    chrome.close()
print(json.dumps({"first_paint_ms": 1e3 * paint, "frame_median_ms": times[60], "frame_p95_ms": times[113]}))
"""
EMPTY = """
from nbmemprof.views import first
caps = [Capture.build({}, source="none", warnings=["empty: torch was not imported"]) for _ in range(50)]
first.bundle(caps[0]); begin = time.perf_counter()
for empty in caps[1:]: first.bundle(empty)
print(json.dumps({"ms": 1e3 * (time.perf_counter() - begin) / 49}))
"""


def measure(body: str, path: str = "") -> dict[str, float]:
    """Run one measurement in a process of its own."""
    done = subprocess.run([sys.executable, "-c", CELL + body, path], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("snapshot", nargs="?", default="")
    path = parser.parse_args().snapshot
    begin = time.perf_counter()
    for name, body in (
        ("own SVG, first view", OWN),
        ("Altair by vl-convert, timeline only", ALTAIR),
        ("HTML report", REPORT),
        ("HTML report in Chromium, no GPU", FRAMES),
        ("empty capture", EMPTY),
    ):
        print(f"{name:36s}", "  ".join(f"{k} {v:,.1f}" for k, v in measure(body, path).items()))
    print(f"{time.perf_counter() - begin:.1f} s in all")


if __name__ == "__main__":
    main()
