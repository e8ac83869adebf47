"""A modelled CUDA device that is fed with this process's CPU requests as they come."""

from __future__ import annotations

from nbmemprof.allocator import Device
from nbmemprof.allocator import _memory as M
from nbmemprof.errors import OutOfMemoryError
from nbmemprof.sources._cpu_hook import SERIAL
from nbmemprof.sources._cpu_trace import Tracker

__all__ = ["Feed"]

_NUMBER = 8  # bytes of the largest real number's tensor


class Feed:
    """The device, what lies on it, and how far the native events have been read.

    What an operator takes and gives back inside itself is scratch of its CPU kernel and not asked of the device.
    Nor is the tensor without a dimension that torch makes for a Python number (``x + 1``): it is asked for before the operator begins, and on the CPU beside
    a CUDA tensor too. A tensor's own copy takes its storage like that as well: ``copies`` is set meanwhile.
    After a refusal nothing is asked until it has been raised: on a device the operator would have ended there.
    """

    def __init__(self, device: Device, tracker: Tracker) -> None:
        self.device, self._tracker = device, tracker
        self.placed: dict[int, tuple[int, int]] = {}  # CPU address → bytes, address on the device
        self.sources: list[tuple[int, int]] = []  # (end of the device's trace, index of the native event that led there)
        self.refused: OutOfMemoryError | None = None
        self.unasked = 0  # requests of an operator after the one that was refused
        self.lost = 0
        self.at = 0
        self.copies = False

    @property
    def written(self) -> int:
        """Events of the device so far."""
        return int(self.device._model.m[M.AT]) // M.WORDS

    @property
    def behind(self) -> bool:
        """Whether there are requests that were not taken in yet."""
        hook = self._tracker._hook
        return hook is not None and hook.count != self.at

    def begin(self) -> None:
        """Start a window: what was given back since the last one is given back here too."""
        hook = self._tracker._hook
        assert hook is not None  # noqa: S101 - the recorder runs
        if self.placed:
            now = hook.count
            if now - self.at > hook.capacity:
                known = self._tracker.known
                gone = [addr for addr, (size, _) in self.placed.items() if known.get(addr, (0, 0))[0] != size]
            else:
                gone = [addr for addr, size in zip(*(hook.read(self.at, now)[name].tolist() for name in ("addr", "size")), strict=True) if size < 0]
            for addr in gone:
                self._free(addr)
        self.at = hook.count
        self.sources.clear()
        self.refused, self.unasked, self.lost = None, 0, 0

    def follow(self) -> None:
        """Take in what was requested since the last call. Never raises: a refusal is kept in ``refused``."""
        hook = self._tracker._hook
        if hook is None or hook.count == self.at:
            return
        start, stop = self.at, hook.count
        if stop - start > hook.capacity:
            self.lost += stop - start - hook.capacity
            start = stop - hook.capacity
        rows = hook.read(start, stop)
        self.at = stop
        addrs, sizes, tags = rows["addr"].tolist(), rows["size"].tolist(), rows["tag"].tolist()
        opened: dict[int, int] = {}
        scratch: set[int] = set()
        for i, (addr, size, tag) in enumerate(zip(addrs, sizes, tags, strict=True)):
            if size > 0:
                opened[addr] = i
            else:
                made = opened.pop(addr, None)
                if made is not None and tags[made] == tag and tag & SERIAL:
                    scratch.update((made, i))
        for i, (addr, size, tag) in enumerate(zip(addrs, sizes, tags, strict=True)):
            number = 0 < size <= _NUMBER and not tag & SERIAL and not self.copies
            if i not in scratch and addr and not number:
                if size > 0:
                    self._ask(addr, size)
                else:
                    self._free(addr)
                self.sources.append((self.written, start + i))

    def _ask(self, addr: int, size: int) -> None:
        if self.refused is not None:
            self.unasked += 1
            return
        try:
            self.placed[addr] = (size, self.device.malloc(size))
        except OutOfMemoryError as error:
            self.refused = error

    def _free(self, addr: int) -> None:
        place = self.placed.pop(addr, None)
        if place is not None:
            self.device.free(place[1])

    def raise_refused(self) -> None:
        """Raise what was refused, once.

        Raises
        ------
        OutOfMemoryError
            ``torch.OutOfMemoryError`` too.
        """
        if self.refused is not None:
            error, self.refused = self.refused, None
            raise error.with_traceback(None)
