"""What one look at the GPU itself corrects in a prediction: the bytes outside of torch's allocator, and the attention kernels that torch takes.

Two processes of their own: one uses the libraries that the predicted code would use, the other watches how much less is free. Neither runs
the user's code; both are gone afterwards. This process makes no CUDA context.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from nbmemprof import _optional
from nbmemprof.prediction.catalogue import GPU, Outside
from nbmemprof.prediction.child import Limits, PredictionFailed, fresh
from nbmemprof.units import format_bytes

__all__ = ["Look", "calibrated", "calls", "chosen", "differs", "key_of", "look", "told", "use", "watch"]

Key = tuple[Any, ...]
_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # torch.nn.attention.SDPBackend
_PLUS_MINUS_MIB = 10  # the driver's pages; a process of the same libraries, not of the same kernels
_SECONDS = 120.0
_STIR, _LOOKS = 32 << 20, 15
MIB = 1 << 20

chosen: dict[Key, str] = {}  # in a child: what was seen, instead of the table


@dataclass
class Look:
    """What was seen: the GPU's name and torch's version, bytes outside the allocator, kernels by call; ``why`` not, where it failed."""

    title: str = ""
    torch: str = ""
    outside_bytes: int | None = None
    table_mib: int = 0  # what the catalogue has for it
    kernels: dict[Key, str] = field(default_factory=dict)
    why: str | None = None


def key_of(torch: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, gqa: bool) -> Key:
    """What the choice of a kernel hangs on."""
    shapes = tuple(tuple(t.shape[1:]) for t in (query, key, value))
    strided = tuple(t.stride(-1) == 1 for t in (query, key, value))
    masked = None if mask is None else (str(mask.dtype), tuple(mask.shape[1:]), bool(mask.requires_grad))
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return str(query.dtype), shapes, strided, masked, dropout > 0, causal, gqa, grad


# ---------------------------------------------------------------------- from the process that asks
def look(used: set[str], calls: list[Key], gpu: GPU) -> Look:
    """Look at the GPU that is here.

    Parameters
    ----------
    used
        Libraries that the predicted code met.
    calls
        Attention calls, by :func:`key_of`.
    """
    limits = Limits(_SECONDS)
    watcher = fresh("nbmemprof.prediction.calibrating:watch", limits)
    user = fresh("nbmemprof.prediction.calibrating:use", limits)
    found: dict[str, Any] = {}

    def keep(message: tuple[Any, ...]) -> None:
        found[message[0]] = message[1:]

    try:
        watcher.listen(keep, limits)  # its context is there
        if "none" in found:
            return Look(why=str(found["none"][0]))
        watcher.send("free")
        watcher.listen(keep, limits)
        before = found["free"][0]
        user.send("use", sorted(used), calls)
        user.listen(keep, limits)
        watcher.send("free")
        watcher.listen(keep, limits)
        title, torch, reserved, kernels = found["used"]
        during = found["free"][0]
        table = max(getattr(gpu.outside, name) for name in ("kernels", "blas", "second_blas", "cudnn", "fft", "solver") if name in {"kernels", *used})
        made = Look(title, torch, before - during - reserved, table, kernels)
        user.close()
        for _ in range(_LOOKS):  # the driver takes its time
            watcher.send("free")
            watcher.listen(keep, limits)
            if abs(found["free"][0] - before) <= _STIR:
                break
            time.sleep(0.2)
        else:
            return Look(why=f"another process took or gave back memory on this GPU meanwhile ({format_bytes(abs(found['free'][0] - before))}); calibrate again when it is quiet")
    except PredictionFailed as error:
        return Look(why=str(error))
    finally:
        watcher.close()
        user.close()
    if made.title != gpu.title:
        return Look(why=f"the GPU here is {made.title}, not {gpu.title}")
    return made


def calibrated(gpu: GPU, seen: Look) -> GPU:
    """The catalogue's row with what was seen in place of the table."""
    if seen.outside_bytes is None:
        return gpu
    size = max(1, round(seen.outside_bytes / MIB))
    row = Outside(size, size, size, size, size, size, size, _PLUS_MINUS_MIB, f"measured here: {seen.title}, torch {seen.torch}")
    return replace(gpu, outside=row)


