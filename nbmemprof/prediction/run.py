"""``mp.predict``: the fake run in a child process, its capture here."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction.catalogue import GPU, find
from nbmemprof.prediction.child import Limits, PredictionFailed
from nbmemprof.units import parse_bytes

__all__ = ["NothingOnTheDevice", "PredictionFailed", "predict", "quiet"]


class NothingOnTheDevice(PredictionFailed):
    """The code asked nothing of a CUDA device."""


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
    ``meta["kernels"]`` the attention kernels that were chosen. A request that finds no room meets ``torch.OutOfMemoryError``, as on the device: code
    that catches it goes on, else the capture ends there (this function raises nothing then). ``meta["needs"]`` tells the first such request
    (``refused_bytes seq op layer phase step``), how many there were (``refused``), whether the code ``caught`` it, and the peaks as if none were
    refused (``peak_allocated_bytes peak_reserved_bytes``): of a copy of the run that goes on from there with all that it asks for, or, where that
    came to no end (``whole`` is False, ``known_by`` says why), the least that it needs.

    Raises
    ------
    NothingOnTheDevice
        The code asked for no memory of a CUDA device.
    PredictionFailed
        The child ended without an answer.
    NbmemprofError
        For arguments that make no sense, before anything runs. An error of ``fn`` itself is raised as it is.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> def two_steps():
    ...     model = torch.nn.Linear(4096, 4096, device="cuda")
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...     for _ in range(2):
    ...         model(torch.ones(8, 4096, device="cuda")).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> capture = mp.predict(two_steps, device="H200")
    >>> mp.breakdown(capture).filter(category="optimizer_state")["requested_bytes"].item()
    134250496
    """
    from nbmemprof.allocator import conf as settings
    from nbmemprof.prediction import calibrating, calling, feed, remaking, room

    if not callable(fn):
        raise NbmemprofError(f"predict needs a function to run, not {fn!r}. Write def step(): ... and pass step itself, without quotes or brackets.")
    gpu = find(device)
    rules = torch or gpu.torch
    limit, capacity, host = (None if size is None else parse_bytes(size) for size in (limit_bytes, capacity_bytes, host_bytes))
    settings.parse(conf, rules)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise NbmemprofError(f"seconds={seconds!r} is no time to run. Give seconds above 0.")
    limits, terms = Limits(seconds, host), room.Terms(conf, capacity, limit, seconds)
    try:
        record = calling.record_of(fn, args, kwargs, gpu, rules, limits, {}, terms)
    except BaseException as error:
        raise error.with_traceback(None)  # noqa: B904 - the same error, without our own frames
    if not record.made:
        raise NothingOnTheDevice(_nothing(fn, args, kwargs))
    meta: dict[str, Any] = {}
    if calibrate:
        seen = calibrating.look(record.used, list(calibrating.calls(record)), gpu)
        if calibrating.differs(record, seen):
            with quiet():  # it was shown before
                record = calling.record_of(fn, args, kwargs, gpu, rules, limits, seen.kernels, terms)
        meta, gpu = calibrating.told(gpu, seen), calibrating.calibrated(gpu, seen)
    meta["warnings"] = [*(one for one in record.assumptions if one.startswith(remaking.UNDECIDED)), *meta.get("warnings", [])]
    return feed.capture_of(record, gpu, conf=conf, torch=rules, limit_bytes=limit, capacity_bytes=capacity, meta=meta)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show nothing of what a prediction prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _nothing(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a prediction is empty, with what says ``cpu``."""
    from nbmemprof.prediction import deciding

    told = deciding.on_the_cpu((fn, *args, *kwargs.values()), kwargs)
    why = f": its tensors were on the CPU ({', '.join(told)})" if told else ", so there is nothing to predict"
    return f"{getattr(fn, '__name__', type(fn).__name__)} asked for no memory of a CUDA device{why}. Write device='cuda' where its model and tensors are made, or choose the device inside the function."
