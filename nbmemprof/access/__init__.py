"""How a warp reads and writes memory: sectors and bank conflicts, exactly, on any machine.

>>> import nbmemprof as mp
>>> mp.access.global_load(lambda t: t * 32, 4).sectors
32
>>> mp.access.shared_load(lambda t: t * 33, 4).ways
1

One warp: :func:`global_load`, :func:`global_store`, :func:`shared_load`, :func:`shared_store`, from addresses or an index expression.
A block: :func:`trace` runs a kernel's index arithmetic. Each result says what it costs, draws itself in a notebook, and suggests
only what the model confirms.
"""

from __future__ import annotations

from nbmemprof.access._lanes import Addresses, lanes_of
from nbmemprof.access._trace import Site, Trace, trace
from nbmemprof.access._warp import GlobalAccess, SharedAccess
from nbmemprof.access.suggest import Suggestion

__all__ = ["GlobalAccess", "SharedAccess", "Site", "Suggestion", "Trace", "global_load", "global_store", "shared_load", "shared_store", "trace"]


def global_load(addresses: Addresses, width: int = 4, *, base: int = 0, element_bytes: int | None = None) -> GlobalAccess:
    """Return what a warp's load of global memory costs.

    Parameters
    ----------
    addresses
        Byte addresses of up to 32 lanes, None for an inactive one (a short list is lanes 0 to n - 1); or an index expression, a function of
        the lane that gives an element's index: ``lambda t: t * 32``.
    width
        Bytes that each lane moves: 1, 2, 4, 8 or 16.
    base
        Bytes added to each address.
    element_bytes
        What an index expression counts; ``width`` unless said (``4`` for a float4 load whose index counts floats).

    Returns
    -------
    ``.sectors .lines .requests .ideal_sectors .ideal_unique_sectors`` (ints), ``.efficiency``; ``.explain()`` and ``.suggestions()``.

    Raises
    ------
    NbmemprofError
        A width that no instruction has, more than 32 lanes, an address that is negative, misaligned or no whole number.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> mp.access.global_load(lambda t: t * 32).sectors, mp.access.global_load(lambda t: t).sectors
    (32, 4)
    """
    return GlobalAccess(lanes_of(addresses, width, base=base, element_bytes=element_bytes), width, "load")


def global_store(addresses: Addresses, width: int = 4, *, base: int = 0, element_bytes: int | None = None) -> GlobalAccess:
    """Return what a warp's store to global memory costs; as :func:`global_load`. A sector written in part is masked below the L2.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> mp.access.global_store(lambda t: 2 * t).efficiency
    0.5
    """
    return GlobalAccess(lanes_of(addresses, width, base=base, element_bytes=element_bytes), width, "store")


def shared_load(addresses: Addresses, width: int = 4, *, base: int = 0, element_bytes: int | None = None) -> SharedAccess:
    """Return what a warp's load of shared memory costs.

    Parameters and errors are those of :func:`global_load`; addresses count from the beginning of shared memory.

    Returns
    -------
    ``.wavefronts .ideal_wavefronts .ways .conflicts`` (ints), ``.efficiency``, ``.phases``; ``.explain()`` and ``.suggestions()``.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> mp.access.shared_load(lambda t: t * 32).ways, mp.access.shared_load(lambda t: t * 33).ways
    (32, 1)
    """
    return SharedAccess(lanes_of(addresses, width, base=base, element_bytes=element_bytes), width, "load")


def shared_store(addresses: Addresses, width: int = 4, *, base: int = 0, element_bytes: int | None = None) -> SharedAccess:
    """Return what a warp's store to shared memory costs; as :func:`shared_load`. Lanes that write one word are no conflict.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> mp.access.shared_store(lambda t: 2 * t).ways
    2
    """
    return SharedAccess(lanes_of(addresses, width, base=base, element_bytes=element_bytes), width, "store")
