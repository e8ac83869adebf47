"""The buffer of a reduction that several blocks of threads share: torch's own launch rule, on numbers.

Source: ``setReduceConfig`` and ``ReduceConfig`` in aten/src/ATen/native/cuda/Reduce.cuh (torch 2.11; the same since 2.1). A reduction
whose threads would each add up 256 values or more is split over blocks; these meet in a buffer in global memory.
"""

from __future__ import annotations

from typing import Any

__all__ = ["buffer_bytes", "install"]

WARP = 32
THREADS = 512  # MAX_NUM_THREADS
PER_THREAD_MIN, PER_THREAD_MAX = 16, 256
PER_SM = 2048  # threads that fit on a multiprocessor, compute capability 8.0 and 9.0; 1536 on 8.6, 8.9 and 12.0, 1024 on 7.5


def last_pow2(n: int) -> int:
    """Largest power of two that is not above ``n``."""
    return 1 << max(0, n.bit_length() - 1)


def ceil_div(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


def _coalesced(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(size, stride) by stride, neighbours that lie behind one another as one."""
    dims = sorted((d for d in dims if d[0] != 1), key=lambda d: d[1])
    out: list[tuple[int, int]] = []
    for size, stride in dims:
        if out and out[-1][0] * out[-1][1] == stride:
            out[-1] = (out[-1][0] * size, out[-1][1])
        else:
            out.append((size, stride))
    return out


def buffer_bytes(shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], *, sms: int, acc_bytes: int, per_sm: int = PER_SM, vectors: int = 4) -> tuple[int, int]:
    """Bytes of the buffer and of its semaphores; (0, 0) where one block is enough for each output.

    Parameters
    ----------
    shape, strides
        Of the input, strides in elements.
    dims
        Dimensions that are reduced.
    sms
        Multiprocessors of the GPU.
    acc_bytes
        Size of what is added up in: 4 for a sum of floats.
    per_sm
        Threads that fit on a multiprocessor.
    vectors
        Elements that a thread loads at once.
    """
    if not shape:
        return 0, 0
    reduced = [(n, s) for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if i in dims]
    kept = [(n, s) for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if i not in dims]
    inner, outer = _coalesced(reduced), _coalesced(kept)
    inputs, outputs = 1, 1
    for n, _ in reduced:
        inputs *= n
    for n, _ in kept:
        outputs *= n
    if inputs == 0 or outputs == 0:
        return 0, 0
    first_in = inner[0][1] if inner else 1
    first_out = outer[0][1] if outer else None
    on_fastest = first_out is None or (bool(inner) and first_in < first_out)
    dim0, dim1, stride = (inputs, outputs, first_in) if on_fastest else (outputs, inputs, first_out)
    out_vec = 1
    if stride == 1:
        if on_fastest and dim0 > 128 and len(inner) + len(outer) == 1:
            dim0 //= vectors
        elif not on_fastest:
            out_vec = _output_vector(inner, outer, vectors)
            dim0 //= out_vec
    most = THREADS // out_vec
    width_max = last_pow2(dim0) if dim0 < most else most
    height_max = last_pow2(dim1) if dim1 < most else most
    width = min(width_max, WARP)
    height = min(height_max, most // width)
    width = min(width_max, most // height)
    step_in, step_out = (width, 1) if on_fastest else (1, width)
    per_thread = ceil_div(inputs, step_in)
    across_warps = per_thread >= height * 16 or per_thread >= PER_THREAD_MAX
    if across_warps:
        step_in *= height
    else:
        step_out *= height
    per_thread = ceil_div(inputs, step_in)
    grid = ceil_div(outputs // out_vec, step_out)
    target = sms * (per_sm // (width * height))
    if not (across_warps and per_thread >= PER_THREAD_MAX and grid <= target):
        return 0, 0
    ctas = max(min(ceil_div(target, grid), ceil_div(per_thread, PER_THREAD_MIN)), ceil_div(per_thread, PER_THREAD_MAX))
    if ctas <= 1:
        return 0, 0
    size = acc_bytes * outputs * ctas
    if not on_fastest:
        size *= width * out_vec
    return size, 4 * grid


def _output_vector(inner: list[tuple[int, int]], outer: list[tuple[int, int]], vectors: int) -> int:
    """Outputs that a thread makes at once: every stride must allow it (``get_output_vec_size``)."""
    size = vectors
    while size > 1 and (outer[0][0] % size or any(s % size for _, s in inner) or any(s % size for _, s in outer[1:])):
        size //= 2
    return size


# what is added up in, in bytes, by operator: ``None`` means the size that sums have (4 for floats, 8 for doubles and integers)
_ACCUMULATED = {
    "sum": None, "mean": None, "nansum": None, "prod": None, "linalg_vector_norm": None, "norm": None, "amax": 0, "amin": 0, "max": -1, "min": -1, "argmax": 16, "argmin": 16, "any": 1, "all": 1,
    "var": 16, "std": 16, "var_mean": 16, "std_mean": 16,
}  # fmt: skip


def install(torch: Any, rules: Any) -> None:
    """Follow every reduction."""
    aten = torch.ops.aten
    for name, acc in _ACCUMULATED.items():
        packet = getattr(aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if overload in ("out", "dim_max") or "out" in overload or "names" in overload or ("Scalar" in overload and name in ("max", "min")):
                continue
            if name in ("max", "min") and overload in ("other", "unary_out"):
                continue
            rules.after[op] = _Follow(torch, 0 if name in ("max", "min") and overload == "default" else acc)


class _Follow:
    """Write down the buffer of one reduction after its output."""

    def __init__(self, torch: Any, acc: int | None) -> None:
        self.torch, self.acc = torch, acc

    def __call__(self, recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        source = args[0]
        if not isinstance(source, self.torch.Tensor) or source.device.type != "cuda":
            return
        first = out[0] if isinstance(out, tuple) else out
        whole = self.acc is None and not source.is_floating_point() and not source.is_complex() and source.dtype != first.dtype
        cast = recorder.begin(source.numel() * first.element_size(), func._schema.name, "temporary", "operator") if whole else None  # truth values are widened first
        emit(recorder, source, _dims(func, args, kwargs, source.dim()), self._bytes(source, first), func._schema.name)
        if cast is not None:
            recorder.end(cast)

    def _bytes(self, source: Any, out: Any) -> int:
        size = source.element_size()
        if self.acc is None:
            return 8 if not out.is_floating_point() or size == 8 else 8 if out.is_complex() else 4
        if self.acc == 0:
            return int(size)
        if self.acc == -1:
            return 16
        return self.acc


def emit(recorder: Any, source: Any, dims: tuple[int, ...], acc_bytes: int, op: str) -> None:
    """Write down the buffer and the semaphores of a reduction of ``source``."""
    gpu = recorder.rules.gpu
    size, semaphores = buffer_bytes(tuple(source.shape), tuple(source.stride()), dims, sms=gpu.sms, acc_bytes=acc_bytes)
    if size:
        buffer = recorder.begin(size, op, "workspace", "operator")
        recorder.temporary(semaphores, op)
        recorder.end(buffer)


def _dims(func: Any, args: Any, kwargs: Any, rank: int) -> tuple[int, ...]:
    """Which dimensions a call reduces; all of them where it names none."""
    dim = kwargs.get("dim")
    if dim is None:
        for given, argument in zip(args, func._schema.arguments, strict=False):
            if argument.name == "dim":
                dim = given
                break
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(rank))
    if isinstance(dim, int):
        dim = (dim,)
    return tuple(d % rank for d in dim) if rank else ()
