"""What an object is made of, read without running any code of its class: its dict, its slots, its locals."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType, GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any

from nbmemprof._cells import cell_names

__all__ = ["OPTIMIZED", "bases", "class_dict", "describe_type", "file_line", "frame_locals", "function_name", "has_base", "has_base_named", "own_dict", "slots"]

_mro: Any = type.__dict__["__mro__"]
_class_dict: Any = type.__dict__["__dict__"]
_class_name: Any = type.__dict__["__name__"]
OPTIMIZED = 1  # a code flag: locals are not a dict of their own
_COPIES = sys.version_info < (3, 13)  # f_locals is a dict that the frame keeps; from 3.13 on it is a view


def bases(cls: type) -> tuple[type, ...]:
    """The classes in the order of lookup; no ``__getattribute__`` of a metaclass is asked."""
    found: tuple[type, ...] = _mro.__get__(cls)
    return found


def has_base(cls: type, base: type) -> bool:
    """``issubclass`` without hooks."""
    return any(c is base for c in bases(cls))


def has_base_named(cls: type, name: str) -> bool:
    """Whether a class or a base of it was defined with this name."""
    return any(_class_name.__get__(c) == name for c in bases(cls))


def class_dict(cls: type) -> MappingProxyType[str, Any]:
    """What a class itself defines."""
    found: MappingProxyType[str, Any] = _class_dict.__get__(cls)
    return found


def own_dict(thing: Any) -> dict[Any, Any] | None:
    """The dict of an instance, a module or a class; None where it has none."""
    if has_base(type(thing), type):
        inner = gc.get_referents(class_dict(thing))
        return inner[0] if inner and type(inner[0]) is dict else None
    for cls in bases(type(thing)):
        found = class_dict(cls).get("__dict__")
        if type(found) in (GetSetDescriptorType, MemberDescriptorType):
            try:
                value = found.__get__(thing)  # type: ignore[union-attr]
            except Exception:  # a descriptor in C may refuse
                return None
            return value if has_base(type(value), dict) else None
    return None


def slots(thing: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of each filled slot, those of classes in C too where they are plain members."""
    for cls in bases(type(thing)):
        for name, found in list(class_dict(cls).items()):
            if type(found) is MemberDescriptorType and name != "__dict__":
                try:
                    yield name, found.__get__(thing)
                except Exception:  # noqa: S112 - an empty slot
                    continue


def frame_locals(frame: FrameType) -> list[tuple[str, Any]]:
    """Name and value of each local. Before Python 3.13 asking leaves a copy in the frame, which would keep the values: it is emptied again."""
    found = frame.f_locals
    listed = list(found.items())
    # the frame, the name above and the call: anybody else who has this dict asked for it by locals()
    if _COPIES and frame.f_code.co_flags & OPTIMIZED and type(found) is dict and sys.getrefcount(found) <= 3:
        found.clear()
    return listed


def function_name(frame: FrameType) -> str:
    """Name of the function that a frame runs, with its class."""
    code = frame.f_code
    return str(getattr(code, "co_qualname", code.co_name))


def file_line(frame: FrameType, line: int | None = None) -> str:
    """``file.py:12``; a cell as ``In[7]:3``."""
    name = frame.f_code.co_filename
    cell = cell_names().get(name)
    return f"{cell or name.replace(chr(92), '/').rpartition('/')[2]}:{line or frame.f_lineno}"


def describe_type(thing: Any) -> str:
    """Name of the class, as it was defined."""
    name: str = _class_name.__get__(type(thing))
    return name
