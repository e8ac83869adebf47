"""``mp.predict``: the fake run in a child process, its capture here."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

from nbmemprof import _optional
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction.catalogue import GPU, find
from nbmemprof.prediction.recorder import Record
from nbmemprof.units import parse_bytes

__all__ = ["PredictionFailed", "predict"]


class PredictionFailed(NbmemprofError):
    """The process of the fake run ended without an answer."""


def predict(
    fn: Callable[..., Any],
    *args: Any,
    device: str | GPU = "H200",
    capacity_bytes: int | str | None = None,
    limit_bytes: int | str | None = None,
    conf: str = "",
    torch: str | None = None,
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

    Returns
    -------
    A capture with origin ``predicted``: every analysis and view works. ``meta["assumptions"]`` lists what had to be assumed,
    ``meta["kernels"]`` the attention kernels that were chosen.

    Raises
    ------
    PredictionFailed
        The child ended without an answer. An error of ``fn`` itself is raised as it is.
    """
    from nbmemprof.prediction import feed

    gpu = find(device)
    rules = torch or gpu.torch
    record = _in_child(fn, args, kwargs, gpu, rules)
    return feed.capture_of(
        record, gpu, conf=conf, torch=rules, limit_bytes=None if limit_bytes is None else parse_bytes(limit_bytes),
        capacity_bytes=None if capacity_bytes is None else parse_bytes(capacity_bytes), meta={},
    )  # fmt: skip


def _in_child(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], gpu: GPU, rules: str) -> Record:
    loaded = _optional.loaded("torch")
    live = loaded is not None and loaded.cuda.is_initialized()
    context = multiprocessing.get_context("spawn" if live else "fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, fn, args, kwargs, gpu, rules), daemon=True)
    child.start()
    theirs.close()
    try:
        kind, value = pickle.loads(ours.recv_bytes())  # noqa: S301 - written by our own child
    except EOFError as error:
        child.join()
        raise PredictionFailed(f"The fake run's process ended with code {child.exitcode} and no answer. Run less in it, or report the code.") from error
    finally:
        ours.close()
    child.join()
    if kind == "error":
        raise value
    record: Record = value
    return record


def _child(pipe: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], gpu: GPU, rules: str) -> None:
    from nbmemprof.prediction.engine import fake_run

    try:
        answer = ("record", fake_run(fn, args, kwargs, device_row=gpu, torch_rules=rules))
    except BaseException as error:  # noqa: BLE001 - every error is the caller's
        error.add_note("".join(traceback.format_exception(error))) if hasattr(error, "add_note") else None
        answer = ("error", error)
    try:
        data = pickle.dumps(answer)
    except Exception:  # noqa: BLE001 - an error that can't be carried is told in words
        data = pickle.dumps(("error", PredictionFailed(f"{type(answer[1]).__name__}: {answer[1]}")))
    pipe.send_bytes(data)
    pipe.close()
    os._exit(0)
