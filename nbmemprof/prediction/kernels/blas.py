"""Workspaces of cuBLAS and cublasLt: they come with the first product and stay."""

from __future__ import annotations

from typing import Any

__all__ = ["install"]

# cublasLt's, by torch version: measured on an H200 (2.11); _getCUDABlasLtWorkspaceSize in aten/src/ATen/cuda/CUDABlas.cpp
LT_WORKSPACE = {"2.11": 1 << 20}


def install(torch: Any, rules: Any) -> None:
    """Follow every product."""
    aten = torch.ops.aten
    for op in (
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default, aten.dot.default, aten.vdot.default, aten.addbmm.default,
        aten.addmm_.default, aten.baddbmm_.default, aten._addmm_activation.default,
    ):  # fmt: skip
        rules.after[op] = follow
    for op in (aten.linalg_solve_triangular.default, aten.triangular_solve.default):
        rules.after[op] = solve


def solve(recorder: Any, _func: Any, _args: Any, _kwargs: Any, out: Any) -> None:
    """A triangular system is cuBLAS's too."""
    first = out[0] if isinstance(out, (tuple, list)) else out
    if first.device.type == "cuda" and first.numel():
        handle(recorder)


def follow(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Write the workspaces down where this is the first product of its kind: each thread has a handle of its own."""
    if out.device.type != "cuda" or out.numel() == 0:
        return
    rules = recorder.rules
    name = func._schema.name
    light = not rules.light and name in ("aten::addmm", "aten::_addmm_activation") and args[0].dim() == 1
    held = [recorder.begin(t.numel() * t.element_size(), name, "temporary", "operator") for t in _factors(name, args) if not _as_it_lies(t)]
    handle(recorder)
    if light:
        rules.light = True
        recorder.begin(LT_WORKSPACE.get(rules.version, 1 << 20), "cublasLtCreate", "workspace", "operator")
    for index in reversed(held):
        recorder.end(index)


def _factors(name: str, args: Any) -> tuple[Any, ...]:
    """The two matrices of a product, the second one first: cuBLAS computes the transposed one."""
    short = name.removeprefix("aten::").removesuffix("_")
    first = 0 if short in ("mm", "bmm") else 1
    return (args[first + 1], args[first]) if short in ("mm", "bmm", "addmm", "baddbmm", "_addmm_activation") else ()


def _as_it_lies(matrix: Any) -> bool:
    """Whether cuBLAS takes a matrix by its strides: one of the two is 1 and the other one long enough (``prepare_batch_matrix_for_cublas`` in aten/src/ATen/native/cuda/Blas.cpp)."""
    if matrix.dim() < 2 or matrix.numel() == 0:
        return True
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    return bool((right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows)) or (rows == 1 and right == 1) or (columns == 1 and down == 1))


def handle(recorder: Any) -> None:
    """The first use of cuBLAS in this thread makes a handle with its workspace."""
    rules = recorder.rules
    backward = recorder.where.in_backward
    if backward not in rules.handles:
        rules.handles.add(backward)
        recorder.record.used.add("second_blas" if backward and len(rules.handles) > 1 else "blas")
        recorder.begin(rules.gpu.cublas_workspace_bytes, "cublasCreate", "workspace", "operator")
