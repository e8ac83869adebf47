"""Linear algebra: copies that torch makes for cuSOLVER, and workspaces; measured on an H200 (CUDA 13.0), bounded between the sizes that were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["install"]

MIB = 1 << 20
SMALL = 32  # matrices up to this are decomposed in batches
BATCH = 372_628  # bytes a matrix of the batched eigenvalue solver (32 x 32 in fp32)


def install(torch: Any, rules: Any) -> None:
    """Follow them."""
    aten = torch.ops.aten
    table: dict[Any, Callable[..., None]] = {
        aten._linalg_svd.default: _svd, aten.linalg_qr.default: _qr, aten._linalg_eigh.default: _eigh, aten.linalg_inv_ex.default: _copies(2), aten._linalg_solve_ex.default: _copies(1, of=1),
        aten.linalg_lu_solve.default: _copies(1, of=2), aten.linalg_lu.default: _copies(1), aten.cholesky_inverse.default: _copies(1), aten.linalg_matrix_exp.default: _exponential,
        aten.linalg_eig.default: _copies(4, loose=True), aten._linalg_slogdet.default: _copies(0), aten.linalg_cholesky_ex.default: _copies(0), aten.linalg_lu_factor_ex.default: _copies(0),
        aten.linalg_pinv.atol_rtol_tensor: _copies(4, loose=True), aten.cholesky_solve.default: _copies(0),
    }  # fmt: skip
    rules.after.update(table)


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _met(recorder: Any, tensor: Any) -> bool:
    if not hasattr(tensor, "device") or tensor.device.type != "cuda" or tensor.numel() == 0:
        return False
    recorder.record.used.add("solver")
    return True


def _copies(count: int, *, of: int = 0, loose: bool = False) -> Callable[..., None]:
    """So many copies of an argument while the operator runs."""

    def follow(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
        source = args[of] if len(args) > of else args[0]
        if not _met(recorder, source) or not count:
            return
        size, op = _size(source), func._schema.name
        held = [recorder.begin(size, op, "temporary", "operator") for _ in range(count)]
        if loose:
            recorder.loosely(held[-1], 0.0, 3.0)
        for index in reversed(held):
            recorder.end(index)

    return follow


def _exponential(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Powers of the matrix and their sums; batches are parted by norm."""
    _copies(12 if args[0].dim() == 2 else 10)(recorder, func, args, kwargs, out)


def _svd(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """A copy of the matrix, and a workspace of twice its smaller square (one matrix) or 3 MiB (tall ones)."""
    source, op = args[0], func._schema.name
    if not _met(recorder, source):
        return
    element, (rows, columns) = source.element_size(), source.shape[-2:]
    small, large = min(rows, columns), max(rows, columns)
    copy = recorder.begin(_size(source), op, "temporary", "operator")
    guess = element * (2 * small * small + 75 * small) if large < 2 * small else 3 * MIB + element * 32 * small
    recorder.ranged(guess, guess // 8, 2 * guess + 2 * MIB, op)
    recorder.end(copy)


def _qr(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    source, op = args[0], func._schema.name
    if not _met(recorder, source):
        return
    rows, columns = source.shape[-2:]
    single = source.numel() == rows * columns or rows > SMALL
    guess = 3 * MIB + 2 * rows * columns if single else 136_192
    recorder.ranged(guess, 3 * MIB if single else 0, 2 * guess + 4 * source.element_size() * columns * min(rows, columns), op)


def _eigh(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    source, op = args[0], func._schema.name
    if not _met(recorder, source):
        return
    element, n = source.element_size(), source.shape[-1]
    batch = source.numel() // max(1, n * n)
    guess = element * (n * n + 38 * n) if n < 1024 else int(element * 4.07 * n * n)
    if batch > 1 and n <= SMALL:
        guess = batch * BATCH * element // 4
    recorder.ranged(guess, guess // 3, 3 * guess, op)
