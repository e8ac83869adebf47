"""Run the field cases whole on a real GPU: the expected line, bytes an iteration and holder beside what was found. Fixtures in tests/fixtures/h200/cases.

    python tests/gpu/record_cases.py OUT [case ...]

``OUT/NN.json`` has device, versions, date, command, what was expected and what was found; ``OUT/NN*.nbmem.gz`` the captures that
were asked, without this machine's paths. All run in one process, case 01 first: its first matrix product makes the workspaces that are to be kept apart.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def plain(capture):
    """The capture without this machine's paths, and without what made the recording (its cost, its clock)."""
    import nbmemprof as mp

    stacks = capture.tables["stacks"]
    name = pl.col("filename")
    library = pl.lit("lib/site-packages/") + pl.coalesce(name.str.extract(r"-packages/(.*)$"), name.str.extract(r"/(torch/.*)$"))
    short = pl.coalesce(library, name.str.extract(r"([^/]*)$")).alias("filename")
    tables = {n: frame for n, frame in capture.tables.items() if frame.height} | {"stacks": stacks.with_columns(short)}
    return mp.Capture.build(tables, **capture.meta)


def main(arguments: list[str]) -> int:
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    import torch
    from field_cases import CASES, Where

    where = Where("cuda") if torch.cuda.is_available() else Where("cpu", 1 / 64)
    if where.device == "cuda":
        torch.zeros(1, device="cuda")
    device = torch.cuda.get_device_name(0) if where.device == "cuda" else "cpu"
    wrong = 0
    for number in arguments[1:] or list(CASES):
        begin, head = time.perf_counter(), {
            "case": number, "what": (CASES[number].__doc__ or "").strip(), "command": " ".join(["python tests/gpu/record_cases.py OUT", *arguments[1:]]), "device": device, "torch": torch.__version__,
            "python": sys.version.split()[0], "date": datetime.now(UTC).date().isoformat(), "scale": where.scale,
        }  # fmt: skip
        try:
            seen = CASES[number](where)
            head |= {"equal": seen.found == seen.expected, "expected": seen.expected, "found": seen.found, "captures": [f"{number}{name and '-' + name}.nbmem.gz" for name in seen.captures]}
            for file, capture in zip(head["captures"], seen.captures.values(), strict=True):
                whole = plain(capture).save(out / file.removesuffix(".gz"))
                (out / file).write_bytes(gzip.compress(whole.read_bytes(), 9, mtime=0))
                whole.unlink()
            del seen
        except Exception:
            head |= {"equal": False, "failed": traceback.format_exc()}
        (out / f"{number}.json").write_text(json.dumps(head, indent=1, default=str) + "\n")
        wrong += not head["equal"]
        told = "as expected" if head["equal"] else head.get("failed") or {name: [value, head["found"][name]] for name, value in head["expected"].items() if head["found"][name] != value}
        print(f"case {number} on {device} in {time.perf_counter() - begin:.1f} s: {told}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