def calls(record: Any) -> dict[Key, str]:
    """Attention calls of a record, with the kernel that was taken for each."""
    return dict(getattr(record, "attention", {}))


def differs(record: Any, seen: Look) -> bool:
    """Whether torch takes another kernel here than was predicted."""
    return seen.why is None and any(seen.kernels.get(call, kernel) != kernel for call, kernel in calls(record).items())


def told(gpu: GPU, seen: Look) -> dict[str, Any]:
    """What a capture says of it."""
    if seen.why is not None:
        return {"calibration": {"why_not": seen.why}, "warnings": [f"not calibrated: {seen.why}"]}
    return {"calibration": {"gpu": seen.title, "torch": seen.torch, "outside_bytes": seen.outside_bytes, "table_outside_mib": seen.table_mib, "attention": sorted({*seen.kernels.values()})}}


# ---------------------------------------------------------------------- the two processes
def watch(line: Connection) -> None:
    """Hold a context and say what is free when asked."""
    torch = _optional.require("torch", feature="Calibration")
    if not torch.cuda.is_available():
        line.send_bytes(pickle.dumps(("none", "there is no GPU here that torch can use")))
        line.send_bytes(pickle.dumps(("done", False)))
        return
    torch.zeros(1, device="cuda")
    line.send_bytes(pickle.dumps(("done", True)))
    while line.recv_bytes():
        line.send_bytes(pickle.dumps(("free", torch.cuda.mem_get_info()[0])))
        line.send_bytes(pickle.dumps(("done", True)))


def use(line: Connection) -> None:
    """Use each library once, choose the kernels, and stay until the line ends."""
    _, used, calls = pickle.loads(line.recv_bytes())  # noqa: S301 - from the process that made this one
    torch = _optional.require("torch", feature="Calibration")
    _libraries(torch, set(used))
    kernels = {call: _choice(torch, call) for call in calls}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    line.send_bytes(pickle.dumps(("used", torch.cuda.get_device_name(), torch.__version__, torch.cuda.memory_reserved(), {k: v for k, v in kernels.items() if v})))
    line.send_bytes(pickle.dumps(("done", True)))
    line.recv_bytes()


def _libraries(torch: Any, used: set[str]) -> None:
    one = torch.randn(64, 64, device="cuda", requires_grad=True)
    (one * 2).relu().sum().backward()
    if used & {"blas", "second_blas"}:
        for dtype in (torch.float32, torch.bfloat16):
            product = one.to(dtype) @ one.to(dtype)
            if "second_blas" in used:
                product.sum().backward()
    if "cudnn" in used:
        torch.nn.functional.conv2d(torch.randn(1, 8, 16, 16, device="cuda", requires_grad=True), torch.randn(8, 8, 3, 3, device="cuda")).sum().backward()
    if "fft" in used:
        torch.fft.rfft(torch.randn(64, device="cuda"))
    if "solver" in used:
        torch.linalg.eigh(torch.randn(8, 8, device="cuda"))


def _choice(torch: Any, call: Key) -> str | None:
    """The kernel that torch takes for a call, asked with one sample."""
    name, shapes, strided, masked, dropout, causal, gqa, grad = call
    if not all(strided):
        return None
    dtype = getattr(torch, name.removeprefix("torch."))
    try:
        query, key, value = (torch.empty((1, *shape), dtype=dtype, device="cuda", requires_grad=grad) for shape in shapes)
        mask = None
        if masked is not None:
            kind, shape, wants = masked
            mask = torch.zeros((1, *shape), dtype=getattr(torch, kind.removeprefix("torch.")), device="cuda").requires_grad_(wants)
        number = torch._fused_sdp_choice(query, key, value, mask, 0.1 if dropout else 0.0, causal, scale=None, enable_gqa=gqa)
    except (RuntimeError, TypeError):  # no room for it, or another signature: the table holds
        return None
    return _KERNELS.get(int(number))
