"""What can go wrong, as a person reads it: what happened, with which value, what to do next."""

from __future__ import annotations

__all__ = [
    "CantWrite",
    "FlagError",
    "InputRefused",
    "MemoryKept",
    "MissingPackage",
    "NbmemprofError",
    "NotRecording",
    "OutOfMemoryError",
    "SchemaError",
]


class NbmemprofError(Exception):
    """Base of every error that this package raises on purpose.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> try:
    ...     mp.load("no_such_file.pickle")
    ... except mp.NbmemprofError as error:
    ...     print(type(error).__name__)
    InputRefused
    """


class SchemaError(NbmemprofError):
    """A frame does not have the columns or the dtypes of its table."""


class InputRefused(NbmemprofError):
    """A file or object is not a snapshot or capture, is damaged, or is unsafe to read."""


class CantWrite(NbmemprofError, OSError):
    """A file or folder could not be written."""


class MissingPackage(NbmemprofError, ImportError):
    """An optional package is needed for what was asked; the message names the extra to install."""


class FlagError(NbmemprofError):
    """A magic's line could not be understood; nothing has run."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class NotRecording(NbmemprofError):
    """There is no capture, or none can be made here."""


class OutOfMemoryError(NbmemprofError):
    """The modelled device has no room for a request.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device(limit_bytes="1GiB")
    >>> try:
    ...     address = device.malloc("2GiB")
    ... except mp.OutOfMemoryError as error:
    ...     print(str(error)[:60])
    CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 (model
    """


class MemoryKept(NbmemprofError, AssertionError):
    """Memory that was to come back did not: what, how much, from which line."""
