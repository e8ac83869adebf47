"""Write a synthetic but self-consistent PyTorch CUDA memory snapshot (no GPU, no torch needed).

A small best-fit caching allocator (two pools, 512-byte rounding, split and coalesce) is driven by a
training-like workload, and every action it takes is written as a trace entry, so that replaying the
trace forwards from nothing, or backwards from the final segments, gives the same heap.

    python make_snapshot.py 100000 out.pickle [--seed 7] [--depth 24] [--layers 24] [--devices 1]

Beside OUT it writes OUT.truth.json: the peak, its event index, the bytes that leak per call site,
the final free-space shape and bytes per category. Tools can be graded against it.
Same arguments, same bytes: one seeded generator, no clock, no hash order.
"""

import argparse
import bisect
import json
import pickle
import random
import time

MB = 1 << 20
SMALL_LIMIT, SMALL_SEG, LARGE_SEG, BIG_LIMIT, ROUND_BIG = MB, 2 * MB, 20 * MB, 10 * MB, 2 * MB


def round_up(n, q):
    return (n + q - 1) // q * q


class Block:
    __slots__ = ("addr", "size", "req", "used", "prev", "next", "seg", "frames")

    def __init__(s, addr, size, seg):
        s.addr, s.size, s.seg = addr, size, seg
        s.req, s.used, s.prev, s.next, s.frames = 0, False, None, None, []


class Heap:
    """Best-fit allocator with the block rules a PyTorch user sees in snapshots."""

    def __init__(s, trace, base):
        s.trace, s.next_addr, s.clock = trace, base, 1_700_000_000_000_000
        s.free = {"small": [], "large": []}  # sorted (size, addr)
        s.by_addr, s.heads = {}, []
        s.reserved = s.allocated = 0

    def ev(s, action, addr, size, frames):
        s.clock += 3
        s.trace.append(
            {
                "action": action,
                "addr": addr,
                "size": size,
                "stream": 0,
                "time_us": s.clock,
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": (0, 0),
                "frames": list(frames),
            }
        )

    def _put(s, b):
        bisect.insort(s.free[b.seg["kind"]], (b.size, b.addr))

    def _drop(s, b):
        lst = s.free[b.seg["kind"]]
        del lst[bisect.bisect_left(lst, (b.size, b.addr))]

    def malloc(s, req, frames):
        size = max(512, round_up(req, 512))
        kind = "small" if size <= SMALL_LIMIT else "large"
        lst = s.free[kind]
        i = bisect.bisect_left(lst, (size, 0))
        if i == len(lst):
            seg_size = SMALL_SEG if kind == "small" else LARGE_SEG if size < BIG_LIMIT else round_up(size, ROUND_BIG)
            seg = {"kind": kind, "addr": s.next_addr, "size": seg_size, "frames": frames}
            s.next_addr += round_up(seg_size, 2 * MB) + 2 * MB  # a hole, so that segments never touch
            b = Block(seg["addr"], seg_size, seg)
            seg["head"] = b
            s.heads.append(seg)
            s.by_addr[b.addr] = b
            s.reserved += seg_size
            s.ev("segment_alloc", b.addr, seg_size, frames)
        else:
            b = s.by_addr[lst.pop(i)[1]]
        rest = b.size - size
        if (rest >= 512) if kind == "small" else (rest > SMALL_LIMIT):
            r = Block(b.addr + size, rest, b.seg)
            r.prev, r.next = b, b.next
            if b.next:
                b.next.prev = r
            b.next, b.size = r, size
            s.by_addr[r.addr] = r
            s._put(r)
        b.used, b.req, b.frames = True, req, frames
        s.allocated += b.size
        s.ev("alloc", b.addr, req, frames)
        return b

    def release(s, b, frames):
        s.ev("free_requested", b.addr, b.req, frames)
        s.ev("free_completed", b.addr, b.req, frames)
        s.allocated -= b.size
        b.used, b.frames, b.req = False, [], 0
        for n in (b.prev, b.next):
            if n is not None and not n.used:
                s._drop(n)
                lo, hi = (n, b) if n.addr < b.addr else (b, n)
                lo.size += hi.size
                lo.next = hi.next
                if hi.next:
                    hi.next.prev = lo
                del s.by_addr[hi.addr]
                b = lo
        s._put(b)

    def segments(s, device):
        out = []
        for seg in s.heads:
            blocks, b, used, req = [], seg["head"], 0, 0
            while b:
                blocks.append(
                    {
                        "address": b.addr,
                        "size": b.size,
                        "requested_size": b.req if b.used else b.size,
                        "state": "active_allocated" if b.used else "inactive",
                        "frames": list(b.frames) if b.used else [],
                    }
                )
                used += b.size if b.used else 0
                req += b.req if b.used else 0
                b = b.next
            out.append(
                {
                    "device": device,
                    "address": seg["addr"],
                    "total_size": seg["size"],
                    "allocated_size": used,
                    "active_size": used,
                    "requested_size": req,
                    "stream": 0,
                    "segment_type": seg["kind"],
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": list(seg["frames"]),
                    "blocks": blocks,
                }
            )
        return out


