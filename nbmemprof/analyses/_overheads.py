"""What CUDA and its libraries take on a device beside every allocator, measured once and shipped as a table.

Bytes in use on the device beyond torch's reserved, step by step in one process each, by NVML (``used`` of its memory information, version 2)
and ``cudaMemGetInfo``, which agreed to the byte. H200, driver 580.159.04, CUDA 13.0, torch 2.11.0, 2026-11-30; the ends of 30 training and
inference workloads there are within the ranges given. The error of an entry is the range, not a standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NOT_CHARGED", "Entry", "Table", "table_of"]

_MIB = 1 << 20
NOT_CHARGED = 9_240_576  # of a context's bytes the driver charges these to the device, not to the process (constant over all rows measured)


@dataclass(frozen=True)
class Entry:
    """Bytes of one thing, and the range that they were found in."""

    size: int
    low: int
    high: int

    @classmethod
    def mib(cls, size: float, low: float, high: float) -> Entry:
        """From MiB."""
        return cls(int(size * _MIB), int(low * _MIB), int(high * _MIB))

    def plus(self, other: Entry, count: int) -> Entry:
        """With several others."""
        return Entry(self.size + other.size * count, self.low + other.low * count, self.high + other.high * count)


@dataclass(frozen=True)
class Table:
    """One kind of card and CUDA.

    Attributes
    ----------
    context
        The CUDA context.
    kernels
        Images of torch's own kernels: with the first one its module is loaded, others follow as they are first used.
    cublas, another_cublas
        The first handle of cuBLAS, with the library's kernels; each further one (a thread has its own, backward's too) or further stream.
        torch's workspaces, 32 MiB each, lie in torch's allocator and are not in here.
    cudnn, cufft, cusolver, nccl
        What is there after the first use; NCCL for one communicator of one rank.
    where
        Where the numbers are from.
    """

    context: Entry
    kernels: Entry
    cublas: Entry
    another_cublas: Entry
    cudnn: Entry
    cufft: Entry
    cusolver: Entry
    nccl: Entry
    where: str


_H200 = "table: H200, driver 580, CUDA 13.0, torch 2.11"
# NCCL took 488 MiB with a first all_reduce in a bare process, 560 with the process group's own warm-up.
# lazy: +92 with the first kernel; fp32 transformers end there, bf16 ones 16 more, convolution nets 4 to 16 more, inference 12
_LAZY = Table(
    Entry(552_402_944, 552_402_944 - 10 * _MIB, 552_402_944 + 10 * _MIB),
    Entry.mib(97, 90, 114), Entry.mib(66, 64, 72), Entry.mib(66, 64, 72), Entry.mib(8, 6, 20), Entry.mib(8, 6, 16), Entry.mib(96, 60, 130), Entry.mib(530, 480, 800), f"{_H200}, lazy module loading",
)  # fmt: skip
# eager: the context brings torch's kernels along; a library's own come whole with its first use
_EAGER = Table(
    Entry(1_319_960_576, 1_319_960_576 - 20 * _MIB, 1_319_960_576 + 20 * _MIB),
    Entry.mib(2, 0, 16), Entry.mib(499, 470, 530), Entry.mib(70, 64, 74), Entry.mib(204, 180, 320), Entry.mib(8, 6, 16), Entry.mib(206, 150, 260), Entry.mib(490, 380, 800), f"{_H200}, eager module loading",
)  # fmt: skip


def table_of(device: str | None, module_loading: str) -> tuple[Table | None, str]:
    """The table for a card, and where it is from or why there is none.

    Parameters
    ----------
    device
        As torch names it: ``"NVIDIA H200"``.
    module_loading
        ``LAZY`` or ``EAGER`` (the environment's ``CUDA_MODULE_LOADING``).
    """
    if device is None:
        return None, "the capture does not name its card"
    if "H200" not in device and "H100" not in device:
        return None, f"nothing was measured on {device}; begin the recording before CUDA is used and the context is measured"
    made = _EAGER if module_loading == "EAGER" else _LAZY
    return (made, made.where) if "H200" in device else (None, f"nothing was measured on {device}; the H200, of the same architecture, takes 527 MiB for its context")
