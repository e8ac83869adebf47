"""Convolutions: cuDNN's kernels work on channels-last data, so that other layouts are copied into a workspace first.

Fitted to 250 convolutions on an H200 (cuDNN 9.19, heuristic mode): the copies are exact, what the gradient of the weights is summed up
in is a guess with a range. With ``torch.backends.cudnn.benchmark`` every algorithm is tried once for each shape, with workspaces of up to gigabytes.
"""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels.reduction import ceil_div

__all__ = ["install", "workspace"]

SLACK = 16
PARTED = 24  # channels of a group from which cuDNN takes the groups apart
TRIED_MAX = 100.0  # largest workspace that benchmark mode was seen to try: 4.7 GiB, some 98 times the input, output and weights of that call


def install(torch: Any, rules: Any) -> None:
    """Follow forward and backward."""
    aten = torch.ops.aten
    rules.before[aten.convolution.default] = _together
    rules.fix[aten.convolution.default] = _put_last
    rules.fix[aten.convolution_backward.default] = _put_last_backward
    rules.emit[aten.convolution.default] = _forward
    rules.emit[aten.convolution_backward.default] = _backward


def workspace(what: str, x: Any, w: Any, y: Any, *, transposed: bool, stride: tuple[int, ...], padding: tuple[int, ...], groups: int, last: bool, sms: int, dilated: bool = False) -> tuple[int, int, int]:
    """Bytes that one call asks for: low, guess, high.

    Parameters
    ----------
    what
        ``forward``, ``data`` (gradient of the input) or ``weight``.
    x, w, y
        Input, weights and output: anything with ``shape`` and ``element_size()``.
    last
        Channels last.
    dilated
        Whether its taps lie apart.
    """
    element = x.element_size()
    half = element == 2
    if transposed:  # its forward is another convolution's gradient of the data, and the other way round
        x, y = y, x
        what = {"forward": "data", "data": "forward", "weight": "weight"}[what]
    batch, channels = x.shape[0], x.shape[1]
    filters = y.shape[1]
    taps = 1
    for size in w.shape[2:]:
        taps *= size
    spots = batch
    for size in y.shape[2:]:
        spots *= size
    bytes_x, bytes_w, bytes_y = (_count(t) * element for t in (x, w, y))
    if groups == channels and channels > 1:
        if not last:
            return 0, 0, 0
        guess = bytes_w * 128 if what == "weight" else 0
        return 0, guess, 4 * guess + bytes_x * (what == "weight")
    straight = taps == 1 and groups == 1 and all(s == 1 for s in stride) and not any(padding)
    product = batch * channels * filters * 4  # a product of matrices as they lie, one an image
    large = half and what == "weight" and product > max(1 << 20, 1.3 * (bytes_x + bytes_y))
    if straight and not last and not large and _as_product(what, channels, filters, spots // batch):
        return (0, product, product) if what == "weight" else (0, 0, 400)
    whole_w = bytes_w
    if taps == 1 and groups == 1:
        bytes_w = 0  # weights of one tap lie the same in every layout
    if half and channels % 8:  # channels are padded to eight
        wide = ceil_div(channels, 8) * 8
        bytes_x, bytes_w = bytes_x // channels * wide, bytes_w // channels * wide
    few = channels < 8 and groups == 1
    copies = bytes_x + bytes_w + bytes_y + SLACK
    own = _partial(filters, channels // groups * taps, spots, sms, half) if what == "weight" else 0
    grouped = groups > 1
    if last:
        base = _as_they_lie(what, x, w, y, few, stride, groups)
        return 0, base + own, base + 2 * own + (8 << 20 if what == "weight" else 0) + (2 * copies if grouped or (dilated and not half) else 0)
    if few and what == "data" and (not half or stride[0] >= 8):
        return 0, 0, 0 if half else copies
    if few and what == "forward" and (taps <= 16 or channels == 1 or not half):
        far = not half and channels > 1 and taps >= 36 and 1 < max(stride) < 8  # the first layer of a ResNet; all others have kernels of their own
        return 0, copies if far else 0, copies
    if few and not half and (taps <= 16 or channels == 1):
        return 0, 0, copies + own
    if few and half and what == "forward" and channels % 4:  # padded to eight, or to four: seen for float16
        return min(copies, (_count(x) + whole_w // element) // channels * ceil_div(channels, 4) * 4 * element + bytes_y), copies, copies
    if grouped:  # several kernels, some of which sum up in fp32
        return 0, copies + own, 3 * copies + 2 * own + (8 << 20)
    low = bytes_x + bytes_w + SLACK if what == "forward" and not half else copies
    if what == "forward" and not half and dilated:
        return low, low, copies
    if what == "forward" and not half and taps == 1 and channels <= 256:
        return low, bytes_x + whole_w + SLACK, copies
    if what == "forward" and not half and channels in (32, 64) and filters >= 64 and bytes_x + bytes_y < 200 << 20:
        return low, low, copies
    return low, copies + own, copies + 2 * own + (min(8 << 20, bytes_x + bytes_y) if what == "weight" else 0)


def _as_they_lie(what: str, x: Any, w: Any, y: Any, few: bool, stride: tuple[int, ...], groups: int) -> int:
    """What channels last still copies: a few channels or filters are padded to four (fp32) or eight; groups of many channels are parted."""
    element, step = x.element_size(), 4 if x.element_size() == 4 else 8
    channels, filters = x.shape[1], y.shape[1]
    bytes_x, bytes_w, bytes_y = (_count(t) * element for t in (x, w, y))
    if groups > 1:
        parted = channels // groups >= PARTED and _taps(w) > 1
        return int(bytes_x + bytes_w + bytes_y + 64) if parted else 131 * (what != "weight")
    if few and element == 4:
        return int(bytes_x + bytes_w + SLACK + (bytes_y if what == "data" and max(stride) > 1 else 0))
    if channels % 8 and (few or element == 2):
        wide = ceil_div(channels, 8) * 8
        return int(bytes_x // channels * wide + (bytes_w // channels * wide if _taps(w) > 1 else 0) + SLACK)
    if filters < 8 and filters % step:
        wide = ceil_div(filters, step) * step
        return int((bytes_y + bytes_w) // filters * wide + 147)
    return 131 if what != "weight" else 0


def _taps(w: Any) -> int:
    total = 1
    for size in w.shape[2:]:
        total *= int(size)
    return total


def _as_product(what: str, channels: int, filters: int, pixels: int) -> bool:
    """Whether cuDNN multiplies a convolution of one tap as it lies instead of copying it to channels last (as seen in 60 of them)."""
    if what != "weight":
        return not (pixels <= 49 and channels * filters >= 1 << 19)
    if pixels <= 196 and channels * filters > 300_000:
        return False
    return not (pixels >= 3136 and min(channels, filters) >= 16 and (channels % 64 or filters % 64))


def _count(tensor: Any) -> int:
    total = 1
    for size in tensor.shape:
        total *= int(size)
    return total


def _partial(filters: int, depth: int, spots: int, sms: int, half: bool) -> int:
    """Partial sums of the weights' gradient: one fp32 tile for each multiprocessor, as often as whole splits fit."""
    high, wide = (32, 256) if filters <= 32 else (64, 64) if filters <= 64 else (64, 128) if filters <= 128 else (128, 128)
    tiles = ceil_div(filters, high) * ceil_div(depth, wide)
    splits = sms // tiles
    if splits < 2 or spots < 4096:
        return 0 if half or spots < 4096 else sms * 65536
    return splits * tiles * high * wide * 4 + 663


def _last(torch: Any, tensor: Any) -> bool:
    """Whether a tensor's strides say channels last (``Tensor::suggest_memory_format``)."""
    if tensor.dim() not in (4, 5):
        return False
    return torch._prims_common.suggest_memory_format(tensor) in (torch.channels_last, torch.channels_last_3d)


def _layout(torch: Any, x: Any, w: Any) -> bool:
    """Whether cuDNN is asked for channels last: one of the two is enough."""
    return _last(torch, x) or _last(torch, w)


def _depthwise(x: Any, w: Any, groups: int, transposed: bool) -> bool:
    return bool(groups == x.shape[1] and groups > 1 and w.shape[1] == 1 and not transposed)


def _as_last(torch: Any, made: Any) -> Any:
    return made.contiguous(memory_format=torch.channels_last if made.dim() == 4 else torch.channels_last_3d)


def _put_last(recorder: Any, args: Any, out: Any) -> Any:
    """Without cuDNN the fake's output has the plain layout; with it that of the input or the weights."""
    x, w = args[0], args[1]
    torch = recorder.rules.torch
    return _as_last(torch, out) if out.device.type == "cuda" and out.dim() in (4, 5) and _layout(torch, x, w) else out


def _put_last_backward(recorder: Any, args: Any, out: Any) -> Any:
    x, w = args[1], args[2]
    torch = recorder.rules.torch
    if x.device.type != "cuda" or x.dim() not in (4, 5) or not _layout(torch, x, w):
        return out
    return tuple(_as_last(torch, made) if made is not None and made.dim() == x.dim() else made for made in out)


def _ask(recorder: Any, what: str, args: tuple[Any, Any, Any], stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int, op: str) -> None:
    x, w, y = args
    rules = recorder.rules
    recorder.record.used.add("cudnn")
    torch = rules.torch
    low, guess, high = workspace(
        what, x, w, y, transposed=transposed, stride=tuple(stride), padding=tuple(padding), groups=groups, last=_layout(torch, x, w), sms=rules.gpu.sms, dilated=any(d > 1 for d in dilation)
    )
    if torch.backends.cudnn.benchmark and not rules.seen(f"{what} {tuple(x.shape)} {tuple(w.shape)} {x.dtype} {tuple(stride)} {groups}"):
        tried = int(TRIED_MAX * (_count(x) + _count(w) + _count(y)) * x.element_size())
        recorder.record.assume("cuDNN's benchmark mode tries workspaces of unknown sizes: a range is given")
        recorder.ranged(guess, low, max(high, tried), op)
        return
    recorder.ranged(guess, low, high, op)


def _together(_recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """Refuse what torch refuses, in its words (aten/src/ATen/native/Convolution.cpp): a fake convolution takes tensors of two devices."""
    x, w, bias = args[:3]
    for name, other in (("weight", w), ("bias", bias)):
        if other is not None and other.device != x.device:
            raise RuntimeError(f"Input type ({x.type()}) and {name} type ({other.type()}) should be the same")
    return NotImplemented


def _copied(recorder: Any, tensors: tuple[Any, ...], last: bool, op: str) -> list[int]:
    """Torch gives cuDNN tensors of one layout: those in another are copied (``_convolution`` in aten/src/ATen/native/Convolution.cpp)."""
    torch, held = recorder.rules.torch, []
    for tensor in tensors:
        wanted = (torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d) if last and tensor.dim() in (4, 5) else torch.contiguous_format
        if not tensor.is_contiguous(memory_format=wanted):
            held.append(recorder.begin(_count(tensor) * tensor.element_size(), op, "temporary", "operator"))
    return held


def _forward(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    x, w, _bias, stride, padding, dilation, transposed, _output_padding, groups = args
    if out.device.type != "cuda":
        recorder.note(func, out)
        return
    held = _copied(recorder, (x, w), _layout(recorder.rules.torch, x, w), func._schema.name)
    recorder.note(func, out)
    _ask(recorder, "forward", (x, w, out), stride, padding, dilation, transposed, groups, func._schema.name)
    for index in held:
        recorder.end(index)


def _backward(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Gradients of the input, the weights and the bias, one after the other; torch's own depthwise kernels make the weights' first."""
    grad, x, w, _sizes, stride, padding, dilation, transposed, _output_padding, groups, _mask = args
    op = func._schema.name
    dx, dw, db = out
    last = _layout(recorder.rules.torch, x, w)
    held = _copied(recorder, (grad, x, w), last, op) if x.device.type == "cuda" else []
    if _depthwise(x, w, groups, transposed) and not last:
        recorder.note(func, (dw, dx, db))
        for index in held:
            recorder.end(index)
        return
    for what, made in (("data", dx), ("weight", dw)):
        if made is not None:
            recorder.note(func, made)
            _ask(recorder, what, (x, w, grad), stride, padding, dilation, transposed, groups, op)
    for index in held:
        recorder.end(index)
    if db is not None:
        recorder.note(func, db)
        dims = (0, *range(2, grad.dim()))
        from nbmemprof.prediction.kernels import reduction

        reduction.emit(recorder, grad, dims, 4, op)
