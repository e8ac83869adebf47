"""What the scripts share that record on a GPU: stages in a process each, what stands at the head of a file, snapshots without this machine's paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Stage = Callable[[Path], dict[str, Any]]


def device() -> str:
    """Name and driver version of each GPU, as ``nvidia-smi`` prints them; "CPU" where there is none."""
    try:
        told = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        told = ""
    return told.strip() or "CPU"


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def versions(*packages: str) -> dict[str, str]:
    """Of Python, torch, and those of the packages that are loaded."""
    return {"python": sys.version.split()[0]} | {name: str(sys.modules[name].__version__) for name in ("torch", *packages) if name in sys.modules}


def without_paths(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The first device's snapshot; of a path only what follows ``site-packages``, or the file's name, is left. Changes what it is given."""
    entries = [*snapshot["device_traces"][0], *snapshot["segments"], *(b for s in snapshot["segments"] for b in s["blocks"])]
    frames = {id(frame): frame for entry in entries for frame in entry.get("frames", ())}  # shared between entries
    for frame in frames.values():
        _, library, place = frame["filename"].rpartition("/site-packages/")
        frame["filename"] = f"lib/site-packages/{place}" if library else Path(place).name
    snapshot["device_traces"] = snapshot["device_traces"][:1]
    return snapshot


class Stages:
    """The stages of a script, by name: functions from the folder to numbers, which go to ``OUT/STAGE.json`` with device, versions, date, command.

    Parameters
    ----------
    script
        Its ``__file__``.
    facts
        What else stands at the head of each file.
    limits
        Seconds after which a stage is stopped, by name; ``""``: of all others.
    env
        Environment of a stage, by name.
    jobs
        How many run at a time, but for those ``alone``.
    """

    def __init__(
        self, script: str, facts: Callable[[], dict[str, Any]], *, limits: Mapping[str, int], env: Mapping[str, dict[str, str]] | None = None, jobs: int = 1,
        alone: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.script, self.facts, self.limits, self.env, self.jobs, self.alone = script, facts, limits, env or {}, jobs, alone
        self.named: dict[str, Stage] = {}

    def __call__(self, function: Stage) -> Stage:
        self.named[function.__name__.rstrip("_")] = function
        return function

    def one(self, name: str, out: Path) -> int:
        """Run a stage here."""
        begin = time.perf_counter()
        try:
            numbers, code = self.named[name](out), 0
        except BaseException:
            numbers, code = {"failed": traceback.format_exc()}, 1
        seconds = time.perf_counter() - begin
        head = {"stage": name, "what": (self.named[name].__doc__ or "").strip(), "command": f"python tests/gpu/{Path(self.script).name} OUT {name}", "device": device(), "date": today()}
        (out / f"{name}.json").write_text(json.dumps(head | self.facts() | {"seconds": seconds, "numbers": numbers}, indent=1, default=str))
        shown = {k: v for k, v in numbers.items() if k != "stats"}
        print(f"== {name} ({seconds:.1f} s)\n{numbers['failed'] if code else json.dumps(shown, default=str)[:2500]}", flush=True)
        return code

    def main(self, arguments: list[str]) -> int:
        """``OUT [stage ...]``: one stage runs here, several (without a name: all) in processes of their own."""
        out, names = Path(arguments[0]), arguments[1:] or list(self.named)
        out.mkdir(parents=True, exist_ok=True)
        if len(names) == 1:
            return self.one(names[0], out)

        def run(name: str) -> int:
            limit = self.limits.get(name, self.limits[""])
            env = os.environ | self.env.get(name, {}) | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            try:
                return subprocess.run([sys.executable, self.script, str(out), name], env=env, check=False, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                print(f"== {name}\nstopped after {limit} s", flush=True)
                return 1

        with ThreadPoolExecutor(self.jobs) as pool:
            codes = list(pool.map(run, [name for name in names if name not in self.alone]))
        return max(codes + [run(name) for name in names if name in self.alone])
