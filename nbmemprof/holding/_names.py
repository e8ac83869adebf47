"""The chain from a root to a tensor in words: ``model.0.weight``, ``BEST[3]``, a local of a frame of the last traceback."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import AsyncGeneratorType, CellType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType, TracebackType
from typing import Any

from nbmemprof.holding._objects import Objects
from nbmemprof.holding._parts import describe_type, file_line, frame_locals, function_name, has_base, has_base_named, own_dict, slots
from nbmemprof.holding._roots import Root

__all__ = ["Link", "Namer", "describe_function", "short"]

_LRU: type = type(functools.lru_cache(lambda: None))
_PARTIAL = functools.partial
_PLAIN = (str, int, float, bool, bytes, type(None))
_SUSPENDED: dict[type, str] = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
_HOOKS = {
    "_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook", "_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook",
    "_state_dict_hooks": "state_dict hook", "_load_state_dict_pre_hooks": "load_state_dict hook", "_load_state_dict_post_hooks": "load_state_dict hook",
    "_post_accumulate_grad_hooks": "gradient hook", "_optimizer_step_pre_hooks": "optimizer hook", "_optimizer_step_post_hooks": "optimizer hook",
}  # fmt: skip
_INSIDE = ("._modules", "._parameters", "._buffers")
_GRAPH = ".grad_fn"
_CLOSURE = " closure "
_WEAK = ("variable", "module", "cycle", "native")
_LONG = 40  # characters of a key


@dataclass(frozen=True, slots=True)
class Link:
    """One step of a chain and what the chain became by it.

    ``text`` is the whole way so far as an expression; ``kind`` and ``place`` are those of the last thing on it that says most.
    """

    steps: tuple[str, ...]
    text: str
    kind: str
    place: str
    root: str  # label of the root
    origin: str  # its kind


class Namer:
    """Names objects that a walk has reached; what is asked twice is kept."""

    def __init__(self, objects: Objects, roots: list[Root]) -> None:
        self._objects, self._roots = objects, roots
        self._links: dict[int, Link] = {}
        self._children: dict[int, dict[int, str]] = {}
        self._lines: dict[int, int] = {}  # where a frame stood, by the traceback that leads to it
        self.across: dict[int, tuple[str, ...]] = {}  # steps that no reference shows: .grad, autograd graphs

    def link(self, number: int) -> Link:
        """The chain that ends at an object."""
        todo = []
        at = number
        while at not in self._links:
            todo.append(at)
            if self._objects.parent[at] < 0:
                break
            at = int(self._objects.parent[at])
        for at in reversed(todo):
            parent = int(self._objects.parent[at])
            self._links[at] = self._step(self._links[parent], parent, at) if parent >= 0 else self._first(at, self._roots[-2 - parent])
        return self._links[number]

    def _first(self, number: int, root: Root) -> Link:
        thing = self._objects.items[number]
        place, kind = root.where, root.kind
        text = describe_type(thing) if not root.label else root.label
        start = Link((text if not root.where else f"{text} in {root.where}",), text, kind, place, root.label, kind)
        return self._through(start, thing)

    def _step(self, before: Link, parent: int, number: int) -> Link:
        holder, thing = self._objects.items[parent], self._objects.items[number]
        across = self.across.get(number)
        if across is not None:
            return self.beyond(before, across)
        word = self._word(parent, holder, thing)
        if word is None:
            return before
        kind, place, text = before.kind, before.place, before.text
        weak = kind in _WEAK
        frame = self._frame(parent, holder)
        if frame is not None:
            text, place, kind = word, f"{function_name(frame)} ({file_line(frame, self._lines.get(id(frame)))})", "local" if weak else kind
            word = f"{word} in {place}"
        elif text.endswith(_INSIDE) and word.startswith("['"):
            word = f".{word[2:-2]}"
            text = text[: text.rindex("._")] + word
        else:
            text += word
        if word[1:] in _HOOKS and has_base(type(thing), dict):
            kind, place = "hook", f"{_HOOKS[word[1:]]} of {short(before.text)}"
        elif word == _GRAPH and weak:
            kind = "graph"
        elif word.startswith(_CLOSURE) and (weak or kind == "local"):
            kind, place = "closure", describe_function(self._closure(int(self._objects.parent[parent])))
        return self._through(Link((*before.steps, word), text, kind, place, before.root, before.origin), thing)

    @staticmethod
    def beyond(before: Link, steps: tuple[str, ...]) -> Link:
        """The chain with steps that no reference shows; the first of them stands in the text."""
        kind = "graph" if steps[0] == _GRAPH and before.kind in ("variable", "module", "local", "closure", "generator", "thread") else before.kind
        return Link((*before.steps, *steps), before.text + steps[0], kind, before.place, before.root, before.origin)

    def _frame(self, parent: int, holder: Any) -> FrameType | None:
        """The frame whose local a reference is, directly or through a cell."""
        if type(holder) is CellType and self._objects.parent[parent] >= 0:
            holder = self._objects.items[self._objects.parent[parent]]
        return holder if type(holder) is FrameType else None

    def _through(self, link: Link, thing: Any) -> Link:
        """What the thing itself says about the chain that passes through it."""
        cls = type(thing)
        if cls is _LRU:
            inner = (own_dict(thing) or {}).get("__wrapped__")
            what = describe_function(inner) or short(link.text)
            kind, place = ("lru_cache", what) if link.kind in (*_WEAK, "local") else (link.kind, link.place)
            return Link((*link.steps, f"lru_cache of {what}"), link.text, kind, place, link.root, link.origin)
        if cls in _SUSPENDED and link.kind in ("variable", "module", "local"):
            return Link(link.steps, link.text, "generator", f"{describe_type(thing)} {thing.__qualname__}", link.root, link.origin)
        return link

    # ------------------------------------------------------------------ one reference
    def _word(self, parent: int, holder: Any, thing: Any) -> str | None:
        """How a holder calls what it refers to; None where the reader need not know of the step."""
        cls = type(holder)
        if cls is TracebackType:
            if type(thing) is FrameType:
                self._lines[id(thing)] = holder.tb_lineno
            return None
        if cls is FunctionType and type(thing) is tuple and thing is holder.__closure__:
            return None
        if cls is tuple and type(thing) is CellType and self._closure(parent):
            return None
        if cls is CellType:
            return self._captured(parent)
        if type(thing) in (TracebackType, FrameType) and cls is not dict and cls not in (list, tuple):
            return None
        if type(thing) is CellType and cls is FrameType:
            return None
        if type(thing) is OrderedDict and has_base_named(cls, "TensorBase"):
            return "._backward_hooks"
        if has_base_named(type(thing), "_FunctionBase") and has_base_named(cls, "TensorBase"):
            return _GRAPH
        names = self._children.get(parent)
        if names is None:
            names = self._children[parent] = self._names(parent, holder)
        return names.get(id(thing), f".<{describe_type(thing)}>") or None

    def _names(self, number: int, holder: Any) -> dict[int, str]:
        """Words for everything that an object refers to, by address; of several the first counts."""
        cls = type(holder)
        if has_base(cls, dict):
            return self._of_dict(number, holder)
        found: dict[int, str] = {}
        if cls is FrameType:
            pairs = [(value, name) for name, value in frame_locals(holder)]
        elif cls in _SUSPENDED:
            frame = getattr(holder, _SUSPENDED[cls])
            pairs = [(value, f": local {name}") for name, value in (frame_locals(frame) if frame is not None else ())]
        elif has_base(cls, list) or has_base(cls, tuple) or has_base(cls, deque):
            iterate: Callable[[Any], Any] = list.__iter__ if has_base(cls, list) else tuple.__iter__ if has_base(cls, tuple) else deque.__iter__
            pairs = [(value, f"[{i}]") for i, value in enumerate(iterate(holder))]
        elif cls is MethodType:
            pairs = [(holder.__self__, ".__self__"), (holder.__func__, ".__func__")]
        elif cls is _PARTIAL:
            pairs = [(holder.func, ".func"), (holder.args, ".args"), (holder.keywords, ".keywords")]
        elif cls is _LRU:
            return _Always(" cache")
        elif cls in (set, frozenset):
            return _Always("{…}")
        else:
            own = own_dict(holder)
            pairs = [] if own is None else [(own, ""), *((value, f".{key}") for key, value in list(dict.items(own)))]
            pairs += [(value, f".{name}") for name, value in slots(holder)]
            if cls is FunctionType:
                pairs += [(holder.__defaults__, ".__defaults__"), (holder.__kwdefaults__, ".__kwdefaults__")]
            elif has_base(cls, BaseException):
                pairs += [(BaseException.__dict__[name].__get__(holder), f".{name}") for name in ("args", "__cause__", "__context__")]
        for value, word in pairs:
            found.setdefault(id(value), word)
        return found

    def _of_dict(self, number: int, holder: Any) -> dict[int, str]:
        parent = int(self._objects.parent[number])
        above = self._objects.items[parent] if parent >= 0 else None
        attributes = above is not None and type(above) is not dict and own_dict(above) is holder
        found: dict[int, str] = {}
        for key, value in list(dict.items(holder)):
            found.setdefault(id(value), f".{key}" if attributes and type(key) is str else f"[{_key(key)}]")
            found.setdefault(id(key), ".keys()")
        return found

    def _closure(self, number: int) -> Any:
        """The function whose closure a tuple is."""
        parent = int(self._objects.parent[number])
        above = self._objects.items[parent] if parent >= 0 else None
        return above if type(above) is FunctionType and above.__closure__ is self._objects.items[number] else None

    def _captured(self, cell: int) -> str:
        parent = int(self._objects.parent[cell])
        if parent < 0:
            return ".<cell>"
        holder, it = self._objects.items[parent], self._objects.items[cell]
        if type(holder) is FrameType:
            return next((name for name, value in frame_locals(holder) if value is it.cell_contents), "<cell>")
        function = self._closure(parent) if type(holder) is tuple else None
        if function is None:
            return ".<cell>"
        place = next((i for i, each in enumerate(function.__closure__) if each is it), None)
        return f"{_CLOSURE}{function.__code__.co_freevars[place]}" if place is not None else ".<cell>"


class _Always(dict[int, str]):
    """One word for everything."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self._word = word

    def get(self, key: Any, default: Any = None) -> Any:
        return self._word


def describe_function(thing: Any) -> str:
    """Name of a function with what it is defined in; empty for anything else."""
    return thing.__qualname__.replace("<locals>.", "") if type(thing) is FunctionType else ""


def _key(key: Any) -> str:
    plain = all(type(k) in _PLAIN for k in key) if type(key) is tuple else type(key) in _PLAIN
    text = repr(key) if plain else f"<{describe_type(key)}>"
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"


def short(text: str, most: int = 80) -> str:
    """A long expression without its middle."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"
