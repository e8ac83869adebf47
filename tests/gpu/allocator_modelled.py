"""The operations of ``allocator_scripts.py`` on the modelled device, and what it says beforehand of a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _recording import today
from allocator_scripts import FILL, FILLED, GC_LIMITS, KEYS, LEAVE, OVERSIZE, PATTERNS, SCRIPTS, SETTINGS, UNKNOWN, Op, digest

POLICIES: tuple[str | int, ...] = ("windows", "ascending", "descending", 1, 2)



class Modelled:
    """The operations on :class:`nbmemprof.allocator.Device`."""

    def __init__(
        self,
        conf: str,
        *,
        streams: list[int] | None = None,
        fill: int = FILL,
        limit: int | None = None,
        capacity: int | None = None,
        addresses: Any = "ascending",
    ) -> None:
        from nbmemprof.allocator import Device

        self.streams, self.fill = streams or [0, 1 << 20, 2 << 20], fill
        self.device = Device(conf, torch="2.11", limit_bytes=limit, capacity_bytes=capacity, addresses=addresses)
        self.addr: dict[int, int] = {}
        self.pools: dict[Any, Any] = {}
        self.users: dict[Any, int] = {}
        self.entered: dict[Any, Any] = {}
        self.captured: tuple[int, Any] | None = None

    def do(self, op: Op) -> int | str | None:
        device = self.device
        before = device.stats()
        waiting = {s for s, queue in device._queues.items() if queue}
        answer = getattr(self, "_" + op[0])(*op[1:])
        after = device.stats()
        if after["num_device_free"] > before["num_device_free"]:  # the driver waits for the whole device before it frees
            device.synchronize()
        elif after["num_sync_all_streams"] > before["num_sync_all_streams"]:
            for stream in waiting:
                device.synchronize(stream)
        return answer

    def counters(self) -> list[int]:
        stats = self.device.stats()
        return [stats[f"{OVERSIZE[k]}.current"] if k in OVERSIZE else stats[k] if k.startswith("num_") else stats[f"{k}.all.current"] for k in KEYS]

    def _alloc(self, which: int, size: int, stream: int) -> int | str:
        from nbmemprof.errors import OutOfMemoryError

        outside = self.captured is not None and stream != self.captured[0]
        try:
            self.addr[which] = self.device.malloc(size, stream=self.streams[stream], pool=(0, 0) if outside else None)
        except OutOfMemoryError:
            return "OOM"
        return self.addr[which]

    def _fill(self, which: int, _leave: int) -> int | str:
        return self._alloc(which, self.fill, 0)

    def _free(self, which: int) -> None:
        if which in self.addr:
            self.device.free(self.addr.pop(which))

    def _use(self, which: int, stream: int) -> None:
        if which in self.addr:
            self.device.record_stream(self.addr[which], self.streams[stream])

    def _busy(self, stream: int) -> None:
        self.device.busy(self.streams[stream])

    def _sync(self) -> None:
        self.device.synchronize()

    def _empty(self) -> None:
        self.device.empty_cache()

    def _limit(self, limit: int) -> None:
        self.device.set_limit(limit)

    def _limit_over_fill(self, limit: int) -> None:
        self.device.set_limit(self.fill + limit)

    def _warm(self, stream: int) -> None:
        """The first graph of a process makes two small tensors for random numbers, which stay while a graph does."""
        for _ in range(2):
            self.device.malloc(8, stream=self.streams[stream])
        self.device.graph_pool()

    def _begin(self, graph: int, stream: int, share: int | None) -> None:
        context = self.device.capture(None if share is None else self.pools["graph", share], stream=self.streams[stream])
        pool = self.pools["graph", graph] = context.__enter__()
        self.users[pool] = self.users.get(pool, 0) + 1
        self.entered["graph", graph] = context
        self.captured = (stream, pool)

    def _end(self, graph: int) -> None:
        self.entered.pop(("graph", graph)).__exit__(None, None, None)
        self.captured = None

    def _replay(self, graph: int) -> None:
        """No event."""

    def _reset(self, graph: int) -> None:
        pool = self.pools["graph", graph]
        self.users[pool] -= 1
        if self.users[pool] == 0:
            self.device.drop_pool(pool)

    def _pool(self, pool: int, options: dict[str, bool]) -> None:
        self.pools[pool] = self.device.mem_pool(**options)

    def _enter(self, pool: int) -> None:
        self.entered[pool] = self.device.use_pool(self.pools[pool])
        self.entered[pool].__enter__()

    def _leave(self, pool: int) -> None:
        self.entered.pop(pool).__exit__(None, None, None)

    def _drop(self, pool: int) -> None:
        self.device.drop_pool(self.pools[pool])


def without_fill(counters: list[int], fill: int) -> list[int]:
    """Counters without the filling request, where it is live."""
    filled = counters[0] >= fill > 0
    return [c - fill if filled and i in FILLED else c for i, c in enumerate(counters)]


def outcome(answer: Any) -> Any:
    return "served" if isinstance(answer, int) else answer


def foretell(name: str, policy: str | int) -> dict[str, Any]:
    conf, make = SCRIPTS[name]
    ops = make()
    fill = FILL if ops[0][0] == "fill" else 0
    model = Modelled(conf, capacity=fill + LEAVE if fill else None, addresses=policy)
    rows = []
    for op in ops:
        try:
            answer = model.do(op)
        except RuntimeError:  # the script ends here, as a recording does
            break
        rows.append([outcome(answer), without_fill(model.counters(), fill)])
    stats = model.device.stats()
    return {
        "rows": digest(rows), "refused": [i for i, (answer, _) in enumerate(rows) if answer == "OOM"], "checkpoints": [counters for _, counters in rows[99::100]],
        "end": rows[-1][1], "peak_reserved_bytes": stats["reserved_bytes.all.peak"] - fill, "peak_allocated_bytes": stats["allocated_bytes.all.peak"] - fill,
        "retries": stats["num_alloc_retries"], "ooms": stats["num_ooms"],
    }  # fmt: skip


def foretell_peak(pattern: str, setting: str, policy: str | int) -> dict[str, int]:
    model = Modelled(SETTINGS[setting], limit=GC_LIMITS[pattern] if setting == "gc80" else None, addresses=policy)
    for op in PATTERNS[pattern]():
        model.do(op)
    stats = model.device.stats()
    return {
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "ooms": stats["num_ooms"],
        "retries": stats["num_alloc_retries"],
    }


def predict(path: Path) -> None:
    found: dict[str, Any] = {
        "what": "Said by nbmemprof.allocator.Device before the recordings were made. Addresses are not said: they are the driver's. Where the orders of segment addresses (the policies) differ, the outcome hangs on addresses.",
        "assumed": [
            "driver_oom*: the driver gives exactly what cudaMemGetInfo calls free, in whole pages of 2 MiB",
            "streams_limit*: a busy stream ends at the script's sync, at a flush that waits for it, or where the driver frees a segment (which waits for the device)",
            "graph_streams: frees deferred by a capture complete in the first request after its end",
            "graph*: the first graph of a process makes two 8-byte tensors",
        ],
        "keys": KEYS, "date": today(), "scripts": {}, "patterns": {}, "unknown_option": {UNKNOWN: refusal()},
    }  # fmt: skip
    for name, (conf, make) in SCRIPTS.items():
        made: dict[str, Any] = {}
        for policy in POLICIES:
            said = foretell(name, policy)
            same = next((p for p, other in made.items() if other == said), None)
            made[str(policy)] = said if same is None else {"as": same}
        hangs = any("as" not in v for p, v in made.items() if p != "windows")
        found["scripts"][name] = {"conf": conf, "operations": len(make()), "script": digest(make()), "hangs_on_addresses": hangs, "policies": made}
        print(name, len(make()), "hangs" if hangs else "same", {k: made["windows"][k] for k in ("retries", "ooms", "peak_reserved_bytes")}, flush=True)
    for pattern in PATTERNS:
        for setting in SETTINGS:
            each = [foretell_peak(pattern, setting, policy) for policy in POLICIES]
            found["patterns"][f"{pattern}_{setting}"] = {k: [min(e[k] for e in each), max(e[k] for e in each)] for k in each[0]}
            print(pattern, setting, found["patterns"][f"{pattern}_{setting}"], flush=True)
    path.write_text(json.dumps(found, separators=(",", ":")).replace('"},"', '"},\n"').replace('},"', '},\n"') + "\n")


def refusal() -> str:
    from nbmemprof.allocator import ConfError, parse

    try:
        parse(UNKNOWN, "2.11")
    except ConfError as error:
        return f"refused: {error}"
    return "accepted"
