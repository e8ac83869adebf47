"""``torch.save`` and ``torch.load`` in a fake run: checkpoints live in the process, no file is written or overwritten.

A tensor is kept as its shape, device and place in its storage, and comes back where ``map_location`` says.
Files that were there before are read by torch itself, which makes fakes of them.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from nbmemprof.prediction import carrying
from nbmemprof.prediction.patches import Changes, when_imported

__all__ = ["checkpoints"]

_HEAD = b"nbmemprof fake checkpoint\n"
_SAID = "torch.save wrote no file: checkpoints are kept in the prediction"
_PRETRAINED = "save_pretrained wrote no files"


def checkpoints(torch: Any, session: Any, changes: Changes) -> None:
    """Put both in place."""
    kept: dict[str, bytes] = {}
    plain_load = torch.load
    shadows = session.recorder.shadows

    def save(obj: Any, f: Any, *_args: Any, **_kwargs: Any) -> None:
        session.record.assume(_SAID)
        data = _HEAD + carrying.dump_tensors(torch, obj, shadows)
        if isinstance(f, (str, os.PathLike)):
            kept[str(Path(f).absolute())] = data
        else:
            f.write(data)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        data = kept.get(str(Path(f).absolute())) if isinstance(f, (str, os.PathLike)) else _peek(f)
        if data is None:
            return plain_load(f, map_location, *args, **kwargs)
        return carrying.load_tensors(data[len(_HEAD) :], shadows, lambda device: _placed(torch, device, map_location))

    changes.put(torch, "save", save)
    changes.put(torch, "load", load)
    changes.put(torch.serialization, "save", save)
    changes.put(torch.serialization, "load", load)
    when_imported("transformers.modeling_utils", changes, lambda module: changes.put(module.PreTrainedModel, "save_pretrained", lambda *_args, **_kwargs: session.record.assume(_PRETRAINED)))
    safe = _safetensors()
    if safe is not None:
        changes.put(safe, "save_file", lambda tensors, filename, *_args, **_kwargs: save(dict(tensors), filename))


def _safetensors() -> Any:
    from nbmemprof import _optional

    return _optional.loaded("safetensors.torch")


def _peek(file: Any) -> bytes | None:
    """A checkpoint of ours in a file object; None for another."""
    if not isinstance(file, io.IOBase) or not file.seekable():
        return None
    at = file.tell()
    data = file.read()
    if isinstance(data, bytes) and data.startswith(_HEAD):
        return data
    file.seek(at)
    return None


def _placed(torch: Any, device: str, where: Any) -> str:
    """Where ``map_location`` puts a tensor that was saved on a device."""
    if where is None:
        return device
    if isinstance(where, dict):
        return str(where.get(device, where.get("cuda:0" if device == "cuda" else device, device))).partition(":")[0]
    if isinstance(where, (str, torch.device)):
        return str(where).partition(":")[0]
    return device  # a function of storages: as it was


