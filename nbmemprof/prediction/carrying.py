"""Names of the kernel in a fresh child: by value with cloudpickle, but tensors as what they are shaped like.

A tensor crosses as shape, strides, dtype, device and place in its storage, with its values only where a fake run looks at them (small
integers, booleans, scalars): a model of any size is some kilobytes. On the device it becomes part of the opening balance.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbmemprof import _optional
from nbmemprof.capture import Capture, load
from nbmemprof.prediction import lazies
from nbmemprof.prediction.shadows import LIMIT, SMALL

__all__ = ["Packed", "capture", "dump_tensors", "load_tensors", "pack", "unpack"]

_HIDDEN = {"In", "Out", "get_ipython", "exit", "quit", "open"}


@dataclass
class Packed:
    """A namespace on its way; ``left`` are names that could not come, with the reason."""

    data: bytes
    left: dict[str, str] = field(default_factory=dict)


class _Globals(dict[str, object]):
    """Stands for the kernel's names: in the child it is the names of the child's shell."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _shell_names, ()


def _shell_names() -> dict[str, Any]:
    ipython = _optional.loaded("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return {} if shell is None else shell.user_ns


def pack(namespace: dict[str, Any], why: str) -> Packed:
    """Take the names of a shell along.

    Parameters
    ----------
    why
        Why it can't be forked, for the message where cloudpickle is missing.
    """
    cloudpickle = _optional.require("cloudpickle", feature=f"A prediction with the names of this notebook (in a fresh process, since {why})")
    wanted = {name: value for name, value in namespace.items() if not name.startswith("_") and name not in _HIDDEN}
    left: dict[str, str] = {}
    try:
        return Packed(_dump(cloudpickle, namespace, wanted))
    except Exception:  # something in it can't go: find out what, one by one
        for name, value in list(wanted.items()):
            try:
                _dump(cloudpickle, namespace, {name: value})
            except Exception as error:
                left[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                del wanted[name]
    return Packed(_dump(cloudpickle, namespace, wanted), left)


def _dump(cloudpickle: Any, namespace: dict[str, Any], wanted: dict[str, Any]) -> bytes:
    torch = _optional.loaded("torch")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, _Globals):
                return obj.__reduce__()
            if torch is not None and isinstance(obj, torch.Tensor):
                return _tensor(torch, obj)
            if torch is not None and isinstance(obj, torch.Generator):
                return torch.Generator, ()
            return super().reducer_override(obj)

    out = io.BytesIO()
    pickler = Pickler(out)
    pickler.globals_ref[id(namespace)] = _Globals()
    pickler.dump(wanted)
    return out.getvalue()


def _tensor(torch: Any, tensor: Any, shadows: Any = None) -> Any:
    """How a tensor is made again."""
    fake = torch._subclasses.fake_tensor.FakeTensor
    if torch.nn.parameter.is_lazy(tensor):
        return lazies.like(tensor)
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter, fake, getattr(torch.nn, "Buffer", fake)):
        raise TypeError(f"a tensor of type {type(tensor).__name__} with layout {tensor.layout} can't be carried over")
    storage = tensor.untyped_storage()
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    is_fake = isinstance(tensor, fake)
    place = (storage._cdata if is_fake else storage.data_ptr() or storage._cdata, storage.nbytes())
    grad = tensor.grad if tensor.is_leaf else None
    values = _values(torch, tensor, shadows if is_fake else None)
    return _made, (kind, tensor.device.type, place, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad, grad, values)


def _values(torch: Any, tensor: Any, shadows: Any) -> Any:
    """Values that a fake run may look at, as an array; None for large and for unknown ones."""
    count = tensor.numel()
    if count > SMALL and (count > LIMIT or tensor.is_floating_point() or tensor.is_complex()):
        return None
    if shadows is None and isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor):
        return None
    with torch.utils._python_dispatch._disable_current_modes():
        known = tensor if shadows is None else shadows.of(tensor)
        if known is None:
            return None
        known = known.detach().cpu().contiguous()
        return (known.float() if known.dtype == torch.bfloat16 else known).numpy().copy()


def dump_tensors(torch: Any, obj: Any, shadows: Any) -> bytes:
    """An object as bytes, its tensors as what they are shaped like."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return _tensor(torch, obj, shadows) if isinstance(obj, torch.Tensor) else NotImplemented

    out = io.BytesIO()
    Pickler(out).dump(obj)
    return out.getvalue()


def load_tensors(data: bytes, shadows: Any, place: Callable[[str], str]) -> Any:
    """The object again, its tensors new and where ``place`` puts those of a device."""
    kept = _making.shadows, _making.place
    _making.shadows, _making.place = shadows, place
    try:
        return pickle.loads(data)  # noqa: S301 - made by dump_tensors in this process
    finally:
        _making.shadows, _making.place = kept
        _making.storages.clear()


class _Making:
    """What the tensors of one load have in common."""

    def __init__(self) -> None:
        self.storages: dict[tuple[str, int], Any] = {}
        self.shadows: Any = None
        self.place: Callable[[str], str] = lambda device: device


_making = _Making()


def _made(kind: str, device: str, place: tuple[int, int], shape: Any, stride: Any, offset: int, dtype: Any, wants_grad: bool, grad: Any, values: Any) -> Any:
    torch = _optional.require("torch", feature="a prediction")
    device = _making.place(device)
    key, nbytes = (device, place[0]), place[1]
    with torch.no_grad():
        whole = _making.storages.get(key) if nbytes else None
        if whole is None:
            whole = _making.storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        size = dtype.itemsize
        made = whole[: nbytes // size * size].view(dtype).as_strided(shape, stride, offset).detach()
    if values is not None and _making.shadows is not None:
        with _making.shadows._outside():
            known = torch.from_numpy(values.copy()).to(dtype).reshape(shape)
        _making.shadows.put(made, known)
    made = torch.nn.Parameter(made, requires_grad=wants_grad) if kind == "parameter" else made.requires_grad_(wants_grad)
    if grad is not None:
        made.grad = grad
    return made


def unpack(packed: Packed, shell: Any, session: Any) -> None:
    """In the child: bind the names; those that could not come say so when they are asked for."""
    names = load_tensors(packed.data, session.recorder.shadows, lambda device: device)
    shell.user_ns.update(names)
    session.carried = list(names.values())  # named when some of it was adopted: what a name knows can't be swapped
    if packed.left:
        session.record.assume("names that could not be carried into the prediction: " + ", ".join(f"{name} ({why})" for name, why in packed.left.items()))


def capture(data: bytes) -> Capture:
    """A capture from the bytes of its file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack():
        path = Path(folder, "capture.nbmem")
        path.write_bytes(data)
        loaded = load(path)
        for name in list(loaded.tables):  # before the file goes
            _ = loaded.tables[name].height
        return loaded
