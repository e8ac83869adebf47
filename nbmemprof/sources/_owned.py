"""Whose storages are where: weights, buffers, gradients, optimizer state, inputs, KV caches and what was tagged, each with the moment at which it was seen.

Nothing here keeps a module, an optimizer, a tensor or a cache alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from nbmemprof import _kv_caches, tags
from nbmemprof.sources import _owners
from nbmemprof.sources._stacks import Layers

__all__ = ["Owned"]

_MOST_SHAPES = 20_000  # of caches; then every second of the older ones is let go
_known_roots: dict[int, weakref.ref[Any]] = {}  # modules and optimizers seen in earlier recordings
_known_optimizers: dict[int, weakref.ref[Any]] = {}


class Owned:
    """The owners of one recording. A moment is the number of an observer's record."""

    def __init__(self, torch: Any, device_type: str, clock_ns: Callable[[], int], layers: Layers, guard: Callable[[Exception], None]) -> None:
        self.torch, self.device_type, self.clock_ns, self.layers, self._guard = torch, device_type, clock_ns, layers, guard
        self.rows: list[tuple[int, int, int | None, int, str, str, str | None, str | None]] = []  # moment, clock, device, address, category, evidence, layer, name
        self.caches: list[tuple[int, int, _kv_caches.Shape, int | None]] = []  # moment, clock, what a KV cache held, tokens of it that are padding
        self.parameters: list[tuple[str, str, str, int, int, int]] = []  # layer, name, dtype, elements, rows of a matrix (0: none), bytes; as of the last look everywhere
        self.fresh_grads = False  # gradients may have come since they were noted
        self._masks: dict[int, weakref.ref[Any]] = {}  # attention masks of the first forward with a cache
        self._living: dict[int, weakref.ref[Any]] = {}  # caches that were met
        self._seen: dict[tuple[int | None, int], tuple[str, str | None]] = {}
        self._parameters: list[tuple[weakref.ref[Any], str]] = []
        self._layer_of_parameter: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._states: dict[int, int] = {}  # how many states an optimizer had when they were noted
        self._roots = {id(root): ref for ref in list(_known_roots.values()) if (root := ref()) is not None}
        self._optimizers = {id(optimizer): ref for ref in list(_known_optimizers.values()) if (optimizer := ref()) is not None}

    # ------------------------------------------------------------------ whom the program uses
    def meet_root(self, module: Any, moment: Callable[[], int]) -> bool:
        """An outermost module is called; whether it is new."""
        known = self._roots.get(id(module))
        if known is not None and known() is module:
            return False
        named = self.layers.name(module) is not None
        self._roots[id(module)] = _known_roots[id(module)] = weakref.ref(module)
        if not named:  # a part of a model that is known is no root of its own
            self.module(module, moment())
        return True

    def meet_optimizer(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if id(optimizer) not in self._optimizers or self._optimizers[id(optimizer)]() is not optimizer:
            self._optimizers[id(optimizer)] = _known_optimizers[id(optimizer)] = weakref.ref(optimizer)
            self._states.pop(id(optimizer), None)

    def forward(self, moment: int, args: Any, kwargs: Any, result: Any) -> None:
        """An outermost module has been called: its inputs, and the KV caches that it was given or gave."""
        for tensor in _owners.tensors_in((args, kwargs), self.torch, 3):
            if tensor.grad_fn is None and not isinstance(tensor, self.torch.nn.Parameter):
                self.own(moment, tensor, "inputs", "storage", None, None)
        for cache in _kv_caches.caches_of([kwargs, result, *args]):
            kept = [tensor for tensor in _owners.tensors_in(cache, self.torch) if not tensor.requires_grad]
            for tensor in kept:  # in training these are activations, and the cache ends with the forward
                self.own(moment, tensor, "kv_cache", "storage", None, type(cache).__name__)
            if kept:
                self._shape(moment, cache, kwargs.get("attention_mask") if isinstance(kwargs, dict) else None)

    # ------------------------------------------------------------------ looking
    def look(self, moment: int, *, everywhere: bool = False) -> None:
        """Note every owner that is known now; ``everywhere``: search for others first."""
        self._seen.clear()
        self._states.clear()
        self._parameters.clear()
        caches: list[Any] = []
        if everywhere:
            try:
                modules, optimizers, caches = _owners.find(self.torch)
                for module in modules:
                    self._roots.setdefault(id(module), weakref.ref(module))
                for optimizer in optimizers:
                    self._optimizers.setdefault(id(optimizer), weakref.ref(optimizer))
            except Exception as error:
                self._guard(error)
        for note, refs in ((self.module, self._roots), (self.optimizer, self._optimizers)):
            for key, ref in list(refs.items()):
                owner = ref()
                if owner is None:
                    del refs[key]
                    continue
                try:
                    if refs is not self._roots or not self._is_part(owner):
                        note(owner, moment)
                except Exception as error:
                    self._guard(error)
        self.gradients(moment)
        if everywhere:
            self._table()
        met = [cache for ref in self._living.values() if (cache := ref()) is not None] if everywhere else []
        for cache in {id(c): c for c in (*caches, *met)}.values():
            for tensor in _owners.tensors_in(cache, self.torch):
                self.own(moment, tensor, "kv_cache", "storage", None, type(cache).__name__)
            try:
                self._shape(moment, cache, wait=True)
            except Exception as error:
                self._guard(error)
        for obj, category, name in tags.tagged():
            self.tagged(obj, category, name, moment)

    def _is_part(self, module: Any) -> bool:
        """Whether the module is below another root, whose walk will meet it."""
        return "." in (self.layers.name(module) or "")

    # ------------------------------------------------------------------ noting
    def own(self, moment: int, tensor: Any, category: str, evidence: str, layer: str | None, name: str | None) -> None:
        for device, addr in _owners.addresses(tensor, self.device_type):
            key, what = (device, addr), (category, layer)
            if category in ("weights", "buffers", "optimizer_state") and self._seen.get(key) == what:
                continue
            self._seen[key] = what
            self.rows.append((moment, self.clock_ns(), device, addr, category, evidence, layer, name))

    def module(self, root: Any, moment: int) -> None:
        for tensor, category, layer, name in _owners.of_module(root, self.layers.learn_all(root)):
            self.own(moment, tensor, category, "storage", layer, name)
            if category == "weights" and not self.torch.nn.parameter.is_lazy(tensor):
                ref = weakref.ref(tensor)
                self._parameters.append((ref, layer))
                known = self._layer_of_parameter.get(id(tensor))
                if known is None or known[0]() is not tensor:  # of tied weights the first place counts
                    self._layer_of_parameter[id(tensor)] = (ref, layer)

    def _table(self) -> None:
        """What the weights of the known modules are made of; of tied ones the first place."""
        self.parameters, seen = [], set()
        for ref in self._roots.values():
            root = ref()
            if root is None or self._is_part(root):
                continue
            for tensor, category, layer, name in _owners.of_module(root, self.layers.learn_all(root)):
                try:
                    if category != "weights" or id(tensor) in seen or tensor.device.type != self.device_type or hasattr(tensor, "__tensor_flatten__"):
                        continue
                    if self.torch.nn.parameter.is_lazy(tensor):  # it has neither a shape nor memory yet
                        continue
                    seen.add(id(tensor))
                    rows = tensor.shape[:-1].numel() if tensor.ndim >= 2 else 0
                    self.parameters.append((layer, name, str(tensor.dtype).removeprefix("torch."), tensor.numel(), rows, tensor.numel() * tensor.element_size()))
                except Exception as error:  # a tensor of somebody's own class
                    self._guard(error)

    def gradients(self, moment: int, optimizer: Any = None) -> None:
        """Gradients where they are now: of the optimizer's parameters, or of all that are known."""
        self.fresh_grads = False
        if optimizer is None:
            found: list[tuple[Any, str | None]] = [(p, layer) for ref, layer in self._parameters if (p := ref()) is not None]
        else:
            found = [(p, self._layer_for(p)) for group in optimizer.param_groups for p in group["params"]]
        now, plain, strided, add, device_type = self.clock_ns(), self.torch.Tensor, self.torch.strided, self.rows.append, self.device_type
        for parameter, layer in found:
            grad = parameter.grad if parameter.is_leaf else None  # torch warns of others
            if grad is None:
                continue
            if type(grad) is plain and grad.is_cuda and grad.layout is strided and not grad.storage_offset():
                if device_type == "cuda":
                    add((moment, now, grad.get_device(), grad.data_ptr(), "gradients", "storage", layer, None))
            else:
                self.own(moment, grad, "gradients", "storage", layer, None)

    def _layer_for(self, parameter: Any) -> str | None:
        known = self._layer_of_parameter.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else None

    def optimizer(self, optimizer: Any, moment: int, *, grown: bool = False) -> None:
        """The state of an optimizer; ``grown``: only if there is other than when it was last noted."""
        if grown and self._states.get(id(optimizer)) == len(optimizer.state):
            return
        self._states[id(optimizer)] = len(optimizer.state)
        for parameter, tensor, name in _owners.of_optimizer(optimizer, self.torch):
            self.own(moment, tensor, "optimizer_state", "storage", self._layer_for(parameter), name)
        for group in optimizer.param_groups:  # parameters of no module
            for parameter in group["params"]:
                if id(parameter) not in self._layer_of_parameter:
                    self.own(moment, parameter, "weights", "storage", None, None)

    def tagged(self, obj: Any, category: str, name: str, moment: int) -> None:
        for tensor in _owners.tensors_in(obj, self.torch):
            self.own(moment, tensor, category, "tag", None, name)

    def _shape(self, moment: int, cache: Any, mask: Any = None, *, wait: bool = False) -> None:
        """How much a cache holds; ``wait``: the program has ended, so the device may be asked."""
        now, known = self.clock_ns(), self._living.get(id(cache))
        if known is None or known() is not cache:
            self._masks.pop(id(cache), None)
            try:
                self._living[id(cache)] = weakref.ref(cache)
            except TypeError:  # tuples
                self._living.pop(id(cache), None)
        if mask is not None and id(cache) not in self._masks:
            self._masks[id(cache)] = weakref.ref(mask)
        ref = self._masks.get(id(cache)) if wait else None
        kept = ref() if ref is not None else None
        for shape in _kv_caches.shapes(cache, wait=wait):
            self.caches.append((moment, now, shape, _kv_caches.padding(kept) if kept is not None else None))
        if len(self.caches) > _MOST_SHAPES:
            del self.caches[1 : _MOST_SHAPES // 2 : 2]
