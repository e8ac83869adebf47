"""Thousands of damaged files: each gives a result or a refusal, within the memory limit and the time limit, and none runs anything.

``NBMEMPROF_MUTANTS`` says how many of each kind of file (10,000); ``NBMEMPROF_MUTANTS_FROM`` with which to begin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import mutants
import pytest

BATCH = 500


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["snapshot", "nbmem"])
def test_ten_thousand_mutants_load_or_are_refused(kind, tmp_path):
    first, count = int(os.environ.get("NBMEMPROF_MUTANTS_FROM", "0")), int(os.environ.get("NBMEMPROF_MUTANTS", "10000"))
    failures: list[str] = []
    tried = {"ok": 0, "refused": 0}
    for begin in range(first, first + count, BATCH):
        many = min(BATCH, first + count - begin)
        failures += _batch(begin, many, tmp_path / f"{begin}.txt", tried, kind)
    print(f"\n{count} damaged {kind} files from number {first} on: {tried['ok']} opened, {tried['refused']} refused, {len(failures)} failed")
    assert not failures, "\n\n".join(failures[:10])
    assert sum(tried.values()) == count
    assert min(tried.values()) > count // 10


def _batch(first: int, count: int, progress: Path, tried: dict[str, int], kind: str) -> list[str]:
    """Try a batch in a child process with a memory limit; one that stands still is ended and named."""
    command = [sys.executable, mutants.__file__, str(first), str(count), str(progress), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"POLARS_MAX_THREADS": "2"}) as child:
        seen, since = "", time.monotonic()
        while child.poll() is None:
            time.sleep(0.2)
            now = progress.read_text() if progress.exists() else ""
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > 3 * mutants.LIMIT_S:
                child.kill()
                return [f"mutant {seen} takes more than {3 * mutants.LIMIT_S} s"]
        lines = child.stdout.read().splitlines() if child.stdout else []
    failures = ["\n".join(json.loads(line).values()) for line in lines if line.startswith("{")]
    state = progress.read_text() if progress.exists() else "nothing"
    if child.returncode or not state.startswith("done"):
        return [*failures, f"the child ended with {child.returncode} at mutant {state}"]
    opened, refused = map(int, state.split()[1:])
    tried["ok"] += opened
    tried["refused"] += refused
    return failures
