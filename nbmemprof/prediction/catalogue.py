"""What a prediction has to know about a GPU, one row each: memory, SMs, capability, attention kernels, what lies outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import polars as pl

from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction import _gpus

__all__ = ["CATALOGUE", "GPU", "Outside", "find", "gpus", "outside_of"]

MIB = 1 << 20


@dataclass(frozen=True)
class Outside:
    """Bytes on the device beyond what the allocator reserved, cumulative in the order of the fields.

    Attributes
    ----------
    context, kernels, blas, second_blas, cudnn, fft, solver
        MiB after the CUDA context, the first kernel, the first matrix product, the first from a second thread, the first cuDNN call, the
        first FFT, the first decomposition. One that is not used adds nothing.
    plus_minus
        MiB of uncertainty.
    source
        Where the numbers were measured.
    """

    context: int
    kernels: int
    blas: int
    second_blas: int
    cudnn: int
    fft: int
    solver: int
    plus_minus: int
    source: str


# lazy module loading (the default); one process on an H200
_HOPPER_13 = Outside(527, 619, 685, 755, 763, 773, 869, 100, "measured: H200, driver 580.159.04, CUDA 13.0, torch 2.11")


@dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes
    ----------
    name
        As a person writes it: ``"H200"``.
    title
        As torch names it.
    capacity_bytes
        ``torch.cuda.mem_get_info()[1]``: what CUDA reports as the total.
    sms
        Streaming multiprocessors: reduction buffers depend on their number.
    capability
        Compute capability.
    generation
        Architecture's name: the key of the attention rules (:mod:`nbmemprof.prediction.attention`).
    cublas_workspace_bytes
        What torch sets aside for each cuBLAS handle and stream.
    outside
        The table of :class:`Outside`.
    torch
        Version whose rules hold unless the caller names one: the one measured on this GPU.
    sources
        Where each number is from.
    capacity_plus_minus_bytes
        How far ``capacity_bytes`` differs between drivers, with ECC and with a display; 0 where it was measured.
    """

    name: str
    title: str
    capacity_bytes: int
    sms: int
    capability: tuple[int, int]
    generation: str
    cublas_workspace_bytes: int
    outside: Outside
    torch: str = "2.11"
    sources: tuple[str, ...] = field(default=())
    capacity_plus_minus_bytes: int = 0


def _modelled(sms: int, capability: tuple[int, int]) -> Outside:
    """What lies outside the allocator where nobody measured it: of the H200's context 1 KiB for each resident thread goes with their number."""
    threads = sms * _gpus.THREADS_PER_SM[capability] - 132 * _gpus.THREADS_PER_SM[9, 0]
    step = round(threads * 1024 / MIB)
    known = _HOPPER_13
    context, kernels, blas, second, cudnn, fft, solver = (getattr(known, name) + step for name in ("context", "kernels", "blas", "second_blas", "cudnn", "fft", "solver"))
    return Outside(context, kernels, blas, second, cudnn, fft, solver, 250, _gpus.OUTSIDE_SOURCE)


def _reported(name: str, title: str, mib: int, off: int, sms: int, capability: tuple[int, int], generation: str) -> GPU:
    sources = (
        f"capacity: reported by torch in public logs, ± {off} MiB",
        "SMs, capability: NVIDIA's data sheets",
        f"cuBLAS: {_gpus.CUBLAS_SOURCE}",
        f"outside: {_gpus.OUTSIDE_SOURCE}",
    )
    return GPU(
        name,
        title,
        mib * MIB,
        sms,
        capability,
        generation,
        _gpus.cublas_workspace_bytes(capability),
        _modelled(sms, capability),
        sources=sources,
        capacity_plus_minus_bytes=off * MIB,
    )


CATALOGUE: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("H200", "NVIDIA H200", 150_109_880_320, 132, (9, 0), "hopper", 32 * MIB, _HOPPER_13, sources=("measured: cudaMemGetInfo, driver 580.159.04",)),
        *(_reported(*row) for row in _gpus.REPORTED),
    )
}
_ALIASES = {"a100": "A100-80GB", "a100sxm480gb": "A100-80GB", "a10080gbpcie": "A100-80GB", "h100sxm": "H100", "h10080gb": "H100", "a6000": "RTX A6000"}


def find(name: str | GPU) -> GPU:
    """Return the row of a GPU; upper and lower case, blanks and the maker's name don't matter.

    Raises
    ------
    NbmemprofError
        Names the GPUs that are known.
    """
    if isinstance(name, GPU):
        return name
    if not isinstance(name, str):
        raise NbmemprofError(f"device={name!r} is no name of a GPU. Give one as text, like 'H200'. Known are: {', '.join(CATALOGUE)}.")
    wanted = _plain(_ALIASES.get(_plain(name), name))
    for gpu in CATALOGUE.values():
        if wanted in (_plain(gpu.name), _plain(gpu.title)):
            return gpu
    if not wanted:
        raise NbmemprofError(f"Which GPU? Known are: {', '.join(CATALOGUE)}.")
    raise NbmemprofError(f"There is no GPU {name!r} in the catalogue. Known are: {', '.join(CATALOGUE)}.")


def _plain(name: str) -> str:
    text = name.lower()
    for word in ("nvidia", "geforce", "tesla", "quadro", " ", "-", "_"):
        text = text.replace(word, "")
    return text if not text.isdigit() else f"rtx{text}"


def outside_of(gpu: GPU, cuda: int = 13) -> Outside:
    """The table of what lies outside the allocator for a CUDA major version: CUDA 13's was measured on an H200, others are that with a larger error."""
    if cuda == 13:
        return gpu.outside
    return replace(
        gpu.outside,
        plus_minus=gpu.outside.plus_minus + 100,
        source=f"{gpu.outside.source}; CUDA {cuda} was not measured: CUDA 13's numbers with a larger error",
    )


def gpus() -> pl.DataFrame:
    """Which GPUs are known, and what is known of each?

    Returns
    -------
    One row a GPU by capacity: ``gpu title generation capability sms capacity_bytes capacity_plus_minus_bytes cublas_workspace_bytes outside_bytes`` (context,
    kernels and two cuBLAS handles, as in training) ``outside_plus_minus_bytes sources``.
    """
    rows = [
        {
            "gpu": g.name, "title": g.title, "generation": g.generation, "capability": ".".join(map(str, g.capability)), "sms": g.sms, "capacity_bytes": g.capacity_bytes,
            "capacity_plus_minus_bytes": g.capacity_plus_minus_bytes, "cublas_workspace_bytes": g.cublas_workspace_bytes, "outside_bytes": g.outside.second_blas * MIB,
            "outside_plus_minus_bytes": g.outside.plus_minus * MIB, "sources": "; ".join(g.sources),
        }
        for g in CATALOGUE.values()
    ]  # fmt: skip
    return pl.DataFrame(rows).sort("capacity_bytes", "gpu")
