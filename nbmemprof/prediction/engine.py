"""A step under fake tensors: one function that runs in any process and returns what the step would take on a GPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Self

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction import composites, habits, kernels, legal, patches
from nbmemprof.prediction.beyond import Beyond
from nbmemprof.prediction.catalogue import GPU
from nbmemprof.prediction.feed import needs
from nbmemprof.prediction.kernels import encoder
from nbmemprof.prediction.lines import Lines
from nbmemprof.prediction.memory import Memory
from nbmemprof.prediction.recorder import Record, recorder_class
from nbmemprof.prediction.room import Room, Terms
from nbmemprof.prediction.rules import Rules
from nbmemprof.prediction.shadows import Shadows
from nbmemprof.prediction.where import Where

__all__ = ["Session", "fake_run"]


class Session:
    """Fake CUDA for as long as the block runs: ``with Session(gpu) as session:`` then the user's code, as often as wanted.

    With ``terms`` a request that finds no room raises torch's error; between ``begin`` and ``finish`` a copy of the process goes on without that, to tell
    what would be needed.
    """

    def __init__(self, gpu: GPU, *, torch_rules: str | None = None, terms: Terms | None = None) -> None:
        self.gpu, self.version, self.terms = gpu, torch_rules or gpu.torch, terms
        self.record = Record()
        self.lines = Lines(self.record.stacks)
        self.room = Room(self.record, gpu, self.version, terms)
        self.carried: list[Any] = []  # objects that came from the kernel
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        torch = _optional.require("torch", feature="a prediction")
        stack = self._stack
        try:
            with torch.enable_grad():  # autograd starts its threads with the first backward: one for each device, and there is none yet. So a copy can be made later.
                torch.ones(1, device="cpu", requires_grad=True).sum().backward()
            stack.enter_context(legal.fake_cuda())
            fake_tensor = torch._subclasses.fake_tensor
            mode_class = _fakes(fake_tensor.FakeTensorMode)
            memory = Memory(self.gpu, self.record, None)
            changes = stack.enter_context(patches.patched(self.gpu, memory))
            rules = Rules(torch, self.gpu, self.version, self.record)
            kernels.install(torch, rules)
            stack.enter_context(composites.registered(torch, rules, self.record))
            where = Where(torch, self.record)
            shadows = Shadows(torch, self.record)
            encoder.nested(torch, changes, self.record, shadows)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(where.watching())
            stack.enter_context(_no_log("torch._subclasses.fake_tensor"))  # an error is raised to whom it belongs; it needs no log
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            stack.enter_context(mode_class(allow_non_fake_inputs=True))
            self.recorder = recorder_class(torch)(self.record, where, shadows, rules, lines=self.lines, room=self.room if self.terms is not None else None)
            self.where = where
            where.index_of, where.value_of = self.recorder.index_of, shadows.of
            stack.enter_context(self.recorder)
            stack.enter_context(habits.kept(torch, self))
        except NbmemprofError:
            stack.close()
            raise
        except Exception as error:  # no code of the user's has run: something of torch's is not where it was
            stack.close()
            raise legal.cant_fake(torch, f"{type(error).__name__}: {error}") from error
        except BaseException:
            stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def begin(self) -> None:
        """Code begins: at its first refusal a copy of this process is made."""
        if self.terms is not None:
            self.room.beyond = Beyond(self.terms.seconds)

    def finish(self, since: int = 0) -> None:
        """The code is done. In the copy: tell what it took from the event ``since`` on, and end; else note what the copy told."""
        beyond = self.room.beyond
        if beyond is None or beyond.at is None:
            return
        if beyond.copy:
            beyond.tell(needs(self.record, conf=self.room.device.conf, torch=self.version, since=since))
        self.record.needs.append((beyond.at, beyond.answer()))
        self.begin()  # of a cell with several recordings the next may meet one too


def _fakes(base: Any) -> Any:
    """The mode that makes fakes, without touching a device and without a wrapper around each call."""

    class Fakes(base):  # type: ignore[misc]
        avoid_device_init = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.dispatch(func, types, args, kwargs or {})

    return Fakes


@contextlib.contextmanager
def _no_log(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def fake_run(fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *, device_row: GPU, torch_rules: str | None = None) -> Record:
    """Run ``fn`` under fake tensors in this process and return its record.

    Raises
    ------
    CantFake
        This torch's internals are not known.
    """
    with Session(device_row, torch_rules=torch_rules) as session:
        session.lines.end_at(fake_run.__code__)
        result = fn(*args, **(kwargs or {}))
        del result
    return session.record
