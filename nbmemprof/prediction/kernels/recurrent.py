"""cuDNN's recurrent nets: one buffer of weights, a reserve that is held until backward, a workspace for each call."""

from __future__ import annotations

from typing import Any

__all__ = ["composites", "install"]

DROPOUT_STATE = 6_488_064  # cuDNN's random states, once for a process; measured on an H200
SMALL = 256  # hidden size from which the workspace's rule was exact; a GRU whose input was 3.3 times as wide needed a third more
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_KEPT = {0: 2, 1: 2, 2: 6, 3: 7}  # values a step, unit and layer that backward needs


def _aligned(size: int) -> int:
    return -(-size // 32) * 32


def reserve_bytes(mode: int, steps: float, batch: int, hidden: int, layers: int, directions: int, element: int, dropout: float) -> int:
    """What training keeps for backward: some values a step, unit and layer, with dropout a bit an element between layers (exact for 40 nets on an H200)."""
    units = round(steps * batch) * hidden * directions
    kept = units * element * (_KEPT[mode] * layers - 1)
    masks = units * (layers - 1) * directions // 8 if dropout and layers > 1 else 0
    return _aligned(kept) + (_aligned(masks + (units * (layers - 1) * directions % 8 > 0)) if masks else 0) + 256


def workspace_bytes(mode: int, steps: float, batch: int, width: int, hidden: int, layers: int, directions: int, element: int) -> int:
    """What one call needs beside: a copy of the weights, some values a step, and 8 MiB a layer and direction.

    Fitted to 40 nets on an H200: within 1 KiB for LSTMs and GRUs with hidden sizes from 256, low by up to half for smaller ones in fp32.
    """
    gates, share = _GATES[mode], width / hidden
    inner = hidden * directions
    weights = gates * directions * hidden * (hidden + width + (layers - 1) * (hidden + inner))
    if directions == 1:
        slope, fixed = (5 + share + (layers > 1), 10 * layers) if mode == 2 else (4 + share + max(share, layers > 1), 5 * layers)
    else:
        slope, fixed = (14 + share, 24 * layers) if mode == 2 else (10 + layers + 2 * share, 14 * layers)
    values = round((slope * steps + fixed) * batch * hidden)
    return element * (weights + values) + (8 << 20) * layers * directions + 256 + 256 * min(layers, 2)


def install(torch: Any, rules: Any) -> None:
    """Answer the operators of cuDNN's nets."""
    aten = torch.ops.aten
    rules.before[aten._cudnn_rnn.default] = _forward
    rules.before[aten._cudnn_rnn_backward.default] = _backward
    rules.before[aten._cudnn_rnn_flatten_weight.default] = _flatten


def composites(torch: Any) -> dict[str, Any]:
    """From the name of a composite operator to what is registered for CUDA in its place: torch's own choice on a GPU is cuDNN."""

    def net(mode: int, packed: bool) -> Any:
        def run(*given: Any) -> Any:
            if packed:
                data, sizes, hidden, params, _biases, layers, dropout, train, both = given
                batch_first, batch_sizes = False, [int(sizes[i].item()) for i in range(sizes.shape[0])]
            else:
                data, hidden, params, _biases, layers, dropout, train, both, batch_first = given
                batch_sizes = []
            for name, tensors in (("hidden", hidden if isinstance(hidden, (list, tuple)) else [hidden]), ("parameter", params)):
                apart = next((t for t in tensors if t.device != data.device), None)
                if apart is not None:  # in torch's words (aten/src/ATen/native/RNN.cpp)
                    raise RuntimeError(f"Input and {name} tensors are not at the same device, found input tensor at {data.device} and {name} tensor at {apart.device}")
            first, second = (hidden[0], hidden[1]) if isinstance(hidden, (list, tuple)) else (hidden, None)
            size = second.shape[2] if second is not None else first.shape[2]
            projected = first.shape[2] if second is not None and first.shape[2] != size else 0
            each = len(params) // (layers * (2 if both else 1))
            flat = _flat(torch, params)
            out = torch.ops.aten._cudnn_rnn(data, list(params), each, flat, first, second, mode, size, projected, layers, batch_first, dropout, train, both, batch_sizes, None)
            return (out[0], out[1], out[2]) if second is not None else (out[0], out[1])

        return run

    return {f"{name}.{kind}": net(mode, kind == "data") for name, mode in MODES.items() for kind in ("input", "data")}


def _flat(torch: Any, params: Any) -> Any:
    """The buffer in which all weights lie; None where they lie apart."""
    storage = params[0].untyped_storage()
    if all(p.untyped_storage()._cdata == storage._cdata for p in params):
        return torch.ops.aten.as_strided(params[0].detach(), (storage.nbytes() // params[0].element_size(),), (1,), 0)
    return None


def _flatten(recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """Weights move into one buffer."""
    weights = args[0]
    with recorder:
        flat = weights[0].new_empty(sum(w.numel() for w in weights))
        at = 0
        for weight in weights:
            weight.set_(flat.untyped_storage(), at, weight.shape, weight.stride())
            at += weight.numel()
    return flat


def _shape(args: Any) -> tuple[float, int, bool]:
    """Steps, batch, and whether the batch is packed: then the batch is that of the first step, and the steps are the rows as if all were that long."""
    data, batch_first, sizes = args[0], args[10], args[14]
    if sizes:
        return data.shape[0] / int(sizes[0]), int(sizes[0]), True
    steps, batch = data.shape[0], data.shape[1]
    return (batch, steps, False) if batch_first else (steps, batch, False)


def _bounded(recorder: Any, index: int, packed: bool, width: int, hidden: int, directions: int) -> None:
    """Where the workspace is only known within bounds: packed batches, inputs wider than what comes out, small nets."""
    if width > hidden * directions or hidden < SMALL:
        recorder.loosely(index, 0.8, 2.0 if hidden < SMALL else 1.5)
    elif packed:
        recorder.loosely(index, 0.8, 1.05)


def _forward(recorder: Any, func: Any, args: Any, _kwargs: Any) -> Any:
    data, weights, _, flat, hx, cx, mode, hidden, projected, layers, batch_first, dropout, train, both, _sizes, _ = args
    torch, op = recorder.rules.torch, func._schema.name
    steps, batch, packed = _shape(args)
    directions = 2 if both else 1
    width = (projected or hidden) * directions
    recorder.record.used.add("cudnn")
    with recorder:
        if dropout and train and not recorder.rules.seen("dropout state"):
            recorder.temporary(8, op)
            recorder.begin(DROPOUT_STATE, op, "workspace", "operator")
        source = (data.transpose(0, 1) if batch_first and not packed else data).contiguous()
        out = data.new_empty((data.shape[0], width) if packed else (int(steps), batch, width))
        hy = hx.new_empty(hx.shape)
        cy = cx.new_empty(cx.shape) if cx is not None else data.new_empty(0)
        if flat is None:  # weights that lie apart are copied together
            flat = data.new_empty(sum(w.numel() for w in weights))
        space = recorder.begin(workspace_bytes(mode, steps, batch, data.shape[-1], hidden, layers, directions, data.element_size()), op, "workspace", "operator")
        _bounded(recorder, space, packed, data.shape[-1], hidden, directions)
        kept = reserve_bytes(mode, steps, batch, hidden, layers, directions, data.element_size(), dropout) if train else 0
        reserve = torch.empty(kept, dtype=torch.uint8, device=data.device)
        recorder.end(space)
        del source
        return (out.transpose(0, 1) if batch_first and not packed else out), hy, cy, reserve, flat


def _backward(recorder: Any, func: Any, args: Any, _kwargs: Any) -> Any:
    data, weights, _, flat, hx, cx, out, grad_out, grad_hy, grad_cy, mode, hidden, _projected, layers, batch_first, _dropout, _train, both, sizes, _, _reserve, mask = args
    op = func._schema.name
    shape = (data, weights, 0, flat, hx, cx, mode, hidden, 0, layers, batch_first, 0.0, True, both, sizes)
    steps, batch, packed = _shape(shape)
    size = workspace_bytes(mode, steps, batch, data.shape[-1], hidden, layers, 2 if both else 1, data.element_size())
    swap = batch_first and not packed
    with recorder:
        grad_out = out.new_zeros(out.shape) if grad_out is None else grad_out
        grad_hy = hx.new_zeros(hx.shape) if grad_hy is None else grad_hy
        if cx is not None:
            grad_cy = cx.new_zeros(cx.shape) if grad_cy is None else grad_cy
        source = (data.transpose(0, 1) if swap else data).contiguous()
        given = (grad_out.transpose(0, 1) if swap else grad_out).contiguous()
        dx = source.new_empty(source.shape)
        dhx = hx.new_empty(hx.shape)
        dcx = cx.new_empty(cx.shape) if cx is not None else None
        recorder.temporary(size, op)
        _bounded(recorder, len(recorder.record.made) - 1, packed, data.shape[-1], hidden, 2 if both else 1)
        del given, source
        grads = []
        if mask[3]:
            source = (data.transpose(0, 1) if swap else data).contiguous()
            whole = flat.new_zeros(flat.shape)
            recorder.temporary(size, op)
            at = 0
            for weight in weights:
                grads.append(whole.narrow(0, at, weight.numel()).view(weight.shape))
                at += weight.numel()
            del source
        return dx.transpose(0, 1) if swap else dx, dhx, dcx, grads
