"""``mp.predict``: the fake run in a child process, its capture here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbmemprof.capture import Capture
from nbmemprof.prediction.catalogue import GPU, find
from nbmemprof.prediction.child import Limits, PredictionFailed
from nbmemprof.units import parse_bytes

__all__ = ["PredictionFailed", "predict"]


def predict(
    fn: Callable[..., Any],
    *args: Any,
    device: str | GPU = "H200",
    capacity_bytes: int | str | None = None,
    limit_bytes: int | str | None = None,
    conf: str = "",
    torch: str | None = None,
    calibrate: bool = False,
    seconds: float = Limits.seconds,
    host_bytes: int | str | None = None,
    **kwargs: Any,
) -> Capture:
    """What would ``fn(*args)`` take on a GPU that is not here?

    Runs it under fake tensors in a child process: nothing of this process changes, no GPU is touched, no real memory of the size is needed.

    Parameters
    ----------
    fn
        A training step, several, or any code; at least two steps show what the optimizer keeps.
    device
        Name of a GPU of the catalogue, or a row of it.
    capacity_bytes
        Memory of the GPU instead of the catalogue's; sizes may be text such as ``"40GiB"``.
    limit_bytes
        Torch's own limit (``set_per_process_memory_fraction``).
    conf
        ``PYTORCH_CUDA_ALLOC_CONF``.
    torch
        Version whose rules hold; by default the one that was measured on this GPU.
    calibrate
        Where this very GPU is here: look at it for some seconds, and correct what lies outside of the allocator and which attention kernels are
        taken. ``meta["calibration"]`` says what was corrected, or why not.
    seconds, host_bytes
        What the child may take on this machine: time, and memory (None: 8 GiB, at most half of what is free).

    Returns
    -------
    A capture with origin ``predicted``: every analysis and view works. ``meta["assumptions"]`` lists what had to be assumed,
    ``meta["kernels"]`` the attention kernels that were chosen.

    Raises
    ------
    PredictionFailed
        The child ended without an answer. An error of ``fn`` itself is raised as it is.
    """
    from nbmemprof.prediction import calibrating, calling, feed

    gpu = find(device)
    rules, limits = torch or gpu.torch, Limits(seconds, None if host_bytes is None else parse_bytes(host_bytes))
    record = calling.record_of(fn, args, kwargs, gpu, rules, limits, {})
    meta: dict[str, Any] = {}
    if calibrate:
        seen = calibrating.look(record.used, list(calibrating.calls(record)), gpu)
        if calibrating.differs(record, seen):
            record = calling.record_of(fn, args, kwargs, gpu, rules, limits, seen.kernels)
        meta, gpu = calibrating.told(gpu, seen), calibrating.calibrated(gpu, seen)
    return feed.capture_of(
        record, gpu, conf=conf, torch=rules, limit_bytes=None if limit_bytes is None else parse_bytes(limit_bytes),
        capacity_bytes=None if capacity_bytes is None else parse_bytes(capacity_bytes), meta=meta,
    )  # fmt: skip
