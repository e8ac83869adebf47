"""Memory that device kernels ask for beside their outputs."""

from __future__ import annotations

from typing import Any

__all__ = ["install"]

LT_WORKSPACE = {"2.11": 1 << 20}  # cublasLt's, by torch version; measured on an H200


def install(torch: Any, rules: Any) -> None:
    """Fill the tables of ``rules``."""
    aten = torch.ops.aten
    for op in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default, aten.dot.default, aten.addbmm.default):
        rules.after[op] = _blas


def _blas(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    if out.device.type != "cuda":
        return
    rules = recorder.rules
    backward = recorder.where.in_backward
    if backward not in rules.handles:
        rules.handles.add(backward)
        recorder.record.used.add("second_blas" if backward else "blas")
        recorder.begin(rules.gpu.cublas_workspace_bytes, "cublasCreate", "workspace", "operator")
    if not rules.light and func._schema.name == "aten::addmm" and args[0].dim() == 1:
        rules.light = True
        recorder.begin(LT_WORKSPACE.get(rules.version, 1 << 20), "cublasLtCreate", "workspace", "operator")