class Stacks:
    """Call stacks built from shared frame dicts, as the real recorder shares them (innermost first)."""

    def __init__(s, depth):
        s.cache, s.frames, s.depth = {}, {}, depth

    def frame(s, file, line, name):
        k = (file, line, name)
        if k not in s.frames:
            s.frames[k] = {"filename": file, "line": line, "name": name}
        return s.frames[k]

    def get(s, phase, layer, op):
        k = (phase, layer, op)
        if k not in s.cache:
            f = [
                s.frame("torch/nn/functional.py", 100 + op, f"op_{op}"),
                s.frame("model/block.py", 20 + op, "forward" if phase == "fwd" else phase),
                s.frame("model/net.py", 200 + layer, f"layer_{layer}"),
            ]
            f += [s.frame("torch/nn/modules/module.py", 1700 + i, "_call_impl") for i in range(max(0, s.depth - 6))]
            f += [
                s.frame("train.py", {"fwd": 41, "bwd": 43, "opt": 45, "leak": 47}.get(phase, 39), "train_step"),
                s.frame("train.py", 90, "main"),
                s.frame("<ipython-input-3>", 1, "<module>"),
            ]
            s.cache[k] = f
        return s.cache[k]


def drive(heap, st, rng, layers, target, truth):
    """Weights and optimizer state once, then steps of forward / backward / update until `target` events."""
    cat = truth["live_bytes_by_category"]
    sizes = [rng.choice([1, 2, 3, 4]) * 256 * 1024 + rng.randrange(0, 4096) for _ in range(layers)]

    def track():
        if heap.allocated > truth["peak_allocated"]:
            truth["peak_allocated"], truth["peak_event"] = heap.allocated, len(heap.trace) - 1

    def take(size, fr, category):
        b = heap.malloc(size, fr)
        cat[category] = cat.get(category, 0) + b.size
        track()
        return b, category

    def give(p, fr):
        cat[p[1]] -= p[0].size
        heap.release(p[0], fr)

    for l in range(layers):
        take(sizes[l], st.get("init", l, 0), "weights")
    step = 0
    while len(heap.trace) < target:
        batch = rng.choice([4, 8, 8, 8, 12])
        acts = []
        for l in range(layers):
            for op in range(3):
                acts.append(take(batch * (64 * 1024 + 8192 * op) + rng.randrange(0, 2048), st.get("fwd", l, op), "activations"))
            w = take(rng.choice([65536, 262144, 4 * MB]), st.get("fwd", l, 9), "workspace")
            give(w, st.get("fwd", l, 9))
            if len(heap.trace) >= target:
                break
        grads = []
        while acts:
            l = (len(acts) - 1) // 3
            if len(acts) % 3 == 0:
                grads.append(take(sizes[l], st.get("bwd", l, 1), "gradients"))
            give(acts.pop(), st.get("bwd", l, 2))
        if step == 0:
            for l in range(layers):
                take(sizes[l], st.get("opt", l, 0), "optimizer")
                take(sizes[l], st.get("opt", l, 1), "optimizer")
        for i, g in enumerate(grads):
            give(g, st.get("opt", i % layers, 2))
        if step % 5 == 0:  # the leak: one loss history tensor each fifth step
            b, _ = take(1024, st.get("leak", 0, 0), "leaked")
            k = "train.py:47"
            truth["leaked_bytes_by_site"][k] = truth["leaked_bytes_by_site"].get(k, 0) + b.size
            truth["leaked_blocks"] += 1
        step += 1
    truth["steps"] += step


def build(events, seed=7, depth=24, layers=24, devices=1):
    rng, st, snap, truths = random.Random(seed), Stacks(depth), {"segments": [], "device_traces": []}, []
    for d in range(devices):
        truth = {"device": d, "peak_allocated": 0, "peak_event": 0, "leaked_bytes_by_site": {}, "leaked_blocks": 0, "steps": 0, "live_bytes_by_category": {}}
        tr = []
        heap = Heap(tr, 0x7F0000000000 + d * (1 << 40))
        drive(heap, st, rng, layers, events // devices, truth)
        segs = heap.segments(d)
        free = [b["size"] for s in segs for b in s["blocks"] if b["state"] == "inactive"]
        truth.update(
            events=len(tr),
            reserved=heap.reserved,
            allocated=heap.allocated,
            free_blocks=len(free),
            free_bytes=sum(free),
            largest_free=max(free, default=0),
            segments=len(segs),
        )
        snap["segments"] += segs
        snap["device_traces"].append(tr)
        truths.append(truth)
    snap["allocator_settings"] = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "expandable_segments": False,
        "garbage_collection_threshold": 0.0,
        "max_split_size": -1,
        "roundup_power2_divisions": {},
    }
    snap["external_annotations"] = []
    return snap, truths


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("events", type=int)
    ap.add_argument("out")
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--depth", type=int, default=24)
    ap.add_argument("--layers", type=int, default=24)
    ap.add_argument("--devices", type=int, default=1)
    a = ap.parse_args()
    t = time.perf_counter()
    snap, truths = build(a.events, a.seed, a.depth, a.layers, a.devices)
    with open(a.out, "wb") as f:
        pickle.dump(snap, f, protocol=4)
    with open(a.out + ".truth.json", "w") as f:
        json.dump(truths, f, indent=1, sort_keys=True)
    print(
        f"{a.out}: {sum(x['events'] for x in truths)} events, peak {truths[0]['peak_allocated'] / MB:.1f} MiB, "
        f"{truths[0]['segments']} segments, {time.perf_counter() - t:.1f} s"
    )


if __name__ == "__main__":
    main()
