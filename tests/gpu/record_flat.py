"""The profiler leaves nothing on the device or the host: 200 profiled cells with the full view in a real shell, beside 200 plain ones. Fixture tests/fixtures/h200/flat.json.

    python tests/gpu/record_flat.py OUT [cells]

``OUT/flat.json`` has device, versions, date, command and, after each 20 cells, resident bytes, objects, and of the device allocated,
reserved and used bytes. One cell in twenty fails.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
CELLS, EACH = 200, 20
BODY = """for _ in range(2):
    net(torch.randn(64, 256, device=device)).square().mean().backward()
    opt.step(); opt.zero_grad()"""
FAILS = "kept = torch.empty(1 << 20, device=device)\nraise ValueError('now and then')"


def counts(torch, device: str) -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was given back to the C library is not held
    found = {"rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"), "objects": len(gc.get_objects())}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved(), "used_bytes": total - free}
    return found


def run(shell, torch, device: str, magic: str, cells: int) -> dict[str, object]:
    from IPython.utils.capture import capture_output

    rows, shown, begin = [], 0, time.perf_counter()
    for i in range(cells):
        with capture_output() as out:
            shell.run_cell(magic + (FAILS if i % EACH == EACH // 2 else BODY), store_history=True)
        shown += sum("text/html" in o.data for o in out.outputs)
        del out
        if i % EACH == EACH - 1:
            rows.append({"cells": i + 1} | counts(torch, device))
            print(magic.strip() or "plain", rows[-1], f"{time.perf_counter() - begin:.1f} s", flush=True)
    return {"views": shown, "seconds": round(time.perf_counter() - begin, 1), "rows": rows}


def main(arguments: list[str]) -> int:
    out, cells = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else CELLS
    out.mkdir(parents=True, exist_ok=True)
    import torch
    from IPython.core.interactiveshell import InteractiveShell

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shell = InteractiveShell.instance()
    net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(device)
    shell.user_ns.update(torch=torch, device=device, net=net, opt=torch.optim.Adam(net.parameters()))
    shell.run_line_magic("load_ext", "nbmemprof")
    run(shell, torch, device, "%%memprof\n", EACH)  # what is made once: compiled code, imports, caches
    head = {
        "what": __doc__.split("\n")[0], "command": "python tests/gpu/record_flat.py OUT", "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu", "torch": torch.__version__,
        "python": sys.version.split()[0], "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    found = {"plain": run(shell, torch, device, "", cells), "profiled": run(shell, torch, device, "%%memprof\n", cells)}
    (out / "flat.json").write_text(json.dumps(head | found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
