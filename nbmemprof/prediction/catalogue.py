"""What a prediction has to know about a GPU, one row each: memory, SMs, capability, attention kernels, what lies outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbmemprof.errors import NbmemprofError

__all__ = ["CATALOGUE", "GPU", "Outside", "find"]

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


CATALOGUE: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("H200", "NVIDIA H200", 150_109_880_320, 132, (9, 0), "hopper", 32 * MIB, _HOPPER_13, sources=("measured: cudaMemGetInfo, driver 580.159.04",)),
    )
}


def find(name: str | GPU) -> GPU:
    """Return the row of a GPU; upper and lower case, blanks and the maker's name don't matter.

    Raises
    ------
    NbmemprofError
        Names the GPUs that are known.
    """
    if isinstance(name, GPU):
        return name
    wanted = name.lower().replace("nvidia", "").replace(" ", "").replace("-", "")
    for gpu in CATALOGUE.values():
        if wanted in (gpu.name.lower().replace("-", ""), gpu.title.lower().replace("nvidia", "").replace(" ", "").replace("-", "")):
            return gpu
    raise NbmemprofError(f"There is no GPU {name!r} in the catalogue. Known are: {', '.join(CATALOGUE)}.")
