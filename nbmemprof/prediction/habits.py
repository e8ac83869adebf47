"""What notebooks do beside computing, and what it comes to in a fake run: arrays, loaders, checkpoints, compilers, questions about memory.

Each habit is a small function that puts something in torch's place through :class:`~nbmemprof.prediction.patches.Changes`; everything is put
back at the end. What could not be done as on a GPU is counted among the record's assumptions.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from nbmemprof import _optional
from nbmemprof.prediction import asking, attention, calibrating, habit_operators, keeping
from nbmemprof.prediction.patches import Changes
from nbmemprof.prediction.shadows import _NAME as VALUE

__all__ = ["COMPILED", "kept"]

COMPILED = "torch.compile was left out: the code ran as it is written, and what fusion, recomputation and CUDA graphs change is not predicted"
TRIED = ("2.11.", "2.13.", "2.14.")
_LBFGS = "LBFGS: how far it searches and what it remembers hang on values that nobody knows: a range is given"
_UNKNOWN_ARRAY = "the values of an array were taken as zeros"
_GRAPHED = "a CUDA graph was run as plain code: its private pool is not predicted"


@contextlib.contextmanager
def kept(torch: Any, session: Any) -> Iterator[None]:
    """Let the habits work while the block runs; ``session`` is the fake session that is open."""
    changes = session.changes = Changes()
    session.compiled = False
    if not str(torch.__version__).startswith(TRIED):
        session.record.assume(f"torch {torch.__version__} was not tried with predictions ({', '.join(one.rstrip('.') for one in TRIED)} were); what is known of its internals was checked and holds")
    with contextlib.ExitStack() as stack:
        stack.callback(changes.undo)
        for habit in (_arrays, _copies, _text, _loaders, _placing, _optimizers, _seeds, _graphs, _legacy, _sharing, _distributions, _bars, _attention, keeping.checkpoints, asking.memory):
            habit(torch, session, changes)
        habit_operators.install(torch, session)
        stack.enter_context(_compilers(torch, session, changes))
        yield


# ---------------------------------------------------------------------- values
def _arrays(torch: Any, session: Any, changes: Changes) -> None:
    """``.numpy()`` and ``np.asarray``: known values, else zeros."""
    fake, shadows, plain = torch._subclasses.fake_tensor.FakeTensor, session.recorder.shadows, torch.Tensor.numpy

    def numpy(self: Any, *, force: bool = False) -> Any:
        if not isinstance(self, fake):
            return plain(self, force=force)
        if self.device.type != "cpu" and not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        value = shadows.of(self)
        with shadows._outside():
            if value is None:
                session.record.assume(_UNKNOWN_ARRAY)
                return plain(torch.zeros(tuple(self.shape), dtype=self.dtype))
            return plain(value.detach().clone())

    changes.put(torch.Tensor, "numpy", numpy)


def _copies(torch: Any, session: Any, changes: Changes) -> None:
    """``copy.deepcopy``: the value beside a fake is no part of it; what is real stays real."""
    fake, shadows, plain = torch._subclasses.fake_tensor.FakeTensor, session.recorder.shadows, torch.Tensor.__deepcopy__

    def deep(self: Any, memo: Any) -> Any:
        if not isinstance(self, fake):
            with shadows._outside():
                return plain(self, memo)
        value = self.__dict__.pop(VALUE, None)
        memo[id(self.fake_mode)] = self.fake_mode  # a copied mode would give back torch's weak references twice
        self.__dict__["data_ptr"] = lambda: 0  # no storage of its own to copy byte by byte: torch clones it
        try:
            made = plain(self, memo)
            made.__dict__.pop("data_ptr", None)
        finally:
            self.__dict__.pop("data_ptr", None)
            if value is not None:
                shadows.put(self, value)
        if value is not None:
            with shadows._outside():
                shadows.put(made, value.clone())
        return made

    changes.put(torch.Tensor, "__deepcopy__", deep)


def _text(torch: Any, _session: Any, changes: Changes) -> None:
    """``f"{loss:.3f}"``."""
    fake, plain = torch._subclasses.fake_tensor.FakeTensor, torch.Tensor.__format__

    def formatted(self: Any, spec: str) -> str:
        if isinstance(self, fake):
            return format(self.item(), spec) if self.dim() == 0 and spec else format(repr(self), spec)
        return str(plain(self, spec))

    changes.put(torch.Tensor, "__format__", formatted)


# ---------------------------------------------------------------------- data
def _loaders(torch: Any, session: Any, changes: Changes) -> None:
    """``DataLoader(num_workers=…)``: batches are made in this process; workers hold no memory of the device."""
    loader_class = torch.utils.data.DataLoader
    plain = loader_class._get_iterator

    def iterator(self: Any) -> Any:
        if not self.num_workers:
            return plain(self)
        alone = copy.copy(self)
        alone.__dict__.update(num_workers=0, timeout=0, prefetch_factor=None, persistent_workers=False)
        return plain(alone)

    changes.put(loader_class, "_get_iterator", iterator)


def _bars(torch: Any, _session: Any, _changes: Changes) -> None:
    """``tqdm.auto``: the bar of text, since widgets of a child have no one to draw them."""
    notebook, plain = _optional.loaded("tqdm.notebook"), _optional.loaded("tqdm.std")
    if notebook is None or plain is None:
        return
    for module in (notebook, _optional.loaded("tqdm.auto"), _optional.loaded("tqdm.autonotebook")):
        if module is not None:
            for name in ("tqdm", "tqdm_notebook"):
                if hasattr(module, name):
                    _changes.put(module, name, plain.tqdm)
    notebook_class = notebook.tqdm_notebook
    if notebook_class is not plain.tqdm:
        _changes.put(notebook_class, "__new__", lambda cls, *args, **kwargs: plain.tqdm(*args, **kwargs) if cls is notebook_class else object.__new__(cls))


# ---------------------------------------------------------------------- where things are
def _placing(torch: Any, _session: Any, changes: Changes) -> None:
    """``p.data = p.data.cuda()``: a fake remembers its device beside its storage."""
    fake, plain = torch._subclasses.fake_tensor.FakeTensor, torch._C.TensorBase.data

    def put(self: Any, value: Any) -> None:
        if isinstance(value, fake) and not isinstance(self, fake):
            torch.utils.swap_tensors(self, torch.nn.Parameter(value.detach(), requires_grad=self.requires_grad) if isinstance(self, torch.nn.Parameter) else value.detach())
            return
        plain.__set__(self, value)
        if isinstance(self, fake) and isinstance(value, fake):
            self.fake_device = value.fake_device

    changes.put(torch.Tensor, "data", property(plain.__get__, put))


def _optimizers(torch: Any, session: Any, changes: Changes) -> None:
    """``model.cuda()`` after the optimizer was made: on a device parameters stay the same objects, fakes are replaced; the optimizer follows."""
    known: weakref.WeakSet[Any] = weakref.WeakSet()
    session.optimizers = known
    optimizer_class, module_class = torch.optim.Optimizer, torch.nn.Module
    add, apply = optimizer_class.add_param_group, module_class._apply
    depth = [0]

    def added(self: Any, group: Any) -> Any:
        known.add(self)
        if isinstance(self, torch.optim.LBFGS):
            session.record.assume(_LBFGS)
        return add(self, group)

    def applied(self: Any, fn: Any, recurse: bool = True) -> Any:
        if depth[0] or not known:
            return apply(self, fn, recurse)
        before = [(module, name, parameter) for module in self.modules() for name, parameter in module._parameters.items() if parameter is not None]
        depth[0] += 1
        try:
            result = apply(self, fn, recurse)
        finally:
            depth[0] -= 1
        moved = {id(old): (old, module._parameters[name]) for module, name, old in before if module._parameters[name] is not old}
        for optimizer in list(known) if moved else ():
            _follow(optimizer, moved)
        return result

    changes.put(optimizer_class, "add_param_group", added)
    changes.put(module_class, "_apply", applied)


def _follow(optimizer: Any, moved: dict[int, tuple[Any, Any]]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [moved[id(p)][1] if id(p) in moved else p for p in group["params"]]
    for old, new in moved.values():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _sharing(torch: Any, _session: Any, changes: Changes) -> None:
    """``share_memory_()``: fakes have nothing to share."""
    fake, plain = torch._subclasses.fake_tensor.FakeTensor, torch.Tensor.share_memory_
    changes.put(torch.Tensor, "share_memory_", lambda self: self if isinstance(self, fake) else plain(self))
    changes.put(torch.nn.DataParallel, "forward", lambda self, *args, **kwargs: self.module(*args, **kwargs))  # one device: what it does there


# ---------------------------------------------------------------------- torch.cuda
def _seeds(torch: Any, _session: Any, changes: Changes) -> None:
    """Seeds of a device: nothing draws from it."""
    for module in (torch.cuda, torch.cuda.random):
        for name in ("manual_seed", "manual_seed_all"):
            changes.put(module, name, lambda _seed: None)


def _graphs(torch: Any, session: Any, changes: Changes) -> None:
    """``torch.cuda.graph``: its body runs once, a replay does nothing."""

    class Graph:
        """A graph of nothing."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            session.record.assume(_GRAPHED)

        def replay(self) -> None:
            """Do nothing."""

        reset = capture_end = replay

        def capture_begin(self, *_args: Any, **_kwargs: Any) -> None:
            """Begin."""

        def pool(self) -> tuple[int, int]:
            """Its pool's name."""
            return 0, 1

    changes.put(torch.cuda, "CUDAGraph", Graph)
    changes.put(torch.cuda, "graph", lambda *_args, **_kwargs: contextlib.nullcontext())
    changes.put(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    changes.put(torch.cuda, "make_graphed_callables", lambda callables, *_args, **_kwargs: callables)


def _legacy(torch: Any, session: Any, changes: Changes) -> None:
    """``torch.cuda.FloatTensor(3, 4)``."""
    types = {"FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64,
             "IntTensor": torch.int32, "ShortTensor": torch.int16, "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool}  # fmt: skip

    def maker(dtype: Any) -> Callable[..., Any]:
        def make(*given: Any) -> Any:
            if len(given) == 1 and not isinstance(given[0], int):
                return torch.tensor(given[0], dtype=dtype, device="cuda")
            return torch.empty(given, dtype=dtype, device="cuda")

        return make

    for name, dtype in types.items():
        changes.put(torch.cuda, name, maker(dtype))
    version = session.gpu
    changes.put(torch.version, "cuda", torch.version.cuda or f"{13 if version.capability >= (7, 5) else 12}.0")


def _distributions(torch: Any, _session: Any, changes: Changes) -> None:
    """Values are not known, so they can't be checked."""
    changes.put(torch.distributions.Distribution, "_validate_args", False)


def _attention(torch: Any, session: Any, changes: Changes) -> None:
    """Note which attention was called, and take the kernels that were seen on the GPU itself."""
    plain = attention.choose
    noted: dict[Any, str] = {}
    session.record.attention = noted

    def choose(torch: Any, gpu: Any, version: str, *call: Any) -> str:
        key = calibrating.key_of(torch, *call)
        kernel = calibrating.chosen.get(key) or plain(torch, gpu, version, *call)
        noted[key] = kernel
        return kernel

    changes.put(attention, "choose", choose)


# ---------------------------------------------------------------------- compilers
@contextlib.contextmanager
def _compilers(torch: Any, session: Any, changes: Changes) -> Iterator[None]:
    """``torch.compile``: recognised, and the code run as it is written."""
    plain, plain_method = torch.compile, torch.nn.Module.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        session.record.assume(COMPILED)
        session.compiled = True
        return plain(model, **_eager(options))

    def method(self: Any, *_args: Any, **options: Any) -> None:
        session.record.assume(COMPILED)
        session.compiled = True
        plain_method(self, **_eager(options))

    def _eager(options: dict[str, Any]) -> dict[str, Any]:
        """Without inductor, whose import alone takes seconds and threads."""
        return {name: value for name, value in options.items() if name in ("fullgraph", "dynamic", "disable")} | {"backend": "eager"}

    changes.put(torch, "compile", compiled)
    changes.put(torch.nn.Module, "compile", method)
    stance = getattr(torch.compiler, "set_stance", None)
    with contextlib.nullcontext() if stance is None else stance("force_eager"):
        yield
