"""nbmemprof: what holds the memory of a training step or a server, seen in the notebook.

``%load_ext nbmemprof``, then ``%%memprof`` at the top of a cell. ``import nbmemprof as mp`` for scripts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module that has it; loaded on first use so that importing the package stays light
_NAMES = {
    "Capture": "capture",
    "load": "capture",
    "NbmemprofError": "errors",
    "OutOfMemoryError": "errors",
    "record": "recording",
    "profile": "profiling",
    "snapshot": "recording",
    "stats": "memory_stats",
    "summary": "analyses.summary",
    "timeline": "analyses.timeline",
    "breakdown": "analyses.breakdown",
    "sites": "analyses.sites",
    "leaks": "analyses.leaks",
    "lifetimes": "analyses.lifetimes",
    "fragmentation": "analyses.fragmentation",
    "oom": "analyses.oom",
    "advise": "analyses.advise",
    "pools": "analyses.pools",
    "holes": "analyses.holes",
    "stalls": "analyses.stalls",
    "replay": "allocator.replay",
    "what_if": "allocator.what_if",
    "diff": "analyses.diff",
    "watch": "watching",
    "open_run": "runs",
    "layers": "analyses.layers",
    "ledger": "analyses.ledger",
    "kv_cache": "analyses.kv_cache",
    "cards": "prediction.cards",
    "compare": "comparing",
    "tag": "tags",
    "phase": "tags",
    "holders": "holding",
    "counters": "gpu.counters",
    "predict": "prediction.run",
    "max_batch": "searching.batch",
    "sweep": "searching.sweeping",
    "temporary": "patterns",
    "LeakTracker": "patterns",
    "assert_no_growth": "patterns",
    "BufferPool": "buffers",
}
_QUESTIONS = ("analyses.", "allocator.")  # the functions in these rooms that take a capture check that they got one
# public module -> where it lives
_MODULES = {"access": "access", "allocator": "allocator", "probes": "gpu.probes"}

__all__ = ["__version__", *sorted(_NAMES), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
        if _NAMES[name].startswith(_QUESTIONS):
            from nbmemprof._asked import asked

            value = asked(value)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES, *_MODULES])


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nbmemprof``."""
    from nbmemprof import cuda_cell, magics

    magics.load(shell)
    cuda_cell.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext nbmemprof``: nothing of it stays in the shell."""
    from nbmemprof import cuda_cell, magics

    magics.unload(shell)
    cuda_cell.unload(shell)


if TYPE_CHECKING:  # "as": a type checker counts these as public names
    from nbmemprof import access as access
    from nbmemprof import allocator as allocator
    from nbmemprof.allocator.replay import replay as replay
    from nbmemprof.allocator.what_if import what_if as what_if
    from nbmemprof.analyses.advise import advise as advise
    from nbmemprof.analyses.breakdown import breakdown as breakdown
    from nbmemprof.analyses.diff import diff as diff
    from nbmemprof.analyses.fragmentation import fragmentation as fragmentation
    from nbmemprof.analyses.holes import holes as holes
    from nbmemprof.analyses.kv_cache import kv_cache as kv_cache
    from nbmemprof.analyses.layers import layers as layers
    from nbmemprof.analyses.leaks import leaks as leaks
    from nbmemprof.analyses.ledger import ledger as ledger
    from nbmemprof.analyses.lifetimes import lifetimes as lifetimes
    from nbmemprof.analyses.oom import oom as oom
    from nbmemprof.analyses.pools import pools as pools
    from nbmemprof.analyses.sites import sites as sites
    from nbmemprof.analyses.stalls import stalls as stalls
    from nbmemprof.analyses.summary import summary as summary
    from nbmemprof.analyses.timeline import timeline as timeline
    from nbmemprof.buffers import BufferPool as BufferPool
    from nbmemprof.capture import Capture as Capture
    from nbmemprof.capture import load as load
    from nbmemprof.comparing import compare as compare
    from nbmemprof.errors import NbmemprofError as NbmemprofError
    from nbmemprof.errors import OutOfMemoryError as OutOfMemoryError
    from nbmemprof.gpu import probes as probes
    from nbmemprof.gpu.counters import counters as counters
    from nbmemprof.holding import holders as holders
    from nbmemprof.memory_stats import stats as stats
    from nbmemprof.patterns import LeakTracker as LeakTracker
    from nbmemprof.patterns import assert_no_growth as assert_no_growth
    from nbmemprof.patterns import temporary as temporary
    from nbmemprof.prediction.cards import cards as cards
    from nbmemprof.prediction.run import predict as predict
    from nbmemprof.profiling import profile as profile
    from nbmemprof.recording import record as record
    from nbmemprof.recording import snapshot as snapshot
    from nbmemprof.runs import open_run as open_run
    from nbmemprof.searching.batch import max_batch as max_batch
    from nbmemprof.searching.sweeping import sweep as sweep
    from nbmemprof.tags import phase as phase
    from nbmemprof.tags import tag as tag
    from nbmemprof.watching import watch as watch
