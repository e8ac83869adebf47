"""``mp.max_batch``: the largest batch whose two full steps fit, exactly, with few tries."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable
from typing import Any

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction.catalogue import find
from nbmemprof.searching.fakes import FakeBench, NothingOnTheDevice
from nbmemprof.searching.progress import Line
from nbmemprof.searching.result import MaxBatch
from nbmemprof.searching.search import Search
from nbmemprof.searching.trying import Bench, CudaBench, HostBench, Room, Try, VirtualBench
from nbmemprof.units import format_bytes, parse_bytes

__all__ = ["max_batch", "searched"]

_KEPT_BYTES = 1 << 20


def max_batch(
    step: Callable[..., Any],
    low: int = 1,
    high: int | None = None,
    *,
    setup: Callable[[], Any] | None = None,
    conf: str | None = None,
    limit_bytes: int | str | None = None,
    capacity_bytes: int | str | None = None,
    device: Any = None,
    confirm: bool = True,
    seconds: float | None = None,
) -> MaxBatch:
    """How large may the batch be?

    Two small tries tell how each request grows; the requests of a larger batch are put through the allocator's rules under
    the limit, flushes and retries included; the search jumps to the largest that they serve, and the answer and the answer + 1
    are run. A try is two full steps: optimizer state appears in the first, so the second is the one that counts.

    Parameters
    ----------
    step
        ``step(batch)``: one full step; with ``setup``, ``step(state, batch)``. ``batch`` may be any number that memory grows with: samples,
        tokens, resolution.
    low, high
        Smallest batch, with which the search begins, and the largest that is wanted; None: no bound.
    setup
        Makes the state (model, optimizer) afresh for each try. Without it the state that the step refers to is put back after each try:
        models, optimizers, scalers, schedulers, containers, random numbers. What iterators have given is gone.
    conf
        Allocator settings during the search; None: as they are.
    limit_bytes, capacity_bytes
        Torch's own limit, and the card; None: as they are. Sizes may be text such as ``"8GiB"``.
    device
        None: the GPU that is here, else an H200. The name of another GPU (``"A100-40GB"``): predicted, without confirming.
    confirm
        False: predict after the two probes. Without a GPU the answer is predicted by fake runs of ``device``, the answer and the answer + 1 among
        them. A step that makes no CUDA tensors runs here instead: on a modelled device where ``limit_bytes`` or ``capacity_bytes`` is given, else as it
        is, until it raises an error of memory itself.
    seconds
        Begin no further try after this long; the answer is then the largest that fitted.

    Returns
    -------
    A :class:`MaxBatch`: ``batch exact tries per_sample_bytes peak_bytes(batch)``.

    Raises
    ------
    NbmemprofError
        For arguments that make no sense. An error of the step that is not about memory is raised as it is, with everything put back.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> model = torch.nn.Linear(1000, 1000)
    >>> def step(batch):
    ...     model(torch.ones(batch, 1000)).sum().backward()
    >>> mp.max_batch(step, limit_bytes="100MiB").batch > 1000
    True
    """
    _check(step, setup, low, high)
    limit, capacity = (None if size is None else parse_bytes(size) for size in (limit_bytes, capacity_bytes))
    torch = _optional.loaded("torch")
    if torch is not None and torch.cuda.is_available() and (device is None or _is_here(torch, device)):
        index = torch.device(device).index if device is not None and _is_cuda(torch, device) else None
        with torch.cuda.device(index):
            here = CudaBench(step, setup, limit_bytes=limit, capacity_bytes=capacity, conf=conf)
            return searched(here, low, high, device=torch.cuda.get_device_name(), conf=conf, confirm=confirm, seconds=seconds)
    gpu = find("H200" if device is None or _is_cuda(torch, device) else device)
    fake = FakeBench(step, setup, gpu, limit_bytes=limit, capacity_bytes=capacity, conf=conf)
    try:
        return searched(fake, low, high, device=gpu.title, conf=conf, confirm=confirm, seconds=seconds)
    except NothingOnTheDevice:
        pass  # out of the handler: its frames hold nothing while the search goes on
    sizes = [size for size in (limit, capacity) if size is not None]
    if sizes:
        modelled = VirtualBench(step, setup, name=gpu.name, capacity_bytes=min(sizes), conf=conf or "")
        return searched(modelled, low, high, device=f"a modelled {gpu.name}", conf=conf, confirm=confirm, seconds=seconds)
    return searched(HostBench(step, setup), low, high, device="this machine's memory", seconds=seconds)


def _check(step: Any, setup: Any, low: Any, high: Any) -> None:
    if not callable(step) or not (setup is None or callable(setup)):
        raise NbmemprofError(
            f"max_batch needs a function that runs one full step, not {step if not callable(step) else setup!r}. Write def step(batch): ... and pass step."
        )
    with contextlib.suppress(ValueError, TypeError):  # one whose parameters nobody knows: its call will tell
        _takes(step, inspect.signature(step), setup)
    for name, value in (("low", low), ("high", high)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise NbmemprofError(f"{name}={value!r} is not a batch size. Give a whole number of 1 or more.")
    if high is not None and high < low:
        raise NbmemprofError(f"high={high} is below low={low}. Swap them.")


def _takes(step: Any, signature: inspect.Signature, setup: Any) -> None:
    """Refuse a step that can't be called with what it will be given."""
    given = ["batch"] if setup is None else ["state", "batch"]
    try:
        signature.bind(*given)
    except TypeError:
        name = getattr(step, "__name__", "step")
        wants_state = setup is None and len([p for p in signature.parameters.values() if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) == 2
        todo = "Give setup= (%memprof max-batch: --setup NAME), a function that makes its state" if wants_state else f"Write def {name}({', '.join(given)}): ..."
        raise NbmemprofError(f"{name}{signature} can't be called as {name}({', '.join(given)}), which is what max_batch does{'' if setup is None else ' with setup'}. {todo}.") from None


def _is_cuda(torch: Any, device: Any) -> bool:
    try:
        return torch is not None and bool(torch.device(device).type == "cuda")
    except (RuntimeError, TypeError):
        return False


def _is_here(torch: Any, device: Any) -> bool:
    if _is_cuda(torch, device):
        return True
    name = str(device).lower().replace("nvidia", "").strip()
    return name in torch.cuda.get_device_name().lower().split()


def searched(
    bench: Bench, low: int, high: int | None, *, device: str | None = None, conf: str | None = None, confirm: bool = True, seconds: float | None = None
) -> MaxBatch:
    """Search at a bench, with a line of progress."""
    begin = time.perf_counter()
    with Line() as line, bench:
        search = Search(bench, low, high, seconds=seconds, told=lambda tries, batch, room: line.say(_progress(tries, batch, room)))
        search.run(confirm=confirm)
    exact = search.lo is not None and (search.lo == high or (search.hi is not None and search.hi - search.lo == 1))
    guessed = search.predicted if not confirm and search.predicted is not None and not exact else None
    origin = "predicted" if guessed is not None else bench.origin
    notes = ["The runs at different batches could not be matched request by request; the prediction used their peaks."] if search.by_peaks else []
    if bench.kept_bytes > _KEPT_BYTES:
        notes.append(
            f"The step keeps {format_bytes(bench.kept_bytes)} on the device after it ended, in a place that could not be put back; the answer counts them. With setup= each try begins afresh."
        )
    return MaxBatch(
        guessed if guessed is not None else search.lo or 0, exact, origin, search.tries, search.room, low, high, time.perf_counter() - begin, device, conf,
        search.predicted, search.stopped, tuple(notes),
    )  # fmt: skip


def _progress(tries: list[Try], batch: int, room: Room) -> str:
    fitted = max((t.batch for t in tries if t.fits), default=None)
    known = f"largest so far {fitted}, " if fitted is not None else ""
    size = f" in {format_bytes(room.bytes)}" if room.bytes is not None else ""
    return f"max batch{size}: try {len(tries) + 1} at {batch}, {known}{sum(not t.fits for t in tries)} out of memory"
