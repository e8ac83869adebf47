"""Where in the step the fake run is: phase, step, and the module that asks."""

from __future__ import annotations

import bisect
import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from nbmemprof import _kv_caches
from nbmemprof.prediction import lazies

__all__ = ["Where"]


class Where:
    """Follows modules, backward and optimizers through torch's own global hooks."""

    def __init__(self, torch: Any, record: Any) -> None:
        self.torch, self.record = torch, record
        self.step = 0
        self._optimizers: list[tuple[int | None, int]] = []  # steps under way: the node that was running and the modules being called as each began
        self.label: str | None = None
        self._stack: list[str] = []
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._roots = 0
        self._seq: list[int] = [-1]
        self._seq_layer: list[str | None] = [None]
        self._node = torch._C._current_autograd_node
        self._next = torch._C._autograd._get_sequence_nr
        self.node: int | None = None  # number of the node in which the last ``now`` was asked
        self._owners: Any = torch.utils.weak.WeakIdKeyDictionary()  # parameter -> layer
        self.index_of: Any = lambda _tensor: None
        self.value_of: Any = lambda _tensor: None
        self._padding: dict[int, tuple[Any, int | None]] = {}  # of the caches that are there: padding in their first mask

    def now(self) -> tuple[str | None, str | None, int]:
        """Module path, phase and step of what is asked for now."""
        self.node = None
        node = self._node()
        if self._optimizers and self._optimizers[-1] == (None if node is None else node._sequence_nr(), len(self._stack)):
            return None, "optimizer", self.step  # what runs within a step's closure is a forward and a backward of its own
        if node is not None:
            if self._stack:
                return self._stack[-1], "recompute", self.step
            self.node = node._sequence_nr()
            return self._layer_of(self.node), "backward", self.step
        if self._stack:
            return self._stack[-1], "forward", self.step
        return None, None, self.step

    def current(self) -> Any:
        """The node of the graph that is running; None outside of backward."""
        return self._node()

    def number(self) -> int | None:
        """Number of the node of the graph that is running; None outside of backward."""
        node = self._node()
        return None if node is None else node._sequence_nr()

    def _layer_of(self, number: int) -> str | None:
        at = bisect.bisect_right(self._seq, number) - 1
        return self._seq_layer[at] if at >= 0 else None

    @property
    def in_backward(self) -> bool:
        """Whether a node of the graph is running: on a device that is another thread."""
        return self._node() is not None

    # ------------------------------------------------------------------ hooks
    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow modules and optimizers while the block runs."""
        from torch.nn.modules import module
        from torch.optim import optimizer

        handles = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
            optimizer.register_optimizer_step_pre_hook(self._step_begins),
            optimizer.register_optimizer_step_post_hook(self._step_ends),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
                for name in ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"):
                    getattr(module, name, {}).pop(handle.id, None)  # torch forgets these

    def _enter(self, module: Any, args: Any) -> None:
        name = self._names.get(module)
        if name is None:
            name = self._name(module)
        if not self._stack and self._node() is None:
            for value in args:
                if isinstance(value, self.torch.Tensor) and self._comes_from_outside(value):
                    self._own(value, "inputs", None)
        self._stack.append(name)
        self._changed(name)

    def _comes_from_outside(self, value: Any) -> bool:
        """Whether no module made it and no graph leads to it: blocks that are called one after the other hand on activations."""
        index = self.index_of(value)
        return index is not None and value.grad_fn is None and self.record.made[index].phase is None

    def _leave(self, _module: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._changed(self._stack[-1] if self._stack else None)
        if not self._stack and self._node() is None:
            for value in kwargs.values():
                if isinstance(value, self.torch.Tensor) and self._comes_from_outside(value):
                    self._own(value, "inputs", None)
            for cache in _kv_caches.caches_of([kwargs, out, *args]):
                self.cache(cache, kwargs.get("attention_mask"))

    def cache(self, cache: Any, mask: Any = None) -> None:
        """A KV cache was given to a forward, or came of one. In training it is activations, and ends with the forward."""
        kept = [tensor for tensor in _kv_caches.tensors(cache, self.torch) if not tensor.requires_grad]
        for tensor in kept:
            self._own(tensor, "kv_cache", None, type(cache).__name__)
        if not kept:
            return
        known = self._padding.get(id(cache))
        if known is None or known[0]() is not cache:
            with contextlib.suppress(TypeError):  # tuples
                known = self._padding[id(cache)] = weakref.ref(cache), self._padded(mask)
        padded = known[1] if known is not None else None
        for shape in _kv_caches.shapes(cache, wait=True, read=self._length):
            self.record.caches.append((len(self.record.events), shape, padded))

    def _length(self, tensor: Any) -> int | None:
        value = self.value_of(tensor)
        with self.torch.utils._python_dispatch._disable_current_modes():
            return None if value is None else int(value)

    def _padded(self, mask: Any) -> int | None:
        value = self.value_of(mask) if isinstance(mask, self.torch.Tensor) else None
        with self.torch.utils._python_dispatch._disable_current_modes():
            return None if value is None else _kv_caches.padding(value)

    def _changed(self, name: str | None) -> None:
        number = self._next()
        if number < self._seq[-1]:
            return  # another thread counts on its own
        if number == self._seq[-1]:
            self._seq_layer[-1] = name
            return
        self._seq.append(number)
        self._seq_layer.append(name)

    def _name(self, module: Any) -> str:
        if self._stack:  # a module that is no child of what was called before: named after where it was called
            return f"{self._stack[-1]}.{type(module).__name__}"
        self._add_root(module)
        return self._names[module]

    def _add_root(self, root: Any) -> None:
        first = type(root).__name__
        for path, child in root.named_modules():
            if child not in self._names:
                self._names[child] = f"{first}.{path}" if path else first
        for path, parameter in root.named_parameters(remove_duplicate=False):
            layer, _, name = f"{first}.{path}".rpartition(".")
            if not lazies.wait(self.torch, parameter, functools.partial(self._parameter, layer=layer, name=name)):
                self._parameter(parameter, layer, name)
        for path, buffer in root.named_buffers():
            layer, _, name = f"{first}.{path}".rpartition(".")
            if not lazies.wait(self.torch, buffer, functools.partial(self._own, category="buffers", layer=layer, name=name)):
                self._own(buffer, "buffers", layer, name)

    def _parameter(self, parameter: Any, layer: str, name: str) -> None:
        if self._owners.setdefault(parameter, layer) is layer and self.index_of(parameter) is not None:
            rows = parameter.shape[:-1].numel() if parameter.ndim >= 2 else 0
            self.record.parameters.append((layer, name, str(parameter.dtype).removeprefix("torch."), parameter.numel(), rows, parameter.numel() * parameter.element_size()))
        self._own(parameter, "weights", layer, name)

    def _own(self, tensor: Any, category: str, layer: str | None, name: str | None = None) -> None:
        index = self.index_of(tensor)
        if index is None:
            return
        made = self.record.made[index]
        if made.category is None or (made.category == "inputs" and category == "kv_cache"):
            made.category, made.evidence, made.name = category, "storage", name
            made.layer = layer or made.layer

    def _step_begins(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                self._own(parameter.grad, "gradients", self._owners.get(parameter))
        self._optimizers.append((self.number(), len(self._stack)))

    def _step_ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for parameter, state in optimizer.state.items():
            layer = self._owners.get(parameter) if isinstance(parameter, self.torch.Tensor) else None
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, self.torch.Tensor):
                    self._own(value, "optimizer_state", layer, str(name))
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:  # those that the step's closure made
                self._own(parameter.grad, "gradients", self._owners.get(parameter))
        if self._optimizers:
            self._optimizers.pop()
        self.step += 1
        self.record.marks.append((len(self.record.events), "step", str(self.step)))


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
