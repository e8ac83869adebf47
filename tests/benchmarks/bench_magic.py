"""What ``%%memprof`` adds to an empty cell, in milliseconds, display included.

    python tests/benchmarks/bench_magic.py [--torch] [--cells 50]

Runs in a real kernel. Pairs of a plain cell and a profiled one, in turns; prints the median and the 95th
percentile of the difference after the first profiled cell, which is shown on its own.
"""

import argparse
import json

import nbformat
from nbclient import NotebookClient

MEASURE = """
import json, statistics, time
ip_ = get_ipython()
def run_(text):
    begin = time.perf_counter()
    ip_.run_cell(text, store_history=True)
    return 1e3 * (time.perf_counter() - begin)
first_ = run_("%%memprof\\npass") - run_("pass")
pairs_ = [(run_("pass"), run_("%%memprof\\npass")) for _ in range(CELLS)]
added_ = sorted(b - a for a, b in pairs_)
print(json.dumps({"first_ms": first_, "median_ms": statistics.median(added_), "p95_ms": added_[int(0.95 * (len(added_) - 1))], "plain_ms": statistics.median(a for a, _ in pairs_)}))
"""


def measure(cells: int = 50, *, with_torch: bool = False) -> dict[str, float]:
    """Milliseconds that the magic adds to an empty cell."""
    sources = ["%load_ext nbmemprof", *(["import torch"] if with_torch else []), MEASURE.replace("CELLS", str(cells))]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    lines = [line for o in notebook.cells[-1].outputs for line in o.get("text", "").splitlines()]
    found: dict[str, float] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return found


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", action="store_true", help="import torch first, so that its source records")
    parser.add_argument("--cells", type=int, default=50)
    args = parser.parse_args()
    print("  ".join(f"{name} {value:.2f}" for name, value in measure(args.cells, with_torch=args.torch).items()))


if __name__ == "__main__":
    main()
