"""GPUs from Turing to Blackwell as data.

``REPORTED``: name, as torch names it, MiB that CUDA reports as the total and how far reports differ, SMs, compute capability, generation.

MiB: what ``torch.cuda.get_device_properties(...).total_memory`` was in public training logs and out-of-memory messages (Ultralytics prints it, torch's message has it in GiB);
it depends a little on driver, ECC and display, which is the number after it. SMs and compute capability: NVIDIA's data sheets and architecture white papers
(Turing 2018, Ampere GA100/GA102 2020, Ada 2022, Hopper 2022, Blackwell 2024/25) and docs.nvidia.com/cuda "CUDA GPUs".
"""

from __future__ import annotations

__all__ = ["CUBLAS_SOURCE", "OUTSIDE_SOURCE", "REPORTED", "THREADS_PER_SM", "cublas_workspace_bytes"]

REPORTED: tuple[tuple[str, str, int, int, int, tuple[int, int], str], ...] = (
    ("T4", "Tesla T4", 14912, 200, 40, (7, 5), "turing"),
    ("RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti", 10825, 200, 68, (7, 5), "turing"),
    ("TITAN RTX", "NVIDIA TITAN RTX", 24212, 200, 72, (7, 5), "turing"),
    ("RTX 8000", "Quadro RTX 8000", 48380, 220, 72, (7, 5), "turing"),
    ("A100-40GB", "NVIDIA A100-SXM4-40GB", 40441, 220, 108, (8, 0), "ampere"),
    ("A100-80GB", "NVIDIA A100-SXM4-80GB", 81153, 120, 108, (8, 0), "ampere"),
    ("A10G", "NVIDIA A10G", 22508, 80, 80, (8, 6), "ampere"),
    ("A40", "NVIDIA A40", 45486, 150, 84, (8, 6), "ampere"),
    ("RTX A6000", "NVIDIA RTX A6000", 48540, 150, 84, (8, 6), "ampere"),
    ("RTX 3060", "NVIDIA GeForce RTX 3060", 11910, 140, 28, (8, 6), "ampere"),
    ("RTX 3080", "NVIDIA GeForce RTX 3080", 10002, 100, 68, (8, 6), "ampere"),
    ("RTX 3090", "NVIDIA GeForce RTX 3090", 24124, 150, 82, (8, 6), "ampere"),
    ("L4", "NVIDIA L4", 22563, 140, 58, (8, 9), "ada"),
    ("L40S", "NVIDIA L40S", 45455, 140, 142, (8, 9), "ada"),
    ("RTX 4060 Ti", "NVIDIA GeForce RTX 4060 Ti", 7806, 120, 34, (8, 9), "ada"),
    ("RTX 4080 SUPER", "NVIDIA GeForce RTX 4080 SUPER", 15944, 150, 80, (8, 9), "ada"),
    ("RTX 4090", "NVIDIA GeForce RTX 4090", 24081, 140, 128, (8, 9), "ada"),
    ("H100", "NVIDIA H100 80GB HBM3", 81079, 80, 132, (9, 0), "hopper"),
    ("H20", "NVIDIA H20", 97285, 150, 78, (9, 0), "hopper"),
    ("B200", "NVIDIA B200", 182631, 40, 148, (10, 0), "blackwell"),
    ("RTX 5080", "NVIDIA GeForce RTX 5080", 15840, 150, 84, (12, 0), "blackwell-rtx"),
    ("RTX 5090", "NVIDIA GeForce RTX 5090", 32102, 150, 170, (12, 0), "blackwell-rtx"),
    ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97249, 60, 188, (12, 0), "blackwell-rtx"),
)

CUBLAS_SOURCE = "aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize"
# resident threads an SM holds (CUDA programming guide, table of compute capabilities): a context sets aside local memory for each
THREADS_PER_SM = {(7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048, (12, 0): 1536}
OUTSIDE_SOURCE = "not measured on this GPU: the H200's, with the context scaled by resident threads"


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """What torch sets aside for each cuBLAS handle and stream: 32 MiB on Hopper and (in its newer versions) Blackwell, else ``:4096:2:16:8``."""
    return 32 << 20 if capability[0] >= 9 else (2 * 4096 + 8 * 16) << 10
